"""transformers' continuous batching, extended for a server.

Results go to the event loop, the prefix cache forgets old weights, a dead sampling thread is reported.
One background thread (of transformers) samples; everything here that touches its state runs inside
:meth:`Batching.frozen`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import input_outputs
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestState

from actors.embedded.experts import ExpertRecord
from actors.embedded.options import EngineOptions
from actors.embedded.paged_model import PagedModel
from actors.embedded.requests import EngineRequest
from actors.embedded.states import RequestStates

PLACEHOLDER_TEMPERATURE = 2.0
"""Makes transformers create its temperature step (it leaves it out at 1.0); each request then brings its own value."""
MASK_BYTES_MAX = 256 * 2**20
"""Attention over paged KV on a CPU has a dense mask [batch tokens, cached tokens]; this bounds it."""


class Batching(ContinuousBatchingManager):
    """``deliver`` and ``fatal`` are called on the event loop."""

    def __init__(
        self,
        model: Any,
        options: EngineOptions,
        eos_token_ids: tuple[int, ...],
        deliver: Callable[[list[GenerationOutput]], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.states = RequestStates(model)
        paged = PagedModel(model)
        super().__init__(
            paged,
            GenerationConfig(
                do_sample=True,
                temperature=PLACEHOLDER_TEMPERATURE,
                top_p=None,
                top_k=None,
                eos_token_id=list(eos_token_ids),
                max_new_tokens=options.max_length,
            ),
            _configuration(paged, options, share=not self.states and not options.return_routed_experts),
        )
        self.eos_token_ids = frozenset(eos_token_ids)
        self._experts = ExpertRecord(model) if options.return_routed_experts else None
        self.output_router = _Router(asyncio.get_running_loop(), deliver, self._experts)
        self._fatal = fatal
        self._stale: set[str] = set()
        self.unread: set[str] = set()
        """Requests of which no pass has read a token yet; the caller adds its own before it submits them."""
        self.prefix_queries = 0
        """Prompt tokens looked up in the prefix cache."""
        self.prefix_hits = 0
        """Prompt tokens found there."""
        self.ending = False
        """No step is made any more: set before :meth:`stop` where the memory of cache or weights is given up."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its result is delivered once, and before it one after each token if it is a stream."""
        stops = request.stop_token_ids | (frozenset() if request.ignore_eos else self.eos_token_ids)
        self.prefix_queries += len(request.token_ids)
        self.add_request(
            request.token_ids,
            request_id=request.request_id,
            max_new_tokens=request.max_tokens,
            streaming=request.stream,
            eos_token_id=list(stops) or [-1],
            temperature=request.temperature,
        )

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Hold the sampling thread between two steps. Blocks the calling thread until it is there; may nest. On a GPU
        that thread has a stream of its own, so it continues when what was done meanwhile has ended."""
        with self.pause():
            try:
                yield
            finally:
                if self.model.device.type == "cuda":
                    torch.cuda.synchronize(self.model.device)

    def _requests(self) -> tuple[dict[str, RequestState], dict[str, RequestState]]:
        """Requests in the current batch, and those that wait for a place in it; none before the first pass."""
        if self.batch_processor is None:
            return {}, {}
        scheduler = self.batch_processor.scheduler
        return scheduler.active_requests, scheduler.waiting_requests

    def sampled_counts(self) -> dict[str, int]:
        """Tokens sampled so far by each unfinished request. Inside :meth:`frozen`."""
        active, waiting = self._requests()
        counts = {request_id: len(state.logprobs) for request_id, state in (waiting | active).items()}
        return dict.fromkeys(self.unread.copy(), 0) | counts

    def forget_cache(self) -> None:
        """Make new requests blind to KV computed by the old weights. Inside :meth:`frozen`.

        Requests in flight keep their KV: their later tokens are sampled by the new weights over a context read by the
        old ones. (vLLM 0.32 drops it when it pauses, and reads the context again.) What they compute is not offered to
        other requests.
        """
        if self.batch_processor is None:
            return
        cache = self.batch_processor.cache
        cache.evict_cached_blocks()
        for allocator in cache.cache_allocators.values():
            allocator.ledger.hash_to_block.clear()
            allocator.ledger.block_to_hash.clear()
        self._stale = set(self.batch_processor.scheduler.active_requests)

    def begin_anew(self) -> None:
        """Forget cached prefixes, and count and sample as after the start. Inside :meth:`frozen`."""
        self.forget_cache()
        self.prefix_queries = self.prefix_hits = 0
        self.distributed_helper.set_tp_seed(self.continuous_batching_config.seed, self.model.device)

    def running(self) -> int:
        """Requests in the current batch."""
        return len(self._requests()[0])

    def in_hand(self) -> int:
        """Requests that the sampling thread has or has yet to take, those that were cancelled since its last step
        included."""
        return sum(map(len, self._requests())) + int(self.input_queue.qsize())

    def sampled_in_flight(self) -> int:
        """Tokens sampled so far by the requests in the current batch."""
        return sum(len(state.logprobs) for state in list(self._requests()[0].values()))

    def cache_used(self) -> float:
        """Share of KV blocks that requests in flight hold, 0 to 1; blocks kept for prefix hits count as free."""
        if self.batch_processor is None:
            return 0.0
        allocators = self.batch_processor.cache.cache_allocators.values()
        used = sum(len(blocks) for allocator in allocators for blocks in list(allocator.block_table.values()))
        return min(1.0, used / sum(allocator.num_blocks for allocator in allocators))

    def _create_batch_processor(self) -> Any:
        if self.model.device.type == "cpu":  # or its inputs are pinned beside a GPU, and PyTorch puts them on a Mac's
            input_outputs.get_available_devices = lambda: frozenset({"cpu"})
        processor = super()._create_batch_processor()
        cache = processor.cache
        self.model.config.adapt(cache)
        search = cache.search_prefix_match

        def counted_search(request_id: str, prompt_ids: list[int]) -> int:
            found: int = search(request_id, prompt_ids)
            self.prefix_hits += found
            return found

        def mark_fresh(state: RequestState, complete_blocks: dict[str, int]) -> None:
            """As the original, but also for requests that end with their first token, and not for stale ones."""
            if not cache.use_prefix_sharing or state.request_id in self._stale:
                return
            for name, blocks in complete_blocks.items():
                token_ids = state.initial_tokens + state.generated_tokens
                cache.cache_allocators[name].mark_complete_blocks(state.request_id, token_ids, blocks)

        look_for_news = processor._update_tp_group_state

        def ending_or_news() -> bool:
            """True: no step is made. A stop is otherwise seen only after the step that follows a pause."""
            return bool(look_for_news()) or self.ending

        cache.search_prefix_match, cache.mark_complete_blocks = counted_search, mark_fresh
        processor._update_tp_group_state = ending_or_news
        return processor

    def _generation_step(self) -> None:
        processor = self.batch_processor
        requests, scheduler = processor.inputs_and_outputs.requests_in_batch, processor.scheduler
        self.unread.difference_update(request.state.request_id for request in requests)
        with self.states.batch(requests, scheduler.active_requests):
            super()._generation_step()
        if self._experts is not None:
            read = [(r.state.request_id, r.state.position_offset - r.query_length, r.query_length) for r in requests]
            self._experts.add(read, {**scheduler.active_requests, **scheduler.waiting_requests})

    def _handle_critical_error(self, error: Exception, batch_processor: Any) -> None:
        super()._handle_critical_error(error, batch_processor)
        self.output_router.loop.call_soon_threadsafe(self._fatal, error)


class _Router:
    """Replaces transformers' OutputRouter: one callback on the event loop for all results of a step."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Callable[[list[GenerationOutput]], None],
        experts: ExpertRecord | None,
    ) -> None:
        self.loop = loop
        self._deliver = deliver
        self._experts = experts

    def deliver(self, output: GenerationOutput) -> None:
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        if self._experts is not None:
            for output in outputs:
                if output.is_finished() or output.error is not None:
                    output.experts = self._experts.take(output.request_id)
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._deliver, outputs)

    def fail_and_deliver(self, state: RequestState, error: Exception) -> None:
        output = state.to_generation_output()
        output.error = f"{type(error).__name__}: {error}"
        self.deliver(output)


def _configuration(model: PagedModel, options: EngineOptions, *, share: bool) -> ContinuousBatchingConfig:
    """Sizes of cache and batch. Small pages and a bounded batch keep the dense CPU mask, the main cost, small.
    ``share``: requests with a common prefix share its blocks."""
    sizes = model.config
    token_bytes = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * model.dtype.itemsize
    page = max(4, options.block_size)
    batch_tokens = max(options.batch_tokens, options.max_sequences)
    wanted = 2 * options.max_sequences * (options.max_length + page)
    tokens = min(wanted, int(options.kv_cache_gib * 2**30) // token_bytes)
    if model.device.type == "cpu":
        tokens = min(tokens, MASK_BYTES_MAX // (batch_tokens * model.dtype.itemsize) - batch_tokens)
    tokens = max(tokens, options.max_length + page)
    return ContinuousBatchingConfig(
        page_size=page,
        num_blocks=-(-tokens // page),
        max_batch_tokens=batch_tokens,
        max_requests_per_batch=options.max_sequences,
        max_blocks_per_request=0 if model.device.type == "cpu" or sizes.rows else None,
        return_logprobs=True,
        per_request_processors=True,
        drop_unsupported_processors=False,
        use_async_batching=False,
        use_cuda_graph=False,
        allow_block_sharing=share,
        auto_switch_to_flash=model.device.type == "cuda" and not model.eager,
        safety_margin=0.1,
        seed=int(torch.randint(2**31, ()).item()) if options.seed < 0 else options.seed,
    )
