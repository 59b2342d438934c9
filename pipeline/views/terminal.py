"""Rollouts in the terminal: the list as a table, one transcript, and escaping of control characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from typing import Any, Literal

from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from pipeline.store.queries import Listed
from pipeline.views.reader import Listing, RunReader
from pipeline.views.tables import table
from pipeline.views.transcript import dumps

_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that turn the direction of what stands behind them (Unicode, "Explicit Directional Formatting"): a line
would read as something else than what it says. Text in Arabic or Hebrew needs none of them."""
_LINES = (0x2028, 0x2029)
_CONTROL = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if i not in (0x09, 0x0A)} | {
    i: f"\\u{i:04x}" for i in (*_DIRECTIONS, *_LINES)
}
_CONTROL_JSON = {i: f"\\u{i:04x}" for i in (*range(0x7F, 0xA0), *_DIRECTIONS, *_LINES)}


def safe(text: str) -> str:
    """Escape control characters that would steer a terminal or reverse its lines; tabs and line ends stay."""
    return text.translate(_CONTROL)


def json_line(value: Mapping[str, Any]) -> str:
    """JSON text that does not steer a terminal either: JSON escapes only half of the control characters."""
    return dumps(value).translate(_CONTROL_JSON)


Colour = Literal["sampled", "logprob", "ratio", "entropy", "advantage", "version"]
COLUMN: Mapping[str, str] = {
    "logprob": "logprobs",
    "ratio": "ratios",
    "entropy": "entropies",
    "advantage": "advantages",
    "version": "versions",
}
CONTEXT_CHARACTERS_MAX = 4000
"""Length at which a message is cut; its middle is omitted."""
_VERSIONS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#84cc16")
_SAMPLED = Style(color="green")
_EDGE = Style(dim=True)


def print_found(found: Mapping[str, Any], colour: Colour, console: Console) -> None:
    """Print one trajectory, as made by :func:`pipeline.views.transcript.found_json`."""
    console.print(Rule(Text(str(found["trajectory_id"]), "bold"), align="left"))
    for name, value in _facts(found):
        console.print(Text.assemble((f"{name:>12}  ", "dim"), safe(value)))
    transcript = found["transcript"]
    if transcript is None:
        console.print(Text(safe(found["missing"]), "yellow"))
    else:
        _print_turns(transcript, colour, console)
    failure = found["failure"]
    if failure:
        console.print(Text(f"\nfailed in {safe(failure['boundary'])}: {safe(failure['kind'])}", "bold red"))
        console.print(Text(safe(failure["message"]), "red"))
        console.print(Text(safe(failure.get("details", "")), "dim"))


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    reward, *parts = ("none" if v is None else f"{v:.6g}" for v in (found["reward"], *found["rewards"].values()))
    if parts:
        reward += "   = " + ", ".join(f"{name} {part}" for name, part in zip(found["rewards"], parts, strict=True))
    versions, fresh, evaluation = found["versions"], found["step"], found["evaluation"]
    steps = "not trained fresh" if fresh is None else f"trained in step {fresh}"
    if found["replays"]:
        steps += f", replayed in {', '.join(map(str, found['replays']))}"
    if evaluation is not None:
        steps = f"none: it was sampled to evaluate the weights of {evaluation} updates"
    facts = [
        ("task", f"{found['task_id']}   environment {found['environment']}"),
        ("reward", reward),
        ("became", " ".join(x for x in (found["status"], found["state"], found["reason"]) if x)),
        ("steps", steps),
        ("tokens", f"{found['n_sampled']} sampled of {found['n_tokens']}, in {found['n_turns']} turns"),
        ("versions", "none" if versions is None else f"{versions[0]} to {versions[1]}"),
        ("actor", str(found["actor"])),
    ]
    if trace := found.get("trace"):
        facts.append(("trace", f"{trace['id']} at {trace['place']}"))
    transcript = found["transcript"]
    if transcript is not None:
        times, trained = transcript["timings"], transcript["trained"]
        began = times["started_at"] and datetime.fromtimestamp(times["started_at"]).isoformat(" ", "seconds")
        facts.append(
            ("time", f"{found['seconds']:.3g} s, of it engine {times['generate_seconds']:.3g} s, environment "
                     f"{times['environment_seconds']:.3g} s; began {began or 'unknown'}")
        )  # fmt: skip
        facts.append(
            ("learner", "kept nothing of it: no ratio, entropy or advantage" if trained is None else
             f"values of step {trained['step']}, before its update of version {trained['policy_version']}"
             + (", replayed" if trained["replayed"] else ""))
        )  # fmt: skip
    return facts


def _print_turns(transcript: Mapping[str, Any], colour: Colour, console: Console) -> None:
    style_of = None if colour == "sampled" else _styles(transcript, colour)
    if style_of is None and colour != "sampled":
        console.print(Text(f"--colour {colour}: not recorded for this trajectory", "yellow"))
    branch = 0
    for number, turn in enumerate(transcript["turns"]):
        if turn["branch"] != branch:
            branch = turn["branch"]
            about = Text(f"branch {branch}: begins with the whole prompt again", "magenta")
            console.print(Rule(about, style="magenta"))
        if turn["template"]:
            console.print(Text("\nchat template", "bold blue"))
            console.print(Text(safe(truncate(turn["template"])), "dim"))
        for message in turn["messages"]:
            console.print(Text(f"\n{safe(str(message['role']))}", "bold blue"))
            console.print(Text(safe(truncate(str(message["content"])))))
            if message.get("extra"):
                console.print(Text(safe(str(message["extra"])), "dim"))
        facts = [f"turn {number + 1}", f"{turn['finish']}", f"{len(turn['completion']['ids'])} tokens"]
        facts += [] if turn["reward"] is None else [f"reward {turn['reward']:.6g}"]
        facts += [f"{name} {value:.6g}" for name, value in turn["signals"].items()]
        console.print(Text.assemble(("\nassistant", "bold green"), (f"   {safe(' · '.join(facts))}", "dim")))
        console.print(_completion(turn["completion"], colour, style_of))


def _completion(
    completion: Mapping[str, Any], colour: Colour, style_of: Callable[[float | None], Style] | None
) -> Text:
    text, special = Text(), set(completion["special"])
    column = completion[COLUMN[colour]] if style_of else None
    for i, piece in enumerate(completion["texts"]):
        shown = safe(piece) or f"‹{completion['parts'].get(str(i), '')}›"
        style = style_of(column[i] if column else None) if style_of else _SAMPLED
        text.append(shown, style + _EDGE if i in special else style)
    return text


def _styles(transcript: Mapping[str, Any], colour: Colour) -> Callable[[float | None], Style] | None:
    """Style of a token by its value; None where no values were recorded."""
    columns = [turn["completion"][COLUMN[colour]] for turn in transcript["turns"]]
    values = [v for column in columns if column for v in column if v is not None]
    if not values:
        return None
    sizes = [abs(math.log(max(v, 1e-9))) if colour == "ratio" else abs(v) for v in values]
    largest = max(*sizes, 0.05 if colour == "ratio" else 1e-6)
    versions = sorted({int(v) for v in values}) if colour == "version" else []

    def style(value: float | None) -> Style:
        if value is None or math.isnan(value):
            return Style(dim=True)
        if colour == "version":
            return Style(color=_VERSIONS[versions.index(int(value)) % len(_VERSIONS)])
        if colour == "logprob":
            return _background((234, 88, 12), min(1.0, -value / 5.0))
        if colour == "entropy":
            return _background((147, 51, 234), value / largest)
        at = math.log(max(value, 1e-9)) if colour == "ratio" else value
        return _background((220, 38, 38) if (at > 0) == (colour == "ratio") else (37, 99, 235), abs(at) / largest)

    return style


def _background(rgb: tuple[int, int, int], share: float) -> Style:
    share = max(0.0, min(1.0, share))
    if share < 0.05:
        return Style()
    red, green, blue = (int(255 - (255 - c) * share) for c in rgb)
    return Style(color="black" if share < 0.6 else "white", bgcolor=f"rgb({red},{green},{blue})")


def truncate(text: str, characters_max: int = CONTEXT_CHARACTERS_MAX) -> str:
    """A text without its middle if it is longer."""
    half = characters_max // 2
    if len(text) <= characters_max:
        return text
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


BECAME_WIDTH_MIN = 14
TASK_WIDTH_MIN = 6
DROPPED_FIRST = ("seconds", "versions", "environment", "sampled", "turns", "step", "reward", "task")
"""Columns dropped on a narrow terminal, in this order. Ids are never truncated: they select a rollout."""
_STATUS = {"complete": "green", "truncated": "yellow", "error": "red", "aborted": "red"}


def print_list(listing: Listing, reader: RunReader, console: Console, repeatable: Collection[int] = ()) -> None:
    """Print the table, and how many there are. ``repeatable`` updates have a mark behind their step."""
    headings = ["", "trajectory", "step", "task", "environment", "reward", "turns", "sampled", "versions", "seconds"]
    lines = [_cells(row, reader.has_trace(row), repeatable) for row in listing.rows]
    widths = {heading: max([len(heading), *(line[i].cell_len for line in lines)]) for i, heading in enumerate(headings)}
    if len({row.environment for row in listing.rows}) < 2:
        del widths["environment"]

    def room() -> int:
        """Columns of the terminal that are left, with two between."""
        return console.width - sum(width + 2 for width in widths.values())

    for heading in DROPPED_FIRST:
        if BECAME_WIDTH_MIN - room() > max(0, widths["task"] - TASK_WIDTH_MIN):
            widths.pop(heading, None)
    if "task" in widths:
        widths["task"] -= max(0, BECAME_WIDTH_MIN - room())
    widths["became"] = max(BECAME_WIDTH_MIN, room())
    shown = [i for i, heading in enumerate(headings) if heading in widths]
    left = ("", "trajectory", "task", "environment", "became")
    rows = ([*(line[i] for i in shown), _became(row)] for row, line in zip(listing.rows, lines, strict=True))
    found = table([heading if heading in left else f">{heading}" for heading in widths], rows)
    for column, (heading, width) in zip(found.columns, widths.items(), strict=True):
        column.width, column.no_wrap, column.overflow = width, True, "ellipsis"
        column.min_width = None if heading in ("task", "became") else width
    console.print(found)
    rest = f" of {listing.count} (--limit {listing.count} shows all)" if len(lines) < listing.count else ""
    console.print(f"{len(lines)}{rest} trajectories. ● kept with its tokens in traces/", style="dim")


def _cells(row: Listed, kept: bool, repeatable: Collection[int]) -> list[Text]:
    """By heading."""
    steps = [] if row.step is None else [f"{row.step}{' ↻' if row.step - 1 in repeatable else ''}"]
    steps += [f"+{len(row.replays)}"] if row.replays else []
    versions = "-".join(str(v) for v in sorted({row.version_min, row.version_max}) if row.version_min >= 0)
    task, environment = Text(safe(row.task_id)), Text(safe(row.environment))
    task.truncate(24, overflow="ellipsis")
    environment.truncate(16, overflow="ellipsis")
    reward = "-" if row.reward is None else f"{row.reward:.4g}"
    return [
        Text("●" if kept else "", "cyan"),
        Text(row.trajectory_id),
        Text(" ".join(steps)),
        task,
        environment,
        Text(reward, "dim" if row.reward is None else "green" if row.reward > 0 else ""),
        Text(str(row.n_turns)),
        Text(str(row.n_sampled)),
        Text(versions),
        Text(f"{row.duration_seconds:.1f}"),
    ]


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
