"""Experts that the routers of the embedded engine chose, by request: what vLLM returns as ``routed_experts``.

A forward pass reads pieces of several requests. After each pass, what its routers chose is added to the requests, a
token once: where the engine reads a request again, the first choice stays, since it made the log-probabilities. Tokens
whose keys come from the prefix cache pass no router, so nothing is shared between requests here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pipeline.errors import ConfigurationError
from pipeline.runtime.routers import routers_of


class ExpertRecord:
    """Used by the sampling thread alone. Raises :class:`ConfigurationError` for a model without experts."""

    def __init__(self, model: Any) -> None:
        self._n_layers = model.config.get_text_config().num_hidden_layers
        routers = routers_of(model)
        if not routers:
            raise ConfigurationError(
                f"learner.routing_replay is true, but {type(model).__name__} has no router of experts that "
                "transformers names: set it to false"
            )
        self._chosen: dict[int, Tensor] = {}
        for layer, (router, logits) in routers.items():
            router.register_forward_hook(partial(self._remember, layer, logits))
        self._rows: dict[str, list[npt.NDArray[Any]]] = {}
        self._known: dict[str, int] = {}
        """Tokens in the rows of each request."""
        self._dtype: Any = np.uint8

    def _remember(self, layer: int, logits: int, router: Any, inputs: Any, output: Any) -> None:
        indices = [out for out in output if isinstance(out, Tensor) and not out.is_floating_point()]
        if len(indices) != 1:
            raise ConfigurationError(
                f"learner.routing_replay is true, but {type(router).__name__} does not return the experts that it "
                "chose: set it to false, or engine.kind: vllm"
            )
        self._dtype = np.uint8 if output[logits].shape[-1] <= 256 else np.uint16
        self._chosen[layer] = indices[0].reshape(-1, indices[0].shape[-1])

    def add(self, batch: Iterable[tuple[str, int, int]], alive: Iterable[str]) -> None:
        """``batch``: id, position of the first token and number of tokens of each request of the last pass, as they lie
        in it. Requests that are not in ``alive`` are forgotten."""
        first = next(iter(self._chosen.values()))
        experts = np.zeros((len(first), self._n_layers, first.shape[-1]), self._dtype)
        for layer, chosen in self._chosen.items():
            experts[:, layer] = chosen.cpu().numpy()
        at = 0
        for request_id, position, n_tokens in batch:
            rows, known = self._rows.setdefault(request_id, []), self._known.get(request_id, 0)
            rows.append(experts[at + known - position : at + n_tokens])
            self._known[request_id] = max(known, position + n_tokens)
            at += n_tokens
        for request_id in self._rows.keys() - set(alive):
            self.take(request_id)

    def take(self, request_id: str) -> npt.NDArray[Any] | None:
        """``[tokens, layers, k]`` of a finished request, without its last token; None where it passed no router."""
        rows = self._rows.pop(request_id, None)
        self._known.pop(request_id, None)
        return None if rows is None else np.concatenate(rows)


def encoded(experts: npt.NDArray[Any]) -> str:
    """Base64 of the bytes of a ``.npy`` file, as vLLM encodes them."""
    with io.BytesIO() as buffer:
        np.save(buffer, experts, allow_pickle=False)
        return base64.b64encode(buffer.getbuffer()).decode("ascii")
