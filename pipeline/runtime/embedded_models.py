"""Models with which the embedded engine cannot generate, known from their ``config.json``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import read_json

ATTENTION_KINDS = frozenset({"full_attention", "sliding_attention"})
"""Kinds of layers whose keys and values the engine caches."""
STATE_KINDS = frozenset({"linear_attention", "conv"})
"""Kinds of layers that hand on a state."""
_STATELESS = frozenset({"mlp", "moe"})
_FORMER_NAMES = {"attention": "full_attention", "mamba": "linear_attention"}
"""Names in older files, as transformers reads them."""


def check_embedded(folder: Path) -> None:
    """Raises :class:`ConfigurationError` for a model folder that the embedded engine cannot serve."""
    facts: dict[str, Any] = read_json(folder / "config.json") or {}
    text = facts.get("text_config") or facts
    name = (facts.get("architectures") or [facts.get("model_type")])[0]
    check_layers(name, text.get("layer_types") or text.get("layers_block_type"))


def check_layers(model: str, kinds: Iterable[str] | None) -> None:
    """Raises :class:`ConfigurationError` for a model with such kinds of layers, if it names them."""
    found = {_FORMER_NAMES.get(kind, kind) for kind in kinds or ["full_attention"]}
    others = sorted(found - ATTENTION_KINDS - STATE_KINDS - _STATELESS)
    if others:
        raise unserved(model, f"has layers of the kinds {others}")
    if not found & ATTENTION_KINDS:
        raise unserved(model, "has no layers of attention")


def unserved(model: str, reason: str) -> ConfigurationError:
    """The refusal of a model. ``reason`` is what the model has or does."""
    return ConfigurationError(
        f"engine.kind: the embedded engine cannot generate with {model}, which {reason}: set engine.kind: vllm"
    )
