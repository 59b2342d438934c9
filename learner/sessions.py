"""One session for each replay stage, behind the interface of one.

Consumes: what :class:`LearnerSession` does, on every link. Produces: an update's groups when every stage has given its
share; each CONSUMED names to each stage its own groups only. Waits for: the slowest stage. A stage that restarts stops
the next update, not the other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import anyio

from learner.assembly import Group, Progress
from learner.consumed import Trained
from learner.session import LearnerSession, Standing
from pipeline.config.training import GroupsConfig
from pipeline.errors import StoreError
from pipeline.replay.records import parse_group_id
from pipeline.transport.base import Limits, Link


class LearnerSessions:
    """``links`` lead to the replay stages by index; ``groups`` and ``credit_groups`` are those of all together."""

    def __init__(
        self, links: Sequence[Link], groups: GroupsConfig, credit_groups: int, standing: Standing, limits: Limits
    ) -> None:
        n = len(links)
        share = groups.model_copy(update={"groups_per_step": groups.groups_per_step // n})
        self._changed = anyio.Event()
        self._sessions = [
            LearnerSession(link, share, credit_groups // n, part, limits, self._ring)
            for link, part in zip(links, divide(standing, n), strict=True)
        ]

    @property
    def standing(self) -> Standing:
        """What was done, towards all stages together."""
        merged: dict[int, list[str]] = {}
        trained: dict[int, Trained] = {}
        for session in self._sessions:
            for update, ids in session.standing.unacknowledged.items():
                merged[update] = sorted([*merged.get(update, []), *ids])
            for update, facts in session.standing.trained.items():
                trained[update] = trained.get(update, Trained()) | facts
        first = self._sessions[0].standing
        return Standing(first.updates, first.policy_version, first.durable_updates, merged, first.announced, trained)

    @property
    def evaluation(self) -> Mapping[str, Any]:
        """The newest EVALUATION, which comes from the first stage."""
        return self._sessions[0].evaluation

    @property
    def connected(self) -> bool:
        """Whether every stage is."""
        return all(session.connected for session in self._sessions)

    @property
    def missing(self) -> list[int]:
        """Stages without a connection."""
        return [index for index, session in enumerate(self._sessions) if not session.connected]

    async def run(self) -> None:
        """Receive until cancelled. Raises what :meth:`LearnerSession.run` does, in an exception group."""
        await self._each(lambda session: session.run())

    async def welcome(self) -> int:
        """Wait for the first WELCOME of every stage; the newest version that any has recorded (-1: none)."""
        return max([await session.welcome() for session in self._sessions])

    async def ready(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update``, all stages' together and ordered by id; they are in training from then
        on."""
        while not all(session.assembler.ready(update) for session in self._sessions):
            await self._changed.wait()
        groups = [group for session in self._sessions for group in await session.ready(update)]
        return tuple(sorted(groups, key=lambda group: group.group_id))

    async def foreseen(self, update: int) -> tuple[Group, ...]:
        """Wait for the groups of ``update`` and only look at them: what :meth:`ready` would give if nothing changed
        until then."""
        while not all(session.assembler.ready(update) for session in self._sessions):
            await self._changed.wait()
        groups = [group for session in self._sessions for group in session.assembler.look(update)]
        return tuple(sorted(groups, key=lambda group: group.group_id))

    async def changed(self) -> None:
        """Wait for any message."""
        await self._changed.wait()

    def progress(self, update: int) -> Progress:
        parts = [session.progress(update) for session in self._sessions]
        return Progress(
            update, sum(p.complete for p in parts), sum(p.needed for p in parts), sum(p.trajectories for p in parts)
        )

    async def consumed(self, update: int, trained: Trained | None = None) -> None:
        """The optimizer has made ``update``: every stage is told, with its own groups."""
        await self._each(lambda session: session.consumed(update, trained))

    async def announce(self, policy_version: int, updates: int) -> None:
        """The weights after ``updates`` updates are live as ``policy_version``."""
        await self._each(lambda session: session.announce(policy_version, updates))

    async def checkpointed(self, updates: int) -> None:
        """Everything up to ``updates`` updates is durable here."""
        await self._each(lambda session: session.checkpointed(updates))

    async def bye(self, reason: str) -> None:
        await self._each(lambda session: session.bye(reason))

    async def acknowledged(self) -> None:
        """Wait until every CONSUMED was acknowledged by every stage."""
        for session in self._sessions:
            await session.acknowledged()

    async def _each(self, call: Callable[[LearnerSession], Coroutine[Any, Any, None]]) -> None:
        """All at once: a stage that does not read must not keep the others waiting."""
        async with anyio.create_task_group() as group:
            for session in self._sessions:
                group.start_soon(call, session)

    def _ring(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()


def divide(standing: Standing, n: int) -> list[Standing]:
    """For each of ``n`` stages the same, with its own groups only: a group's number mod ``n`` tells its stage.

    Raises :class:`StoreError` for a group id that is none.
    """
    parts = [Standing(standing.updates, standing.policy_version, standing.durable_updates) for _ in range(n)]
    for update, ids in standing.unacknowledged.items():
        for text in ids:
            number = parse_group_id(text)
            if number is None:
                raise StoreError(f"the checkpoint names a group {text!r}, which is no group id: use an older one")
            parts[number % n].unacknowledged.setdefault(update, []).append(text)
    for update, facts in standing.trained.items():
        for part in parts:
            if update in part.unacknowledged:
                part.trained[update] = facts.of(part.unacknowledged[update])
    return parts
