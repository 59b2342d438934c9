"""The critic: estimates the value of the state before each sampled token, trained on the estimator's returns.

The state before a token is the hidden state at the position that predicts it, so values and log-probs are aligned by
the same indices. Dimensions: S sampled tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.data.microbatch import MicroBatch
from learner.data.rows import Row, TokenArray
from learner.distributed.ranks import on_device
from learner.losses.auxiliary import value_loss
from learner.observability.timing import Stopwatch
from learner.policy.policy import Backbone
from learner.training.optimizer import clip_and_step, gradient_norm, load_moments, make_optimizer
from learner.training.report import AppliedStep, CriticReport
from pipeline.config.learner import LearnerConfig
from pipeline.errors import FormatMismatch


class Critic:
    """``backbone``: its own copy, trained whole; or, with ``owns=False``, the policy's, which it only reads."""

    def __init__(self, backbone: Backbone, config: LearnerConfig, *, owns: bool) -> None:
        self.backbone = backbone
        self.owns = owns
        self._config = config
        sizes = backbone.model.config
        hidden = getattr(sizes, "hidden_size", None) or sizes.get_text_config().hidden_size
        self._head = torch.nn.Linear(hidden, 1).to(backbone.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        backbone.ranks.divide(self._head)
        self.optimizer = make_optimizer(self.parameters, config, config.critic.learning_rate)
        self.began = 0
        """Updates that the policy had when the critic began."""

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters]

    @property
    def named_parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        head = [(f"head.{name}", p) for name, p in self._head.named_parameters()]
        return [*(self.backbone.named_parameters if self.owns else []), *head]

    @property
    def modules(self) -> list[torch.nn.Module]:
        """Modules that the policy does not have."""
        return [*([self.backbone.root] if self.owns else []), self._head]

    def score(self, part: MicroBatch) -> Tensor:
        """Value of the state before each sampled token, float32 ``[S]``, in units of reward. With gradient where
        gradients are enabled."""
        with torch.set_grad_enabled(self.owns and torch.is_grad_enabled()):
            hidden_SH = self.backbone.hidden(part)
        return self.of_hidden(part, hidden_SH)

    def of_hidden(self, part: MicroBatch, hidden_SH: Tensor) -> Tensor:
        """Values ``[S]`` of hidden states of the critic's backbone, as it gave them for ``part``."""
        (values,) = self.backbone.whole(part, (self._head(hidden_SH.float()).squeeze(-1),))
        return values

    def values(self, rows: Sequence[Row], watch: Stopwatch) -> TokenArray:
        """Values of all sampled tokens of ``rows``, float32 ``[S]``, rows in order, without gradient."""
        return self.backbone.token_pass(rows, lambda part: (self.score(part),), 1, watch)[0]

    def learn(
        self,
        parts: Sequence[MicroBatch | None],
        values: TokenArray,
        returns: TokenArray,
        rate: float,
        watch: Stopwatch,
        applied: list[tuple[AppliedStep, Tensor]] | None = None,
    ) -> CriticReport:
        """One optimizer step over ``parts``: the mean over their tokens of the clipped value loss.

        None among ``parts``: only another rank has rows there. ``values`` (before the update) and ``returns`` are
        indexed by ``MicroBatch.token_index_S``. A step whose loss or gradient is not finite is skipped. Interrupted
        passes change nothing. ``applied``: gets the step, see :class:`StepTotals`.
        """
        ranks = self.backbone.ranks
        total = int(ranks.summed([sum(part.n_sampled for part in parts if part is not None and part.counted)])[0])
        sums = torch.zeros(2, dtype=torch.float64, device=self.backbone.device)
        try:
            for part in parts:
                ranks.agree()
                if part is None:
                    found = self.score(self.backbone.idle_part())
                    torch.where(torch.zeros_like(found) > 0, found, 0.0).sum().backward()  # type: ignore[no-untyped-call]
                    continue
                with watch.phase("forward"):
                    old, goal = (on_device(a[part.token_index_S], self.backbone.device) for a in (values, returns))
                    found = self.score(part)
                    weights, mask = torch.full_like(goal, 1.0 / total), torch.ones_like(goal, dtype=torch.bool)
                    terms = value_loss(found, old, goal, weights, mask, self._config.critic.clip)
                    if part.counted:
                        sums += torch.stack([terms.loss.detach(), terms.clipped.sum()])
                with watch.phase("backward"):
                    terms.loss.backward()  # type: ignore[no-untyped-call]
            with watch.phase("optimize"):
                ranks.sum_replicas(self.parameters)
                measured = gradient_norm(self.parameters, ranks).reshape(1).double()
                norm, loss, clipped = torch.cat([measured, sums]).tolist()
                loss, clipped = ranks.summed([loss, clipped])
                if finite := math.isfinite(loss) and math.isfinite(norm):
                    fresh, limit, recorded = not self.optimizer.state, self._config.grad_clip, applied is not None
                    bits = clip_and_step(self.optimizer, self.parameters, norm, rate, limit, summed=recorded)
                    if applied is not None and bits is not None:
                        applied.append((AppliedStep("critic", loss, norm, rate, fresh), bits))
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        passes = self.backbone.form.cost.learning if self.owns else 1
        watch.operations += ranks.summed([passes * sum(part.operations for part in parts if part is not None)])[0]
        tokens = self._tokens(parts, len(values))
        return CriticReport(
            loss=loss,
            clip_ratio=clipped / total,
            grad_norm=norm,
            explained_variance=explained_variance(values[tokens], returns[tokens]),
            skipped=not finite,
        )

    def _tokens(self, parts: Sequence[MicroBatch | None], count: int) -> npt.NDArray[np.int64]:
        """Indices of the tokens in the parts of all ranks, ascending."""
        chosen = np.zeros(count, np.float32)
        for part in parts:
            if part is not None:
                chosen[part.token_index_S] = 1.0
        return np.flatnonzero(self.backbone.ranks.merged((chosen,))[0])

    def state(self) -> dict[str, Any]:
        """Weights and optimizer; not copies."""
        return {
            "backbone": dict(self.backbone.model.state_dict()) if self.owns else {},
            "head": dict(self._head.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "began": self.began,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Resume from a saved state. Raises :class:`FormatMismatch` when it is of another model."""
        try:
            if self.owns:
                self.backbone.model.load_state_dict(state["backbone"])
            self._head.load_state_dict(state["head"])
            self.began = state.get("began", 0)
            load_moments(self.optimizer, state["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise FormatMismatch(
                f"the saved critic belongs to another model or critic.backbone ({error}): choose another run.name"
            ) from error


def explained_variance(values: npt.ArrayLike, returns: npt.ArrayLike) -> float | None:
    """``1 - Var(R - V) / Var(R)``: 1 is a perfect critic, 0 one no better than a constant. None where all returns are
    equal or something is not finite."""
    v, r = np.asarray(values, dtype=np.float64), np.asarray(returns, dtype=np.float64)
    if not (np.isfinite(v).all() and np.isfinite(r).all()):
        return None
    spread = float(r.var())
    return 1.0 - float((r - v).var()) / spread if spread > 0 else None
