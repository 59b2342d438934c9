"""Routers of a mixture of experts: they follow recorded choices, balance their load, and are measured.

Routing replay (R3, arXiv:2510.11370): the experts of a token are those that the engine chose, weighted by the router's
own scores of them, so that gradients reach the router. Only ``topk`` inside of a router is replaced, which serves every
family whose router chooses by it. A token whose experts are unknown has the router's own choice.

Dimensions: N tokens laid in a pass, E experts, K experts of a token, L layers that have a router, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from learner.data.microbatch import MicroBatch
from learner.distributed.context import ContextGroup
from learner.models.model_folder import ModelFolder
from pipeline.config import RunConfig
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError, TrainingError
from pipeline.runtime.routers import routers_of
from pipeline.schema.trajectory import ExpertArray, known_experts

_TOPK = (torch.topk, Tensor.topk)
_SIGMOID = (torch.sigmoid, Tensor.sigmoid)
Form = tuple[int, int, int]
"""Dimensions of the scores that ``topk`` gets, E and K."""


class _Choosing(TorchFunctionMode):
    """Calls of ``topk`` while a router runs. In the call of ``form``, tokens in ``known_N`` get ``experts_NK``."""

    def __init__(
        self, form: Form | None = None, experts_NK: Tensor | None = None, known_N: Tensor | None = None
    ) -> None:
        super().__init__()
        self.calls: list[Form] = []
        self.sigmoid = False
        """A sigmoid was computed."""
        self.chosen: Tensor | None = None
        """Results of the call of ``form``."""
        self._form, self._experts_NK, self._known_N = form, experts_NK, known_N

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sigmoid |= func in _SIGMOID
        if func not in _TOPK:
            return result
        scores, (values, indices) = args[0], result
        form = (scores.ndim, scores.shape[-1], indices.shape[-1])
        self.calls.append(form)
        if form != self._form:
            return result
        if self._experts_NK is not None and self._known_N is not None:
            indices = torch.where(self._known_N[:, None], self._experts_NK.long(), indices)
            values = scores.gather(-1, indices)
        self.chosen = indices
        return torch.return_types.topk((values, indices))


@dataclass(frozen=True, slots=True)
class _Router:
    forward: Callable[..., Any]
    form: Form
    """Form of the call of ``topk`` that chooses the experts."""
    logits: int
    """Index of the logits in the output."""
    sigmoid: bool
    """Its scores are sigmoids of the logits, not a softmax."""

    @property
    def width(self) -> int:
        return self.form[1]

    @property
    def k(self) -> int:
        return self.form[2]


@dataclass(frozen=True, slots=True)
class Routing:
    """Load and scores of the routers in one pass."""

    balance: Tensor
    """The load-balancing loss, with gradient where the pass has one. Switch Transformers (arXiv:2101.03961, eq. 4-6),
    for K experts of a token and sigmoid scores as in DeepSeek-V3 (arXiv:2412.19437, eq. 17-20): the mean over layers of
    ``E Σ_e f_e P_e``, f the share of an expert in the choices and P its mean share in a token's scores; 1 where the
    load is even. Over all laid tokens but padding."""
    sums: Tensor
    """float64 ``[1 + L·E]``: the entropy of the tokens' scores, nats, as a mean over layers, summed over tokens; then
    how many tokens each expert got, layer by layer."""


class Routers:
    """The routers of ``model``, whose forward passes are replaced. Raises :class:`ConfigurationError` where there are
    none, and for one that does not choose by ``topk``.

    The experts of a pass stay until the next pass: with checkpointing its layers run again in the backward pass.
    """

    def __init__(self, model: Any, *, replay: bool) -> None:
        """``replay``: recorded choices are followed."""
        self._replay = replay
        self.balances = False
        """The load-balancing loss has a gradient."""
        config = model.config.get_text_config()
        self._layers, name = config.num_hidden_layers, type(model).__name__
        modules = routers_of(model)
        if not modules:
            raise ConfigurationError(f"{name} has no router of experts that transformers names")
        self._routers = {
            layer: _probed(module, logits, config.hidden_size, f"{name}, layer {layer}")
            for layer, (module, logits) in modules.items()
        }
        for layer, (module, _) in modules.items():
            module.forward = partial(self._forward, layer, self._routers[layer])
        self._experts_NLK: Tensor | None = None
        self._known_N: Tensor | None = None
        self._real_N: Tensor | None = None
        self._found: list[tuple[Tensor, Tensor, Tensor]] = []
        self._passing = False
        self._context: ContextGroup | None = None

    @property
    def n_sums(self) -> int:
        """Length of :attr:`Routing.sums`."""
        return 1 + sum(router.width for router in self._routers.values())

    @contextmanager
    def passing(
        self, batch: MicroBatch, place: Callable[[npt.NDArray[Any]], Tensor], context: ContextGroup | None = None
    ) -> Iterator[None]:
        """Around a forward pass; ``place`` puts arrays on its device. With a ``context`` the experts of ``batch`` are
        those of this rank's tokens. Raises :class:`TrainingError` for experts that the model does not have."""
        experts = batch.experts_NLK if self._replay else None
        self._experts_NLK = self._known_N = None
        if experts is not None:
            known_N = known_experts(experts)
            self._check(experts[known_N])
            kind = np.uint8 if experts.dtype == np.uint8 else np.int32  # torch has few operations for uint16
            self._experts_NLK, self._known_N = place(experts.astype(kind, copy=False)), place(known_N)
        self._real_N = None if batch.real_N is None else place(batch.real_N)
        self._context = context
        self._found, self._passing = [], True
        try:
            yield
        finally:
            self._passing = False

    def taken(self) -> Routing:
        """Load and scores of the last pass, which are forgotten."""
        balances, entropies, counts = zip(*self._found, strict=True)
        self._found = []
        entropy = torch.stack(entropies).mean().double().reshape(1)
        return Routing(torch.stack(balances).mean(), torch.cat([entropy, *counts]))

    def measured(self, sums: npt.NDArray[np.float64]) -> tuple[float | None, float | None]:
        """Mean entropy of a router's scores, nats, and the tokens of the expert with most over those of an even load,
        mean over layers; of summed :attr:`Routing.sums`. None where nothing passed."""
        routers = list(self._routers.values())
        counts = np.split(sums[1:], np.cumsum([router.width for router in routers])[:-1])
        n_tokens = counts[0].sum() / routers[0].k
        if not n_tokens:
            return None, None
        return float(sums[0] / n_tokens), float(np.mean([c.max() / c.mean() for c in counts]))

    def _check(self, experts: ExpertArray) -> None:
        widths = {(router.width, router.k) for router in self._routers.values()}
        for layer, router in self._routers.items():
            if experts.shape[1:] != (self._layers, router.k) or (
                len(experts) and experts[:, layer].max() >= router.width
            ):
                most = int(experts[:, layer].max()) if len(experts) and layer < experts.shape[1] else None
                raise TrainingError(
                    f"expected experts of {self._layers} layers, (number, chosen) {sorted(widths)}, got the shape "
                    f"{experts.shape} with numbers up to {most}: the engine serves another model"
                )

    def _forward(self, layer: int, router: _Router, *args: Any, **kwargs: Any) -> Any:
        experts_NK = None if self._experts_NLK is None else self._experts_NLK[:, layer]
        with _Choosing(router.form, experts_NK, self._known_N) as choosing:
            output = router.forward(*args, **kwargs)
        balanced = self.balances and torch.is_grad_enabled()
        if self._passing or balanced:  # a layer that is computed again must keep the same tensors
            assert choosing.chosen is not None
            with torch.set_grad_enabled(balanced):
                context = self._context if balanced else None
                found = _routing(output[router.logits], choosing.chosen, router, self._real_N, context)
            if self._passing:
                self._found.append(found)
        return output


def _routing(
    logits: Tensor, chosen: Tensor, router: _Router, real_N: Tensor | None, context: ContextGroup | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Load-balancing loss, with a ``context`` this rank's part of that of the whole pass; summed entropy; tokens of
    each expert, float64 ``[E]``."""
    logits_NE = logits.reshape(-1, router.width).float()
    if router.sigmoid:
        scores_NE = logits_NE.sigmoid()
        scores_NE = scores_NE / scores_NE.sum(dim=-1, keepdim=True)
    else:
        scores_NE = logits_NE.softmax(dim=-1)
    n_laid = len(scores_NE)
    real_N = scores_NE.new_ones(n_laid) if real_N is None else real_N.float()
    experts_M = chosen.reshape(-1)
    with torch.no_grad():
        counts_E = scores_NE.new_zeros(router.width, dtype=torch.float64)
        counts_E.scatter_add_(0, experts_M, real_N.double().repeat_interleave(router.k))
        entropy = torch.where(real_N > 0, torch.special.entr(scores_NE).sum(dim=-1), 0.0).sum()
        whole_E = counts_E if context is None else context.summed(counts_E)
        n_real = whole_E.sum() / router.k
        shares_E = (whole_E / (router.k * n_real)).float()
    means_E = torch.where(real_N[:, None] > 0, scores_NE, 0.0).sum(dim=0) / n_real.float()
    return router.width * (shares_E * means_E).sum(), entropy, counts_E


def _probed(module: torch.nn.Module, logits: int, hidden: int, name: str) -> _Router:
    """The last call of ``topk`` of a router, found by a pass without memory, is its choice. ``logits``: their place in
    its output."""
    inputs = [torch.zeros((2, hidden), device="meta")]
    if len(signature(module.forward).parameters) > 1:  # the bias of each expert is kept by the module around it
        inputs.append(torch.zeros(len(next(module.parameters())), device="meta"))
    with torch.no_grad(), _Choosing() as choosing:
        try:
            output = deepcopy(module).to("meta")(*inputs)
        except Exception as error:
            raise ConfigurationError(f"the router of {name} cannot be followed ({error})") from error
    form = choosing.calls[-1] if choosing.calls else (0, 0, 0)
    if form[0] != 2 or choosing.calls.count(form) != 1 or output[logits].shape[-1] != form[1]:
        raise ConfigurationError(f"the router of {name} does not choose experts by one call of topk over its scores")
    return _Router(module.forward, form, logits, choosing.sigmoid)


def found_routers(model: Any, config: LearnerConfig) -> Routers | None:
    """The routers of ``model``; None where it has none that can be followed, and nothing needs them. Raises
    :class:`ConfigurationError` where ``learner.routing_replay`` does."""
    try:
        return Routers(model, replay=config.routing_replay)
    except ConfigurationError as error:
        if config.routing_replay:
            raise ConfigurationError(f"learner.routing_replay is true, but {error}: set it to false") from error
        return None


def check_routers(config: RunConfig, folder: Path) -> None:
    """Raises :class:`ConfigurationError` for a model whose routers cannot do what the run file asks for."""
    empty = ModelFolder(folder, trust_remote_code=config.model.trust_remote_code).empty()
    require_routers(found_routers(empty, config.learner), config)


def require_routers(routers: Routers | None, config: RunConfig) -> None:
    """Raises :class:`ConfigurationError` where ``loss.load_balancing`` needs some."""
    if config.loss.load_balancing and routers is None:
        raise ConfigurationError(
            "loss.load_balancing is above 0, but the model has no router of experts that can be followed: set it to 0"
        )
