"""The transcript of one rollout in the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

from rich.console import Console
from rich.rule import Rule
from rich.style import Style
from rich.text import Text

from pipeline.show.safe import safe

Colour = Literal["sampled", "logprob", "ratio", "entropy", "advantage", "version"]
COLUMN: Mapping[str, str] = {
    "logprob": "logprobs",
    "ratio": "ratios",
    "entropy": "entropies",
    "advantage": "advantages",
    "version": "versions",
}
CONTEXT_CHARACTERS_MAX = 4000
"""Of one message; the middle of a longer one is left out."""
_VERSIONS = ("#3b82f6", "#f59e0b", "#10b981", "#ef4444", "#8b5cf6", "#14b8a6", "#ec4899", "#84cc16")
_SAMPLED = Style(color="green")
_EDGE = Style(dim=True)


def print_found(found: Mapping[str, Any], colour: Colour, console: Console) -> None:
    """One trajectory as :func:`pipeline.show.views.found_json` tells it."""
    console.print(Rule(Text(str(found["trajectory_id"]), "bold"), align="left"))
    for name, value in _facts(found):
        console.print(Text.assemble((f"{name:>12}  ", "dim"), safe(value)), soft_wrap=True)
    transcript = found["transcript"]
    if transcript is None:
        console.print(Text(safe(found["missing"]), "yellow"), soft_wrap=True)
    else:
        _print_turns(transcript, colour, console)
    failure = found["failure"]
    if failure:
        console.print(Text(f"\nfailed in {safe(failure['boundary'])}: {safe(failure['kind'])}", "bold red"))
        console.print(Text(safe(failure["message"]), "red"), soft_wrap=True)
        console.print(Text(safe(failure.get("details", "")), "dim"), soft_wrap=True)


def _facts(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    parts = {k: v for k, v in found["rewards"].items()}
    reward = "none" if found["reward"] is None else f"{found['reward']:.6g}"
    if parts:
        reward += "   = " + ", ".join(f"{k} {'none' if v is None else f'{v:.6g}'}" for k, v in parts.items())
    versions = found["versions"]
    facts = [
        ("task", f"{found['task_id']}   environment {found['environment']}"),
        ("reward", reward),
        ("became", " ".join(x for x in (found["status"], found["state"], found["reason"]) if x)),
        ("steps", _joined_steps(found["step"], found["replays"], found["evaluation"])),
        ("tokens", f"{found['n_sampled']} sampled of {found['n_tokens']}, in {found['n_turns']} turns"),
        ("versions", "none" if versions is None else f"{versions[0]} to {versions[1]}"),
        ("actor", str(found["actor"])),
    ]
    transcript = found["transcript"]
    if transcript is not None:
        times = transcript["timings"]
        facts.append(
            ("time", f"{found['seconds']:.3g} s, of it engine {times['generate_seconds']:.3g} s, environment "
                     f"{times['environment_seconds']:.3g} s; began {_clock(times['started_at'])}")
        )  # fmt: skip
        trained = transcript["trained"]
        facts.append(
            ("learner", "kept nothing of it: no ratio, entropy or advantage" if trained is None else
             f"values of step {trained['step']}, before its update of version {trained['policy_version']}"
             + (", replayed" if trained["replayed"] else ""))
        )  # fmt: skip
    return facts


def _print_turns(transcript: Mapping[str, Any], colour: Colour, console: Console) -> None:
    scale = _scale(transcript, colour)
    missing = scale is None and colour != "sampled"
    if missing:
        console.print(Text(f"--colour {colour}: not recorded for this trajectory", "yellow"))
    branch = 0
    for number, turn in enumerate(transcript["turns"]):
        if turn["branch"] != branch:
            branch = turn["branch"]
            console.print(
                Rule(Text(f"branch {branch}: begins with the whole prompt again", "magenta"), style="magenta")
            )
        for message in turn["messages"]:
            console.print(Text(f"\n{safe(str(message['role']))}", "bold blue"))
            console.print(Text(safe(_cut(str(message["content"])))), soft_wrap=True)
            if message.get("extra"):
                console.print(Text(safe(str(message["extra"])), "dim"), soft_wrap=True)
        about = [f"turn {number + 1}", f"{turn['finish']}", f"{len(turn['completion']['ids'])} tokens"]
        about += [] if turn["reward"] is None else [f"reward {turn['reward']:.6g}"]
        about += [f"{name} {value:.6g}" for name, value in turn["signals"].items()]
        console.print(
            Text.assemble(("\nassistant", "bold green"), (f"   {safe(' · '.join(about))}", "dim")), soft_wrap=True
        )
        console.print(_completion(turn["completion"], scale), soft_wrap=True)


def _completion(completion: Mapping[str, Any], scale: _Scale | None) -> Text:
    text = Text()
    column = None if scale is None else completion[scale.column]
    special = set(completion["special"])
    for i, piece in enumerate(completion["texts"]):
        shown = safe(piece) or f"‹{completion['parts'].get(str(i), '')}›"
        style = _SAMPLED if scale is None else scale.style(column[i] if column else None)
        text.append(shown, style + _EDGE if i in special else style)
    return text


class _Scale:
    """Colours for values of one column."""

    def __init__(self, colour: Colour, largest: float, versions: Sequence[int]) -> None:
        self.column = COLUMN[colour]
        self._colour = colour
        self._largest = largest
        self._versions = {v: i for i, v in enumerate(versions)}

    def style(self, value: float | None) -> Style:
        """Background of one token."""
        if value is None or math.isnan(value):
            return Style(dim=True)
        if self._colour == "version":
            return Style(color=_VERSIONS[self._versions[int(value)] % len(_VERSIONS)])
        if self._colour == "logprob":
            return _background((234, 88, 12), min(1.0, -value / 5.0))
        if self._colour == "entropy":
            return _background((147, 51, 234), value / self._largest)
        at = math.log(max(value, 1e-9)) if self._colour == "ratio" else value
        return _background((220, 38, 38) if (at > 0) == (self._colour == "ratio") else (37, 99, 235),
                           abs(at) / self._largest)  # fmt: skip


def _scale(transcript: Mapping[str, Any], colour: Colour) -> _Scale | None:
    if colour == "sampled":
        return None
    columns = [turn["completion"][COLUMN[colour]] for turn in transcript["turns"]]
    values = [v for column in columns if column for v in column if v is not None]
    if not values:
        return None
    sizes = [abs(math.log(max(v, 1e-9))) if colour == "ratio" else abs(v) for v in values]
    least = 0.05 if colour == "ratio" else 1e-6
    return _Scale(colour, max(*sizes, least), sorted({int(v) for v in values}) if colour == "version" else ())


def _background(rgb: tuple[int, int, int], share: float) -> Style:
    share = max(0.0, min(1.0, share))
    if share < 0.05:
        return Style()
    red, green, blue = (int(255 - (255 - c) * share) for c in rgb)
    return Style(color="black" if share < 0.6 else "white", bgcolor=f"rgb({red},{green},{blue})")


def _joined_steps(step: int | None, replays: Sequence[int], evaluation: int | None) -> str:
    if evaluation is not None:
        return f"none: it was played to evaluate the weights of {evaluation} updates"
    fresh = "not trained fresh" if step is None else f"trained in step {step}"
    return fresh + (f", replayed in {', '.join(map(str, replays))}" if replays else "")


def _cut(text: str) -> str:
    half = CONTEXT_CHARACTERS_MAX // 2
    if len(text) <= CONTEXT_CHARACTERS_MAX:
        return text
    return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds") if seconds else "unknown"
