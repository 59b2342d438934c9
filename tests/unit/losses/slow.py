"""Every loss and correction again, one token at a time in float64, written from the formulas alone."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0


@dataclass
class Token:
    """One sampled token. Fields as of ``LossTokens``."""

    new: float
    mu: float
    proximal: float
    reference: float
    advantage: float
    row: int = 0
    mask: bool = True
    replayed: bool = False
    with_lessons: bool = False
    recorded: bool = True
    factor: float = 1.0
    others: tuple[float, int] = (0.0, 0)
    """Of the other rows of the trajectory: sum of log r, and number of tokens."""
    weight: float = 0.125
    entropy: float = 0.5

    @property
    def off(self) -> bool:
        return self.replayed or self.with_lessons


def slow_loss(tokens: list[Token], rules, name: str, *, proximal: bool = True) -> tuple[float, list[float], list[bool]]:
    """Loss, its derivative by every log π, and which tokens are trained."""
    leaves = [torch.tensor(t.new, dtype=torch.float64, requires_grad=True) for t in tokens]
    kept = [t.mask and not rejected(tokens, i, rules, proximal) for i, t in enumerate(tokens)]
    total = torch.zeros((), dtype=torch.float64)
    for row in sorted({t.row for t in tokens}):
        members = [i for i, t in enumerate(tokens) if t.row == row and kept[i]]
        log_ratios = {i: clamp(leaves[i] - pi_old(tokens[i], rules, proximal), LOG_RATIO_MAX) for i in members}
        for i in members:
            t = tokens[i]
            loss = token_loss(t, i, members, leaves, log_ratios, tokens, rules, name, proximal)
            total = total + t.weight * t.factor * weight_of(tokens, i, rules, proximal) * loss
            total = total - t.weight * rules.entropy_bonus * t.entropy
            if rules.kl_in_loss:
                d = clamp(leaves[i] - t.reference, LOG_RATIO_MAX)
                total = total + t.weight * rules.kl_coef * slow_kl(d, rules.kl_estimator)
    grads = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
    return total.item(), [0.0 if g is None else g.item() for g in grads], kept


def token_loss(t, i, members, leaves, log_ratios, tokens, rules, name, proximal) -> Tensor:
    a, rho = t.advantage, log_ratios[i].exp()
    if t.off and rules.off_policy.name == "shaped":
        return -a * rho / (rho + rules.off_policy.beta)
    if t.off and rules.off_policy.name == "second_moment" and t.recorded:
        return dual(-a * rho, a, rules.off_policy)
    low, high = (rules.off.low, rules.off.high) if t.off else (rules.fresh.low, rules.fresh.high)
    old = pi_old(t, rules, proximal)
    old = old.item() if isinstance(old, Tensor) else old
    n = len(members)
    if name == "ppo":
        return clip_form(a, rho, low, high, rules)
    if name == "gspo":
        product = math.prod([log_ratios[j].exp() for j in members])
        return clip_form(a, product ** (1 / n), low, high, rules)
    if name == "gspo_token":
        product = math.prod([math.exp(log_ratios[j].item()) for j in members])
        return clip_form(a, product ** (1 / n) * rho / rho.item(), low, high, rules)
    if name == "gmpo":
        product = torch.ones((), dtype=torch.float64)
        for j in members:
            other = log_ratios[j].exp()
            limit_high = math.exp(rules.off.high if tokens[j].off else rules.fresh.high)
            limit_low = math.exp(-(rules.off.low if tokens[j].off else rules.fresh.low))
            if tokens[j].advantage > 0:
                product = product * (other if other.item() < limit_high else limit_high)
            else:
                product = product * (other if other.item() > limit_low else limit_low)
        return dual(-a * product ** (1 / n), a, rules.options)
    if name == "cispo":
        return -min(max(rho.item(), 1 - low), 1 + high) * a * leaves[i]
    if name == "sapo":
        tau = rules.options.positive if a > 0 else rules.options.negative
        return -a * (4 / tau) / (1 + torch.exp(-tau * (rho - 1)))
    if name in ("dppo_tv", "dppo_kl"):
        far = coin_distance(math.exp(leaves[i].item()), math.exp(old), name)
        if (a > 0 and rho.item() > 1 and far > high) or (a < 0 and rho.item() < 1 and far > low):
            return torch.zeros((), dtype=torch.float64)
        return -a * min(rho.item(), rules.options.ratio_max) * rho / rho.item()
    raise AssertionError(name)


def clip_form(a, ratio, low, high, rules):
    bounded = ratio if 1 - low <= ratio.item() <= 1 + high else ratio.detach().clamp(1 - low, 1 + high)
    surrogate = ratio * a if (ratio * a).item() < (bounded * a).item() else bounded * a
    return dual(-surrogate, a, rules.options)


def dual(loss, a, options):
    if a < 0 and options.dual_clip is not None and loss.item() > -a * options.dual_clip:
        return torch.tensor(-a * options.dual_clip, dtype=torch.float64)
    return loss


def coin_distance(p: float, q: float, name: str) -> float:
    if name == "dppo_tv":
        return 0.5 * (abs(p - q) + abs((1 - p) - (1 - q)))
    total = 0.0
    for x, y in ((q, p), (1 - q, 1 - p)):
        if x > 0:
            total += math.inf if y <= 0 else x * math.log(x / y)
    return total


def pi_old(t: Token, rules, proximal: bool):
    now = t.proximal if proximal else t.new
    if t.replayed:
        if rules.replay_correction.name != "token":
            return now
        if not t.recorded:
            return 0.0 if rules.off_policy.name == "shaped" else now
        return t.mu
    return now if rules.decoupled else t.mu


def clamp(x, limit):
    value = x.item() if isinstance(x, Tensor) else x
    if abs(value) <= limit:
        return x
    bound = math.copysign(limit, value)
    return torch.tensor(bound, dtype=torch.float64) if isinstance(x, Tensor) else bound


def ratio_at(tokens, i, level, eligible, rules, proximal, others=(0.0, 0)) -> float:
    def log_r(t):
        return clamp((t.proximal if proximal else t.new) - t.mu, LOG_RATIO_MAX)

    if level == "token":
        return math.exp(log_r(tokens[i]))
    row = [log_r(t) for t in tokens if t.row == tokens[i].row and eligible(t)]
    if level == "sequence":
        return math.exp(clamp(sum(row) + others[0], LOG_RATIO_MAX))
    return math.exp((sum(row) + others[0]) / (len(row) + others[1]))


def weight_of(tokens, i, rules, proximal) -> float:
    t, form = tokens[i], rules.replay_correction
    if t.replayed:
        if form.name == "token" or not t.recorded:
            return 1.0
        level = "geometric" if form.name == "geometric" else "sequence"
        r = ratio_at(tokens, i, level, lambda t: t.mask and t.replayed and t.recorded, rules, proximal, t.others)
        if form.name != "soft":
            return r if form.max is None else min(r, form.max)
        side = "positive" if t.advantage >= 0 else "negative"
        k, rate = getattr(form, f"k_{side}"), getattr(form, f"lambda_{side}")
        return r**k * math.exp(rate * (1 - r))
    if not rules.decoupled or rules.weight == "none":
        return 1.0
    r = ratio_at(tokens, i, rules.weight, lambda t: t.mask and not t.replayed, rules, proximal, t.others)
    return min(r, rules.weight_max)


def rejected(tokens, i, rules, proximal) -> bool:
    def eligible(t):
        return t.mask and not t.off and t.recorded

    if not eligible(tokens[i]):
        return False
    for mask in rules.masks:
        high = math.inf if mask.high is None else mask.high
        if mask.level == "any_token":
            row = [j for j, t in enumerate(tokens) if t.row == tokens[i].row and eligible(t)]
            ratios = [ratio_at(tokens, j, "token", eligible, rules, proximal) for j in row]
        else:
            ratios = [ratio_at(tokens, i, mask.level, eligible, rules, proximal)]
        if any(r < mask.low or r > high for r in ratios):
            return True
    return False


def slow_kl(d: Tensor, estimator: str) -> Tensor:
    values = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.exp(-x) - 1 + x}
    if not estimator.endswith("+"):
        return values[estimator](d)
    k2 = values["k2"](d)
    return k2 - k2.item() + values[estimator[:-1]](d).item()
