"""The policy losses: one pure function each, by name or import path, and the rules of a run file.

PPO, GSPO and GMPO clip a ratio, DPPO masks by a divergence, CISPO and SAPO weigh tokens down instead of cutting them
off. ``bounded`` and ``shaped`` are the losses of off-policy tokens without a clip. A new loss is one function, one
entry here, and the class of its options in ``learner.losses.options``.

Dimension: S sampled tokens; every tensor is float ``[S]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from learner.losses.base import ClipRange, LossRules, PolicyLoss, Scored, TokenLosses
from learner.losses.options import CORRECTIONS, OFF_POLICIES, POLICIES, DppoKl, DppoTv, Gmpo, Gspo, Ppo, Sapo
from pipeline.config.base import Given
from pipeline.config.load import read_options
from pipeline.config.losses import ImportanceConfig, LossConfig
from pipeline.config.replay import ReplayConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import resolve


def ppo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``max(-A ρ, -A clip(ρ, 1 - lo, 1 + hi))`` with ρ the token's ratio (arXiv:1707.06347, eq. 7), dual clip."""
    return _clipped(tokens.log_ratio.exp(), tokens, rules.options_of(Ppo).dual_clip)


def gspo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """PPO's form with the row's ratio ``s = exp(mean over the row of log π/π_old)`` at every token of the row
    (arXiv:2507.18071). With ``aggregation: sequence_mean`` it is the published loss."""
    return _clipped(tokens.row_mean(tokens.log_ratio).exp(), tokens, rules.options_of(Gspo).dual_clip)


def gspo_token(tokens: Scored, rules: LossRules) -> TokenLosses:
    """PPO's form with ``sg(s) π / sg(π)``: the row's ratio in value, each token's own gradient (arXiv:2507.18071),
    for advantages that differ within a row."""
    d = tokens.log_ratio
    mean = tokens.row_mean(d.detach())
    return _clipped((mean + d - d.detach()).exp(), tokens, rules.options_of(Gspo).dual_clip)


def gmpo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-A exp(mean over the row of d')``, d' the token's log-ratio clipped to ``[-lo, hi]`` on the side where its
    advantage would push it further (arXiv:2507.20673), dual clip."""
    d, up = tokens.log_ratio, tokens.advantages > 0
    bounded = torch.maximum(torch.minimum(d, tokens.high), -tokens.low)
    one_sided = torch.where(up, torch.minimum(d, bounded), torch.maximum(d, bounded))
    ratio = tokens.row_mean(one_sided).exp()
    detached = d.detach()
    return TokenLosses(
        dual_clipped(-tokens.advantages * ratio, tokens.advantages, rules.options_of(Gmpo).dual_clip),
        (tokens.advantages < 0) & (detached < -tokens.low),
        up & (detached > tokens.high),
    )


def dual_clipped(losses_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    """``min(ℓ, -A c)`` where A < 0 (arXiv:1912.09729), float ``[S]``."""
    if dual_clip is None:
        return losses_S
    return torch.where(advantages_S < 0, torch.minimum(losses_S, -advantages_S * dual_clip), losses_S)


def _clipped(ratio_S: Tensor, tokens: Scored, dual_clip: float | None) -> TokenLosses:
    a, low, high = tokens.advantages, 1.0 - tokens.low, 1.0 + tokens.high
    losses = torch.maximum(-a * ratio_S, -a * ratio_S.clamp(low, high))
    detached = ratio_S.detach()
    return TokenLosses(dual_clipped(losses, a, dual_clip), (a < 0) & (detached < low), (a > 0) & (detached > high))


def dppo_tv(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-A min(ρ, ratio_max) M`` (arXiv:2602.04879): M is 0 where A pushes π further from π_old than the clip allows in
    binary total variation, |π - π_old| of the token; beyond ``ratio_max`` the gradient keeps that weight."""
    return _masked(binary_tv(tokens.logprobs, tokens.old), tokens, rules.options_of(DppoTv).ratio_max)


def dppo_kl(tokens: Scored, rules: LossRules) -> TokenLosses:
    """As :func:`dppo_tv`, by the KL divergence from π to π_old of the coin "this token, or any other"."""
    return _masked(binary_kl(tokens.logprobs, tokens.old), tokens, rules.options_of(DppoKl).ratio_max)


def binary_tv(logprobs_S: Tensor, old_S: Tensor) -> Tensor:
    """``|π - π_old|``, float64 ``[S]``, without gradient."""
    return (logprobs_S.detach().double().exp() - old_S.double().exp()).abs()


def binary_kl(logprobs_S: Tensor, old_S: Tensor) -> Tensor:
    """``q log(q/p) + (1 - q) log((1 - q)/(1 - p))`` with q = π_old, p = π: float64 ``[S]``, without gradient, +inf
    where π rules out what π_old allows."""
    p, q = logprobs_S.detach().double().clamp(max=0.0), old_S.double().clamp(max=0.0)
    same, other = q.exp(), -torch.expm1(q)
    zero = torch.zeros_like(p)
    of_same = torch.where(same > 0, same * (q - p), zero)
    of_other = torch.where(other > 0, other * (_log_complement(q) - _log_complement(p)), zero)
    return (of_same + of_other).clamp(min=0.0)


def _log_complement(logprobs_S: Tensor) -> Tensor:
    """``log(1 - p)``."""
    return torch.log(-torch.expm1(logprobs_S))


def _masked(divergence_S: Tensor, tokens: Scored, ratio_max: float) -> TokenLosses:
    a, d = tokens.advantages, tokens.log_ratio
    low = (a < 0) & (d.detach() < 0) & (divergence_S > tokens.low)
    high = (a > 0) & (d.detach() > 0) & (divergence_S > tokens.high)
    weight = d.detach().exp().clamp(max=ratio_max)
    losses = -a * weight * (d - d.detach()).exp()
    return TokenLosses(torch.where(low | high, torch.zeros_like(losses), losses), low, high)


def cispo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-sg(clip(ρ, 1 - lo, 1 + hi)) A log π`` (arXiv:2506.13585): every token keeps a gradient, of clipped weight.
    Tokens whose weight was clipped are counted, whatever their advantage's sign."""
    ratio, a = tokens.log_ratio.detach().exp(), tokens.advantages
    low, high = 1.0 - tokens.low, 1.0 + tokens.high
    losses = -ratio.clamp(low, high) * a * tokens.logprobs
    return TokenLosses(losses, (a != 0) & (ratio < low), (a != 0) & (ratio > high))


def sapo(tokens: Scored, rules: LossRules) -> TokenLosses:
    """``-A f(ρ)`` with ``f(x) = 4/τ sigmoid(τ (x - 1))``, τ by the sign of A (arXiv:2511.20347).

    The gradient is that of ``-A ρ`` times ``4 p (1 - p)``, p the sigmoid: 1 at ρ = 1, fading on both sides. Tokens for
    which it is below 1/2 count as clipped.
    """
    options, ratio, a = rules.options_of(Sapo), tokens.log_ratio.exp(), tokens.advantages
    temperature = torch.where(a > 0, ratio.new_full((), options.positive), ratio.new_full((), options.negative))
    gate = torch.sigmoid(temperature * (ratio - 1.0))
    p, moved = gate.detach(), ratio.detach()
    faded = (a != 0) & (4.0 * p * (1.0 - p) < 0.5)
    return TokenLosses(-a * gate * 4.0 / temperature, faded & (moved < 1.0), faded & (moved > 1.0))


def bounded(ratio_S: Tensor, advantages_S: Tensor, dual_clip: float | None) -> Tensor:
    """``-A ρ`` with the dual clip alone: M2PO's loss (arXiv:2510.01161), whose mask is taken beforehand."""
    return dual_clipped(-advantages_S * ratio_S, advantages_S, dual_clip)


def shaped(log_ratio_S: Tensor, advantages_S: Tensor, beta: float) -> Tensor:
    """``-A ρ / (ρ + β)`` (LUFFY, arXiv:2504.14945; ExGRPO, arXiv:2510.02245), as ``-A sigmoid(log ρ - log β)``, which
    does not overflow. At most |A|, so the dual clip never binds."""
    return -advantages_S * torch.sigmoid(log_ratio_S - math.log(beta))


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


def needed_scores(loss: LossConfig) -> frozenset[str]:
    """Scores to gather before the first optimizer step, out of :data:`SCORES`.

    log π before the step is not asked for by the proximal anchor or by masks: with one optimizer step the loss's own
    pass gives it, with several the trainer scores only the rows that need it.
    """
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
