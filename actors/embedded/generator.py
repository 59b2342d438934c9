"""The generator behind the HTTP routes of the embedded engine: generate, cancel, pause, load weights, stamp, resume,
sleep, wake.

New weights are loaded into the live model (:mod:`actors.embedded.weights`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from actors.embedded.batching import Batching
from actors.embedded.options import EngineOptions
from actors.embedded.requests import Bounds, EngineRequest, Span, VersionRecord
from actors.embedded.sleep import TAGS, WEIGHTS, SleepMode
from actors.embedded.weights import load_weights, patch_weights
from actors.servers.progress import EngineActivity, EngineProgress
from actors.servers.refusal import Refusal
from pipeline.errors import ConfigurationError, DeltaMismatch
from pipeline.runtime.embedded_models import check_layers, unserved

T = TypeVar("T")
Heard = Callable[[list[int], list[float]], None]
"""Gets all tokens of a request so far, and their log-probabilities."""
log = logging.getLogger(__name__)
TRIAL_TOKENS = 8
"""Sampled after each prompt of the trial."""
TRIAL_NATS_MAX, TRIAL_NATS_MAX_16_BITS = 0.001, 0.5
"""Mean distance of log-probabilities in the trial, where weights have 32 and 16 bits."""


@dataclass(frozen=True, slots=True)
class GeneratedTokens:
    """Sampled tokens of one request."""

    token_ids: list[int]
    logprobs: list[float]
    """Nats, under the distribution that was sampled from (after temperature, top-p, top-k)."""
    finish_reason: str | None = None
    """``stop`` or ``length``; None while it is sampled."""
    stop_reason: int | None = None
    """The token of ``stop_token_ids`` that ended it; None for the model's own end token."""
    spans: list[Span] | None = None
    experts: npt.NDArray[Any] | None = None
    """``[tokens, layers, k]`` of the tokens from ``EngineRequest.experts_from`` to the last but one."""


class Generator:
    """Owned by one event loop. Control operations run one at a time in one worker thread."""

    def __init__(self, options: EngineOptions, fatal: Callable[[BaseException], None]) -> None:
        self.options = options
        self.versions = VersionRecord()
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self._sampled = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._waiting: dict[str, asyncio.Future[GenerationOutput]] = {}
        self._streams: dict[str, Heard] = {}
        self._control = ThreadPoolExecutor(1, thread_name_prefix="control")
        self._held: AbstractContextManager[None] | None = None
        self._stopping = False
        self._model, eos = load_model(options)
        self.bounds = Bounds(options, int(self._model.config.get_text_config().vocab_size))
        self._batching = Batching(self._model, options, eos, self._delivered, fatal)
        self._rest = SleepMode(self._model, self._batching)
        self.passes = 0
        """Forward passes of the model."""
        self._model.register_forward_pre_hook(self._count_pass)
        self.progress = EngineProgress(self._activity)

    @property
    def sleeping(self) -> bool:
        """Nothing is sampled: asleep, or paused."""
        return self.paused or bool(self._rest.asleep)

    @property
    def paused(self) -> bool:
        return self._held is not None

    @property
    def alive(self) -> bool:
        """False when the sampling thread has ended."""
        return bool(self._batching.is_running())

    def start(self) -> None:
        self._batching.start()

    async def try_out(self) -> None:
        """Sample after two prompts, and compare with plain passes; only :attr:`passes` tells of it afterwards. A state
        is also handed on between the pieces of a prompt that is too long for one pass.

        Raises :class:`ConfigurationError` where the model samples wrongly or fails: it has attention or states of its
        own, which continuous batching passes by.
        """
        room, pass_tokens = self.options.max_length - TRIAL_TOKENS, self.options.batch_tokens
        longest = max(1, min(room, pass_tokens + 2 if self._batching.states else 8))
        lengths = [1, longest, *[longest] * (pass_tokens // longest if self._batching.states else 0)]
        prompts = {str(n): [(n + 7 * i) % self.bounds.vocabulary_size for i in range(m)] for n, m in enumerate(lengths)}
        self._waiting = {name: asyncio.get_running_loop().create_future() for name in prompts}

        def submit() -> None:
            with self._batching.frozen():
                for name, ids in prompts.items():
                    self._batching.submit(EngineRequest(name, ids, TRIAL_TOKENS, 1.0, frozenset(), True, True))

        def forget() -> None:
            with self._batching.frozen():
                self._batching.begin_anew()

        model = type(self._model).__name__
        await self._in_control(submit)
        outputs = await asyncio.gather(*self._waiting.values())
        self._waiting = {}
        distances = []
        for output, ids in zip(outputs, prompts.values(), strict=True):
            if output.error is not None:
                raise unserved(model, f"fails ({output.error})")
            scores = await self.score([*ids, *output.generated_tokens])
            distances += [abs(a - b) for a, b in zip(scores[len(ids) - 1 :], output.logprobs, strict=True)]
        mean = sum(distances) / len(distances)
        if not mean <= (TRIAL_NATS_MAX if self._model.dtype == torch.float32 else TRIAL_NATS_MAX_16_BITS):
            raise unserved(model, f"samples tokens {mean:.2g} nats from its own log-probabilities")
        await self._in_control(forget)

    async def stop(self) -> None:
        """End sampling at the next step; unfinished requests are answered 503."""
        self._stopping = True
        await self._in_control(self._end_sampling)
        self._control.shutdown(wait=False)
        for request_id, future in list(self._waiting.items()):
            if not future.done():
                future.set_exception(Refusal(503, f"request {request_id}: the engine is shutting down"))

    async def generate(self, request: EngineRequest, heard: Heard | None = None) -> GeneratedTokens:
        """Sample one completion. Cancelling the call cancels the request. ``heard`` gets all tokens of a stream but the
        last. Raises :class:`Refusal` (400, 503)."""
        if self._stopping or not self.alive:
            raise Refusal(503, "the engine is shutting down")
        if len(self._waiting) >= self.options.queue_max:
            raise Refusal(
                503,
                f"{len(self._waiting)} requests are in flight, the engine takes {self.options.queue_max}: try again",
            )
        if request.request_id in self._waiting:
            raise Refusal(400, f"request_id {request.request_id!r} is already in flight")
        future: asyncio.Future[GenerationOutput] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        if heard is not None:
            self._streams[request.request_id] = heard
        self._batching.unread.add(request.request_id)  # before its version is read: from here on a stamp counts it
        self.versions.begin(request.request_id)
        try:
            self._batching.submit(request)
            output = await future
            return self._completed(request, output)
        except asyncio.CancelledError:
            self.finished["abort"] += 1
            self._batching.cancel_request(request.request_id)
            raise
        finally:
            del self._waiting[request.request_id]
            self._streams.pop(request.request_id, None)
            self._batching.unread.discard(request.request_id)
            self.versions.forget(request.request_id)

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """log π of each token but the first under the model's own distribution (temperature 1), by one forward pass
        between two steps. Raises :class:`Refusal` (503) when asleep."""

        def forward() -> list[float]:
            if self._rest.asleep:
                raise Refusal(503, "prompt_logprobs: the engine is asleep")
            ids = torch.tensor([token_ids], device=self._model.device)
            with self._batching.frozen(), torch.inference_mode():
                logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            scores = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
            return [float(score) for score in scores]

        return await self._in_control(forward)

    async def pause(self) -> None:
        """Stop between two steps and keep all requests. Returns when no step runs; harmless when paused."""
        await self._in_control(self._hold)

    async def resume(self) -> None:
        """Undo :meth:`pause`; harmless when not paused. Raises :class:`Refusal` (400) when asleep."""

        def resume() -> None:
            if self._rest.asleep:
                raise Refusal(400, "resume: the engine is asleep: wake it up first")
            self._release()

        await self._in_control(resume)

    async def sleep(self, level: int) -> None:
        """Pause, and release the memory of the KV cache and (level 2, or on a GPU) of the weights up. Requests are
        suspended, those that come now too; harmless when asleep."""

        def fall_asleep() -> None:
            self._hold()
            if not self._rest.asleep:
                log.info("asleep (level %d) after %d forward passes", level, self.passes)
            self._rest.fall_asleep(level)

        await self._in_control(fall_asleep)

    async def wake_up(self, tags: Sequence[str] = TAGS) -> bool:
        """Take the memory of ``tags`` back, and continue once nothing sleeps; True if it continues. Raises
        :class:`Refusal` (400) as :meth:`actors.embedded.sleep.SleepMode.wake`."""

        def wake() -> bool:
            slept = bool(self._rest.asleep)
            awake = self._rest.wake(tags)
            if awake:
                if slept:
                    log.info("awake after %d forward passes", self.passes)
                self._release()
            return awake

        return await self._in_control(wake)

    def _end_sampling(self) -> None:
        self._batching.ending = True  # without its memory, a sleeping engine may not make one more step
        self._release()
        self._batching.stop(block=True, timeout=1.0, hard_stop=True)

    def _hold(self) -> None:
        if self._held is None:
            held = self._batching.frozen()
            held.__enter__()
            self._held = held

    def _release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)

    def _activity(self) -> EngineActivity:
        return EngineActivity(self._batching.in_hand(), self.sleeping, self.passes)

    def _count_pass(self, module: Any, inputs: Any) -> None:
        self.passes += 1

    async def reload(self, folder: Path) -> None:
        """Load new weights between two steps. Raises :class:`Refusal` and keeps the old ones when they do not fit."""

        def load() -> None:
            if WEIGHTS in self._rest.asleep:
                raise Refusal(400, "reload_weights: the weights are asleep: wake tags=weights first")
            with self._batching.frozen():
                load_weights(self._model, folder)
                self._rest.discarded = False
                self._batching.forget_cache()

        await self._in_control(load)

    async def load_deltas(self, files: Sequence[Path]) -> None:
        """Bring the weights to a newer version by weight deltas, between two steps. Raises :class:`DeltaMismatch` and
        keeps the old ones when the result is not that version."""

        def load() -> None:
            if WEIGHTS in self._rest.asleep or self._rest.discarded:
                raise DeltaMismatch("the weights are asleep or discarded")
            with self._batching.frozen():
                patch_weights(self._model, files)
                self._batching.forget_cache()

        await self._in_control(load)

    async def stamp(self, version: str) -> None:
        """Tokens sampled from now on carry ``version``."""

        def mark() -> None:
            with self._batching.frozen():
                self.versions.current = version  # before requests are counted: those that begin meanwhile have it
                self.versions.stamp(version, self._batching.sampled_counts())

        await self._in_control(mark)

    def statistics(self) -> dict[str, float]:
        """Gauges and counters under vLLM's names, without the prefix."""
        running = self._batching.running()
        sampled = self.generation_tokens + self._batching.sampled_in_flight()
        self._sampled = max(self._sampled, sampled)  # a counter: it may not fall between a batch and its delivery
        return {
            "num_requests_running": running,
            "num_requests_waiting": max(0, len(self._waiting) - running),
            "kv_cache_usage_perc": self._batching.cache_used(),
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self._sampled,
            "prefix_cache_queries_total": self._batching.prefix_queries,
            "prefix_cache_hits_total": self._batching.prefix_hits,
        }

    async def _in_control(self, operation: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._control, operation)
        except RuntimeError as error:
            if self._stopping:
                raise Refusal(503, "the engine is shutting down") from error
            raise

    def _delivered(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            future = self._waiting.get(output.request_id)
            if future is None or future.done():
                continue
            if output.is_finished() or output.error is not None:
                future.set_result(output)
            else:
                self._streams[output.request_id](output.generated_tokens, output.logprobs)

    def _completed(self, request: EngineRequest, output: GenerationOutput) -> GeneratedTokens:
        if output.error is not None:
            self.finished["error"] += 1
            raise Refusal(500, f"request {request.request_id} failed in the engine: {output.error}")
        ids = output.generated_tokens
        self.prompt_tokens += len(request.token_ids)
        self.generation_tokens += len(ids)
        last = ids[-1] if ids else -1
        is_eos = not request.ignore_eos and last in self._batching.eos_token_ids
        stopped = is_eos or last in request.stop_token_ids
        reason = "stop" if stopped else "length"
        self.finished[reason] += 1
        experts = getattr(output, "experts", None)
        return GeneratedTokens(
            token_ids=ids,
            logprobs=output.logprobs,
            finish_reason=reason,
            stop_reason=last if stopped and not is_eos else None,
            spans=self.versions.finish(request.request_id, len(ids)),
            experts=None if experts is None else experts[request.experts_from :],
        )


def load_model(options: EngineOptions) -> tuple[Any, tuple[int, ...]]:
    """The model on its device in inference mode, and the tokens that end a completion. Raises
    :class:`ConfigurationError` where transformers cannot make it."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: Any = "auto" if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    except ValueError as error:
        raise ConfigurationError(
            f"engine.kind: the embedded engine cannot load {options.model}: {error}; set engine.kind: vllm"
        ) from error
    check_layers(type(model).__name__, getattr(model.config.get_text_config(), "layer_types", None))
    model = model.to(device).eval().requires_grad_(False)
    eos: Any = None
    if (options.model / "generation_config.json").exists():
        eos = GenerationConfig.from_pretrained(options.model).eos_token_id
    eos = model.config.get_text_config().eos_token_id if eos is None else eos
    ids = tuple(eos) if isinstance(eos, list | tuple) else (() if eos is None else (int(eos),))
    return model, ids
