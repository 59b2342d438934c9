"""States of requests in layers that hand on a state instead of keys and values: linear attention and convolutions.

transformers' continuous batching lays the tokens of all requests in one row, and caches keys and values only. Here such
a layer gets the tokens of each request apart from the others, with the request's own state as transformers' cache.
Requests that bring equally many tokens are computed together; while a batch stays the same, so does their joined state.

Dimensions: N tokens of the batch, B requests computed together, T tokens of each of them, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.continuous_batching.requests import FutureRequestState
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.runtime.embedded_models import STATE_KINDS


@dataclass(frozen=True, slots=True)
class Joined:
    """States of requests that were computed together; a row for each."""

    names: tuple[str, ...]
    layers: dict[int, LinearAttentionLayer]


class RequestStates:
    """Takes the place of the forward passes of the layers of ``model`` that have a state."""

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        self._layers = [layer for layer, kind in enumerate(kinds) if kind in STATE_KINDS]
        self._cache = DynamicCache(config=config) if self._layers else None
        self._rows: dict[str, tuple[Joined, int]] = {}
        """States of each request, and its row there."""
        self._groups: list[tuple[Tensor, Joined]] = []
        """Tokens ``[B, T]`` of the batch that is computed, as places in N, and the states of their requests."""
        for module in model.modules():
            mixes = not isinstance(module, GradientCheckpointingLayer)
            if mixes and getattr(module, "layer_idx", None) in self._layers:
                module.forward = self._apart(module.layer_idx, module.forward)

    def __bool__(self) -> bool:
        """True where the model has such layers."""
        return bool(self._layers)

    @contextmanager
    def batch(self, requests: Sequence[FutureRequestState], alive: Collection[str]) -> Iterator[None]:
        """A pass over the tokens of ``requests``, laid one after another. States of requests that are not ``alive``
        are dropped. A request whose first token comes begins without a state."""
        if not self._layers:
            yield
            return
        self._rows = {name: row for name, row in self._rows.items() if name in alive}
        groups: dict[tuple[int, bool], list[tuple[str, int]]] = {}
        start = 0
        for request in requests:
            length, state = request.query_length, request.state
            groups.setdefault((length, state.position_offset == length), []).append((state.request_id, start))
            start += length
        for (length, fresh), members in groups.items():
            names, starts = zip(*members, strict=True)
            tokens = torch.tensor(starts)[:, None] + torch.arange(length)
            self._groups.append((tokens, self._fresh(names) if fresh else self._joined(names)))
            self._rows |= {name: (self._groups[-1][1], row) for row, name in enumerate(names)}
        try:
            yield
        finally:
            self._groups = []

    def move(self, *, to_host: bool) -> None:
        """Move all states to host memory, or back to the device that they came from."""
        for joined in {id(joined): joined for joined, _ in self._rows.values()}.values():
            for layer in joined.layers.values():
                layer.offload() if to_host else layer.prefetch()

    def _fresh(self, names: tuple[str, ...]) -> Joined:
        assert self._cache is not None
        layers = self._cache.layers
        return Joined(names, {n: LinearAttentionLayer(layers[n].number_of_states) for n in self._layers})

    def _joined(self, names: tuple[str, ...]) -> Joined:
        rows = [self._rows[name] for name in names]
        first = rows[0][0]
        if first.names == names and all(joined is first for joined, _ in rows):
            return first
        return Joined(names, {n: _cat([(joined.layers[n], row) for joined, row in rows]) for n in self._layers})

    def _apart(self, index: int, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """``forward`` of a layer, request by request while a batch is computed."""
        (argument,) = {"cache_params", "past_key_values"} & inspect.signature(forward).parameters.keys()

        def apart(hidden_states: Tensor, **others: Any) -> Tensor:
            if not self._groups:
                return forward(hidden_states, **others)
            assert self._cache is not None
            out = torch.empty_like(hidden_states)
            for tokens, joined in self._groups:
                self._cache.layers[index] = joined.layers[index]
                out[0, tokens] = forward(hidden_states[0, tokens], **{argument: self._cache})
            return out

        return apart


def _cat(rows: Sequence[tuple[LinearAttentionLayer, int]]) -> LinearAttentionLayer:
    joined = copy(rows[0][0])
    for name in ("conv_states", "recurrent_states"):
        states = {
            at: None if state is None else torch.cat([getattr(layer, name)[at][row, None] for layer, row in rows])
            for at, state in getattr(joined, name).items()
        }
        setattr(joined, name, states)
    return joined
