"""Experts of a mixture in the compute type.

transformers multiplies the experts' weights with ``grouped_mm``, which autocast does not know: it computes in the type
of the weights, float32 for a policy. Here the weights are cast first, as autocast casts those of linear layers. The
weights of several ranks come in the compute type already (:mod:`learner.policy.fsdp`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "afterplay_autocast"


class _Cast:
    """An experts module whose weights are read in ``dtype``."""

    def __init__(self, experts: torch.nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        return value.to(self._dtype) if isinstance(value, torch.nn.Parameter) else value


def experts_forward(experts: Any, hidden_NH: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Weighted sum ``[N, H]`` of the outputs of each token's K experts, in the type of ``hidden_NH``."""
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        experts = _Cast(experts, torch.get_autocast_dtype(device))
    output: Tensor = grouped_mm_experts_forward(experts, hidden_NH, chosen_NK, weights_NK)
    return output


def use_compute_type(model: Any) -> None:
    """Have experts that compute by ``grouped_mm`` follow autocast. The loops of others over experts do."""
    if getattr(model.config.get_text_config(), "_experts_implementation", None) == "grouped_mm":
        model.set_experts_implementation(NAME)


ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
