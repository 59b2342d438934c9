"""Models with which the embedded engine cannot generate, known from their ``config.json``.

transformers' continuous batching keeps keys and values of one size, for layers of full or sliding attention.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import read_json

_KINDS = {"full_attention", "sliding_attention"}
_WITHOUT_SDPA = {"gpt_oss"}
"""Model types whose attention transformers computes without scaled dot-product attention."""


def check_embedded(folder: Path) -> None:
    """Raises :class:`ConfigurationError` for a model folder that the embedded engine cannot serve."""
    facts: dict[str, Any] = read_json(folder / "config.json") or {}
    text = facts.get("text_config") or facts
    others = sorted(set(text.get("layer_types") or text.get("layers_block_type") or ()) - _KINDS)
    keys = (text.get("qk_nope_head_dim") or 0) + (text.get("qk_rope_head_dim") or 0)
    if others:
        reason = f"has layers of the kinds {others}"
    elif keys and keys != text.get("v_head_dim"):
        reason = f"has keys of the size {keys} and values of the size {text.get('v_head_dim')}"
    elif text.get("attn_logit_softcapping"):
        reason = "caps its attention scores"
    elif text.get("model_type") in _WITHOUT_SDPA:
        reason = "does not take scaled dot-product attention"
    else:
        return
    name = (facts.get("architectures") or [facts.get("model_type")])[0]
    raise ConfigurationError(
        f"engine.kind: the embedded engine cannot generate with {name}, which {reason}: set engine.kind: vllm"
    )
