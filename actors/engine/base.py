"""The interface of an inference engine to the agent loops, satisfied by the HTTP client and the stub of the tests, and
time limits that pause while the engines sleep (``engine.colocate: sleep``).

A sleeping engine is neither slow nor dead: the learner has the device. Requests, episodes and waits that continue
meanwhile keep the time that they had left when it fell asleep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import anyio
import numpy as np
import numpy.typing as npt

from pipeline.schema import FinishReason, TokenSpan, VersionSpan


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


@dataclass(frozen=True, slots=True)
class Generation:
    """Checked completion of an engine. All lengths are n, the number of sampled tokens (the stop token included)."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Nats, under the distribution sampled from."""
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    """``ABORT``: the engine gave the request up; its tokens are to be discarded and the request made again."""

    def as_span(self) -> TokenSpan:
        """The SAMPLED span of a turn."""
        return TokenSpan.sampled(self.token_ids, self.logprobs, self.version_spans)


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """An engine's own counters since it started, in tokens."""

    queries: float
    hits: float


class Engine(Protocol):
    """One replica. Methods raise :class:`EngineUnavailable` (does not answer), :class:`EngineRefused` (the request is
    wrong) or :class:`EngineProtocolError` (the answer is), each naming the engine."""

    @property
    def name(self) -> str:
        """Its base URL."""
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session_id: str = "", cache_salt: str = ""
    ) -> Generation:
        """Continue ``token_ids``."""
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

    async def prefix_cache(self) -> PrefixCache | None:
        """None where the engine does not count."""
        ...

    async def close(self) -> None: ...


class PausableTimeout:
    """Shared by everything of an actor that waits for an engine. Use inside one event loop."""

    def __init__(self) -> None:
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
            try:
                yield scope
            finally:
                del self._scopes[scope]

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
    """A generation and the engine that made it."""

    generation: Generation
    engine: str
    seconds: float
    """Wall time of the request that succeeded."""
