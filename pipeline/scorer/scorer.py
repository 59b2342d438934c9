"""The scorer: all parts of a trajectory's reward, at once, with bounded concurrency."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import anyio

from pipeline.config.training import ScorerConfig
from pipeline.schema import Trajectory
from pipeline.scorer.calls import Call
from pipeline.scorer.verdict import ENVIRONMENT, ScoreFailure, Verdict, combine

Observe = Callable[[str, float, str], None]
"""Called with function name, seconds and failure reason (empty when it succeeded)."""


class Scorer:
    """``reward = environment_weight · environment score + Σ weight · function``; None as soon as one of them has no
    value.

    *consumes* trajectories; *produces* verdicts; *waits for* user functions, each at most its ``timeout_seconds``; at
    most ``concurrency`` trajectories at once.
    Raises :class:`ConfigurationError` when it is built with a path that leads to no function.
    """

    def __init__(self, config: ScorerConfig, observe: Observe | None = None) -> None:
        threads = anyio.CapacityLimiter(config.concurrency)
        workers = anyio.CapacityLimiter(config.workers)
        self._calls = [Call(section, threads, workers) for section in config.functions]
        self._weights = {ENVIRONMENT: config.environment_weight, **{call.name: call.weight for call in self._calls}}
        self._places = anyio.CapacityLimiter(config.concurrency)
        self._observe = observe or (lambda name, seconds, failure: None)

    @property
    def immediate(self) -> bool:
        """Whether there are no user functions, so that :meth:`score_now` is enough."""
        return not self._calls

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts."""
        return tuple(self._weights)

    def score_now(self, trajectory: Trajectory) -> Verdict:
        """The environment's own score, without waiting."""
        parts = dict(trajectory.rewards)
        return combine(parts, {ENVIRONMENT: self._weights[ENVIRONMENT]}, self._environment_failure(parts))

    async def score(self, trajectory: Trajectory) -> Verdict:
        """All parts. Never raises for what user code does."""
        parts: dict[str, float | None] = dict(trajectory.rewards)
        failures = list(self._environment_failure(parts))

        async def one(call: Call) -> None:
            started = time.perf_counter()
            outcome = await call(trajectory)
            failed = isinstance(outcome, ScoreFailure)
            self._observe(
                call.name, time.perf_counter() - started, outcome.reason if isinstance(outcome, ScoreFailure) else ""
            )
            parts[call.name] = None if failed else outcome  # type: ignore[assignment]
            if isinstance(outcome, ScoreFailure):
                failures.append(outcome)

        async with self._places, anyio.create_task_group() as group:
            for call in self._calls:
                group.start_soon(one, call)
        return combine(parts, self._weights, tuple(failures))

    def _environment_failure(self, parts: dict[str, float | None]) -> tuple[ScoreFailure, ...]:
        value = parts.get(ENVIRONMENT)
        if self._weights[ENVIRONMENT] == 0 or (value is not None and math.isfinite(value)):
            return ()
        self._observe(ENVIRONMENT, 0.0, "missing")
        return (ScoreFailure(ENVIRONMENT, "missing", "the environment gave no score"),)
