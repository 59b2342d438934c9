"""Attention of packed rows (:mod:`learner.packing`): each run's queries see its own row and nothing else.

On a GPU in half precision one call of torch's variable-length flash attention does all runs (its causal mask is aligned
to the last key, as runs that begin later than their keys need it); elsewhere one call of scaled dot-product attention
per run. It reaches the layers of a model through transformers' attention interface, with the runs as an argument that
every layer hands on.

Dimensions: N tokens laid, K keys read, R runs, H query heads, G key heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from learner.packing import Layout

NAME = "afterplay_packed"
_VARLEN_HEAD_MAX = 256


@dataclass(frozen=True, slots=True)
class Runs:
    """What attention needs of a layout, on its device."""

    query_lengths: list[int]
    key_lengths: list[int]
    queries_from: Tensor
    """int32 ``[R+1]``: where each run begins in N, and N."""
    keys_from: Tensor
    """int32 ``[R+1]``, in K."""
    keys_K: Tensor | None
    varlen: bool
    """One call does all runs."""
    masks: dict[torch.dtype, list[Tensor | None]] = field(default_factory=dict)
    """``[queries, keys]`` of each run, 0 or minus infinity; None: plainly causal. Made once for all layers."""

    @classmethod
    def of(cls, layout: Layout, device: torch.device, *, varlen: bool) -> Runs:
        queries, keys = layout.query_lengths_R.tolist(), layout.key_lengths_R.tolist()
        return cls(
            queries,
            keys,
            _starts(layout.query_lengths_R, device),
            _starts(layout.key_lengths_R, device),
            None if layout.keys_K is None else torch.from_numpy(layout.keys_K).to(device),
            varlen,
        )

    def masks_of(self, like: Tensor) -> list[Tensor | None]:
        """Masks of the type and on the device of ``like``."""
        if like.dtype not in self.masks:
            self.masks[like.dtype] = [
                None if q == k else like.new_full((q, k), -torch.inf).triu_(k - q + 1)
                for q, k in zip(self.query_lengths, self.key_lengths, strict=True)
            ]
        return self.masks[like.dtype]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    runs: Runs | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """``[1, N, H, D]`` from query ``[1, H, N, D]`` and key and value ``[1, G, N, D]``. Without ``runs``: what
    transformers' own scaled dot-product attention gives, so that the model can be called as any other."""
    if runs is None:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **others)
        return out, None
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    grouped = key.shape[1] != query.shape[1]
    if runs.keys_K is not None:
        key, value = (_Gather.apply(x, runs.keys_K) for x in (key, value))  # type: ignore[no-untyped-call]
    if runs.varlen:
        return _varlen(query, key, value, runs, scaling, grouped), None
    parts = zip(
        torch.split(query, runs.query_lengths, dim=2),
        torch.split(key, runs.key_lengths, dim=2),
        torch.split(value, runs.key_lengths, dim=2),
        runs.masks_of(query.detach()),
        strict=True,
    )
    out = torch.cat([_causal(q, k, v, mask, scaling, grouped) for q, k, v, mask in parts], dim=2)
    return out.transpose(1, 2), None


def packed_inputs(layout: Layout, device: torch.device, *, varlen: bool) -> dict[str, Any]:
    """Arguments of a model's forward pass over a layout. The mask is none: being of four dimensions it keeps
    transformers from making one of ``[N, N]``, and packed attention does not read it."""
    return {
        "input_ids": torch.from_numpy(layout.token_ids_N).to(device)[None],
        "position_ids": torch.from_numpy(layout.positions_N).to(device)[None],
        "attention_mask": torch.zeros(1, 1, 1, 1, device=device),
        "runs": Runs.of(layout, device, varlen=varlen),
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
    """Whether torch's variable-length attention does it: a GPU, 16 bits, heads of at most 256."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or head_size > _VARLEN_HEAD_MAX:
        return False
    if find_spec("torch.nn.attention.varlen") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, grouped: bool) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )


def _varlen(query: Tensor, key: Tensor, value: Tensor, runs: Runs, scaling: float | None, grouped: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    out = varlen_attn(
        q,
        k,
        v,
        runs.queries_from,
        runs.keys_from,
        max(runs.query_lengths),
        max(runs.key_lengths),
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=grouped,
    )
    assert isinstance(out, Tensor)
    return out[None]


def _starts(lengths: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)).to(device)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
