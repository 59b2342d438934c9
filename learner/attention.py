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
from transformers import AttentionInterface

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
    **_: Any,
) -> tuple[Tensor, None]:
    """``[1, N, H, D]`` from query ``[1, H, N, D]`` and key and value ``[1, G, N, D]``. Without ``runs`` plain causal
    attention of ``[B, …]``."""
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    grouped = key.shape[1] != query.shape[1]
    if runs is None:
        return _causal(query, key, value, None, scaling, grouped).transpose(1, 2).contiguous(), None
    if runs.keys_K is not None:
        key, value = key.index_select(2, runs.keys_K), value.index_select(2, runs.keys_K)
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
