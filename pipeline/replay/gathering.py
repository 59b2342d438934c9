"""Trajectories that wait for the rest of their group, because a reward function must see all of it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")

ENDED_MAX = 65_536
"""Ended groups that are remembered, so that what still comes of them is not kept."""


class Gathering(Generic[T]):
    """*consumes* members; *produces* a group's members once all are here. Bounded by what admission lets in."""

    def __init__(self) -> None:
        self._groups: dict[int, dict[int, T]] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """Members that wait."""
        return sum(map(len, self._groups.values()))

    def put(self, group: int, seq: int, member: T, n: int) -> list[T] | None:
        """Keep one; all members, by ``seq``, once there are ``n``."""
        if group in self._ended:
            return None
        members = self._groups.setdefault(group, {})
        members[seq] = member
        return [members[s] for s in sorted(members)] if len(members) >= n else None

    def drop(self, group: int, seqs: set[int]) -> None:
        """These members have failed: others will come in their place."""
        members = self._groups.get(group, {})
        for seq in seqs & members.keys():
            del members[seq]

    def end(self, group: int) -> None:
        """The group is scored, or was given up."""
        self._groups.pop(group, None)
        self._ended[group] = None
        while len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)
