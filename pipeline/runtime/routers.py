"""Routers of a mixture of experts in a model of transformers, and the size of what they choose.

A model class of transformers names the class of its routers, to record their logits (``_can_record_outputs``).
transformers is not imported: callers hand in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigurationError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of ``config.json``."""


def routers_of(model: Any) -> dict[int, tuple[Any, int]]:
    """The router of each layer that has one, by the number of the layer, and the place of the logits in its output.
    Raises :class:`ConfigurationError` where a layer has several."""
    recorders: list[Any] = []
    for part in model.modules():
        named = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits") or []
        recorders += named if isinstance(named, list) else [named]
    found: dict[int, tuple[Any, int]] = {}
    for name, module in model.named_modules():
        for recorder in recorders:
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                layer = next((int(part) for part in name.split(".") if part.isdecimal()), -1)
                if layer < 0 or found.get(layer, (module,))[0] is not module:
                    raise ConfigurationError(f"expected one router in each layer of the model, got {name} too")
                found[layer] = module, recorder.index
    return found


def choice_bytes(facts: Mapping[str, Any]) -> int:
    """Bytes of the experts of one token, by the ``config.json`` of a model; 0 where it has none."""
    facts = facts.get("text_config") or facts
    experts = max((facts.get(name) or 0 for name in _EXPERTS), default=0)
    layers, k = facts.get("num_hidden_layers") or 0, facts.get("num_experts_per_tok") or facts.get("top_k_experts") or 0
    return int(layers * k * (1 if experts <= 256 else 2)) if experts else 0
