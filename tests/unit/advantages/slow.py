"""Slow references: each estimator again from its published formula, in Python floats, a token at a time.

Nothing here is shared with the estimators, and forms differ from theirs where there is another: explicit sums over
pairs, sets and later tokens.
"""

from __future__ import annotations

import itertools
import math

EPSILON = 1e-6


def groups(scored):
    out = {}
    for i, p in enumerate(scored):
        out.setdefault(p.group, []).append(i)
    return out


def mean(values):
    values = list(values)
    return math.fsum(values) / len(values)


def std(values):
    values = list(values)
    centre = mean(values)
    return math.sqrt(mean((v - centre) ** 2 for v in values))


def flat(values):
    return all(v == values[0] for v in values)


def rewards_by_turn(p, config):
    """Dictionary turn -> reward."""
    if not p.turn_rewards:
        return {int(p.turns[-1]): p.reward}
    out = dict(enumerate(p.turn_rewards))
    if config.rewards == "both":
        out[len(p.turn_rewards) - 1] += p.reward - math.fsum(p.turn_rewards)
    return out


def rewards_by_token(p, config):
    out = [0.0] * p.n_tokens
    if config.rewards == "outcome":
        out[-1] = p.reward
    else:
        for turn, reward in rewards_by_turn(p, config).items():
            before = [t for t in range(p.n_tokens) if p.turns[t] <= turn]
            if before:
                out[before[-1]] += reward
    if p.penalties is not None:
        out = [r - float(x) for r, x in zip(out, p.penalties, strict=True)]
    return out


def later(rewards, t, factor):
    return math.fsum(factor ** (j - t) * rewards[j] for j in range(t, len(rewards)))


def whitened(parts):
    everything = [v for part in parts for v in part]
    if flat(everything):
        return [[0.0] * len(part) for part in parts]
    centre, scale = mean(everything), std(everything) + EPSILON
    return [[(v - centre) / scale for v in part] for part in parts]


def by_group(rule):
    def estimate(scored, config):
        out = [None] * len(scored)
        for members in groups(scored).values():
            group = [scored[i] for i in members]
            lengths = [p.n_tokens for p in group]
            if config.rewards == "outcome":
                returns = [p.reward - (0.0 if p.penalties is None else math.fsum(p.penalties)) for p in group]
                per_turn = {0: [0.0] * len(group) if flat(returns) else rule(returns, lengths, config)}
            else:
                turns = [rewards_by_turn(p, config) for p in group]
                for p, r in zip(group, turns, strict=True):
                    for t in range(p.n_tokens):
                        k = int(p.turns[t])
                        r[k] = r.get(k, 0.0) - (0.0 if p.penalties is None else float(p.penalties[t]))
                per_turn = {}
                for k in range(max(max(r) for r in turns) + 1):
                    returns = [
                        math.fsum(config.turn_gamma ** (j - k) * v for j, v in r.items() if j >= k) for r in turns
                    ]
                    per_turn[k] = [0.0] * len(group) if flat(returns) else rule(returns, lengths, config)
            for g, i in enumerate(members):
                p = scored[i]
                out[i] = [per_turn[0 if config.rewards == "outcome" else int(k)][g] for k in p.turns]
        return out

    return estimate


def grpo(returns, lengths, config):
    scale = std(returns) + EPSILON if config.estimator.normalize_std else 1.0
    return [(r - mean(returns)) / scale for r in returns]


def rloo(returns, lengths, config):
    return [r - mean(other for j, other in enumerate(returns) if j != i) for i, r in enumerate(returns)]


def opo(returns, lengths, config):
    each_token = [r for r, n in zip(returns, lengths, strict=True) for _ in range(n)]
    return [r - mean(each_token) for r in returns]


def maxrl(returns, lengths, config):
    return [(r - mean(returns)) / (mean(returns) + EPSILON) for r in returns]


def pass_at_k(returns, lengths, config):
    sets = list(itertools.combinations(range(len(returns)), config.estimator.k))
    best = [max(returns[i] for i in chosen) for chosen in sets]
    return [
        (mean(b for b, chosen in zip(best, sets, strict=True) if i in chosen) - mean(best)) / (std(best) + EPSILON)
        for i in range(len(returns))
    ]


def centred(returns, lengths, config):
    return [r - mean(returns) for r in returns]


def gpg(scored, config):
    advantages = by_group(centred)(scored, config)
    teaching = [i for members in groups(scored).values() for i in members if any(any(advantages[j]) for j in members)]
    alpha = len(scored) / len(teaching) if teaching else 1.0
    return [[alpha * a for a in part] for part in advantages]


def gae_raw(scored, config):
    """The sum over later tokens instead of the recursion."""
    out = []
    for p in scored:
        rewards, values = rewards_by_token(p, config), [*map(float, p.values), 0.0]
        deltas = [rewards[t] + config.estimator.gamma * values[t + 1] - values[t] for t in range(p.n_tokens)]
        out.append([later(deltas, t, config.estimator.gamma * config.estimator.gae_lambda) for t in range(p.n_tokens)])
    return out


def gae(scored, config):
    raw = gae_raw(scored, config)
    return whitened(raw) if config.estimator.whiten else raw


def reinforce_pp(scored, config):
    raw = [[later(rewards_by_token(p, config), t, config.estimator.gamma) for t in range(p.n_tokens)] for p in scored]
    return whitened(raw) if config.estimator.whiten else raw


def reinforce_pp_baseline(scored, config):
    raw = by_group(centred)(scored, config)
    return whitened(raw) if config.estimator.whiten else raw


def remax(scored, config):
    gamma = config.estimator.gamma
    return [[later(rewards_by_token(p, config), t, gamma) - p.baseline for t in range(p.n_tokens)] for p in scored]


def cpo(scored, config):
    out = by_group(grpo)(scored, config)
    for members in groups(scored).values():
        average = mean(scored[i].reward for i in members)
        if average <= config.estimator.failed_mean:
            weight = config.estimator.failed_weight
        elif average >= config.estimator.solved_mean:
            weight = -config.estimator.solved_weight
        else:
            continue
        largest = max(float(h) for i in members for h in scored[i].entropies)
        for i in members:
            p = scored[i]
            for t in range(p.n_tokens):
                g, o = float(p.hinted[t]), float(p.logprobs[t])
                share = float(p.entropies[t]) / largest if largest > 0 else 0.0
                out[i][t] += weight * share * math.exp(g) * (g - o)
    return out


def distilled(teacher):
    def estimate(scored, config):
        out = by_group(grpo)(scored, config)
        ratios = [
            [min(20.0, max(-20.0, float(g) - float(o))) for g, o in zip(getattr(p, teacher), p.logprobs, strict=True)]
            for p in scored
        ]
        for i, p in enumerate(scored):
            others = [r for j, q in enumerate(scored) if j != i and q.group == p.group for r in ratios[j]]
            for t in range(p.n_tokens):
                taught = ratios[i][t] - (mean(others) if others else 0.0)
                out[i][t] = config.estimator.reward_weight * out[i][t] + taught
        return out

    return estimate


SLOW = {
    "grpo": by_group(grpo),
    "rloo": by_group(rloo),
    "leave_one_out": by_group(rloo),
    "opo": by_group(opo),
    "maxrl": by_group(maxrl),
    "gpg": gpg,
    "pass_at_k": by_group(pass_at_k),
    "remax": remax,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "cpo": cpo,
    "distill": distilled("reference"),
    "self_distill": distilled("hinted"),
}
