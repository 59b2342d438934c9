"""Costs, censoring, ratios and intervals of ``afterplay compare``, against known values and exact enumeration."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

from pipeline.views.comparison import (
    Cost,
    LearningCurve,
    Point,
    band,
    cost_to_reach,
    describe_ratio,
    median_of,
    ratio_of,
    runs_to_show,
    shown_distance,
    sign_flip_p,
    smoothed,
    t_interval,
    t_power,
    t_quantile,
    welch_interval,
)


def curve(*values, weights=None):
    return [Point(i + 1, 10 * (i + 1), i + 1.0, v, w) for i, (v, w) in enumerate(zip(values, weights or [1] * 99))]  # noqa: B905


def costs(*tokens, censored=()):
    return {seed: Cost(t, t / 10, t / 5, seed not in censored) for seed, t in enumerate(tokens)}


def test_target_is_reached_at_the_end_of_the_first_whole_window():
    points = curve(1.0, 0.0, 0.9, 0.9, 0.2)
    assert cost_to_reach(points, 0.8, 1) == Cost(10, 1, 1.0, True)
    assert cost_to_reach(points, 0.8, 2) == Cost(40, 4, 4.0, True), "the first value alone is no window of two"
    assert cost_to_reach(points, 0.95, 2) == Cost(50, 5, 5.0, False), "censored at the end of the run"
    assert cost_to_reach(points, 0.1, 6) == Cost(50, 5, 5.0, False)
    assert cost_to_reach([], 0.1, 1) == Cost(0, 0, 0.0, False)


def test_means_over_a_window_are_weighted_by_rollouts():
    assert smoothed(curve(0.0, 1.0, 1.0, weights=[3, 1, 4]), 2) == [0.25, 1.0]


@pytest.mark.parametrize(
    ("freedom", "quantile"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (11, 2.200985), (30, 2.042272)],
)
def test_t_quantiles_are_those_of_the_tables(freedom, quantile):
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=2e-6)
    assert t_quantile(0.5, freedom) == pytest.approx(0, abs=1e-9)


def test_intervals_of_known_samples():
    # Student's sleep data (1908): extra hours with two drugs, paired 95 % interval 0.70 to 2.46, Welch -0.21 to 3.37
    one = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    two = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    middle, half = t_interval([b - a for a, b in zip(one, two, strict=True)])
    assert (middle - half, middle + half) == pytest.approx((0.7001142, 2.4598858), abs=1e-6)
    middle, half = welch_interval(two, one)
    assert (middle - half, middle + half) == pytest.approx((-0.2054832, 3.3654832), abs=0.01)
    assert half >= (3.3654832 + 0.2054832) / 2, "degrees of freedom are rounded down"


def test_interval_of_few_seeds_is_wider_than_their_range():
    found = ratio_of(costs(50, 60, 70), costs(100, 100, 100), "tokens")
    assert found.paired and found.ratio == pytest.approx((0.5 * 0.6 * 0.7) ** (1 / 3))
    assert found.low < 0.5 and found.high > 0.7
    assert ratio_of(costs(50), costs(100), "tokens").high == math.inf, "one seed gives no interval"


def test_seconds_below_one_are_not_rounded_and_a_cost_of_nothing_has_a_finite_ratio():
    found = ratio_of({1: Cost(5, 1, 0.2, True)}, {1: Cost(5, 1, 0.4, True)}, "seconds")
    assert found.ratio == pytest.approx(0.5)
    assert ratio_of({1: Cost(0, 0, 0.0, True)}, {1: Cost(50, 1, 0.4, True)}, "tokens").ratio == pytest.approx(0.02)


def test_ratio_is_the_same_in_every_unit_and_inverse_when_arms_change_places():
    left, right = costs(50, 65, 40, 80), costs(100, 90, 110, 70)
    tokens, seconds, back = (
        ratio_of(left, right, "tokens"),
        ratio_of(left, right, "seconds"),
        ratio_of(right, left, "tokens"),
    )
    assert tokens.ratio == pytest.approx(seconds.ratio)
    assert (tokens.low, tokens.ratio, tokens.high) == pytest.approx((1 / back.high, 1 / back.ratio, 1 / back.low))


def test_pairs_remove_what_seeds_share():
    left, right = costs(10, 100, 1000), costs(20, 201, 1990)
    paired = ratio_of(left, right, "tokens")
    apart = ratio_of(left, {seed + 10: cost for seed, cost in right.items()}, "tokens")
    assert paired.paired and not apart.paired and apart.p is None
    assert paired.high < 0.6 and apart.high > 1, "other seeds: no pairs"
    assert paired.ratio == pytest.approx(apart.ratio)


def test_run_that_never_reaches_the_target_stays_in_the_ratio():
    base = costs(100, 200, 400, censored={2})
    found = ratio_of(costs(50, 100, 800), base, "tokens")
    assert found.horizon == 400 and found.censored == (0, 1) and found.runs == (3, 3)
    assert found.ratio == pytest.approx((0.5 * 0.5 * 1.0) ** (1 / 3)), "800 counts as the horizon of 400 too"
    text = describe_ratio("B", "A", found, "0.8")
    assert "1 of 3 runs of A never reached it" in text and "restricted to 400" in text
    assert median_of([*base.values()], "tokens") == 200
    assert median_of([*costs(1, 2, censored={1}).values()], "tokens") == math.inf


def test_horizon_is_the_smallest_censored_cost_so_that_no_restricted_cost_is_a_guess():
    found = ratio_of(costs(50, 300, censored={1}), costs(100, 500, censored={1}), "tokens")
    assert found.horizon == 300 and found.ratio == pytest.approx(math.sqrt(0.5))
    nothing = ratio_of(costs(50, censored={0}), costs(50, censored={0}), "tokens")
    assert "nothing can be said" in describe_ratio("B", "A", nothing, "0.8")


@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_sign_flip_p_is_that_of_exact_enumeration(n):
    values = np.random.default_rng(n).normal(0.5, 1, n)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True))) for signs in product((1, -1), repeat=n)]
    assert sign_flip_p(values) == pytest.approx(np.mean([s >= abs(values.sum()) - 1e-12 for s in sums]))


def test_sign_flip_p_has_its_smallest_value_when_all_agree():
    assert sign_flip_p([-0.1, -0.2, -0.3, -0.4, -0.5]) == 2 / 2**5
    assert sign_flip_p([-0.1] * 20) == pytest.approx(1 / 2**14), "random patterns hold the observed one"
    assert sign_flip_p([0.0, 0.0]) == 1.0


@pytest.mark.parametrize(("paired", "n"), [(True, 3), (True, 12), (False, 4)])
def test_intervals_cover_the_true_ratio_as_often_as_they_say(paired, n):
    random = np.random.default_rng(7)
    draws, truth, covered = 1500, math.log(0.6), 0
    for _ in range(draws):
        shared = random.normal(0, 1.0, n)
        left = truth + shared + random.normal(0, 0.3, n)
        right = (shared if paired else random.normal(0, 1.0, n)) + random.normal(0, 0.2, n)
        middle, half = t_interval(left - right) if paired else welch_interval(list(left), list(right))
        covered += abs(middle - truth) <= half
    assert covered / draws == pytest.approx(0.95, abs=0.02) or (not paired and 0.95 <= covered / draws <= 0.98)


def test_power_is_that_of_the_tables_and_of_a_normal_distribution_with_many_runs():
    # R: power.t.test(n = 20, delta = 1, sd = 1), and its n for a power of 0.9 is 22.02
    assert t_power(math.sqrt(20 / 2), 38) == pytest.approx(0.8689528, abs=1e-6)
    assert t_power(math.sqrt(22 / 2), 42) < 0.9 < t_power(math.sqrt(23 / 2), 44)
    assert [t_power(0.0, freedom) for freedom in (1, 2, 7, 40)] == pytest.approx([0.05] * 4, abs=1e-4)
    assert 1 < shown_distance(5000) / (1.959964 + 0.841621) < 1.006


@pytest.mark.parametrize(("paired", "n"), [(True, 3), (True, 12), (False, 4)])
def test_a_ratio_that_can_be_shown_is_shown_in_four_of_five_studies(paired, n):
    random = np.random.default_rng(11)
    draws = 4000
    distance = shown_distance(n - 1 if paired else 2 * n - 2)
    left, right = random.normal(0, 1, (2, draws, n))
    shown = 0
    for a, b in zip(left, right, strict=True):
        if paired:
            middle, half = t_interval(a + distance / math.sqrt(n))
        else:
            middle, half = welch_interval(list(a + distance * math.sqrt(2 / n)), list(b))
        shown += abs(middle) > half
    # Welch's degrees of freedom are rounded down, which costs power
    assert shown / draws == pytest.approx(0.8, abs=0.02) or (not paired and 0.72 <= shown / draws <= 0.8)


@pytest.mark.parametrize("n", [2, 3, 5, 12, 30])
@pytest.mark.parametrize("paired", [True, False])
def test_what_so_many_runs_can_show_takes_so_many(n, paired):
    random = np.random.default_rng(n)
    left = {seed: Cost(float(np.exp(x)), 1, 1.0, True) for seed, x in enumerate(random.normal(5, 0.3, n))}
    right = {seed + 100 * (not paired): cost for seed, cost in enumerate(reversed(left.values()))}
    found = ratio_of(left, right, "tokens")
    # the same variances, so that Welch's degrees of freedom are those of the plan
    assert runs_to_show(found, found.can_show * 0.999) == runs_to_show(found, 1 / found.can_show * 1.001) == n
    assert n == 2 or runs_to_show(found, found.can_show * 1.001) == n + 1
    assert runs_to_show(found, 0.9999) is None


def test_a_finding_says_what_its_seeds_can_show():
    # even means, a wide spread: nothing is shown, and the claim needs more
    found = ratio_of(costs(50, 100, 200, 90), costs(100, 100, 100, 100), "tokens")
    text = describe_ratio("B", "A", found, "0.8", claim=0.7)
    assert "no difference is shown" in text and f"4 seeds can show {found.can_show:.2f}" in text
    assert f"0.70 takes {runs_to_show(found, 0.7)}." in text and runs_to_show(found, 0.7) > 4
    # an interval beside 1 that was luck
    lucky = ratio_of(costs(80, 88, 74, 84), costs(100, 100, 100, 100), "tokens")
    assert lucky.high < 1 and "exaggerated" not in describe_ratio("B", "A", lucky, "0.8")
    lucky = ratio_of(costs(80, 94, 82, 92), costs(100, 100, 100, 100), "tokens")
    assert lucky.high < 1 and "exaggerated" in describe_ratio("B", "A", lucky, "0.8")
    assert "can show" not in describe_ratio("B", "A", ratio_of(costs(50), costs(100), "tokens"), "0.8", claim=0.7)


def test_curve_that_has_ended_keeps_its_last_value_in_the_band():
    def learning(*points: tuple[int, float]) -> LearningCurve:
        return LearningCurve(0, tuple(Point(0, tokens, 0.0, value) for tokens, value in points), True, False)

    rows = band([learning((0, 0.0), (10, 1.0)), learning((0, 0.0), (20, 0.4))], window=1)
    begin, middle, end = rows[0], rows[len(rows) // 2], rows[-1]
    assert [r[0] for r in (begin, middle, end)] == pytest.approx([0.0, 10.0, 20.0])
    assert [r[1] for r in (begin, middle, end)] == pytest.approx([0.0, 0.6, 0.7])
    assert end[2] < 0.4 and end[3] > 1.0, "two seeds: wider than their range"
    assert math.isnan(band([learning((5, 1.0))], window=1)[0][1])


def test_finding_is_told_in_words():
    found = ratio_of(costs(60, 62, 61), costs(100, 100, 100), "tokens")
    text = describe_ratio("B", "A", found, "a success rate of 0.8")
    assert text.startswith(
        "B needs 0.61 (0.59 to 0.64) of A's generated tokens to reach a success rate of 0.8; 3 seeds"
    )
    even = ratio_of(costs(90, 110, 100), costs(100, 100, 100), "tokens")
    assert "no difference is shown" in describe_ratio("B", "A", even, "0.8")
