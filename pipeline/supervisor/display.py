"""Progress of a run on the console: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.runtime.progress import RoleState
from pipeline.supervisor.plan import PREFLIGHT, PREPARE
from pipeline.supervisor.processes import HealthAnswer
from pipeline.supervisor.restarts import Phase, Process
from pipeline.views.step_lines import Line, Pace, describe, facts, step_of
from pipeline.views.tables import plain_console, table

_STYLE = {
    Phase.WAITING: "dim",
    Phase.STARTING: "yellow",
    Phase.RUNNING: "green",
    Phase.BACKOFF: "red",
    Phase.STOPPING: "yellow",
    Phase.DONE: "dim",
}

FAILURES_MIN, SUCCESSES_MIN = 8, 32
"""Failed rollouts of an environment, if they are most of its newest rollouts, from which on they are printed; and
successes after which the count begins again."""
HIDDEN = ("failed", "playing")
"""Details that are printed elsewhere, or in the state."""
SILENCE_SECONDS = 15.0
"""Without a terminal: silence after which a line says what each process waits for."""


class Phases:
    """The phases of a run in plain words: a line when each begins or ends, until the first step.

    Pure. ``engine`` is the name of an engine on the console: ``vLLM``."""

    def __init__(self, engine: str, total_steps: int) -> None:
        self._engine = engine
        self._total_steps = total_steps
        self._said: set[str] = set()

    def news(
        self, processes: Mapping[str, Process], answers: Mapping[str, HealthAnswer], steps_done: int, now: float
    ) -> list[str]:
        """Lines that were not returned before, in the order in which things happen."""
        lines = dict(self._facts(processes, answers, steps_done, now))
        new = [line for key, line in lines.items() if key not in self._said]
        self._said |= lines.keys()
        return new

    def _facts(
        self, processes: Mapping[str, Process], answers: Mapping[str, HealthAnswer], steps_done: int, now: float
    ) -> Iterator[tuple[str, str]]:
        """Key and line of each event so far."""
        for name, answer in answers.items():
            yield from ((f"notice {name} {notice}", notice) for notice in answer.notices)
        if prepare := processes.get(PREPARE):
            if prepare.alive:
                yield "preparing", "preparing the model"
            if prepare.phase is Phase.DONE and prepare.exit_code == 0:
                yield "prepared", f"the model is ready after {now - prepare.started_at:.0f} s"
        for name, process in processes.items():
            if name.startswith("engine-") and process.rule.gang in ("", name):
                label = self._engine if "engine-1" not in processes else f"{self._engine} ({name})"
                key = f"{name} {process.restarts}"
                if process.phase is Phase.STARTING:
                    yield f"starting {key}", f"starting {label}{' again' if process.restarts else ''}"
                elif process.phase is Phase.RUNNING and process.running_since is not None:
                    seconds = process.running_since - process.started_at
                    yield f"ready {key}", f"{label} is ready after {seconds:.0f} s"
        if steps_done:
            return
        playing = sum(int(a.details.get("playing") or 0) for n, a in answers.items() if n.startswith("actor-"))
        if playing:
            yield "playing", f"playing the first episodes ({playing} at once)"
        learner = answers.get("learner")
        if learner is not None and learner.state == RoleState.TRAINING:
            yield "training", f"step {learner.details.get('step', 1)} of {self._total_steps}: training"


class FailureNews:
    """Environments most of whose newest rollouts fail: a line when that is noticed, and again whenever their failures
    have doubled. Rollouts before :data:`SUCCESSES_MIN` ones that mostly succeeded are not looked at. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, int, int]] = {}
        """By environment: successes and failures before the newest ones, and the failures at which a line is due."""

    def news(self, outcomes: Mapping[str, Sequence[Any]] | None) -> list[str]:
        """Lines that are due. ``outcomes``: ``failed`` in the status of the replay stage."""
        lines = []
        for name, (succeeded, failed, sentence) in (outcomes or {}).items():
            succeeded_before, failed_before, least = self._since.get(name, (0, 0, FAILURES_MIN))
            right, wrong = succeeded - succeeded_before, failed - failed_before
            if wrong > right and wrong >= least:
                self._since[name] = succeeded_before, failed_before, 2 * wrong
                newest = f" ({wrong} of the newest {right + wrong})" if succeeded_before else ""
                lines.append(sentence + newest)
            elif right >= 2 * wrong and right >= max(SUCCESSES_MIN, least):
                self._since[name] = succeeded, failed, FAILURES_MIN
        return lines


class Display:
    """Console output of the supervisor. Use as a context manager.

    ``processes`` and ``answers`` are read at every refresh, never changed.
    """

    def __init__(
        self,
        title: str,
        total_steps: int,
        processes: Mapping[str, Process],
        answers: Mapping[str, HealthAnswer],
        console: Console | None = None,
        engine: str = "the engine",
        line: Line | None = None,
    ) -> None:
        """``engine`` is what an engine is called; ``line``: the newest step of a run that resumes."""
        self._title = title
        self._total_steps = total_steps
        self._processes = processes
        self._answers = answers
        self.console = console or plain_console()
        self._line = line
        self._phases = Phases(engine, total_steps)
        self._failures = FailureNews()
        self._pace = Pace(total_steps)
        self._started_at = self._printed_at = time.monotonic()
        self._live: Live | None = None
        if self.console.is_terminal:
            self._live = Live(self, console=self.console, refresh_per_second=2, transient=False)

    def __enter__(self) -> Display:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal is gone
                self._live.stop()

    def say(self, text: str) -> None:
        """Print a line with the time of the run."""
        self._printed_at = time.monotonic()
        with suppress(OSError):  # the disk of the console's file is full
            self.console.print(Text(f"{clock(time.monotonic() - self._started_at)}  {text}"))

    def progress(self, line: Line) -> None:
        """Show a step of the learner."""
        self._line = line
        self._pace.finished(step_of(line), time.monotonic())
        if self._live is None:
            left = self._time_left()
            self.say(describe(line, self._total_steps) + (f"  {left}" if left else ""))

    def refresh(self) -> None:
        """Print the phases that have begun or ended since the last call. Without a terminal, also print the state of
        all processes after ``SILENCE_SECONDS`` without a line."""
        for line in self._phases.news(self._processes, self._answers, step_of(self._line), time.monotonic()):
            self.say(line)
        replay = self._answers.get("replay")
        for line in self._failures.news(replay.details.get("failed") if replay else None):
            self.say(line)
        now = time.monotonic()
        if self._live is None and now - self._printed_at >= SILENCE_SECONDS:
            alive = [name for name, process in self._processes.items() if process.alive]
            parts = [self._describe(name, now) for name in alive]
            self.say("; ".join(filter(None, [waiting_in_words(self._processes, self._answers, now), *parts])))

    def _describe(self, name: str, now: float) -> str:
        """State of a process; empty for one that needs no words of its own."""
        process, answer = self._processes[name], self._answers.get(name)
        if name in (PREPARE, PREFLIGHT):
            return ""
        if answer is None or not answer.state:
            return f"{name}: {process.phase.value} for {now - process.started_at:.0f} s"
        if not answer.reason:
            return f"{name}: {_doing(answer)}"
        waits = ": " if answer.state.startswith("waiting") else ", waiting for "
        return f"{name}: {_doing(answer)}{waits}{answer.reason}"

    def _time_left(self) -> str:
        """``about 2:10 left``; empty before there is an estimate, and after the last step."""
        left = self._pace.left(time.monotonic())
        return f"about {clock(left)} left" if left and step_of(self._line) < self._total_steps else ""

    def __rich__(self) -> Group:
        step = step_of(self._line)
        header, numbers = Table.grid(padding=(0, 2)), Table.grid(padding=(0, 3))
        header.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=self._total_steps, completed=step, width=30),
            Text(f"step {step}/{self._total_steps}"),
            Text(clock(time.monotonic() - self._started_at), style="dim"),
            Text(self._time_left(), style="dim"),
        )
        found = facts(self._line) if self._line else {}
        numbers.add_row(*(Text(label, style="dim") for label in found or ("no step yet",)))
        if found:
            numbers.add_row(*(Text(value, style="bold") for value in found.values()))
        return Group(header, numbers, self._table())

    def _table(self) -> Table:
        rows = []
        for name, process in self._processes.items():
            answer = self._answers.get(name) if process.phase in (Phase.RUNNING, Phase.STOPPING) else None
            phase = Text(process.phase.value, style=_STYLE[process.phase])
            facts = (_state(answer), answer.reason) if answer else ("", "")
            rows.append((name, phase, *facts, process.restarts or None))
        found = table(("process", "phase", "state", "waits for", "restarts"), rows)
        for column in found.columns:
            column.overflow, column.no_wrap = "ellipsis", True
        return found


def waiting_in_words(processes: Mapping[str, Process], answers: Mapping[str, HealthAnswer], now: float) -> str:
    """The one thing that the run waits for now, for a reader who does not know its processes; empty if it is none. What
    stands first has to end before what stands behind it can begin. Pure."""
    prepare = processes.get(PREPARE)
    if prepare is not None and prepare.alive:
        return f"the model is being prepared, for {now - prepare.started_at:.0f} s so far"
    loading = [name for name, process in processes.items() if process.phase is Phase.STARTING and name != PREFLIGHT]
    if loading:
        first = min(processes[name].started_at for name in loading)
        verb = "loads" if len(loading) == 1 else "load"
        return f"{', '.join(loading)} {verb} programs and model, for {now - first:.0f} s so far"
    learner = answers.get("learner")
    if learner is not None and learner.state == RoleState.WAITING_FOR_ROLLOUTS:
        return f"episodes are played until a batch is complete ({learner.reason})"
    return ""


def _state(answer: HealthAnswer) -> str:
    """The state, and the details that are not zero or empty and not in it already."""
    shown = {key: value for key, value in answer.details.items() if value and key not in HIDDEN}
    values = {key: f"{value:.3g}" if isinstance(value, float) else value for key, value in shown.items()}
    return f"{_doing(answer)}  {'  '.join(f'{key} {value}' for key, value in values.items())}".strip()


def _doing(answer: HealthAnswer) -> str:
    """The state in words: ``playing 64 episodes``."""
    playing = answer.details.get("playing")
    return f"{answer.state} {playing} episodes" if answer.state == RoleState.PLAYING and playing else answer.state


def clock(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
