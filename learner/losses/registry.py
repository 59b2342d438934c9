"""The policy losses by name. One function and one entry add a loss; a user's own comes by import path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from learner.losses.base import ClipRange, Scored, TokenLosses
from learner.losses.clip import gmpo, gspo, gspo_token, ppo
from learner.losses.divergence import dppo_kl, dppo_tv
from learner.losses.soft import cispo, sapo
from pipeline.config.loss import ImportanceConfig, LossConfig
from pipeline.errors import ConfigurationError, TrainingError
from pipeline.scorer.resolve import resolve

EVIDENCE = frozenset({"logprobs", "entropies", "reference"})
"""Passes before the first optimizer step that can be asked for (fields of ``learner.evidence.Evidence``)."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss and what the learner has to know of it."""

    function: Callable[[Scored, Any], TokenLosses | torch.Tensor]
    """``(tokens, rules)`` to the loss of each token; a plain tensor ``[S]`` means that nothing is clipped. ``rules`` is
    :class:`learner.losses.rules.LossRules`."""
    clip: ClipRange = field(default_factory=lambda: ClipRange(0.2, 0.28))
    """As published; the run file may say otherwise."""
    off_high: float | None = 1.0
    """Upper clip of off-policy tokens where the run file says nothing; None: as of fresh ones."""
    evidence: frozenset[str] = frozenset()
    """Out of :data:`EVIDENCE`."""
    needs_signal: bool = True
    """Tokens without advantage have no gradient, so rows without any need no backward pass."""

    def __call__(self, tokens: Scored, rules: Any) -> TokenLosses:
        """Raises :class:`TrainingError` when a user's function does not give one loss a token."""
        result = self.function(tokens, rules)
        if not isinstance(result, TokenLosses):
            nothing = torch.zeros_like(tokens.mask)
            result = TokenLosses(result, nothing, nothing)
        if not isinstance(result.losses, torch.Tensor) or result.losses.shape != tokens.mask.shape:
            came = getattr(result.losses, "shape", type(result.losses).__name__)
            raise TrainingError(f"expected one loss for each of {len(tokens.mask)} tokens of loss.policy, got {came}")
        return result


LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo),
    "gspo": PolicyLoss(gspo, ClipRange(3e-4, 4e-4)),
    "gspo_token": PolicyLoss(gspo_token, ClipRange(3e-4, 4e-4)),
    "gmpo": PolicyLoss(gmpo, ClipRange(0.4, 0.4)),
    "cispo": PolicyLoss(cispo, ClipRange(1.0, 4.0), off_high=None),
    "sapo": PolicyLoss(sapo, ClipRange(1.0, 0.0)),
    "dppo_tv": PolicyLoss(dppo_tv, ClipRange(0.15, 0.15), off_high=None),
    "dppo_kl": PolicyLoss(dppo_kl, ClipRange(0.05, 0.05), off_high=None),
}


def policy_loss_of(name: str) -> PolicyLoss:
    """By name, or a user's function (or :class:`PolicyLoss`) by import path, for which rows without advantage are
    passed backward too. Raises :class:`ConfigurationError`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ConfigurationError(
            f"expected loss.policy to be one of {', '.join(LOSSES)}, or your own as module:function or "
            f"file.py:function, got {name}"
        )
    found: Any = resolve(name, "policy loss")
    return found if isinstance(found, PolicyLoss) else PolicyLoss(found, needs_signal=False)


def needed_evidence(loss: LossConfig, importance: ImportanceConfig) -> frozenset[str]:
    """What has to be gathered before the first optimizer step, out of :data:`EVIDENCE`.

    log π before the step is not asked for by the proximal anchor or by masks: with one optimizer step the loss's own
    pass gives it, with several the trainer scores only the rows that need it.
    """
    del importance
    needed = set(policy_loss_of(loss.policy).evidence)
    if loss.kl != "none":
        needed.add("reference")
    if loss.kl == "reward":
        needed.add("logprobs")
    if unknown := needed - EVIDENCE:
        raise ConfigurationError(
            f"{loss.policy} asks for {', '.join(sorted(unknown))}: expected {', '.join(sorted(EVIDENCE))}"
        )
    return frozenset(needed)
