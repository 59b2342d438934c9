"""One turn's completion, on whatever engine can give it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from actors.engine.base import Completion, Engine, Generation, Sampling
from actors.rollout.services import Services
from pipeline.errors import EngineError, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.schema import FinishReason

logger = logging.getLogger(__name__)


async def complete(
    services: Services,
    session: str,
    prompt_ids: Sequence[int],
    tokens_max: int,
    version_min: int,
    *,
    greedy: bool = False,
    temperature: float | None = None,
    stop: Sequence[str] = (),
) -> Completion:
    """Sample one completion, trying again (on another engine, where there is one) up to ``actor.retries`` times.

    ``greedy``: take the likeliest tokens instead; ``temperature``: sample at another one; ``stop``: more texts that end
    it. Every try waits for an engine whose policy version is at least ``version_min``. Tokens of a try that did not
    count are counted as discarded. Raises :class:`EngineRefused` at once, and the last :class:`EngineError` when all
    tries failed."""
    sampling = replace(greedily(services.sampling) if greedy else services.sampling, max_tokens=tokens_max)
    if temperature is not None:
        sampling = replace(sampling, temperature=temperature)
    if stop:
        sampling = replace(sampling, stop=(*sampling.stop, *stop))
    avoid: frozenset[str] = frozenset()
    failure: EngineError | None = None
    for _ in range(services.retries + 1):
        async with services.pool.lease(session, version_min, avoid) as engine:
            try:
                return await _request(services, engine, session, prompt_ids, sampling, version_min)
            except EngineRefused:
                services.metrics.engine_errors_total.labels(kind="refused").inc()
                raise
            except EngineError as error:
                kind = "protocol" if isinstance(error, EngineProtocolError) else "unavailable"
                services.metrics.engine_errors_total.labels(kind=kind).inc()
                if isinstance(error, EngineUnavailable):
                    services.pool.failed(engine.name, error)
                failure = error
                avoid |= {engine.name}
    assert failure is not None
    raise failure


async def _request(
    services: Services, engine: Engine, session: str, prompt_ids: Sequence[int], sampling: Sampling, version_min: int
) -> Completion:
    started = time.perf_counter()
    generation = await engine.generate(
        prompt_ids, sampling, session_id=session, cache_salt=f"v{services.pool.version_of(engine.name)}"
    )
    seconds = time.perf_counter() - started
    services.metrics.generate_duration_seconds.labels(backend=services.backend).observe(seconds)
    services.metrics.tokens_total.labels(kind="prompt").inc(len(prompt_ids))
    if generation.finish_reason is FinishReason.ABORT:
        _discard(services, generation)
        raise EngineUnavailable(f"engine {engine.name} gave a request up (finish_reason abort)")
    oldest, newest = generation.version_spans[0].policy_version, generation.version_spans[-1].policy_version
    if oldest < version_min:
        _discard(services, generation)
        raise EngineUnavailable(
            f"engine {engine.name}: expected policy version {version_min} or newer, got tokens of version {oldest}"
        )
    services.pool.sampled_with(engine.name, newest)
    services.metrics.tokens_total.labels(kind="generated").inc(len(generation.token_ids))
    return Completion(generation, engine.name, seconds)


def greedily(sampling: Sampling) -> Sampling:
    """The same limits and stops, without sampling."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)


def _discard(services: Services, generation: Generation) -> None:
    services.metrics.tokens_total.labels(kind="discarded").inc(len(generation.token_ids))
