"""The policy losses by name or import path, and :class:`LossRules` from the run file.

A new loss is one function, one entry here, and the class of its options in ``learner.losses.options``.
"""

from __future__ import annotations

from typing import Any

from learner.losses.base import ClipRange, LossRules, PolicyLoss
from learner.losses.options import CORRECTIONS, OFF_POLICIES, POLICIES
from learner.losses.policy_losses import cispo, dppo_kl, dppo_tv, gmpo, gspo, gspo_token, ppo, sapo
from pipeline.config.algorithm import ImportanceConfig, LossConfig
from pipeline.config.base import Given
from pipeline.config.load import read_options
from pipeline.config.replay import ReplayConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import resolve

SCORES = frozenset({"logprobs", "entropies", "reference"})
"""Passes before the first optimizer step that can be asked for (fields of
:class:`learner.data.rows.TokenScores`)."""

LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo),
    "gspo": PolicyLoss(gspo),
    "gspo_token": PolicyLoss(gspo_token),
    "gmpo": PolicyLoss(gmpo),
    "cispo": PolicyLoss(cispo, off_high=None),
    "sapo": PolicyLoss(sapo),
    "dppo_tv": PolicyLoss(dppo_tv, off_high=None),
    "dppo_kl": PolicyLoss(dppo_kl, off_high=None),
}


def policy_loss_of(name: str) -> PolicyLoss:
    """By name, or a user's function (or :class:`PolicyLoss`) by import path, for which rows without advantage are
    passed backward too. Raises :class:`ConfigurationError`."""
    if name in LOSSES:
        return LOSSES[name]
    read_options(Given(name=name), POLICIES, "loss.policy")
    found: Any = resolve(name, "policy loss")
    if isinstance(found, PolicyLoss):
        return found
    return PolicyLoss(found, needs_signal=False, options=getattr(found, "options", None))


def needed_scores(loss: LossConfig, importance: ImportanceConfig) -> frozenset[str]:
    """Scores to gather before the first optimizer step, out of :data:`SCORES`.

    log π before the step is not asked for by the proximal anchor or by masks: with one optimizer step the loss's own
    pass gives it, with several the trainer scores only the rows that need it.
    """
    del importance
    needed = set(policy_loss_of(loss.policy.name).needs)
    if loss.kl != "none":
        needed.add("reference")
    if loss.kl == "reward":
        needed.add("logprobs")
    if unknown := needed - SCORES:
        raise ConfigurationError(
            f"{loss.policy.name} asks for {', '.join(sorted(unknown))}: expected {', '.join(sorted(SCORES))}"
        )
    return frozenset(needed)


def loss_rules(loss: LossConfig, importance: ImportanceConfig, replay: ReplayConfig | None = None) -> LossRules:
    """``replay`` None: its defaults. Raises :class:`ConfigurationError` for a policy loss that does not exist."""
    replay = replay or ReplayConfig()
    policy = policy_loss_of(loss.policy.name)
    kinds = POLICIES if policy.options is None else {"own": policy.options}
    chosen = read_options(loss.policy, kinds, "loss.policy")
    fresh = ClipRange(
        _first(getattr(chosen, "clip_low", None), policy.clip.low),
        _first(getattr(chosen, "clip_high", None), policy.clip.high),
    )
    return LossRules(
        fresh=fresh,
        off=ClipRange(fresh.low, _first(loss.off_clip_high, _first(policy.off_high, fresh.high))),
        decoupled=importance.anchor == "proximal",
        weight_max=importance.weight_max,
        entropy_bonus=loss.entropy_bonus,
        off_policy=read_options(loss.off_policy, OFF_POLICIES, "loss.off_policy"),
        replay_correction=read_options(replay.correction, CORRECTIONS, "replay.correction"),
        policy=policy,
        options=chosen,
        weight=importance.weight,
        masks=importance.masks,
        kl_in_loss=loss.kl == "loss",
        kl_coef=loss.kl_coef if loss.kl != "none" else 0.0,
        kl_estimator=loss.kl_estimator or ("k1" if loss.kl == "reward" else "k3"),
    )


def _first(wanted: float | None, published: float) -> float:
    return published if wanted is None else wanted
