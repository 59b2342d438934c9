"""How one user function is called: awaited, in a thread, or in a worker process; always with a limit on its time.

A call ends in a number or in a :class:`ScoreFailure`; it never raises for what user code does.
"""

from __future__ import annotations

import inspect
import logging
import math
import traceback
from numbers import Real

import anyio
import anyio.to_process
import anyio.to_thread

from pipeline.codec import decode_trajectory, encode_trajectory
from pipeline.config.training import ScoreFunction
from pipeline.schema import Trajectory
from pipeline.scorer.resolve import resolve
from pipeline.scorer.verdict import ScoreFailure

log = logging.getLogger("afterplay.scorer")

ABANDONED_MAX = 64
"""Threads given up because a function hangs in them; beyond it such functions time out without being called."""


class Call:
    """One function of the run file. Raises :class:`ConfigurationError` when its path does not lead to one."""

    def __init__(self, section: ScoreFunction, threads: anyio.CapacityLimiter, workers: anyio.CapacityLimiter) -> None:
        self.name = section.name or section.path
        self.weight = section.weight
        self._section = section
        self._function = resolve(section.path)
        self._async = inspect.iscoroutinefunction(self._function)
        self._threads = threads
        self._workers = workers
        self._abandoned = 0

    async def __call__(self, trajectory: Trajectory) -> float | ScoreFailure:
        """The function's number, or why there is none."""
        failure: ScoreFailure
        try:
            with anyio.fail_after(self._section.timeout_seconds):
                value = await self._run(trajectory)
            checked = self._checked(value)
            if not isinstance(checked, ScoreFailure):
                return checked
            failure = checked
        except TimeoutError:
            failure = ScoreFailure(self.name, "timeout", f"no answer within {self._section.timeout_seconds} s")
            self._abandon()
        except anyio.BrokenWorkerProcess:
            failure = ScoreFailure(self.name, "crashed", "its worker process died")
        except Exception:
            failure = ScoreFailure(self.name, "raised", traceback.format_exc())
        log.warning(
            "score function %s, trajectory %s: %s: %s",
            self.name,
            trajectory.trajectory_id,
            failure.reason,
            failure.details,
        )
        return failure

    async def _run(self, trajectory: Trajectory) -> object:
        if self._section.worker:
            frames = tuple(bytes(frame) for frame in encode_trajectory(trajectory))
            outcome, value = await anyio.to_process.run_sync(
                call_in_worker, self._section.path, frames, cancellable=True, limiter=self._workers
            )
            return ScoreFailure(self.name, "raised", str(value)) if outcome == "raised" else value
        if self._async:
            return await self._function(trajectory)
        return await anyio.to_thread.run_sync(self._function, trajectory, abandon_on_cancel=True, limiter=self._threads)

    def _abandon(self) -> None:
        """A thread cannot be killed: give its place in the pool to another, up to a bound."""
        if not (self._section.worker or self._async) and self._abandoned < ABANDONED_MAX:
            self._abandoned += 1
            self._threads.total_tokens += 1
            log.warning("%s hangs in a thread, which cannot be stopped: set worker: true for it", self.name)

    def _checked(self, value: object) -> float | ScoreFailure:
        if isinstance(value, ScoreFailure):
            return value
        if value is None:
            return ScoreFailure(self.name, "missing", "it returned None")
        if not isinstance(value, Real):
            return ScoreFailure(
                self.name, "type", f"expected a number or None, got {type(value).__name__}: {str(value)[:200]}"
            )
        number = float(value)
        return number if math.isfinite(number) else ScoreFailure(self.name, "nonfinite", f"it returned {number}")


def call_in_worker(path: str, frames: tuple[bytes, ...]) -> tuple[str, object]:
    """Runs in the worker process: ``("value", number)`` or ``("raised", traceback)``, both safe to send back."""
    try:
        function = resolve(path)
        value = function(decode_trajectory(frames))
        if inspect.iscoroutine(value):
            import asyncio

            value = asyncio.run(value)
        return "value", float(value) if isinstance(value, Real) else (None if value is None else repr(value))
    except Exception:
        return "raised", traceback.format_exc()
