"""The policy losses by name. One function and one entry add a loss; a user's own comes by import path.

What the loss needs from the run file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from learner.losses.base import ClipRange, Scored, TokenLosses
from learner.losses.policy_losses import cispo, dppo_kl, dppo_tv, gmpo, gspo, gspo_token, ppo, sapo
from pipeline.config.algorithm import ImportanceConfig, LossConfig, MaskConfig
from pipeline.errors import ConfigurationError, TrainingError
from pipeline.scorer.conversation import resolve

SCORES = frozenset({"logprobs", "entropies", "reference"})
"""Passes before the first optimizer step that can be asked for (fields of ``learner.evidence.Evidence``)."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy loss and what the learner has to know of it."""

    function: Callable[[Scored, Any], TokenLosses | torch.Tensor]
    """``(tokens, rules)`` to the loss of each token; a plain tensor ``[S]`` means that nothing is clipped. ``rules`` is
    :class:`learner.losses.registry.LossRules`."""
    clip: ClipRange = field(default_factory=lambda: ClipRange(0.2, 0.28))
    """As published; the run file may say otherwise."""
    off_high: float | None = 1.0
    """Upper clip of off-policy tokens where the run file says nothing; None: as of fresh ones."""
    evidence: frozenset[str] = frozenset()
    """Out of :data:`SCORES`."""
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


def needed_scores(loss: LossConfig, importance: ImportanceConfig) -> frozenset[str]:
    """What has to be gathered before the first optimizer step, out of :data:`SCORES`.

    log π before the step is not asked for by the proximal anchor or by masks: with one optimizer step the loss's own
    pass gives it, with several the trainer scores only the rows that need it.
    """
    del importance
    needed = set(policy_loss_of(loss.policy).evidence)
    if loss.kl != "none":
        needed.add("reference")
    if loss.kl == "reward":
        needed.add("logprobs")
    if unknown := needed - SCORES:
        raise ConfigurationError(
            f"{loss.policy} asks for {', '.join(sorted(unknown))}: expected {', '.join(sorted(SCORES))}"
        )
    return frozenset(needed)


@dataclass(frozen=True, slots=True)
class LossRules:
    fresh: ClipRange
    off: ClipRange
    """For off-policy tokens (replayed, or guided)."""
    dual_clip: float | None
    decoupled: bool
    """Anchor at the recomputed π_old and correct with truncated π_old/μ."""
    weight_max: float
    log_ratio_max: float
    entropy_bonus: float
    off_policy: Literal["clip", "shaped", "second_moment"] = "clip"
    shape_beta: float = 0.1
    use_recorded: bool = True
    """Replayed tokens are anchored at recorded μ where there is one."""
    policy: PolicyLoss = field(default_factory=lambda: LOSSES["ppo"])
    weight: Literal["none", "token", "sequence", "geometric"] = "token"
    masks: tuple[MaskConfig, ...] = ()
    ratio_max: float = 20.0
    sapo_positive: float = 1.0
    sapo_negative: float = 1.05
    kl_in_loss: bool = False
    kl_coef: float = 0.0
    """Of now: an adaptive controller changes it between updates."""
    kl_estimator: str = "k3"
    options: dict[str, Any] = field(default_factory=dict)
    """For a loss of the user's own."""

    @classmethod
    def of(cls, loss: LossConfig, importance: ImportanceConfig, use_recorded: bool = True) -> LossRules:
        """Raises :class:`ConfigurationError` for a policy loss that does not exist."""
        policy = policy_loss_of(loss.policy)
        fresh = ClipRange(_first(loss.clip_low, policy.clip.low), _first(loss.clip_high, policy.clip.high))
        return cls(
            fresh=fresh,
            off=ClipRange(
                _first(loss.off_clip_low, fresh.low), _first(loss.off_clip_high, _first(policy.off_high, fresh.high))
            ),
            dual_clip=loss.dual_clip,
            decoupled=importance.anchor == "proximal",
            weight_max=importance.weight_max,
            log_ratio_max=importance.log_ratio_max,
            entropy_bonus=loss.entropy_bonus,
            off_policy=loss.off_policy,
            shape_beta=loss.off_shape_beta,
            use_recorded=use_recorded,
            policy=policy,
            weight=importance.weight,
            masks=importance.masks,
            ratio_max=loss.ratio_max,
            sapo_positive=loss.sapo_positive,
            sapo_negative=loss.sapo_negative,
            kl_in_loss=loss.kl == "loss",
            kl_coef=loss.kl_coef if loss.kl != "none" else 0.0,
            kl_estimator=loss.kl_estimator or ("k1" if loss.kl == "reward" else "k3"),
            options=dict(loss.options),
        )

    def anchored_today(self, *, replayed: bool, recorded: bool) -> bool:
        """Whether of such tokens log π before the first optimizer step of the update is read: as π_old, or for the
        masks."""
        if not replayed:
            return self.decoupled or bool(self.masks)
        return not self.use_recorded or (not recorded and self.off_policy != "shaped")

    @property
    def needs_signal(self) -> bool:
        """Rows without advantage have gradient exactly 0."""
        return self.policy.needs_signal and not self.entropy_bonus and not (self.kl_in_loss and self.kl_coef)


def _first(wanted: float | None, published: float) -> float:
    return published if wanted is None else wanted
