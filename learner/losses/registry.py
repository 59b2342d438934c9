"""The policy losses by name. One function and one entry add a loss; a user's own comes by import path.

What the loss needs from the run file.
"""

from __future__ import annotations

from typing import Any

from learner.losses.base import ClipRange, LossRules, PolicyLoss
from learner.losses.policy_losses import cispo, dppo_kl, dppo_tv, gmpo, gspo, gspo_token, ppo, sapo
from pipeline.config.algorithm import ImportanceConfig, LossConfig
from pipeline.errors import ConfigurationError
from pipeline.scorer.conversation import resolve

SCORES = frozenset({"logprobs", "entropies", "reference"})
"""Passes before the first optimizer step that can be asked for (fields of ``learner.evidence.Evidence``)."""


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


def loss_rules(loss: LossConfig, importance: ImportanceConfig, use_recorded: bool = True) -> LossRules:
    """Raises :class:`ConfigurationError` for a policy loss that does not exist."""
    policy = policy_loss_of(loss.policy)
    fresh = ClipRange(_first(loss.clip_low, policy.clip.low), _first(loss.clip_high, policy.clip.high))
    return LossRules(
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


def _first(wanted: float | None, published: float) -> float:
    return published if wanted is None else wanted
