"""Attention of packed rows (:mod:`learner.data.microbatch`): each run's queries attend only to their own row.

On a GPU in half precision one call of torch's variable-length flash attention does all runs (its causal mask is aligned
to the last key, as runs that begin later than their keys need it); elsewhere one call of scaled dot-product attention
per run, or where a window slides one for each of the run's blocks. Sinks and capped scores are written out; the
variable-length call knows neither. It reaches the layers of a model through transformers' attention interface, with the
runs as an argument that every layer hands on. :mod:`learner.policy.row_form` decides which models take packed rows.

A run's keys are its row from the first token on, so that distances within a run are those within the row. With a
``sliding_window`` a query sees as many keys, itself the last (``transformers.masking_utils.sliding_window_overlay``).

Dimensions: N tokens laid, K keys read, R runs, H query heads, G key heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learner.data.microbatch import Layout
from learner.distributed.context import ContextGroup, Exchange
from learner.distributed.ranks import on_device
from learner.policy.activations import recomputed

NAME = "afterplay_packed"
VARLEN_HEAD_MAX = 256


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of a layout, on the device of attention."""

    query_lengths: list[int]
    key_lengths: list[int]
    queries_from: Tensor
    """int32 ``[R+1]``: where each run begins in N, and N."""
    keys_from: Tensor
    """int32 ``[R+1]``, in K."""
    keys_K: Tensor | None
    varlen: bool
    """One call does all runs."""
    exchange: Exchange | None = None
    """Ranks divide the tokens: queries, keys and values that attention gets are of this rank's. None: of all."""
    masks: dict[tuple[int, int, int | None, torch.dtype], Tensor] = field(default_factory=dict)
    """``[queries, keys]``, 0 or minus infinity, by queries, keys and window. Made once for all layers and blocks."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, varlen: bool, context: ContextGroup | None = None) -> Runs:
        return cls(
            layout.query_lengths_R.tolist(),
            layout.key_lengths_R.tolist(),
            _starts(layout.query_lengths_R, device),
            _starts(layout.key_lengths_R, device),
            None if layout.keys_K is None else on_device(layout.keys_K, device),
            varlen,
            None if context is None else context.exchange(len(layout.token_ids_N)),
        )

    def mask(self, query: Tensor, keys: int, window: int | None) -> Tensor | None:
        """Mask of the type and on the device of ``query``, which ends at the last key. None: plainly causal."""
        queries = query.shape[2]
        if window is not None and window >= keys:
            window = None
        if queries == keys and window is None:
            return None
        kind = (queries, keys, window, query.dtype)
        if kind not in self.masks:
            later = keys - queries
            seen = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(later)
            if window is not None:
                seen.triu_(later - window + 1)
            self.masks[kind] = query.new_zeros(queries, keys).masked_fill_(~seen, -torch.inf)
        return self.masks[kind]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    runs: Runs | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``[1, N, H, D]`` from query ``[1, H, N, D]`` and key and value ``[1, G, N, D]``. ``softcap`` caps the scores,
    ``s_aux`` ``[H]`` are sinks: scores of a key without value. Without ``runs``: what transformers' own attention
    gives, so that the model can be called as any other.

    Raises :class:`NotImplementedError` for sinks and caps where one call is to do all runs.
    """
    written_out = softcap is not None or s_aux is not None
    if runs is None and not written_out:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
        return out, None
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if runs is None:
        return _written_out(query, key, value, attention_mask, scaling, softcap, s_aux).transpose(1, 2), None
    if runs.exchange is None:
        return _attended(query, key, value, runs, scaling, sliding_window, softcap, s_aux), None
    query, key, value = runs.exchange.to_heads(query, key, value)
    sinks = None if s_aux is None else runs.exchange.of_heads(s_aux)
    out = _attended(query, key, value, runs, scaling, sliding_window, softcap, sinks)
    return runs.exchange.to_tokens(out), None


def _attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    runs: Runs,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """``[1, N, H, D]`` of all tokens of the pass."""
    written_out = softcap is not None or sinks is not None
    grouped = key.shape[1] != query.shape[1]
    if runs.keys_K is not None:
        key, value = (_Gather.apply(x, runs.keys_K) for x in (key, value))  # type: ignore[no-untyped-call]
    if runs.varlen:
        if written_out:
            raise NotImplementedError("variable-length attention takes neither sinks nor capped scores")
        return _varlen(query, key, value, runs, scaling, sliding_window, grouped)
    outputs = []
    for q, k, v in zip(
        torch.split(query, runs.query_lengths, dim=2),
        torch.split(key, runs.key_lengths, dim=2),
        torch.split(value, runs.key_lengths, dim=2),
        strict=True,
    ):
        end = k.shape[2] - q.shape[2]
        for block in torch.split(q, sliding_window or q.shape[2], dim=2):
            begin = max(0, end - sliding_window + 1) if sliding_window else 0
            end += block.shape[2]
            keys, values = k[:, :, begin:end], v[:, :, begin:end]
            mask = runs.mask(block.detach(), end - begin, sliding_window)
            if written_out:
                outputs.append(_written_out(block, keys, values, mask, scaling, softcap, sinks))
            else:
                outputs.append(
                    torch.nn.functional.scaled_dot_product_attention(
                        block, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
                    )
                )
    outputs = [out.transpose(1, 2) for out in outputs]
    return outputs[0] if len(outputs) == 1 else recomputed(_end_to_end, *outputs)


def _end_to_end(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, dim=1)


def _written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """``[B, H, queries, D]``. Scores ``[B, H, queries, keys]`` become ``softcap · tanh(score / softcap)`` (Gemma 2,
    arXiv:2408.00118, section 2), are masked, and are normalised together with a sink for each head (gpt-oss,
    arXiv:2508.10925, section 2). ``mask``: 0 or True where a key is seen; None: causal."""
    B, H, queries, D = query.shape
    G, keys = key.shape[1], key.shape[2]
    products = query.reshape(B, G, H // G, queries, D) @ key[:, :, None].mT
    scores = products.reshape(B, H, queries, keys).float() * (D**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and queries > 1:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_()
    if mask is not None:
        seen = mask if mask.dtype == torch.bool else mask == 0
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().reshape(1, -1, 1, 1).expand(B, H, queries, 1)], dim=-1)
    shares = scores.softmax(-1)[..., :keys].to(value.dtype)
    outputs = shares.reshape(B, G, H // G, queries, keys) @ value[:, :, None]
    return outputs.reshape(B, H, queries, value.shape[-1])


def packed_inputs(
    layout: Layout, device: torch.device, *, varlen: bool, context: ContextGroup | None = None
) -> dict[str, Any]:
    """Arguments of a model's forward pass over a layout, or over this rank's part of its tokens. The mask is none:
    being of four dimensions it keeps transformers from making one of ``[N, N]``, and packed attention does not read
    it."""
    part = slice(None) if context is None else context.part(len(layout.token_ids_N))
    return {
        "input_ids": on_device(layout.token_ids_N[part], device)[None],
        "position_ids": on_device(layout.positions_N[part], device)[None],
        "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
        "runs": Runs.of(layout, device, varlen=varlen, context=context),
        "use_cache": False,
    }


class _Gather(torch.autograd.Function):
    """Keys or values ``[1, G, K, D]`` of each run. The gradients of those that many rows share are added in float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keys_K: Tensor) -> Tensor:
        ctx.save_for_backward(keys_K)
        ctx.tokens = x.shape[2]
        return x.index_select(2, keys_K)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (keys_K,) = grads, ctx.saved_tensors
        shape = (*grad.shape[:2], ctx.tokens, grad.shape[3])
        total = torch.zeros(shape, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device)
        return total.index_add_(2, keys_K, grad.to(total.dtype)).to(grad.dtype), None


def can_varlen(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """True where torch's variable-length attention works: a GPU, 16 bits, heads of at most 256, torch from 2.11 on
    (2.10 lets neither scale nor window be chosen)."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > VARLEN_HEAD_MAX:
        return False
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    from torch.nn.attention.varlen import varlen_attn

    return _parameters(varlen_attn) >= {"scale", "window_size"} and torch.cuda.get_device_capability(device) >= (8, 0)


def packs_by_varlen(model: Any, device: torch.device, compute: torch.dtype) -> bool:
    """True where packed attention is one call of torch's variable-length attention."""
    return can_varlen(device, compute, max((size for _, size in heads_of(model.config.get_text_config())), default=0))


def heads_of(config: Any) -> list[tuple[int, int]]:
    """Number and size of the query heads of each layer. Layers of Gemma 4 differ."""
    found = []
    for layer in config.per_layer_config:
        heads = getattr(layer, "num_attention_heads", None) or 1
        found.append((heads, getattr(layer, "head_dim", None) or getattr(layer, "hidden_size", 0) // heads))
    return found


def window_of(config: Any, layer: int) -> int | None:
    """Tokens that a layer's attention reads at most, its own among them; None: all. ``config`` is of the text. Without
    kinds of layers in it (Mistral 0.1, Phi-3.5) a window is that of every layer."""
    kinds = getattr(config, "layer_types", None)
    return getattr(config, "sliding_window", None) if not kinds or kinds[layer] == "sliding_attention" else None


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, window: int | None, grouped: bool
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    options: dict[str, Any] = {"scale": scaling, "window_size": (window - 1 if window else -1, 0)}
    if "enable_gqa" in _parameters(varlen_attn):  # torch 2.11 has no such option, and does it
        options["enable_gqa"] = grouped
    longest = max(runs.query_lengths), max(runs.key_lengths)
    out = varlen_attn(q, k, v, runs.queries_from, runs.keys_from, *longest, **options)
    assert isinstance(out, Tensor)
    return out[None]


def _starts(lengths: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return on_device(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), device)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
