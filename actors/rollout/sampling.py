"""Completions for one order, from any engine that is fit.

A long completion is requested in parts of ``engine.part_tokens``: the next part continues the prompt and all tokens so
far, on the same engine, whose prefix cache has them. A part that fails is requested again elsewhere, so that a lost
engine costs at most one part of a turn, and each token keeps the version and log-probability of the engine that
sampled it.

A completion may be heard while it is sampled. The parts that came whole stand then as ever. A part that fails after a
token of it was heard is not requested again, because another sample would not continue what was heard: the completion
fails.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import anyio
import numpy as np
import numpy.typing as npt

from actors.engine.base import Completion, Engine, Generation, Heard, Sampling
from actors.engine.pool import EnginePool
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Conversation
from pipeline.errors import EngineBusy, EngineError, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.plugin_limits import kept_running
from pipeline.schema import FinishReason, Order

AGAIN_SECONDS = 0.25
AGAIN_SECONDS_MAX = 10.0
"""Wait before a request is made again at an engine where it failed, doubled each time, with jitter."""
_KINDS = {EngineBusy: "busy", EngineRefused: "refused", EngineProtocolError: "protocol"}
"""Labels of failed requests in metrics; others are ``unavailable``."""


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
        part_tokens: int | None = None,
    ) -> None:
        """``sampling`` as the run file says; the order may be greedy or have a temperature of its own.

        ``context_max``: tokens of prompt and completion together. ``part_tokens``: of one request at most."""
        if order.greedy:
            sampling = replace(sampling, temperature=0.0)
        elif order.temperature is not None:
            sampling = replace(sampling, temperature=order.temperature)
        self.differs = order.greedy or order.temperature is not None
        """This order is sampled otherwise than the run file says: greedily, or for an evaluation."""
        self.sampling = replace(sampling, experts_from=None) if self.differs else sampling
        self.model = model
        self.context_max = context_max
        self.engines: list[str] = []
        """Engines in the order of their completions, repetitions in a row left out."""
        self.seconds = 0.0
        """Time of the requests that succeeded."""
        self.requests: list[tuple[float, float]] = []
        """See :attr:`pipeline.schema.Timings.requests`; they begin with this object."""
        self.asking = False
        """A completion was requested and did not come (yet)."""
        self._began = time.perf_counter()
        self._session = order.order_id
        self._version = order.policy_version
        self._pool = pool
        self._metrics = metrics
        self._backend = backend
        self._retries = retries
        self._part_tokens = part_tokens

    def reason(self) -> str:
        """Reason why no engine can answer; empty when one can."""
        return self._pool.reason(self._version)

    async def complete(
        self,
        prompt_ids: Sequence[int],
        tokens_max: int,
        stop: Sequence[str] = (),
        conversation: Conversation | None = None,
        n_added: int | None = None,
        heard: Heard | None = None,
    ) -> Completion:
        """Sample one completion. A request that fails is made again, on another engine where there is one, up to
        ``actor.retries`` times; one that meets a busy engine is made again for ``wait_seconds_max`` of the pool.

        ``stop``: more texts that end it. ``conversation``: the prompt as messages, for an endpoint that takes these;
        None: the program gave ids alone. ``n_added``: last tokens of the prompt, those that no earlier request of the
        branch had (None: all); experts are asked for from the token before them on. Every try waits for an engine whose
        policy version is at least that of the order and of all tokens so far. Tokens of a try that did not count are
        counted as discarded. ``heard`` gets the tokens as they come. Raises
        :class:`EngineRefused` at once, and the last :class:`EngineError` when all tries failed."""
        self.asking = True
        sampling = self.sampling
        if stop or tokens_max != sampling.max_tokens:
            sampling = replace(sampling, max_tokens=tokens_max, stop=(*sampling.stop, *stop))
        if sampling.experts_from is not None and n_added is not None:
            sampling = replace(sampling, experts_from=max(0, len(prompt_ids) - n_added - 1))
        with kept_running():
            completion = await self._in_parts(prompt_ids, sampling, heard)
        self.asking = False
        self._version = max(self._version, completion.generation.newest_version)
        self.seconds += completion.seconds
        return completion

    async def _in_parts(self, prompt_ids: Sequence[int], sampling: Sampling, heard: Heard | None) -> Completion:
        """A stop text may lie across the border of two parts, so a request with one is not divided."""
        most = sampling.max_tokens if self._part_tokens is None or sampling.stop else self._part_tokens
        whole: Completion | None = None
        left, ids, version_min = sampling.max_tokens, prompt_ids, self._version
        while True:
            asked = min(most, left)
            part_sampling = sampling if asked == sampling.max_tokens else replace(sampling, max_tokens=asked)
            try:
                part = await self._tried(ids, part_sampling, version_min, heard)
            except EngineError:
                if whole is not None:
                    self._discard(whole.generation)
                raise
            whole = part if whole is None else whole.followed_by(part)
            sampled, left = len(part.generation.token_ids), sampling.max_tokens - len(whole.generation.token_ids)
            if part.generation.finish_reason is not FinishReason.LENGTH or sampled < asked or left <= 0:
                return whole
            ids = [*prompt_ids, *whole.generation.token_ids.tolist()]
            if sampling.experts_from is not None:
                sampling = replace(sampling, experts_from=len(ids) - 1)
            version_min = part.generation.newest_version

    async def _tried(
        self, prompt_ids: Sequence[int], sampling: Sampling, version_min: int, heard: Heard | None
    ) -> Completion:
        avoid: frozenset[str] = frozenset()
        failures, refusals, waited = 0, 0, 0.0
        was_heard = False

        def hear(token_ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]) -> None:
            nonlocal was_heard
            assert heard is not None
            was_heard = True
            heard(token_ids, logprobs)

        while True:
            asked = ""
            try:
                async with self._pool.lease(self._session, version_min, avoid, len(prompt_ids)) as engine:
                    asked = engine.name
                    hears = None if heard is None else hear
                    return await self._request(engine, prompt_ids, sampling, version_min, hears)
            except EngineError as error:
                if not asked:
                    raise
                kind = next((kind for cls, kind in _KINDS.items() if isinstance(error, cls)), "unavailable")
                self._metrics.engine_errors_total.labels(kind=kind).inc()
                busy = isinstance(error, EngineBusy)
                failures, refusals = failures + (not busy), refusals + busy
                out_of_time = busy and waited >= self._pool.wait_seconds_max
                if isinstance(error, EngineRefused) or failures > self._retries or out_of_time or was_heard:
                    raise
                avoid |= {asked}
                if not self._pool.other_fit(version_min, avoid):
                    seconds = self._again_after(error, refusals if busy else failures)
                    waited += seconds if busy else 0.0
                    await anyio.sleep(seconds)
                    avoid = frozenset()

    def _again_after(self, error: EngineError, tries: int) -> float:
        """Seconds before a request is made for another time at an engine where it failed ``tries`` times."""
        if isinstance(error, EngineGone):
            return 0.0
        asked = error.seconds if isinstance(error, EngineBusy) else None  # 0 tells no time
        seconds = asked or AGAIN_SECONDS * 2.0 ** min(tries - 1, 16)
        return min(seconds, AGAIN_SECONDS_MAX) * (1.0 + self._pool.jitter.random())

    async def _request(
        self, engine: Engine, prompt_ids: Sequence[int], sampling: Sampling, version_min: int, heard: Heard | None
    ) -> Completion:
        started = time.perf_counter()
        salt = f"v{self._pool.version_of(engine.name)}"
        generation = await engine.generate(prompt_ids, sampling, session_id=self._session, cache_salt=salt, heard=heard)
        seconds = time.perf_counter() - started
        self._metrics.generate_duration_seconds.labels(backend=self._backend).observe(seconds)
        self._metrics.tokens_total.labels(kind="prompt").inc(len(prompt_ids))
        if generation.finish_reason is FinishReason.ABORT:
            self._discard(generation)
            raise EngineUnavailable(f"engine {engine.name} aborted a request (finish_reason abort)")
        oldest = generation.version_spans[0].policy_version
        if oldest < version_min:
            self._discard(generation)
            raise EngineGone(
                f"engine {engine.name}: expected policy version {version_min} or newer, got tokens of version {oldest}"
            )
        self.requests.append((round(started - self._began, 3), round(seconds, 3)))
        self._pool.sampled_with(engine.name, generation.newest_version, len(generation.token_ids))
        self._metrics.tokens_total.labels(kind="generated").inc(len(generation.token_ids))
        if engine.name not in self.engines[-1:]:
            self.engines.append(engine.name)
        return Completion(generation, engine.name, seconds)

    def _discard(self, generation: Generation) -> None:
        self._metrics.tokens_total.labels(kind="discarded").inc(len(generation.token_ids))
