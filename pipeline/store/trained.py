"""Updates whose groups are still in a store with their payloads: what the learner was sent for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Any

from pipeline.errors import StoreError
from pipeline.schema import GroupPlan
from pipeline.schema.record_file import Frames
from pipeline.store.queries import reading
from pipeline.store.records import GroupRecord, TrainedVersions
from pipeline.store.store import load_snapshot, read_payload


@dataclass(frozen=True, slots=True)
class SentRollout:
    """Contents of one DELIVERY that the learner needs."""

    about: Mapping[str, Any]
    """``reward`` and ``rewards``; of a replayed one also ``replay``, with its ``weight``."""
    frames: Frames


@dataclass(frozen=True, slots=True)
class SentGroup:
    """One group of an update, with the replays that were trained."""

    plan: GroupPlan
    rollouts: tuple[SentRollout, ...]
    """By index; none where the group was left out."""


@dataclass(frozen=True, slots=True)
class SentUpdate:
    update: int
    policy_version: int
    """Version of the weights that it was made from."""
    groups: tuple[SentGroup, ...]


class TrainedUpdates:
    """The updates of one store that can be sent again. Their groups are read once, payloads when they are asked for."""

    def __init__(self, path: Path) -> None:
        """Updates of the store at ``path``, also while a stage writes it. Raises :class:`StoreError`."""
        self._path = path
        with reading(path) as connection:
            snapshot = load_snapshot(connection)
            stored = {row_id for (row_id,) in connection.execute("SELECT row_id FROM payloads")}
        self._versions = TrainedVersions(snapshot.meta.get("trained_versions"))
        groups: dict[int, list[GroupRecord]] = {}
        for group in snapshot.groups.values():
            if group.consumed and group.update is not None:
                del group.replays[group.k :]  # behind those that were trained
                groups.setdefault(group.update, []).append(group)
        size = (snapshot.meta.get("shape") or {}).get("groups_per_step")
        self._groups = {
            update: members
            for update, members in sorted(groups.items())
            if len(members) == size and all(stored.issuperset(_row_ids(group)) for group in members)
        }

    @property
    def updates(self) -> frozenset[int]:
        """Updates of which every group is whole."""
        return frozenset(self._groups)

    def sent(self, update: int) -> SentUpdate:
        """Raises :class:`StoreError` where its rollouts were freed since, :class:`KeyError` for one that is not among
        :attr:`updates`."""
        with reading(self._path) as connection:
            groups = tuple(SentGroup(g.plan(), self._rollouts(g, connection)) for g in self._groups[update])
        version = self._versions.at(update)
        return SentUpdate(update, update if version is None else version, groups)

    def _rollouts(self, group: GroupRecord, connection: Connection) -> tuple[SentRollout, ...]:
        if group.dropped:
            return ()
        members = [slot.trajectory for slot in group.slots if slot.trajectory is not None]
        abouts: list[dict[str, Any]] = [{"reward": t.reward, "rewards": dict(t.rewards)} for t in members]
        for replay in group.replays:
            abouts.append({"reward": replay.entry.reward, "rewards": {}, "replay": {"weight": replay.weight}})
        rollouts = []
        for about, row_id in zip(abouts, _row_ids(group), strict=True):
            if (frames := read_payload(connection, row_id, self._path)) is None:
                raise StoreError(f"rollouts of {group.group_id} were freed meanwhile (replay.keep_trained)")
            rollouts.append(SentRollout(about, frames))
        return tuple(rollouts)


def _row_ids(group: GroupRecord) -> list[int]:
    """Payloads that the group was trained from, in the order of DELIVERY."""
    if group.dropped:
        return []
    fresh = [slot.trajectory.row_id for slot in group.slots if slot.trajectory is not None]
    return [*fresh, *(replay.entry.row_id for replay in group.replays)]


def repeatable(updates: Collection[int], checkpoints: Collection[int]) -> dict[int, int]:
    """The updates that can be made again, each with the updates of the newest checkpoint to begin from. 0 is the
    initial model.

    >>> repeatable({0, 1, 4, 5, 6}, {2, 5})
    {0: 0, 1: 0, 5: 5, 6: 5}
    """
    found: dict[int, int] = {}
    for update in sorted(updates):
        if update in checkpoints or update == 0:
            found[update] = update
        elif update - 1 in found:
            found[update] = found[update - 1]
    return found


def describe_steps(updates: Iterable[int]) -> str:
    """Steps of updates in words.

    >>> describe_steps([0, 1, 4])
    'steps 1-2, 5'
    """
    spans: list[list[int]] = []
    for step in sorted(update + 1 for update in updates):
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    return "steps " + ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)
