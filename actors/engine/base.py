"""The interface of an inference engine to the agent loops, satisfied by the HTTP client and the stub of the tests, and
time limits that pause while the engines sleep (``engine.colocate: sleep``).

A sleeping engine is neither slow nor dead: the learner has the device. Requests, episodes and waits that continue
meanwhile keep the time that they had left when it fell asleep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import anyio
import numpy as np
import numpy.typing as npt

from pipeline.schema import FinishReason, TokenSpan, VersionSpan
from pipeline.schema.trajectory import ExpertArray


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of one turn. There is no seed on purpose: a per-request seed kills a CPU vLLM, and the
    rollouts of a group must differ."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    experts_from: int | None = None
    """First position whose experts the engine returns; None: it returns none."""


Heard = Callable[[npt.NDArray[np.int32], npt.NDArray[np.float32]], None]
"""Gets the next token ids and their log-probabilities while a completion is sampled: together the beginning of the
generation that is returned in the end. What it raises ends the request."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Checked completion of an engine. All lengths are n, the number of sampled tokens (the stop token included)."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Nats, under the distribution sampled from."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    """``ABORT``: the engine gave the request up; its tokens are to be discarded and the request made again."""
    experts: ExpertArray | None = None
    """``[tokens, layers, k]``: chosen for the tokens from ``Sampling.experts_from`` to the last but one."""

    @property
    def newest_version(self) -> int:
        """Policy version of the last token."""
        return self.version_spans[-1].policy_version

    def followed_by(self, other: Generation) -> Generation:
        """Both as one completion; ``other`` was sampled after the tokens of this one."""
        at = len(self.token_ids)
        spans = list(self.version_spans)
        for span in other.version_spans:
            start = at + span.start
            if spans and spans[-1].policy_version == span.policy_version:
                start = spans.pop().start
            spans.append(VersionSpan(start, at + span.stop, span.policy_version))
        experts = None if self.experts is None or other.experts is None else (self.experts, other.experts)
        return Generation(
            np.concatenate((self.token_ids, other.token_ids)),
            np.concatenate((self.logprobs, other.logprobs)),
            tuple(spans),
            other.finish_reason,
            None if experts is None else np.concatenate(experts),
        )

    def as_span(self) -> TokenSpan:
        """The SAMPLED span of a turn."""
        return TokenSpan.sampled(self.token_ids, self.logprobs, self.version_spans)


@dataclass(frozen=True, slots=True)
class EngineReport:
    """Load of an engine as it says itself, and its counters since it started."""

    running: float = 0.0
    """Requests in its batch."""
    waiting: float = 0.0
    """Requests that wait for room in the batch or in the KV cache."""
    kv_used: float = 0.0
    """Share of the KV cache that requests in flight hold, 0 to 1."""
    preemptions: float = 0.0
    """Requests that were thrown out of the batch for want of KV cache."""
    sampled: float = 0.0
    """Tokens."""
    prefix_queries: float = 0.0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: float = 0.0
    """Prompt tokens found there."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of an engine, as it lists it."""

    name: str
    """Name that requests ask for."""
    root: str
    """Folder or hub id that it was loaded from."""
    max_length: int | None
    """Tokens of prompt and completion together; None where the engine does not say."""


class Engine(Protocol):
    """One replica. Methods raise :class:`EngineUnavailable` (does not answer; :class:`EngineGone`: and will not before
    it is healthy again; :class:`EngineBusy`: now), :class:`EngineRefused` (the request is wrong) or
    :class:`EngineProtocolError` (the answer is), each naming the engine."""

    @property
    def name(self) -> str:
        """Its base URL."""
        ...

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session_id: str = "",
        cache_salt: str = "",
        heard: Heard | None = None,
    ) -> Generation:
        """Continue ``token_ids``. ``heard`` gets the tokens before the end, where the engine can stream."""
        ...

    async def weight_version(self) -> int | None:
        """Policy version of the current weights; None if they were not stamped since the start."""
        ...

    async def health(self) -> None:
        """Return if it can serve requests."""
        ...

    async def is_sleeping(self) -> bool:
        """True while it keeps its requests without sampling, because the learner has the device. It is healthy then."""
        ...

    async def report(self) -> EngineReport | None:
        """None where the engine does not count."""
        ...

    async def close(self) -> None: ...


_innermost: ContextVar[tuple[PausableTimeout, anyio.CancelScope]] = ContextVar("innermost limit")


class PausableTimeout:
    """Shared by everything of an actor that waits for an engine. Use inside one event loop."""

    def __init__(self, *, pauses: bool = False) -> None:
        """``pauses``: the engines of this run sleep."""
        self.pauses = pauses
        self._asleep_since: float | None = None
        self._scopes: dict[anyio.CancelScope, float] = {}
        """Seconds left; they stand still while asleep."""

    @property
    def asleep(self) -> bool:
        return self._asleep_since is not None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Like ``anyio.move_on_after``, in seconds awake. ``cancelled_caught`` of the scope says whether it was too
        long."""
        deadline = float("inf") if self.asleep else anyio.current_time() + seconds
        with anyio.CancelScope(deadline=deadline) as scope:
            self._scopes[scope] = seconds
            outer = _innermost.set((self, scope))
            try:
                yield scope
            finally:
                _innermost.reset(outer)
                del self._scopes[scope]

    @staticmethod
    def around() -> tuple[PausableTimeout, float]:
        """The owner of the innermost limit around this code, and its seconds awake left. Raises LookupError where there
        is none."""
        own, scope = _innermost.get()
        return own, own._scopes[scope] if own.asleep else max(0.0, scope.deadline - anyio.current_time())

    def fell_asleep(self) -> None:
        """All limits stand still. Harmless when they do."""
        if self.asleep:
            return
        now = self._asleep_since = anyio.current_time()
        for scope in self._scopes:
            self._scopes[scope] = max(0.0, scope.deadline - now)
            scope.deadline = float("inf")

    def woke(self) -> None:
        """Let all limits run again; no effect if they do."""
        if not self.asleep:
            return
        self._asleep_since = None
        now = anyio.current_time()
        for scope, left in self._scopes.items():
            scope.deadline = now + left


@dataclass(frozen=True, slots=True)
class Completion:
    """A generation and the engine that made its last tokens."""

    generation: Generation
    engine: str
    seconds: float
    """Wall time of the requests that succeeded."""

    def followed_by(self, other: Completion) -> Completion:
        """Both as one; ``other`` continues this one."""
        return Completion(self.generation.followed_by(other.generation), other.engine, self.seconds + other.seconds)
