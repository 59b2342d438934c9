"""Where the learner's time went: the end of a run and `afterplay status` say it in a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.metrics.learner import STAGES
from pipeline.supervisor.progress import Line, read_lines

BAR_CELLS = 20
SHARE_MIN = 0.0005
"""Stages with less are not shown."""
_MEANS = {
    "wait": "rollouts are missing",
    "choose": "replays, by today's policy",
    "prepare": "rows not built ahead",
    "publish": "engines still load weights",
    "save": "the disk still writes",
    "other": "statistics, messages",
}
"""What holds the learner up in a stage; the three that are left are its work."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of a run's learner."""

    updates: int
    seconds: float
    """Wall time of all updates; the stages add up to it."""
    stages: Mapping[str, float]
    published: float
    """Beside training: publications, from the first byte until the engines had the version."""
    saved: float
    """Beside training: writing checkpoints."""

    @property
    def text(self) -> str:
        """One line for what went on beside training."""
        return f"beside it: {self.published:.1f} s of publication, {self.saved:.1f} s of writing checkpoints"


def spent(lines: Iterable[Line]) -> Spent | None:
    """Added up over the lines of ``metrics.jsonl``; None where no line tells of its stages."""
    stages, total, updates = dict.fromkeys(STAGES, 0.0), 0.0, 0
    published: dict[Any, float] = {}
    saved: dict[Any, float] = {}
    for line in lines:
        seconds = line.get("seconds")
        if not isinstance(seconds, Mapping) or "step" not in seconds:
            continue
        updates += 1
        total += float(seconds["step"])
        for stage in STAGES:
            stages[stage] += float(seconds.get(stage) or 0.0)
        for found, key, name in ((published, "published", "policy_version"), (saved, "saved", "updates")):
            beside = line.get(key)
            if isinstance(beside, Mapping) and name in beside:
                found[beside[name]] = float(beside.get("seconds") or 0.0)
    return Spent(updates, total, stages, sum(published.values()), sum(saved.values())) if updates else None


def time_table(found: Spent) -> Table:
    """One row for each stage that took any time worth telling; fits 80 columns."""
    title = f"where the learner's {found.seconds:.1f} s of {found.updates} updates went"
    table = Table(title=title, title_justify="left", title_style="", box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True, width=BAR_CELLS)
    table.add_column("", style="dim", no_wrap=True)
    for stage in STAGES:
        seconds = found.stages[stage]
        share = seconds / found.seconds if found.seconds > 0 else 0.0
        if share >= SHARE_MIN:
            bar = Text("█" * round(BAR_CELLS * share), style="yellow" if stage == "wait" else "green")
            table.add_row(stage, f"{seconds:.1f}", f"{100 * share:.1f} %", bar, _MEANS.get(stage, ""))
    return table


def show_time(metrics_file: Path, console: Console) -> None:
    """Print it; nothing where there is no update yet."""
    found = spent(read_lines(metrics_file))
    if found is not None:
        console.print(time_table(found))
        console.print(found.text, soft_wrap=True)
