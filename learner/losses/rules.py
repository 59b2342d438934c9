"""What the loss needs from the run file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from learner.losses.base import ClipRange
from learner.losses.registry import LOSSES, PolicyLoss, policy_loss_of
from pipeline.config.loss import ImportanceConfig, LossConfig, MaskConfig


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
