"""Releases the memory of an engine for its sleep and restores it afterwards. Sampling is held meanwhile.

Levels as vLLM's: 1 keeps the weights in host memory, 2 discards them; both release the KV cache. vLLM computes the
context of unfinished requests again; here the blocks that they hold are copied to host memory, so that they continue
unchanged, as after a pause.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from actors.embedded.batching import Batching
from actors.servers.refusal import Refusal

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)


class SleepMode:
    """Sleep and wake-up of one model and its batching."""

    def __init__(self, model: Any, batching: Batching) -> None:
        self.asleep: set[str] = set()
        """Tags whose memory is given up."""
        self.discarded = False
        """The weights are not those of any version: new ones must be loaded."""
        self._model = model
        self._batching = batching
        self._shapes: dict[str, torch.Size] = {}
        self._saved: dict[str, Tensor] = {}
        """Weights in host memory, by name."""
        self._cache: SavedCache | None = None

    def fall_asleep(self, level: int) -> None:
        """Release memory. Harmless where it is released already: saved weights stay saved."""
        if WEIGHTS not in self.asleep:
            self._give_up_weights(keep=level == 1 and not self.discarded)
            self.asleep.add(WEIGHTS)
        if KV_CACHE not in self.asleep:
            self._cache = SavedCache.take(self._batching)
            self.asleep.add(KV_CACHE)

    def wake(self, tags: Collection[str]) -> bool:
        """Take the memory of ``tags`` back; whether nothing sleeps any more.

        Raises :class:`Refusal` (400) before anything changes: an unknown tag; the KV cache while the weights are
        discarded, because sampling would use undefined weights.
        """
        unknown = sorted(set(tags) - set(TAGS))
        if unknown:
            raise Refusal(400, f"wake_up: expected tags among {list(TAGS)}, got {unknown}")
        lost = WEIGHTS not in tags or (bool(self._shapes) and not self._saved)  # they would be away, or without values
        if KV_CACHE in tags and KV_CACHE in self.asleep and (self.discarded or (WEIGHTS in self.asleep and lost)):
            raise Refusal(400, "wake_up: level 2 discarded the weights: wake tags=weights, load, then tags=kv_cache")
        if WEIGHTS in tags and WEIGHTS in self.asleep:
            self._take_weights_back()
            self.asleep.discard(WEIGHTS)
        if KV_CACHE in tags and KV_CACHE in self.asleep:
            if self._cache is not None:
                self._cache.put_back(self._batching)
            self._cache = None
            self.asleep.discard(KV_CACHE)
        return not self.asleep

    def _give_up_weights(self, *, keep: bool) -> None:
        on_host = next(self._model.parameters()).device.type == "cpu"
        if keep and on_host:
            return
        for name, parameter in self._model.named_parameters():
            self._shapes[name] = parameter.shape
            if keep:
                self._saved[name] = parameter.data.cpu()
            parameter.data = parameter.data.new_empty(0)
        _free_cached()

    def _take_weights_back(self) -> None:
        for name, parameter in self._model.named_parameters():
            if name not in self._shapes:
                continue
            parameter.data = parameter.data.new_empty(self._shapes[name])
            if name in self._saved:
                parameter.data.copy_(self._saved[name])
            else:
                self.discarded = True
        self._shapes.clear()
        self._saved.clear()


class SavedCache:
    """The sectors of a KV cache that were in use, in host memory."""

    def __init__(self, sectors: list[int], contents: Tensor, n_bytes: int) -> None:
        self._sectors = sectors
        self._contents = contents
        self._n_bytes = n_bytes

    @classmethod
    def take(cls, batching: Batching) -> SavedCache | None:
        """Copy what requests in flight hold, drop the blocks for prefix hits, free the memory. None: there is no
        cache yet."""
        if batching.batch_processor is None:
            return None
        batching.forget_cache()
        batching.states.move(to_host=True)
        cache = batching.batch_processor.cache
        cache.pool.try_to_free_sectors()
        free = set(cache.pool.free_sectors)
        first = cache.pool.num_reserved_sectors
        used = [sector for sector in range(first, first + cache.num_sectors) if sector not in free]
        storage = cache.cache_tensor.untyped_storage()
        with torch.inference_mode():
            saved = cls(used, cache.cache_tensor.view(-1, cache.bytes_per_sector)[used].cpu(), storage.nbytes())
        storage.resize_(0)
        _free_cached()
        return saved

    def put_back(self, batching: Batching) -> None:
        """The same blocks under the same numbers, the rest zeros as at the start."""
        assert batching.batch_processor is not None
        cache = batching.batch_processor.cache
        cache.cache_tensor.untyped_storage().resize_(self._n_bytes)
        batching.states.move(to_host=False)
        with torch.inference_mode():
            cache.cache_tensor.zero_()
            if self._sectors:
                view = cache.cache_tensor.view(-1, cache.bytes_per_sector)
                view[self._sectors] = self._contents.to(view.device)


def _free_cached() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
