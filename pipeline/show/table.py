"""Rollouts as a table in the terminal, one line for each."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.replay.listing import Listed
from pipeline.show.reading import Listing, RunReader
from pipeline.show.safe import safe

BECAME_WIDTH_MIN = 14
TASK_WIDTH_MIN = 6
LEFT_OUT_FIRST = ("seconds", "versions", "environment", "sampled", "turns", "step", "reward", "task")
"""Of a narrow terminal, in this order. An id is never cut: it is what a rollout is asked for by."""
_STATUS = {"complete": "green", "truncated": "yellow", "error": "red", "aborted": "red"}


def print_list(listing: Listing, reader: RunReader, console: Console) -> None:
    """Print the table, and how many there are."""
    headings = ["", "trajectory", "step", "task", "environment", "reward", "turns", "sampled", "versions", "seconds"]
    lines = [_cells(row, reader.has_trace(row)) for row in listing.rows]
    widths = {heading: max([len(heading), *(line[i].cell_len for line in lines)]) for i, heading in enumerate(headings)}
    if len({row.environment for row in listing.rows}) < 2:
        del widths["environment"]
    for heading in LEFT_OUT_FIRST:
        over = _taken(widths) + BECAME_WIDTH_MIN - console.width
        if over > max(0, widths["task"] - TASK_WIDTH_MIN):
            widths.pop(heading, None)
    if "task" in widths:
        widths["task"] -= max(0, _taken(widths) + BECAME_WIDTH_MIN - console.width)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading, width in widths.items():
        text = heading in ("", "trajectory", "task", "environment")
        table.add_column(
            heading, width=width, min_width=None if heading == "task" else width, no_wrap=True, overflow="ellipsis",
            justify="left" if text else "right",
        )  # fmt: skip
    room = max(BECAME_WIDTH_MIN, console.width - _taken(widths))
    table.add_column("became", width=room, no_wrap=True, overflow="ellipsis")
    shown = [i for i, heading in enumerate(headings) if heading in widths]
    for row, line in zip(listing.rows, lines, strict=True):
        table.add_row(*(line[i] for i in shown), _became(row))
    console.print(table)
    rest = f" of {listing.count} (--limit {listing.count} shows all)" if len(lines) < listing.count else ""
    console.print(f"{len(lines)}{rest} trajectories. ● kept with its tokens in traces/", style="dim", highlight=False)
    for note in reader.notes:
        console.print(safe(note), style="yellow", markup=False)


def _taken(widths: Mapping[str, int]) -> int:
    """Columns of the terminal, with two between."""
    return sum(width + 2 for width in widths.values())


def _cells(row: Listed, kept: bool) -> list[Text]:
    """By heading."""
    return [
        Text("●" if kept else "", "cyan"),
        Text(row.trajectory_id),
        Text(_steps(row)),
        _short(row.task_id, 24),
        _short(row.environment, 16),
        _reward(row.reward),
        Text(str(row.n_turns)),
        Text(str(row.n_sampled)),
        Text(_versions(row)),
        Text(f"{row.duration_seconds:.1f}"),
    ]


def _short(text: str, width: int) -> Text:
    out = Text(safe(text))
    out.truncate(width, overflow="ellipsis")
    return out


def _reward(reward: float | None) -> Text:
    return Text("-", "dim") if reward is None else Text(f"{reward:.4g}", "green" if reward > 0 else "")


def _became(row: Listed) -> Text:
    text = Text(row.status, _STATUS.get(row.status, ""))
    if row.state != "trained":
        text.append(f" {row.state}", "dim")
        if row.evaluation is not None:
            text.append(f" at {row.evaluation} updates", "dim")
    if row.failure:
        text.append(safe(f" {row.failure['boundary']}: {row.failure['kind']}: {row.failure['message'][:80]}"), "red")
    elif row.reason:
        text.append(f" {safe(row.reason)}", "dim")
    return text


def _steps(row: Listed) -> str:
    own = "" if row.step is None else str(row.step)
    return own + (f" +{len(row.replays)}" if row.replays else "")


def _versions(row: Listed) -> str:
    if row.version_min < 0:
        return ""
    return str(row.version_min) if row.version_min == row.version_max else f"{row.version_min}-{row.version_max}"
