"""Whether a model's rows may be packed: by what its config says of its layers, then by trying."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.attention import NAME, can_varlen, packed_inputs
from learner.packing import SHARED_TOKENS_MIN, Form, lay_out
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative distance of hidden states and gradients of packed rows from those of the rows alone."""


def packs_by_varlen(model: Any, device: torch.device, compute: torch.dtype) -> bool:
    """Whether packed attention is one call of torch's variable-length attention."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    return can_varlen(device, compute, int(size))


def choose_form(
    model: Any,
    config: LearnerConfig,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    compute: torch.dtype,
    *,
    varlen: bool,
) -> Form:
    """How rows are laid out for ``model``; where packed, its attention is exchanged for
    :func:`learner.attention.packed_attention`. Raises :class:`ConfigurationError` where ``learner.packing`` is
    ``packed`` and the model does not allow it."""
    if config.packing == "padded":
        return Form()
    if config.packing == "auto" and device.type == "cuda" and not varlen:
        return Form()
    reason = _unfit(model)
    if reason is None:
        before = model.config._attn_implementation
        model.set_attn_implementation(NAME)
        reason = _probe(model, device, autocast, compute, varlen)
        if reason is not None:
            model.set_attn_implementation(before)
    if reason is None:
        return Form(packed=True, shared_min=SHARED_TOKENS_MIN if config.share_prefixes else None)
    if config.packing == "packed":
        raise ConfigurationError(f"learner.packing is packed, but {reason}: set it to padded")
    log.info("rows are padded, not packed: %s", reason)
    return Form()


def _unfit(model: Any) -> str | None:
    """Why the attention of this model cannot be exchanged; None: it can."""
    config, name = model.config.get_text_config(), type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take its attention from transformers' interface"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"{name} has layers of the kinds {sorted(kinds)}"
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        return f"{name} attends within a sliding window"
    if getattr(config, "attn_logit_softcapping", None):
        return f"{name} caps its attention scores"
    return None


@torch.enable_grad()
def _probe(
    model: Any, device: torch.device, autocast: AbstractContextManager[Any], compute: torch.dtype, varlen: bool
) -> str | None:
    """Three short rows, two of which share their beginning, together and each alone: why hidden states, or gradients
    to the embeddings, differ; None: they do not. No weight gets a gradient."""
    n = min(model.config.get_text_config().vocab_size, 1000)
    ids = np.random.default_rng(0).integers(0, n, 24).astype(np.int32)
    rows = [ids[:12], np.concatenate([ids[:6], ids[12:17]]), ids[17:]]
    together = lay_out(rows, 4)
    try:
        with autocast:
            packed = _passed(model, packed_inputs(together, device, varlen=varlen))
            alone = [
                _passed(model, {"input_ids": torch.from_numpy(row[None, :-1].astype(np.int64)).to(device)})
                for row in rows
            ]
            places = [torch.from_numpy(at).to(device) for at in together.places]
            hidden = torch.cat([packed.hidden.index_select(0, at) for at in places])
            distances = [_distance(hidden, torch.cat([one.hidden for one in alone]))]
        weights = torch.linspace(-1.0, 2.0, hidden.shape[-1], device=device)
        (gradient,) = torch.autograd.grad((hidden.float() * weights).sum(), packed.embedded)
        expected = torch.zeros_like(gradient)
        for one, at in zip(alone, places, strict=True):
            (part,) = torch.autograd.grad((one.hidden.float() * weights).sum(), one.embedded)
            expected.index_add_(1, at, part)
        distances.append(_distance(gradient, expected))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(model).__name__} failed with packed rows ({type(error).__name__}: {error})"
    if all(distance <= _TOLERANCE[compute] for distance in distances):
        return None
    return f"packed rows of {type(model).__name__} differ from single ones by {max(distances):.3f}"


@dataclass(frozen=True, slots=True)
class _Passed:
    embedded: Tensor
    """``[1, N, H]``, a leaf."""
    hidden: Tensor
    """``[N, H]``."""


def _passed(model: Any, inputs: dict[str, Any]) -> _Passed:
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    hidden = model.base_model(**{**others, "inputs_embeds": embedded, "use_cache": False}).last_hidden_state
    return _Passed(embedded, hidden[0])


def _distance(came: Tensor, expected: Tensor) -> float:
    came, expected = came.detach().float(), expected.detach().float()
    return float((came - expected).norm() / expected.norm())
