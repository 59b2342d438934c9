"""Learning curve of a run; cost of each arm of a comparison until a target is reached, and ratios of costs.

An arm is a setting that several seeds were run with. A *cost* is what a run has used up to the first point of its curve
at which the mean of the last ``window`` points is at least the target: generated tokens, updates, or seconds.

Ratios are of geometric means, with Student's t interval of the logarithms: of their differences by seed where both arms
have the same seeds, else Welch's, with its degrees of freedom rounded down. A t interval can be wider than the range of
the values, as it must be with few seeds; a percentile bootstrap cannot. Welch's test is the one that Colas et al. 2019
(arXiv:1904.06979) recommend for few seeds. The p-value of paired arms is that of the sign-flip permutation test, which
is exact and assumes no normal distribution: with n seeds it cannot be below 2 / 2^n.

A run that never reaches the target is censored: its cost is only known to be at least what it used in all. Where one of
the two arms has such a run, all costs are restricted to a horizon, the smallest cost of a censored run: a cost above it
counts as the horizon. It is the largest horizon at which every restricted cost is known without a model, and the ratio
is one of restricted means (Royston & Parmar 2013, doi:10.1186/1471-2288-13-152; here geometric). No run is left out.
Restriction usually moves the ratio towards 1.

What a study *can show* is the ratio nearest to 1 whose interval is beside 1 in :data:`POWER` of all studies with the
same spread and numbers of runs. A significant ratio nearer to 1 than that is exaggerated on average (Gelman & Carlin
2014, doi:10.1177/1745691614551642).
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from typing import Literal

import numpy as np

from pipeline.config import RunConfig
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.evaluation_results import read_results
from pipeline.store.queries import rollouts
from pipeline.store.store import store_path
from pipeline.views.step_lines import Metric, read_lines

Quantity = Literal["tokens", "updates", "seconds"]
QUANTITIES: Mapping[Quantity, str] = {
    "tokens": "generated tokens", "updates": "updates", "seconds": "wall time",
}  # fmt: skip
LEVEL = 0.95
POWER = 0.8
GRID = 201
"""Places at which curves are averaged."""
RUNS_MAX = 1000
"""Runs of an arm that a plan may ask for."""
FLIPS_MAX = 2**14
"""Sign patterns that are enumerated; with more there are as many random ones."""


@dataclass(frozen=True, slots=True)
class Point:
    """State of a run after an update. Counters are from the start of the run."""

    updates: int
    tokens: int
    seconds: float
    value: float
    """Value of this update alone, or of an evaluation of its weights."""
    weight: float = 1.0
    """Weight of the value in means over points: its number of rollouts."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a run until it reached the target."""

    tokens: float
    updates: float
    seconds: float
    reached: bool
    """False: censored, the numbers are of the whole run and lower bounds."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of the cost of an arm to that of another."""

    quantity: Quantity
    ratio: float
    low: float
    """0 where there are too few runs for an interval, and ``high`` infinite."""
    high: float
    p: float | None
    """p-value of the sign-flip test; None for arms that are not paired."""
    paired: bool
    runs: tuple[int, int]
    """Number of runs of the arm, and of the other."""
    censored: tuple[int, int]
    """Number of these that never reached the target."""
    horizon: float | None
    """Costs were restricted to it; None: no run was censored."""
    spread: float = math.inf
    """Standard deviation of the logarithm of the ratio of two runs, one of each arm (of the same seed if paired)."""
    can_show: float = 0.0
    """Such a true ratio, or one as far above 1, is shown in :data:`POWER` of all studies; 0 with too few runs."""


def smoothed(points: Sequence[Point], window: int) -> list[float]:
    """Weighted mean of each ``window`` points in a row, the first at the point that completes a window."""
    found = []
    for end in range(window, len(points) + 1):
        part = points[end - window : end]
        total = math.fsum(p.weight for p in part)
        found.append(math.fsum(p.weight * p.value for p in part) / total if total else math.nan)
    return found


def cost_to_reach(points: Sequence[Point], target: float, window: int) -> Cost:
    """Cost up to the first point at which the smoothed value is at least ``target``."""
    for point, value in zip(points[window - 1 :], smoothed(points, window), strict=False):
        if value >= target:
            return Cost(point.tokens, point.updates, point.seconds, reached=True)
    last = points[-1] if points else Point(0, 0, 0.0, 0.0)
    return Cost(last.tokens, last.updates, last.seconds, reached=False)


def ratio_of(arm: Mapping[int, Cost], base: Mapping[int, Cost], quantity: Quantity) -> Ratio:
    """Ratio of ``arm`` to ``base``, each with its costs by seed; paired where both have the same seeds. A cost of 0
    (a target that the first weights reach) counts as one token, one update or a millisecond."""
    censored = [getattr(cost, quantity) for cost in (*arm.values(), *base.values()) if not cost.reached]
    horizon = min(censored, default=math.inf)
    paired = arm.keys() == base.keys()

    least = 1e-3 if quantity == "seconds" else 1.0

    def logs(costs: Mapping[int, Cost]) -> list[float]:
        return [math.log(max(min(getattr(costs[seed], quantity), horizon), least)) for seed in sorted(costs)]

    left, right = logs(arm), logs(base)
    differences = [a - b for a, b in zip(left, right, strict=True)] if paired else []
    middle, half = t_interval(differences) if paired else welch_interval(left, right)
    spread, can_show = math.inf, 0.0
    if math.isfinite(half):
        error, freedom = student_error(differences) if paired else welch_error(left, right)
        spread = math.sqrt(sum(statistics.variance(values) for values in ((differences,) if paired else (left, right))))
        can_show = math.exp(-shown_distance(freedom) * error)
    return Ratio(
        quantity, math.exp(middle), math.exp(middle - half), math.exp(middle + half) if half < 700 else math.inf,
        sign_flip_p(differences) if paired else None, paired, (len(arm), len(base)),
        (sum(not c.reached for c in arm.values()), sum(not c.reached for c in base.values())),
        horizon if censored else None, spread, can_show,
    )  # fmt: skip


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half the width of its :data:`LEVEL` interval; infinite with fewer than two values."""
    middle = statistics.fmean(values)
    if len(values) < 2:
        return middle, math.inf
    error, freedom = student_error(values)
    return middle, t_quantile(0.5 + LEVEL / 2, freedom) * error


def welch_interval(left: Sequence[float], right: Sequence[float]) -> tuple[float, float]:
    """Difference of two means and half the width of its interval (Welch 1947)."""
    middle = statistics.fmean(left) - statistics.fmean(right)
    if min(len(left), len(right)) < 2:
        return middle, math.inf
    error, freedom = welch_error(left, right)
    return middle, t_quantile(0.5 + LEVEL / 2, freedom) * error


def student_error(values: Sequence[float]) -> tuple[float, int]:
    """Standard error of a mean and its degrees of freedom."""
    return statistics.stdev(values) / math.sqrt(len(values)), len(values) - 1


def welch_error(left: Sequence[float], right: Sequence[float]) -> tuple[float, int]:
    """Standard error of the difference of two means, and its degrees of freedom, rounded down (Welch 1947)."""
    errors = [statistics.variance(values) / len(values) for values in (left, right)]
    total = math.fsum(errors)
    if total == 0:
        return 0.0, 1
    freedom = total**2 / math.fsum(e**2 / (len(v) - 1) for e, v in zip(errors, (left, right), strict=True))
    return math.sqrt(total), max(1, math.floor(freedom + 1e-9))


def t_quantile(probability: float, freedom: int) -> float:
    """Quantile of Student's t distribution for a probability of at least 0.5, by bisection of :func:`t_cdf`."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """Distribution function of Student's t for whole degrees of freedom: the finite sums of Abramowitz & Stegun 1964,
    26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    for i in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (i - 1) / i
        total += term
    if not odd:
        return (1 + sine * total) / 2
    return 0.5 + (angle + (sine * total if freedom > 1 else 0.0)) / math.pi


def t_power(distance: float, freedom: int) -> float:
    """Probability that a t interval holds no 0 if the true value is ``distance`` standard errors from 0: the noncentral
    t distribution beyond the quantile, as the mean over the error's estimate (midpoint rule)."""
    quantile, half = t_quantile(0.5 + LEVEL / 2, freedom), freedom / 2
    step = (3 + 12 / math.sqrt(2 * freedom)) / 1000

    def density(estimate: float) -> float:
        # of the estimated standard error over the true one
        logs = (freedom - 1) * math.log(estimate) - half * estimate**2 + half * math.log(half) - math.lgamma(half)
        return 2 * math.exp(logs)

    def beyond(estimate: float) -> float:
        return math.erfc((quantile * estimate - distance) / math.sqrt(2)) / 2 + (
            math.erfc((quantile * estimate + distance) / math.sqrt(2)) / 2
        )

    return step * math.fsum(density(s) * beyond(s) for s in (step * (i + 0.5) for i in range(1000)))


@cache
def shown_distance(freedom: int) -> float:
    """Distance of a true value from 0, in standard errors, at which the interval is beside 0 in :data:`POWER` of all
    studies. Above 200 degrees of freedom it is that of 200, half a percent too far."""
    freedom = min(freedom, 200)
    low, high = 0.0, 64.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if t_power(middle, freedom) < POWER else (low, middle)
    return high


def runs_to_show(ratio: Ratio, claim: float) -> int | None:
    """Runs of each arm that show a true ratio of ``claim`` in :data:`POWER` of all studies, with the spread of
    ``ratio``; None: more than :data:`RUNS_MAX`, or the spread is not known."""
    effect = abs(math.log(claim))
    if not ratio.spread < effect * math.sqrt(RUNS_MAX) / 3:
        return None
    n = max(2, int((2.8 * ratio.spread / effect) ** 2))  # the lower bound of a normal distribution
    while shown_distance(n - 1 if ratio.paired else 2 * n - 2) * ratio.spread > effect * math.sqrt(n):
        n += 1
    return n


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p-value of the permutation test that flips signs (Fisher 1935): the share of sign patterns whose sum is
    at least as far from 0 as that of ``differences``."""
    values = np.asarray(differences, dtype=np.float64)
    if 2 ** len(values) <= FLIPS_MAX:
        signs = np.array(list(product((1.0, -1.0), repeat=len(values))))
    else:
        signs = np.random.default_rng(0).choice((1.0, -1.0), size=(FLIPS_MAX, len(values)))
        signs[0] = 1.0
    observed = abs(values.sum())
    return float(np.mean(np.abs(signs @ values) >= observed * (1 - 1e-12)))


def median_of(costs: Sequence[Cost], quantity: Quantity) -> float:
    """Median over runs; infinite where it is not known because half of them or more are censored."""
    return statistics.median([getattr(c, quantity) if c.reached else math.inf for c in costs])


def band(curves: Sequence[LearningCurve], window: int) -> list[tuple[float, float, float, float]]:
    """Mean of smoothed curves and its interval, (tokens, mean, low, high) at :data:`GRID` places. A curve that has
    ended keeps its last value; before its first point it has none. With one curve the interval is the curve."""
    lines = [([p.tokens for p in c.points[window - 1 :]], smoothed(c.points, window)) for c in curves]
    grid = np.linspace(0.0, max((xs[-1] for xs, _ in lines if xs), default=0.0), GRID)
    rows = []
    columns = np.array([np.interp(grid, xs, ys, left=math.nan) for xs, ys in lines if xs]).reshape(-1, GRID)
    for tokens, column in zip(grid.tolist(), columns.T, strict=True):
        values = column[~np.isnan(column)].tolist() or [math.nan]
        middle, half = t_interval(values) if len(values) > 1 else (values[0], 0.0)
        rows.append((tokens, middle, middle - half, middle + half))
    return rows


def describe_ratio(arm: str, base: str, ratio: Ratio, target: str, claim: float | None = None) -> str:
    """A finding in words, and whether so many runs can show it, or a ``claim``.

    >>> found = Ratio("tokens", 0.61, 0.45, 0.83, 0.002, True, (12, 12), (0, 0), None)
    >>> describe_ratio("B", "A", found, "a success rate of 0.8")
    "B needs 0.61 (0.45 to 0.83) of A's generated tokens to reach a success rate of 0.8; 12 seeds, paired, p = 0.002."
    """
    n_arm, n_base = ratio.runs
    what = QUANTITIES[ratio.quantity]
    if sum(ratio.censored) == n_arm + n_base:
        return f"No run of {arm} or {base} reached {target}: nothing can be said."
    if math.isinf(ratio.high):
        interval, doubt = "no interval from so few runs", ""
    else:
        interval = f"{ratio.low:.2f} to {ratio.high:.2f}"
        doubt = describe_power(ratio, claim)
    seeds = (
        f"{n_arm} seed{'s' if n_arm > 1 else ''}, paired" if ratio.paired else f"{n_arm} and {n_base} runs, not paired"
    )
    p = "" if ratio.p is None or n_arm < 2 else f", p = {ratio.p:.2g}"
    text = f"{arm} needs {ratio.ratio:.2f} ({interval}) of {base}'s {what} to reach {target}; {seeds}{p}.{doubt}"
    for name, n, censored in zip((arm, base), ratio.runs, ratio.censored, strict=True):
        if censored:
            text += f" {censored} of {n} runs of {name} never reached it."
    if ratio.horizon is not None:
        text += f" Costs are therefore restricted to {ratio.horizon:,.0f}, which usually moves the ratio towards 1."
    return text


def describe_power(ratio: Ratio, claim: float | None) -> str:
    """A sentence about what so many runs can show; empty where that is not known.

    >>> found = Ratio("tokens", 0.84, 0.66, 1.08, 0.16, True, (9, 9), (0, 0), None, 0.39, 0.663)
    >>> describe_power(found, None)
    ' The interval holds 1: no difference is shown. 9 seeds can show 0.66 or 1.51. To show 0.84 takes 42.'
    """
    held, nearer = ratio.low <= 1 <= ratio.high, abs(math.log(ratio.ratio)) < -math.log(ratio.can_show or 1)
    text = " The interval holds 1: no difference is shown." if held else ""
    if not ratio.can_show:
        return text
    n_arm, n_base = ratio.runs
    runs = f"{n_arm} seeds" if ratio.paired else f"{n_arm} and {n_base} runs"
    text += f" {runs} can show {ratio.can_show:.2f} or {1 / ratio.can_show:.2f}."
    if nearer and not held:
        text += f" {ratio.ratio:.2f} is nearer to 1 than that, so it is likely exaggerated."
    wanted = [value for value in (ratio.ratio if nearer else None, claim) if value is not None]
    takes = [f"{value:.2f} takes {runs_to_show(ratio, value) or f'over {RUNS_MAX:,}'}" for value in wanted]
    return text + (f" To show {', '.join(takes)}." if takes else "")


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Curve of one run."""

    seed: int
    points: tuple[Point, ...]
    finished: bool
    """The run has made all its updates."""
    redone: bool
    """Updates were made again from an older checkpoint: their tokens count twice, their seconds once."""


def read_curve(config: RunConfig, directory: RunDirectory, seed: int, metric: Metric) -> LearningCurve:
    """The curve of a run, also of one that is alive.

    Tokens are those sampled for training by every rollout that the replay stage received up to the end of the update,
    also if it was not trained; rollouts of evaluations are not counted. Seconds are those of the learner's updates with
    its waits; a pause between two starts is not in them.
    """
    lines = read_lines(directory.metrics_file)
    if not lines:
        return LearningCurve(seed, (), finished=False, redone=False)
    found = rollouts(store_path(config, directory))
    times, tokens = [r.received_at for r in found], [0, *accumulate(r.n_sampled for r in found)]
    results = [r for r in read_results(directory.evaluations_file) if r.get("status") == "complete"]
    scores = {r["updates"]: r["score"] for r in results if r.get("score") is not None}
    points = [Point(0, 0, 0.0, float(scores[0]))] if metric is Metric.EVAL and 0 in scores else []
    seconds, begin = 0.0, 0
    for line in lines:
        seconds += float(line["seconds"]["step"])
        end = bisect_right(times, line["finished"])
        value, weight = None, 1.0
        if metric is Metric.EVAL:
            value = scores.get(line["step"])
        elif metric is Metric.REWARD:
            value, weight = line["reward_mean"], float(line["n_trajectories"] - line["n_replayed"])
        elif rewards := [r.reward for r in found[begin:end] if r.reward is not None]:
            value = sum(reward >= config.replay.success_threshold for reward in rewards) / len(rewards)
            weight = float(len(rewards))
        if value is not None:
            points.append(Point(line["step"], tokens[end], seconds, float(value), weight))
        begin = end
    redone = any(line["policy_version"] != line["update"] for line in lines)
    return LearningCurve(seed, tuple(points), directory.has_finished(config.run.total_steps), redone)
