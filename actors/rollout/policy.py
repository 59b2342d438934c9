"""Completions for one order, from any engine that is fit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from actors.engine.base import Completion, Engine, Generation, Sampling
from actors.engine.pool import EnginePool
from pipeline.errors import EngineError, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.metrics.actor import ActorMetrics
from pipeline.runtime.plugin_guard import kept_running
from pipeline.schema import FinishReason, Order


class Policy:
    """Samples the completions of one order, and records the engines that did."""

    def __init__(
        self,
        order: Order,
        pool: EnginePool,
        sampling: Sampling,
        metrics: ActorMetrics,
        *,
        model: str,
        backend: str,
        context_max: int,
        retries: int,
    ) -> None:
        """``sampling`` as the run file says; the order may be greedy or have a temperature of its own.

        ``context_max``: tokens of prompt and completion together."""
        if order.greedy:
            sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
        elif order.temperature is not None:
            sampling = replace(sampling, temperature=order.temperature)
        self.sampling = sampling
        self.differs = order.greedy or order.temperature is not None
        """This order is sampled otherwise than the run file says: greedily, or for an evaluation."""
        self.model = model
        self.context_max = context_max
        self.engines: list[str] = []
        """Engines in the order of their completions, repetitions in a row left out."""
        self.seconds = 0.0
        """Time of the requests that succeeded."""
        self.asking = False
        """A completion was requested and did not come (yet)."""
        self._session = order.order_id
        self._version = order.policy_version
        self._pool = pool
        self._metrics = metrics
        self._backend = backend
        self._retries = retries

    def trouble(self) -> str:
        """Reason why no engine can answer; empty when one can."""
        return self._pool.trouble(self._version)

    async def complete(self, prompt_ids: Sequence[int], tokens_max: int, stop: Sequence[str] = ()) -> Completion:
        """Sample one completion, trying again (on another engine, where there is one) up to ``actor.retries`` times.

        ``stop``: more texts that end it. Every try waits for an engine whose policy version is at least that of the
        order and of all completions so far. Tokens of a try that did not count are counted as discarded. Raises
        :class:`EngineRefused` at once, and the last :class:`EngineError` when all tries failed."""
        self.asking = True
        sampling = replace(self.sampling, max_tokens=tokens_max, stop=(*self.sampling.stop, *stop))
        with kept_running():
            completion = await self._tried(prompt_ids, sampling, self._version)
        self.asking = False
        self._version = max(self._version, completion.generation.version_spans[-1].policy_version)
        self.seconds += completion.seconds
        if completion.engine not in self.engines[-1:]:
            self.engines.append(completion.engine)
        return completion

    async def _tried(self, prompt_ids: Sequence[int], sampling: Sampling, version_min: int) -> Completion:
        avoid: frozenset[str] = frozenset()
        failure: EngineError | None = None
        for _ in range(self._retries + 1):
            async with self._pool.lease(self._session, version_min, avoid) as engine:
                try:
                    return await self._request(engine, prompt_ids, sampling, version_min)
                except EngineRefused:
                    self._metrics.engine_errors_total.labels(kind="refused").inc()
                    raise
                except EngineError as error:
                    kind = "protocol" if isinstance(error, EngineProtocolError) else "unavailable"
                    self._metrics.engine_errors_total.labels(kind=kind).inc()
                    if isinstance(error, EngineUnavailable):
                        self._pool.failed(engine.name, error)
                    failure = error
                    avoid |= {engine.name}
        assert failure is not None
        raise failure

    async def _request(
        self, engine: Engine, prompt_ids: Sequence[int], sampling: Sampling, version_min: int
    ) -> Completion:
        started = time.perf_counter()
        salt = f"v{self._pool.version_of(engine.name)}"
        generation = await engine.generate(prompt_ids, sampling, session_id=self._session, cache_salt=salt)
        seconds = time.perf_counter() - started
        self._metrics.generate_duration_seconds.labels(backend=self._backend).observe(seconds)
        self._metrics.tokens_total.labels(kind="prompt").inc(len(prompt_ids))
        if generation.finish_reason is FinishReason.ABORT:
            self._discard(generation)
            raise EngineUnavailable(f"engine {engine.name} aborted a request (finish_reason abort)")
        oldest, newest = generation.version_spans[0].policy_version, generation.version_spans[-1].policy_version
        if oldest < version_min:
            self._discard(generation)
            raise EngineUnavailable(
                f"engine {engine.name}: expected policy version {version_min} or newer, got tokens of version {oldest}"
            )
        self._pool.sampled_with(engine.name, newest)
        self._metrics.tokens_total.labels(kind="generated").inc(len(generation.token_ids))
        return Completion(generation, engine.name, seconds)

    def _discard(self, generation: Generation) -> None:
        self._metrics.tokens_total.labels(kind="discarded").inc(len(generation.token_ids))
