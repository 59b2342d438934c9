"""Medians, intervals and a table of the runs. A run that never reached the goal costs infinitely much."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.replay_efficiency.arms import OFF, Protocol
from benchmarks.replay_efficiency.records import Result, cost_of

GOALS = (0.4, 0.5, 0.6, 0.7)
"""Lower goals that every run passes on its way: they tell whether the one that counts is a lucky spot."""
DRAWS = 10_000
LEVEL = 0.95


def median(values: Sequence[float]) -> float:
    """Median of numbers that may be infinite; nan if there are none."""
    return statistics.median(values) if values else math.nan


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """Percentile bootstrap (Efron 1979) of the median at :data:`LEVEL`, with fixed random numbers. With few values it
    is coarse: its ends are medians of resamples."""
    if not values:
        return math.nan, math.nan
    data = np.sort(np.asarray(values, dtype=np.float64))
    draws = np.random.default_rng(0).integers(len(data), size=(DRAWS, len(data)))
    medians = np.sort(np.median(data[draws], axis=1))
    outside = int(DRAWS * (1 - LEVEL) / 2)
    return float(medians[outside]), float(medians[-1 - outside])


def ratio(result: Result, base: Result) -> float:
    """Tokens of ``result`` over those of ``base``. Where ``base`` never got there, an upper bound of it (what it had
    generated when it was given up); infinite where ``result`` did not."""
    return result.cost / base.tokens if base.tokens else math.nan


def ratios_at(results: Sequence[Result], arm: str, goal: float) -> list[float]:
    """Tokens of ``arm`` until ``goal`` over those of ``off``, for the seeds where ``off`` got there."""
    arms = by_arm(results)
    base = {seed: cost_of(result.points, goal) for seed, result in arms.get(OFF, {}).items()}
    return [
        cost_of(result.points, goal) / base[seed]
        for seed, result in sorted(arms[arm].items())
        if 0 < base.get(seed, math.inf) < math.inf
    ]


def by_arm(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Results by arm and seed, in the order in which the arms come."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.arm, {})[result.seed] = result
    return found


def ratios(results: Sequence[Result], arm: str) -> list[float]:
    """Ratios of ``arm`` to ``off``, for the seeds that both have."""
    arms = by_arm(results)
    base = arms.get(OFF, {})
    return [ratio(r, base[seed]) for seed, r in sorted(arms[arm].items()) if seed in base]


def summarise(results: Sequence[Result], protocol: Protocol) -> dict[str, Any]:
    """Content of ``results.json`` beside the runs. JSON has no infinity: null is a goal not reached."""
    arms: dict[str, Any] = {}
    for arm, by_seed in by_arm(results).items():
        runs = [by_seed[seed] for seed in sorted(by_seed)]
        costs, paired = [r.cost for r in runs], ratios(results, arm)

        def middle(of: Callable[[Result], float | None], runs: list[Result] = runs) -> float | None:
            known = [value for r in runs if (value := of(r)) is not None]
            return _finite(median(known))

        arms[arm] = {
            "seeds": sorted(by_seed),
            "reached": sum(r.hit for r in runs),
            "tokens": {
                "by_seed": [_finite(cost) for cost in costs],
                "median": _finite(median(costs)),
                "min": _finite(min(costs)),
                "max": _finite(max(costs)),
            },
            "ratio_to_off": {
                "by_seed": [_finite(value) for value in paired],
                "median": _finite(median(paired)),
                "interval": [_finite(value) for value in bootstrap_interval(paired)],
            },
            "lower_goals": {
                f"{goal:g}": {
                    "tokens_median": _finite(median([cost_of(r.points, goal) for r in runs])),
                    "ratio_to_off_median": _finite(median(ratios_at(results, arm, goal))),
                }
                for goal in GOALS
            },
            "updates": middle(lambda r: r.updates),
            "seconds": middle(lambda r: r.seconds),
            "replay_share": middle(lambda r: r.training.replay_share),
            "ess": middle(lambda r: r.training.ess),
            "ess_replay": middle(lambda r: r.training.ess_replay),
            "staleness_mean": middle(lambda r: r.training.staleness_mean),
            "staleness_max": max(r.training.staleness_max for r in runs),
            "replay_age_mean": middle(lambda r: r.training.replay_age_mean),
            "guard_factor": middle(lambda r: r.training.guard_factor),
        }
    return {"goal": protocol.goal, "plays": protocol.plays, "every": protocol.every, "steps": protocol.steps,
            "arms": arms}  # fmt: skip


def table(results: Sequence[Result], protocol: Protocol) -> str:
    """Markdown: one row for each arm. Other columns than tokens and ratio are medians over seeds."""
    goal = f"{protocol.goal:g}"
    head = (
        "arm", "seeds that reach it", f"tokens to {goal}: median (min–max)", "ratio to off: median (95 %)", "updates",
        "wall s", "replayed share", "ESS all", "ESS replayed", "staleness mean / max", "age of replays",
    )  # fmt: skip
    rows = [head, ("---",) + ("---:",) * (len(head) - 1)]
    for arm, s in summarise(results, protocol)["arms"].items():
        tokens, to_off = s["tokens"], s["ratio_to_off"]
        interval = "–".join(_number(v, ".2f") for v in to_off["interval"])
        rows.append(
            (
                arm,
                f"{s['reached']} of {len(s['seeds'])}",
                f"{_number(tokens['median'], ',.0f')} ({_number(tokens['min'], ',.0f')}–"
                f"{_number(tokens['max'], ',.0f')})",
                "1" if arm == OFF else f"{_number(to_off['median'], '.2f')} ({interval})" if to_off["by_seed"] else "–",
                f"{s['updates']:.0f}",
                f"{s['seconds']:.0f}",
                f"{s['replay_share']:.2f}",
                _number(s["ess"], ".2f", "–"),
                _number(s["ess_replay"], ".2f", "–"),
                f"{_number(s['staleness_mean'], '.2f', '–')} / {s['staleness_max']}",
                _number(s["replay_age_mean"], ".1f", "–"),
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def lower_table(results: Sequence[Result], protocol: Protocol) -> str:
    """Markdown: median tokens to goals on the way, and their ratio to ``off``."""
    rows = [("arm", *(f"tokens to {goal:g} (ratio)" for goal in GOALS)), ("---",) + ("---:",) * len(GOALS)]
    for arm, s in summarise(results, protocol)["arms"].items():
        cells = (s["lower_goals"][f"{goal:g}"] for goal in GOALS)
        rows.append(
            (
                arm,
                *(
                    f"{_number(c['tokens_median'], ',.0f')} ({_number(c['ratio_to_off_median'], '.2f', '–')})"
                    for c in cells
                ),
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _number(value: float | None, form: str, without: str = "∞") -> str:
    return without if value is None else format(value, form)
