"""An exponential moving average of the trained weights: smoother than the last weights, saved with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pipeline.errors import StoreError


class WeightAverage:
    """``average ← decay · average + (1 - decay) · weights`` after every optimizer step, float32, on their device.

    ``named`` are the trained parameters; the average begins as their present values.
    """

    def __init__(self, named: Iterable[tuple[str, torch.nn.Parameter]], decay: float) -> None:
        self._parameters = dict(named)
        self._decay = decay
        self._average = {name: p.detach().float().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the present weights in."""
        weights = [p.detach() for p in self._parameters.values()]
        torch._foreach_lerp_(list(self._average.values()), weights, 1.0 - self._decay)

    def state(self) -> dict[str, Tensor]:
        """The average by parameter name; not copies."""
        return dict(self._average)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a saved average. Raises :class:`StoreError` when it is of other parameters."""
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in self._average.items()}:
            raise StoreError("the saved average of the weights belongs to another model: choose another run.name")
        for name, tensor in state.items():
            self._average[name].copy_(tensor)
