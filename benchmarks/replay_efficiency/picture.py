"""Two panels: success over generated tokens, and tokens to the goal by seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.replay_efficiency.records import Result

COLOURS = ("#5c6b73", "#2a6f97", "#e07a5f", "#3d9970", "#8e6c8a", "#d4a017", "#b56576")


def draw(results: Sequence[Result], goal: float, path: Path) -> None:
    """Write the picture to ``path``."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), dpi=110, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _curves(left, results, goal)
    _points(right, results, goal)
    for axis in (left, right):
        axis.grid(alpha=0.25, lw=0.6)
        axis.spines[["top", "right"]].set_visible(False)
        axis.yaxis.set_major_formatter("{x:,.0f}" if axis is right else "{x:.1f}")
    left.xaxis.set_major_formatter("{x:,.0f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def _curves(axis: Any, results: Sequence[Result], goal: float) -> None:
    """Median and range over the seeds. A run ends soon after it got there; its last value is held as long as another
    run of its arm continues."""
    for colour, (arm, by_seed) in zip(_colours(), by_arm(results).items(), strict=False):
        ends = [r.points[-1].tokens for r in by_seed.values()]
        grid = np.linspace(0, max(ends), 200)
        curves = np.array(
            [np.interp(grid, [p.tokens for p in r.points], [p.success for p in r.points]) for r in by_seed.values()]
        )
        axis.plot(grid, np.median(curves, axis=0), color=colour, lw=2, label=arm)
        axis.fill_between(grid, curves.min(axis=0), curves.max(axis=0), color=colour, alpha=0.13, lw=0)
    axis.axhline(goal, color="#999999", lw=0.9, ls="--")
    axis.set(title="success rate: median and range over seeds", xlabel="generated tokens", ylim=(0, 1), xlim=(0, None))
    axis.legend(frameon=False, loc="lower right")


def _points(axis: Any, results: Sequence[Result], goal: float) -> None:
    """A circle for each run, a triangle for one that never got there; runs of one seed are joined by a line."""
    arms = by_arm(results)
    seeds = sorted({result.seed for result in results})
    for seed in seeds:
        places = [(x, by_seed[seed].tokens) for x, by_seed in enumerate(arms.values()) if seed in by_seed]
        axis.plot(*zip(*places, strict=True), color="#bbbbbb", lw=0.8, zorder=1)
    for x, (colour, by_seed) in enumerate(zip(_colours(), arms.values(), strict=False)):
        for result in by_seed.values():
            axis.scatter(x, result.tokens, marker="o" if result.hit else "^", s=42, color=colour, zorder=2)
        costs = sorted(by_seed.values(), key=lambda r: r.cost)
        middle = costs[(len(costs) - 1) // 2]
        if middle.hit:
            axis.plot([x - 0.25, x + 0.25], [middle.tokens] * 2, color=colour, lw=2.5, zorder=3)
    axis.set_xticks(
        range(len(arms)), list(arms), rotation=20 if len(arms) > 4 else 0, ha="right" if len(arms) > 4 else "center"
    )
    highest = max(result.tokens for result in results)
    axis.set(title=f"generated tokens until {goal:g}", xlim=(-0.5, len(arms) - 0.5), ylim=(0, 1.08 * highest))


def _colours() -> list[str]:
    return list(COLOURS) * 4


def by_arm(results: Sequence[Result]) -> dict[str, dict[int, Result]]:
    """Results by arm and seed, in the order in which the arms come."""
    found: dict[str, dict[int, Result]] = {}
    for result in results:
        found.setdefault(result.arm, {})[result.seed] = result
    return found
