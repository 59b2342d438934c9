"""The scorer: all parts of a trajectory's reward, at once, with bounded concurrency and in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Generic, TypeVar

import anyio

from pipeline.config.rewards import Part, ScorerConfig
from pipeline.schema import Trajectory
from pipeline.scorer.functions import Call, Outcome, Workers
from pipeline.scorer.verdict import ENVIRONMENT, ScoreFailure, Verdict, combine

One = Callable[[Trajectory], Awaitable[Outcome]]
Many = Callable[[Sequence[Trajectory]], Awaitable[list[Outcome]]]

BATCH_MAX = 64
"""Trajectories in one call of a function with ``per: batch``."""
BATCH_WAIT_SECONDS = 0.1
"""The first trajectory of a batch waits so long for others."""


@dataclass(slots=True)
class _Batch:
    members: list[Trajectory] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    full: anyio.Event = field(default_factory=anyio.Event)
    done: anyio.Event = field(default_factory=anyio.Event)


class ScoreBatcher:
    """*consumes* trajectories; *produces* outcomes, from calls of ``many`` with at most ``size_max`` of them; the first
    of a batch waits ``wait_seconds`` for others and then makes the call for all. The order of calls is that of arrival,
    and there may be several at once."""

    def __init__(self, name: str, many: Many, size_max: int, wait_seconds: float) -> None:
        self._name, self._many, self._size_max, self._wait_seconds = name, many, size_max, wait_seconds
        self._open: _Batch | None = None

    async def one(self, trajectory: Trajectory) -> Outcome:
        """The outcome of this trajectory. Never raises for what ``many`` says."""
        batch = self._open
        leads = batch is None
        if batch is None:
            batch = self._open = _Batch()
        position = len(batch.members)
        batch.members.append(trajectory)
        if len(batch.members) >= self._size_max:
            self._open = None
            batch.full.set()
        if leads:
            await self._lead(batch)
        else:
            await batch.done.wait()
        return batch.outcomes[position]

    async def _lead(self, batch: _Batch) -> None:
        given_up = ScoreFailure(self._name, "crashed", "the call that it was part of was given up")
        try:
            with anyio.move_on_after(self._wait_seconds):
                await batch.full.wait()
            self._close(batch)
            batch.outcomes = await self._many(batch.members)
        finally:
            self._close(batch)
            batch.outcomes += [given_up] * (len(batch.members) - len(batch.outcomes))
            batch.done.set()

    def _close(self, batch: _Batch) -> None:
        if self._open is batch:
            self._open = None


Observe = Callable[[str, float, str], None]
"""Called with the name of a part, seconds and failure reason (empty when it succeeded)."""


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Scored(Generic[S]):
    """A part of the reward. ``score`` takes a trajectory (it may batch them internally), or all that are fresh of a
    group."""

    section: Part
    name: str
    score: S


class Scorer:
    """``reward = environment_weight · environment score + Σ weight · part``; None as soon as one of them has no value.

    *consumes* trajectories; *produces* verdicts; *waits for* user functions and servers, each with its own limit on
    time; at most ``concurrency`` trajectories at once. ``async with`` closes its connections.
    Raises :class:`ConfigurationError` when it is built with a path that leads to no function, options that it does not
    take, or a token that is not there.
    """

    def __init__(
        self,
        config: ScorerConfig,
        observe: Observe | None = None,
        retried: Callable[[str], None] | None = None,
    ) -> None:
        workers = Workers(config.workers)
        self._environment_weight = config.environment_weight
        self._parts: list[_Scored[One]] = []
        self._together: list[_Scored[Many]] = []
        self._services: list[Any] = []
        for function in config.functions:
            call, name = Call(function, config.concurrency, workers), function.known_as
            if function.per == "group":
                self._together.append(_Scored(function, name, call.many))
            elif function.per == "batch":
                batches = ScoreBatcher(name, call.many, BATCH_MAX, BATCH_WAIT_SECONDS)
                self._parts.append(_Scored(function, name, batches.one))
            else:
                self._parts.append(_Scored(function, name, call.one))
        if config.judges or config.reward_models:
            self._build_services(config, retried or (lambda name: None))
        self._slots = anyio.CapacityLimiter(config.concurrency)
        self._observe = observe or (lambda name, seconds, failure: None)
        self.needs_group = config.needs_group
        self.names = config.names
        """Names of all parts, that of the environment's score first."""

    def _build_services(self, config: ScorerConfig, retried: Callable[[str], None]) -> None:
        from pipeline.scorer.judges import Judge, RewardModel

        for section in config.judges:
            judge = Judge(section, retried)
            self._services.append(judge)
            self._parts.append(_Scored(section, section.name, judge.one))
        for model_section in config.reward_models:
            model = RewardModel(model_section, retried)
            self._services.append(model)
            batches = ScoreBatcher(model_section.name, model.many, model_section.batch_max, BATCH_WAIT_SECONDS)
            self._parts.append(_Scored(model_section, model_section.name, batches.one))

    async def __aenter__(self) -> Scorer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections to judges and reward models."""
        for service in self._services:
            await service.close()

    @property
    def immediate(self) -> bool:
        """True if there is nothing but the environment's score, so that :meth:`score_now` is enough."""
        return not (self._parts or self._together)

    def score_now(self, trajectory: Trajectory) -> Verdict:
        """The environment's own score, without waiting."""
        parts = dict(trajectory.rewards)
        return combine(parts, {ENVIRONMENT: self._environment_weight}, self._environment_failure(parts))

    async def score(self, trajectory: Trajectory) -> Verdict:
        """All parts but those of a group. Never raises for what user code does."""
        environment = trajectory.task.environment
        parts: dict[str, float | None] = dict(trajectory.rewards)
        failures = list(self._environment_failure(parts))
        mine = [part for part in self._parts if part.section.applies_to(environment)]

        async def one(part: _Scored[One]) -> None:
            started = time.perf_counter()
            outcome = await part.score(trajectory)
            self._note(part.name, time.perf_counter() - started, outcome, parts, failures)

        async with self._slots, anyio.create_task_group() as group:
            for part in mine:
                group.start_soon(one, part)
        return combine(parts, self._weights(mine), tuple(failures))

    async def score_group(self, trajectories: Sequence[Trajectory], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The verdicts of :meth:`score` completed with the parts that see the whole group; all have numbers so far."""
        environment = trajectories[0].task.environment
        parts = [dict(verdict.rewards) for verdict in verdicts]
        failures = [list(verdict.failures) for verdict in verdicts]
        together = [part for part in self._together if part.section.applies_to(environment)]

        async def one(part: _Scored[Many]) -> None:
            started = time.perf_counter()
            outcomes = await part.score(trajectories)
            seconds = time.perf_counter() - started
            for position, outcome in enumerate(outcomes):
                self._note(part.name, seconds, outcome, parts[position], failures[position])

        async with anyio.create_task_group() as group:
            for part in together:
                group.start_soon(one, part)
        weights = self._weights([part for part in self._parts if part.section.applies_to(environment)] + together)
        return [combine(p, weights, tuple(f)) for p, f in zip(parts, failures, strict=True)]

    def _note(
        self, name: str, seconds: float, outcome: Outcome, parts: dict[str, float | None], failures: list[ScoreFailure]
    ) -> None:
        if isinstance(outcome, ScoreFailure):
            parts[name] = None
            failures.append(outcome)
            self._observe(name, seconds, outcome.reason)
        else:
            parts[name] = outcome
            self._observe(name, seconds, "")

    def _weights(self, parts: Sequence[_Scored[Any]]) -> dict[str, float]:
        return {ENVIRONMENT: self._environment_weight, **{part.name: part.section.weight for part in parts}}

    def _environment_failure(self, parts: dict[str, float | None]) -> tuple[ScoreFailure, ...]:
        value = parts.get(ENVIRONMENT)
        if self._environment_weight == 0 or (value is not None and math.isfinite(value)):
            return ()
        self._observe(ENVIRONMENT, 0.0, "missing")
        return (ScoreFailure(ENVIRONMENT, "missing", "the environment gave no score"),)
