"""Floating-point operations of a model's forward pass by its shape, counted as two for each weight and token."""

from __future__ import annotations

from typing import Any

import torch

from learner.data.cost import PassCost


def pass_cost(model: Any) -> PassCost:
    """Operations of the matrix products and of attention. Of experts those count that a token is sent to."""
    config = model.config.get_text_config()
    output = model.get_output_embeddings()
    weights = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding) or module is output:
            continue
        for name, p in module.named_parameters(recurse=False):
            if p.ndim > 1:
                weights += p.numel() * (_active_experts(config) if p.ndim > 2 or "expert" in name else 1.0)
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    layers = getattr(config, "num_hidden_layers", 0)
    return PassCost(
        token=max(1, int(2 * weights)),
        pair=4 * layers * heads * size,
        sampled=0 if output is None else 2 * output.weight.numel(),
    )


def _active_experts(config: Any) -> float:
    """Share of the experts that compute a token."""
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    return float((getattr(config, "num_experts_per_tok", None) or count) / count)
