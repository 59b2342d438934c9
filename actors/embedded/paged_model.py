"""A model as transformers' continuous batching takes it: layers of full or sliding attention, with keys and values of
one size.

Where attention has sinks or caps its scores, scaled dot-product attention does not compute it: the plain attention of
the model's own module does, over keys and values of the paged cache.

Dimensions: N tokens, K keys, G key heads, D head size, R numbers of a row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.generation.continuous_batching.utils import find_head_dim, find_num_key_value_heads
from transformers.masking_utils import eager_mask

from pipeline.runtime.embedded_models import ATTENTION_KINDS

EAGER = "afterplay_paged_eager"


class PagedModel:
    """Stands for ``model`` in transformers' continuous batching, which reads sizes and kinds of layers from
    ``config``."""

    def __init__(self, model: Any) -> None:
        text = model.config.get_text_config()
        if model.config._attn_implementation != "sdpa" or getattr(text, "attn_logit_softcapping", None):
            model.set_attn_implementation(EAGER)
        self._model = model
        self.config = PagedConfig.of(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        return self._model(**inputs)

    def eval(self) -> PagedModel:
        return self

    @property
    def eager(self) -> bool:
        """Attention is that of the model's own module."""
        return bool(self._model.config._attn_implementation == EAGER)

    def set_attn_implementation(self, name: str) -> None:
        self._model.set_attn_implementation(name)
        self.config._attn_implementation = name


@dataclass(slots=True)
class PagedConfig:
    """Fields of a config that continuous batching reads, for the layers of attention alone."""

    layer_types: list[str] | None
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    num_attention_heads: int
    hidden_size: int
    vocab_size: int
    sliding_window: int | None
    rows: dict[int, int] | None
    """Numbers of layers here by their numbers in the model, where the cache has a row for all heads of a token,
    because layers are left out or sizes differ. The longest row is the ``head_dim`` of the only head."""
    _attn_implementation: str = "sdpa"
    """Decides on masks: those of scaled dot-product attention serve plain attention too."""

    @classmethod
    def of(cls, text: Any) -> PagedConfig:
        """``text``: the config of the language model."""
        kinds = getattr(text, "layer_types", None)
        layers = [n for n in range(text.num_hidden_layers) if kinds is None or kinds[n] in ATTENTION_KINDS]
        sizes = {_sizes(text.per_layer_config[n]) for n in layers}
        heads, key_size, value_size = max(sizes)
        as_rows = len(sizes) > 1 or key_size != value_size or len(layers) < text.num_hidden_layers
        return cls(
            layer_types=None if kinds is None else [kinds[n] for n in layers],
            num_hidden_layers=len(layers),
            num_key_value_heads=1 if as_rows else heads,
            head_dim=max(heads * max(pair) for heads, *pair in sizes) if as_rows else key_size,
            num_attention_heads=1 if as_rows else text.num_attention_heads,
            hidden_size=text.hidden_size,
            vocab_size=text.vocab_size,
            sliding_window=getattr(text, "sliding_window", None),
            rows={number: at for at, number in enumerate(layers)} if as_rows else None,
        )

    def get_text_config(self) -> PagedConfig:
        return self

    def adapt(self, cache: PagedAttentionCache) -> None:
        """Let ``cache`` take keys and values ``[1, G, N, D]`` of the model's layers as rows ``[1, 1, N, R]``."""
        if self.rows is None:
            return
        numbers, update, size = self.rows, cache.update, self.head_dim

        def adapted(key_states: Tensor, value_states: Tensor, layer_idx: int, kwargs: Any) -> tuple[Tensor, Tensor]:
            given = key_states, value_states
            rows = (states.transpose(1, 2).flatten(2)[:, None] for states in given)
            cached = update(*(pad(row, (0, size - row.shape[-1])) for row in rows), numbers[layer_idx], kwargs)
            key, value = (
                row[:, 0, :, : states.shape[1] * states.shape[3]].unflatten(-1, states.shape[1::2]).transpose(1, 2)
                for row, states in zip(cached, given, strict=True)
            )
            return key, value

        cache.update = adapted


def _sizes(layer: Any) -> tuple[int, int, int]:
    """Key heads of a layer, and the sizes of their keys and values; those of a latent vector are made for each head."""
    latent = (getattr(layer, "qk_nope_head_dim", None) or 0) + (getattr(layer, "qk_rope_head_dim", None) or 0)
    if latent:
        return layer.num_attention_heads, latent, layer.v_head_dim
    size = find_head_dim(layer)
    return find_num_key_value_heads(layer), size, size


def paged_eager_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    cache: PagedAttentionCache | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """The ``eager_attention_forward`` beside the class of ``module``, with ``cache`` over the cached keys and values
    too."""
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=others)
    plain = sys.modules[type(module).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor] = plain(module, query, key, value, attention_mask, **others)
    return found


AttentionInterface.register(EAGER, paged_eager_attention)
AttentionMaskInterface.register(EAGER, eager_mask)
