"""The experience of a run as tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline.config import RunConfig
from pipeline.replay.examine import Experience
from pipeline.replay.rescoring import Rescored

TASKS_SHOWN = 10
DISAGREEMENTS_SHOWN = 20


def show(found: Experience, config: RunConfig, run: Path, console: Console | None = None) -> None:
    """Print what ``afterplay replay inspect`` found."""
    console = console or Console(highlight=False)
    value = found.json(config)
    console.print(
        f"{run}: policy version {found.policy_version}, {found.updates} updates, replay "
        f"{'on' if config.replay.enabled else 'off'}",
        style="bold",
        soft_wrap=True,
    )
    _difficulty(found, config, console)
    _pool(found, config, console)
    _states(found, value["states"], console)
    _guard(value["guard"], config, console)
    _audit(value["audit"], console)


def show_rescored(found: Rescored, console: Console | None = None) -> None:
    """Print what ``--rescore`` found."""
    console = console or Console(highlight=False)
    console.print(
        f"\nscored {found.checked} of {found.pooled} pooled trajectories again: {found.agreed} as stored, "
        f"{len(found.different)} otherwise, {len(found.unscored)} not at all",
        soft_wrap=True,
    )
    rows = [*found.different, *found.unscored]
    if not rows:
        return
    table = _table("rewards that are not what is stored", "trajectory", "task", "stored", "today", "why not")
    for row in rows[:DISAGREEMENTS_SHOWN]:
        today = "none" if row.reward is None else f"{row.reward:.6g}"
        table.add_row(row.trajectory_id, row.task_id, f"{row.stored:.6g}", today, row.reason)
    console.print(table)
    if len(rows) > DISAGREEMENTS_SHOWN:
        console.print(f"  and {len(rows) - DISAGREEMENTS_SHOWN} more (--json lists all)", style="dim")


def _difficulty(found: Experience, config: RunConfig, console: Console) -> None:
    table = _table("tasks by successes of their latest fresh group", "successes", "tasks", "in the pool")
    pooled = [shelf.bucket for shelf in found.shelves]
    for bucket, tasks in sorted(found.buckets.items()):
        table.add_row(f"{bucket} of up to {config.groups.n_rollout}", str(tasks), str(pooled.count(bucket)))
    table.add_row("retired", str(len(found.retired)), "0")
    console.print(table)
    for task_id in sorted(found.retired)[:TASKS_SHOWN]:
        console.print(f"  {task_id}", style="dim", soft_wrap=True)
    if len(found.retired) > TASKS_SHOWN:
        console.print(f"  and {len(found.retired) - TASKS_SHOWN} more (--json lists all)", style="dim")


def _pool(found: Experience, config: RunConfig, console: Console) -> None:
    console.print(
        f"\npool: {found.entries} of {config.replay.capacity} trajectories of {len(found.shelves)} tasks, "
        f"{found.n_bytes / 2**20:.1f} MiB, {found.unrecorded} without recorded log-probs, replayed {found.uses} times",
        soft_wrap=True,
    )
    ages = _table("age of the pool in versions", "age", "trajectories")
    for bound, count in sorted(found.ages.items()):
        ages.add_row(f"{bound} and more", str(count))
    console.print(ages)
    shelves = _table(f"largest of {len(found.shelves)} pooled tasks", "task", "trajectories", "KiB", "bucket", "visits")
    for shelf in found.shelves[:TASKS_SHOWN]:
        bucket = "" if shelf.bucket is None else str(shelf.bucket)
        shelves.add_row(
            shelf.task_id, str(shelf.trajectories), f"{shelf.n_bytes / 1024:.1f}", bucket, str(shelf.visits)
        )
    console.print(shelves)


def _states(found: Experience, states: dict[str, dict[str, int]], console: Console) -> None:
    table = _table("states", "what", "state", "count")
    for what, counts in {**states, "pool and replays": dict(found.counters)}.items():
        for position, (state, count) in enumerate(sorted(counts.items())):
            table.add_row(what if position == 0 else "", state, str(count))
    console.print(table)


def _guard(guard: dict[str, Any], config: RunConfig, console: Console) -> None:
    console.print(
        f"mixing {'has begun' if guard['mixing'] else 'has not begun'}; ESS guard "
        f"{'on' if guard['enabled'] else 'off'}, factor {guard['factor']:.2f}; replay share now "
        f"{guard['share']:.2f} of task_ratio {config.replay.task_ratio:.2f}",
        soft_wrap=True,
    )


def _audit(audit: dict[str, dict[str, Any]], console: Console) -> None:
    table = _table("bias audit: means", "population", "count", "tokens", "seconds", "reward", "age")
    for name, means in audit.items():
        cells = ["" if means[key] is None else f"{means[key]:.3g}" for key in ("tokens", "seconds", "reward", "age")]
        table.add_row(name, str(means["count"]), *cells)
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, header_style="dim")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right")
    return table
