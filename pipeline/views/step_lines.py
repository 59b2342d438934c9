"""Reading ``metrics.jsonl``; its lines, evaluations and the learner's phase times in words; values that runs are
compared by."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.views.tables import table

Line = dict[str, Any]


class MetricsTail:
    """Reads whole lines that were added to ``metrics.jsonl`` since the last call. The file may not exist yet, or not be
    readable for a while, and another one may take its place (the learner drops lines of steps that it makes again);
    lines of that which have been read before are not given again."""

    def __init__(self, path: Path, bytes_max: int | None = None) -> None:
        """``bytes_max``: of one call; None reads to the end."""
        self._path = path
        self._bytes_max = bytes_max
        self._file = -1
        """Descriptor of the file that was read last. While it is open, no other file can have its inode."""
        self._close: Callable[[], object] = lambda: None
        self._offset = 0
        self._rest = b""
        self._finished: dict[Any, float | None] = {}
        """Time at which each step was finished, of the lines that were read."""
        self.last: Line | None = None
        """The newest line, from before the first call too."""

    def read(self) -> list[Line]:
        """New lines; anything but a JSON object (a line truncated by a kill) is skipped."""
        try:
            with self._path.open("rb") as file:
                replaced = self._file < 0 or not os.path.sameopenfile(file.fileno(), self._file)
                if replaced or os.fstat(file.fileno()).st_size < self._offset:
                    self._offset, self._rest = 0, b""
                if replaced:
                    self._hold(os.dup(file.fileno()))
                file.seek(self._offset)
                data = file.read(self._bytes_max)
        except OSError:
            return []
        self._offset += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        new = []
        for text in whole:
            with suppress(orjson.JSONDecodeError):
                line = orjson.loads(text)
                if isinstance(line, dict):
                    self.last, step, finished = line, line.get("step"), line.get("finished")
                    if finished is None or finished != self._finished.get(step):
                        new.append(line)
                        self._finished[step] = finished
        return new

    def _hold(self, descriptor: int) -> None:
        self._close()
        self._file, self._close = descriptor, weakref.finalize(self, partial(os.close, descriptor))


def read_lines(path: Path) -> list[Line]:
    """All lines of a ``metrics.jsonl``, the last of each step (a resumed learner repeats some steps), by step."""
    by_step = {line["step"]: line for line in MetricsTail(path).read() if isinstance(line.get("step"), int)}
    return [by_step[step] for step in sorted(by_step)]


class Pace:
    """Estimate of the time left, from the times at which the last steps were finished. Pure."""

    STEPS_MIN = 3
    """Steps of this process before there is an estimate: the first ones wait for the engine."""
    STEPS_MAX = 10
    """Steps that the estimate looks back."""

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._finished: deque[tuple[int, float]] = deque(maxlen=self.STEPS_MAX + 1)

    def finished(self, step: int, now: float) -> None:
        """A step is done. A step that was made again after a restart begins a new estimate."""
        if self._finished and step <= self._finished[-1][0]:
            self._finished.clear()
        self._finished.append((step, now))

    def left(self, now: float) -> float | None:
        """Seconds until the last step is done; None before there is an estimate."""
        if len(self._finished) < self.STEPS_MIN:
            return None
        (first, begun), (last, ended) = self._finished[0], self._finished[-1]
        each = (ended - begun) / (last - first)
        return max(0.0, each * (self._total_steps - last) - (now - ended))


def last_step(path: Path) -> int:
    """Steps done by the newest line of a ``metrics.jsonl``; 0 without a line."""
    tail = MetricsTail(path)
    tail.read()
    return step_of(tail.last)


def step_of(line: Mapping[str, Any] | None) -> int:
    """Steps done when the line was written; 0 without a line."""
    step = line.get("step") if line else None
    return step if isinstance(step, int) else 0


def describe(line: Mapping[str, Any], total_steps: int) -> str:
    """One line of text: step, reward, signals, ratio, ESS, staleness, speed."""
    parts = [f"step {step_of(line)}/{total_steps}"]
    parts += [f"{label} {text}" for label, text in facts(line).items()]
    return "  ".join(parts)


def describe_evaluation(line: Mapping[str, Any]) -> str:
    """One line of text for a line of ``evaluations.jsonl``."""
    parts = [f"evaluation after step {line.get('updates')}"]
    if line.get("status") != "complete":
        parts.append(str(line.get("status")))
    if (score := line.get("score")) is not None:
        parts.append(f"score {score:.3f}" + (f" ± {line['se']:.3f}" if line.get("se") is not None else ""))
    parts += [f"pass@{k} {value:.3f}" for k, value in (line.get("pass_at") or {}).items() if value is not None]
    environments = line.get("environments") or {}
    if len(environments) > 1:
        scores = ((name, own["score"]) for name, own in environments.items())
        parts += [f"{name} {score:.3f}" for name, score in scores if score is not None]
    if missing := sum(own.get("missing", 0) for own in environments.values()):
        parts.append(f"missing {missing}")
    if versions := line.get("versions"):
        parts.append(f"versions {versions[0]} to {versions[1]}")
    return "  ".join(parts)


def facts(line: Mapping[str, Any]) -> dict[str, str]:
    """Label to formatted value, in reading order, for the values that the line has."""
    found: dict[str, str] = {}

    def put(label: str, key: str, form: str) -> None:
        value = line.get(key)
        if isinstance(value, int | float):
            found[label] = format(value, form)

    put("reward", "reward_mean", ".3f")
    signals = line.get("signals")
    for name, value in (signals if isinstance(signals, Mapping) else {}).items():
        if isinstance(value, int | float):
            found[name] = f"{value:.3f}"
    put("ratio", "ratio_mean", ".3f")
    put("ESS", "ess_ratio", ".3f")
    put("staleness", "staleness_mean", ".2f")
    put("KL", "kl_k3", ".4f")
    put("tokens/s", "tokens_per_second", ",.0f")
    return found


BAR_CELLS = 20
SHARE_MIN = 0.0005
"""Stages with a smaller share are not shown."""
_REASONS = {
    "wait": "rollouts are missing",
    "choose": "replays, by the current policy",
    "prepare": "rows not built ahead",
    "publish": "engines still load weights",
    "save": "the disk still writes",
    "other": "statistics, messages",
}
"""Cause of the time in a phase; the phases without one are the learner's work."""


@dataclass(frozen=True, slots=True)
class TimeSpent:
    """Time of a run's learner by phase, in seconds."""

    updates: int
    seconds: float
    """Wall time of all updates; the phases add up to it."""
    phases: Mapping[str, float]
    published: float
    """Publications in parallel to training, from the first byte until the engines had the version."""
    saved: float
    """Writing checkpoints in parallel to training."""


def spent(lines: Iterable[Line]) -> TimeSpent | None:
    """Sums over the lines of ``metrics.jsonl``; None when no line has phase times."""
    from pipeline.runtime.metrics import PHASES  # prometheus_client: the command line starts without it

    phases, total, updates = dict.fromkeys(PHASES, 0.0), 0.0, 0
    published: dict[Any, float] = {}
    saved: dict[Any, float] = {}
    for line in lines:
        seconds = line.get("seconds")
        if not isinstance(seconds, Mapping) or "step" not in seconds:
            continue
        updates += 1
        total += float(seconds["step"])
        for phase in PHASES:
            phases[phase] += float(seconds.get(phase) or 0.0)
        for found, key, name in ((published, "published", "policy_version"), (saved, "saved", "updates")):
            beside = line.get(key)
            if isinstance(beside, Mapping) and name in beside:
                found[beside[name]] = float(beside.get("seconds") or 0.0)
    return TimeSpent(updates, total, phases, sum(published.values()), sum(saved.values())) if updates else None


def phase_times(found: TimeSpent) -> Table:
    """Table with a row for each phase with a share of at least ``SHARE_MIN``; fits 80 columns."""
    rows = []
    for phase, seconds in found.phases.items():
        share = seconds / found.seconds if found.seconds > 0 else 0.0
        if share >= SHARE_MIN:
            bar = Text("█" * round(BAR_CELLS * share), "yellow" if phase == "wait" else "green")
            rows.append((phase, f"{seconds:.1f}", f"{100 * share:.1f} %", bar, Text(_REASONS.get(phase, ""), "dim")))
    title = f"where the learner's {found.seconds:.1f} s of {found.updates} updates went"
    return table(("phase", ">seconds", ">share", "", ""), rows, title)


def print_phase_times(metrics_file: Path, console: Console) -> None:
    """Print the table; nothing when there is no update yet."""
    if found := spent(read_lines(metrics_file)):
        console.print(phase_times(found))
        console.print(
            f"in parallel: {found.published:.1f} s of publication, {found.saved:.1f} s of writing checkpoints"
        )


class Metric(StrEnum):
    """Value of a learning curve."""

    SUCCESS = "success"
    """Share of the training rollouts with a reward of at least ``replay.success_threshold``, of those that the replay
    phase received during the update. An update without any is no point of the curve."""
    REWARD = "reward"
    """Mean reward of the fresh trajectories of the update."""
    EVAL = "eval"
    """Score of the evaluations on held-out tasks."""


WINDOWS: Mapping[Metric, int] = {Metric.SUCCESS: 5, Metric.REWARD: 5, Metric.EVAL: 1}
"""Default number of points whose mean is compared with a target."""
TARGETS: Mapping[Metric, str] = {
    Metric.SUCCESS: "a success rate of", Metric.REWARD: "a mean reward of", Metric.EVAL: "a score of",
}  # fmt: skip
"""Words for a target."""
