"""Floating-point operations of a model's forward pass by its shape, counted as two for each weight and token."""

from __future__ import annotations

from typing import Any

import torch

from learner.data.cost import PassCost

PEAK_TERAFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "MI300X": 1307.0,
}
"""Data sheets: bfloat16, dense, by the first name here that a device's name contains."""


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
        backward=2 if all(p.requires_grad for p in model.parameters()) else 1,
    )


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second of a chip's dense matrix products in 16 bits; None for a CPU, for other types, and for a
    chip that is not in the table."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(chip: str) -> float | None:
    """
    >>> peak_of("NVIDIA H100 80GB HBM3"), peak_of("NVIDIA A100-SXM4-40GB"), peak_of("Tesla K80")
    (989000000000000.0, 312000000000000.0, None)
    """
    return next((1e12 * teraflops for name, teraflops in PEAK_TERAFLOPS.items() if name in chip), None)


def _active_experts(config: Any) -> float:
    """Share of the experts that compute a token."""
    count = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
    return float((getattr(config, "num_experts_per_tok", None) or count) / count)
