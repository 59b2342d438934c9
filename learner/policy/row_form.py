"""Form of the rows that a model takes: packed where its attention allows it, by its config, then by trying."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from learner.data.microbatch import SHARED_TOKENS_MIN, Form, lay_out
from learner.models.model_folder import is_empty
from learner.policy.attention import NAME, VARLEN_HEAD_MAX, heads_of, packed_inputs
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError

log = logging.getLogger(__name__)
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative distance of hidden states and gradients of packed rows from those of the rows alone."""
_TRIAL_TOKENS = 1000
"""Token ids that the trial of packed rows may use."""
_NARROW = {"sliding_window": 3, "attn_logit_softcapping": 1.0}
"""Attributes of configs and layers in the trial: a window shorter than its rows, and a cap that scores reach."""
_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers that may be packed."""
_ROPES_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary embeddings whose frequencies depend on the largest position of a pass."""


def choose_form(
    model: Any,
    config: LearnerConfig,
    device: torch.device,
    autocast: AbstractContextManager[Any],
    compute: torch.dtype,
    *,
    varlen: bool,
) -> Form:
    """Form of the rows for ``model``; where packed, its attention is exchanged for packed attention. Where padded with
    capped scores, transformers' eager attention takes the place of scaled dot-product attention, which ignores caps.

    With ``learner.context_ranks`` packed attention takes padded rows too, because it can divide the tokens of a pass.

    Raises :class:`ConfigurationError` where ``learner.packing`` is ``packed``, or there are ``learner.context_ranks``,
    and the model does not allow it.
    """
    if capped(model) and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    together = config.context_ranks > 1
    padded: Literal["", "configured", "device", "model", "trial"] = ""
    if config.packing == "padded":
        padded = "configured"
    elif config.packing == "auto" and device.type == "cuda" and not varlen:
        padded = "device"
        log.info(
            "rows are padded, not packed: attention over packed rows in one call needs torch 2.11, a GPU of compute "
            "capability 8.0, learner.compute_dtype bfloat16 and heads of at most %d",
            VARLEN_HEAD_MAX,
        )
    if padded and not together:
        return Form(padded_because=padded)
    kind: Literal["model", "trial"] = "model"
    reason = unsupported(model) or (undividable(model, config.context_ranks) if together else None)
    if reason is None:
        reason = _probe(_trial_model(model, device), device, autocast, compute, varlen)
        if reason is None:
            model.set_attn_implementation(NAME)
            return Form(padded_because=padded) if padded else Form(packed=True, shared_min=SHARED_TOKENS_MIN)
        kind = "trial"
    if together:
        raise ConfigurationError(f"learner.context_ranks is {config.context_ranks}, but {reason}: set it to 1")
    if config.packing == "packed":
        raise ConfigurationError(f"learner.packing is packed, but {reason}: set it to padded")
    log.info("rows are padded, not packed: %s", reason)
    return Form(padded_because=kind)


def capped(model: Any) -> bool:
    """True where attention scores are capped."""
    return bool(getattr(model.config.get_text_config(), "attn_logit_softcapping", None))


def unsupported(model: Any) -> str | None:
    """Reason for which the attention of this model cannot be replaced; None: it can."""
    name = type(model).__name__
    others = _kinds(model.config.get_text_config()) - _KINDS
    if others:
        return f"{name} has layers of the kinds {sorted(others)}"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not take its attention from transformers' interface"
    return None


def undividable(model: Any, ranks: int) -> str | None:
    """Reason for which so many ranks cannot divide the tokens of a pass; None: they can."""
    text = model.config.get_text_config()
    heads = sorted({count for count, _ in heads_of(text)})
    if any(count % ranks for count in heads):
        counts = ", ".join(map(str, heads))
        return f"{type(model).__name__} has {counts} attention heads, which they cannot share evenly"
    ropes = getattr(text, "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type")) for rope in (ropes, *ropes.values()) if isinstance(rope, dict)}
    if longer := sorted(kinds & _ROPES_BY_LENGTH):
        return f"the rotary embedding ({', '.join(longer)}) of {type(model).__name__} depends on the length of the row"
    return None


def _kinds(text: Any) -> set[str]:
    """Kinds of layers that a model's config names."""
    return set(getattr(text, "layer_types", None) or ["full_attention"])


def _trial_model(model: Any, device: torch.device) -> Any:
    """``model``, or where it is empty one of its class and size with a layer of each kind, few tokens and random
    weights."""
    if not is_empty(model):
        return model
    config = deepcopy(model.config)
    text = config.get_text_config()
    kinds = sorted(_kinds(text))
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = len(kinds), min(text.vocab_size, _TRIAL_TOKENS), None
    if getattr(text, "layer_types", None):
        text.layer_types = kinds
    for name, value in list(vars(config).items()):  # tokens that stand for images and sounds
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int):
            setattr(config, name, text.vocab_size - 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return type(model)(config).to(device=device, dtype=next(model.parameters()).dtype).eval()


@torch.enable_grad()
def _probe(
    model: Any, device: torch.device, autocast: AbstractContextManager[Any], compute: torch.dtype, varlen: bool
) -> str | None:
    """Three short rows, two of which share their beginning, packed, and each alone with the model's own attention: why
    hidden states, or gradients to the embeddings, differ; None: they do not. No weight gets a gradient."""
    n = min(model.config.get_text_config().vocab_size, _TRIAL_TOKENS)
    ids = np.random.default_rng(0).integers(0, n, 24).astype(np.int32)
    rows = [ids[:12], np.concatenate([ids[:6], ids[12:17]]), ids[17:]]
    together = lay_out(rows, 4)
    own = model.config._attn_implementation
    try:
        with autocast, _narrowed(model):
            model.set_attn_implementation(NAME)
            embedded, packed = _passed(model, packed_inputs(together, device, varlen=varlen))
            model.set_attn_implementation(own)
            alone = [
                _passed(model, {"input_ids": torch.from_numpy(row[None, :-1].astype(np.int64)).to(device)})
                for row in rows
            ]
            indices = [torch.from_numpy(at).to(device) for at in together.indices]
            hidden = torch.cat([packed.index_select(0, at) for at in indices])
            distances = [_distance(hidden, torch.cat([states for _, states in alone]))]
        weights = torch.linspace(-1.0, 2.0, hidden.shape[-1], device=device)
        (gradient,) = torch.autograd.grad((hidden.float() * weights).sum(), embedded)
        expected = torch.zeros_like(gradient)
        for (leaf, states), at in zip(alone, indices, strict=True):
            (part,) = torch.autograd.grad((states.float() * weights).sum(), leaf)
            expected.index_add_(1, at, part)
        distances.append(_distance(gradient, expected))
    except (AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"{type(model).__name__} failed with packed rows ({type(error).__name__}: {error})"
    finally:
        model.set_attn_implementation(own)
    if all(distance <= _TOLERANCE[compute] for distance in distances):
        return None
    return f"packed rows of {type(model).__name__} differ from single ones by {max(distances):.3f}"


@contextmanager
def _narrowed(model: Any) -> Iterator[None]:
    """Windows and caps of ``model`` are :data:`_NARROW` while the block runs. Transformers' masks have the window of
    the config, so a layer that keeps its own elsewhere, or does not hand it on, is found."""
    places = [
        (holder, name, getattr(holder, name))
        for holder in (model.config.get_text_config(), *model.modules())
        for name in _NARROW
        if getattr(holder, name, None)
    ]
    try:
        for holder, name, _ in places:
            setattr(holder, name, _NARROW[name])
        yield
    finally:
        for holder, name, value in places:
            setattr(holder, name, value)


def _passed(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Embeddings ``[1, N, H]``, a leaf, and hidden states ``[N, H]``."""
    others = {name: value for name, value in inputs.items() if name != "input_ids"}
    embedded = model.get_input_embeddings()(inputs["input_ids"]).detach().requires_grad_()
    hidden = model.base_model(**{**others, "inputs_embeds": embedded, "use_cache": False}).last_hidden_state
    return embedded, hidden[0]


def _distance(came: Tensor, expected: Tensor) -> float:
    came, expected = came.detach().float(), expected.detach().float()
    return float((came - expected).norm() / expected.norm())
