"""One play by a program: from its start to what it was worth."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup

from actors.door.recording import Recording
from actors.door.reports import PROGRAM, Report
from actors.door.session import Session
from actors.environments.base import Reply
from actors.loop.base import Game
from actors.loop.driven import DrivenEpisode, Outcome, Policy
from pipeline.errors import AfterplayError, EpisodeLimit, PlugInError, PlugInTimeout
from pipeline.schema import TrajectoryStatus, Turn

if TYPE_CHECKING:
    from actors.door.loop import ProgramLoop

logger = logging.getLogger(__name__)

LISTEN_SECONDS_MAX = 30.0
GRACE_SHARE = 0.1
"""Of the episode's time, at most, for a program to end after its calls are refused."""


class ProgramEpisode(DrivenEpisode):
    """One play by a program."""

    def __init__(self, loop: ProgramLoop, game: Game) -> None:
        super().__init__(game)
        self._loop = loop
        self._recording: Recording | None = None
        self._score: float | None = None
        self._signals: Mapping[str, float] = {}

    async def drive(self, policy: Policy) -> Outcome:
        loop = self._loop
        with anyio.fail_after(LISTEN_SECONDS_MAX):
            await loop.door.listening.wait()
        session = loop.session(self.game, policy)
        self._recording = session.recording
        left = anyio.current_effective_deadline() - anyio.current_time()
        grace = min(loop.grace_seconds, GRACE_SHARE * left)
        timer = asyncio.get_running_loop().call_later(max(0.0, left - 2 * grace), session.expire)
        loop.door.add(session)
        try:
            report, failure = await _played(loop, session, left - grace, grace)
        finally:
            timer.cancel()
            loop.door.remove(session)
        return await self._judged(session, report or session.report, failure)

    def turns(self) -> tuple[Turn, ...]:
        """The last turn has the score and the signals of the report: what came before was not judged."""
        turns = self._recording.turns() if self._recording is not None else ()
        if not turns or self._score is None:
            return turns
        last = replace(turns[-1], reward=self._score, signals={**turns[-1].signals, **self._signals})
        return (*(replace(turn, reward=0.0) for turn in turns[:-1]), last)

    async def _judged(self, session: Session, report: Report | None, failure: AfterplayError | None) -> Outcome:
        """How it ended. Raises where there is nothing to score."""
        if failure is not None and session.report is not None:
            logger.info("the program of %s failed after its report, which stands: %s", self.game.key, failure)
            failure = None
        if report is not None and report.error is not None:
            failure = PlugInError(PROGRAM, "Told", report.error, session.told)
            report = None
        if report is None and session.engine_error is not None:
            raise session.engine_error
        if failure is not None and (session.limit is None or isinstance(failure, PlugInTimeout)):
            raise failure
        if not session.recording.n_turns:
            if session.limit is not None:
                raise EpisodeLimit(f"the limit {session.limit.value} was reached before a first turn")
            raise PlugInError(PROGRAM, "NoCalls", "the program ended without a call of the policy", session.told)
        self._score = await self._reward(session, report)
        self._signals = report.signals if report is not None else {}
        cut = session.limit is not None or (report is not None and not report.done)
        return Outcome(TrajectoryStatus.TRUNCATED if cut else TrajectoryStatus.COMPLETE, self._score)

    async def _reward(self, session: Session, report: Report | None) -> float | None:
        source = self._loop.reward
        told = report is not None and (source != "program" or report.reward is not None)
        if session.limit is not None and not told:
            return self._loop.reward_at_limit
        if source == "scorer":
            return 0.0
        if source == "environment":
            answer = report.answer if report is not None else None
            step = await self.game.step(Reply(session.recording.last_reply if answer is None else answer))
            return step.reward
        if report is None or report.reward is None:
            raise PlugInError(
                PROGRAM,
                "NoReward",
                'the program told no reward: print {"reward": 1.0} as its last line, POST it to '
                "AFTERPLAY_SESSION_URL/finish, or set loop.options.reward to environment or scorer",
                session.told,
            )
        return report.reward


async def _played(
    loop: ProgramLoop, session: Session, seconds_max: float, grace: float
) -> tuple[Report | None, AfterplayError | None]:
    """What the program told, or how it failed. One that has reported may take ``grace`` seconds more to end."""
    report: Report | None = None
    failure: AfterplayError | None = None

    async def lose_patience(group: TaskGroup) -> None:
        await session.reported.wait()
        await anyio.sleep(grace)
        group.cancel_scope.cancel()

    with anyio.move_on_after(seconds_max) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(lose_patience, group)
            try:
                report = await loop.play(session)
            except AfterplayError as error:
                failure = error
            group.cancel_scope.cancel()
    if scope.cancelled_caught and session.report is None:
        failure = _hung(loop, session)
    return report, failure


def _hung(loop: ProgramLoop, session: Session) -> PlugInTimeout:
    if loop.external and not session.leased.is_set():
        return PlugInTimeout(PROGRAM, "NotTaken", "no external program asked for the task (POST /sessions)")
    return PlugInTimeout(
        PROGRAM,
        "TimeoutError",
        "the program had not ended when the time of its episode was over (environments.<name>.max_seconds), and was "
        "ended; its output says what it was doing",
        session.told,
    )
