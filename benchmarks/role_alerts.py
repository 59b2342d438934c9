"""Alerts of a real run under a real Prometheus: each role stopped, killed or hung pages once, and by its own alert.

::

    python -m benchmarks.role_alerts                         # every role and fault; 6 minutes on two cores
    python -m benchmarks.role_alerts --only engine-hung slow --out benchmarks/results/role_alerts.json

Time passes :data:`SPEED` times faster than in production: the limits of the run file and the waits of the shipped
rules are divided by it, nothing else of them is changed. Each fault is done to a process of ``configs/tiny.yaml`` on
the embedded engine:

- *stopped*: SIGSTOP, later SIGCONT.
- *killed*: SIGKILL while the supervisor is stopped, so that nobody starts the process again before it goes on.
- *hung*: a thread blocks (event loop of actor and stage, a layer of the model in learner and engine), while the
  metrics server answers. It is let go later; *left* is a hung process that nobody lets go, which its watchdog ends.
- *given-up*: a role is killed that may not be restarted, so the run ends.
- *slow*: updates of 8 minutes each (the seconds are those of one). *finished*: a run to its end.

A line per fault: what paged, the seconds until it did, and the seconds from the end of the fault until it was resolved.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grafana.generate import alerts_yaml
from grafana.prometheus_process import Api, PrometheusProcess, Target
from grafana.targets import targets_of_run
from pipeline.config.explain import free_ports
from pipeline.config.run import SupervisorConfig
from pipeline.runtime.run_directory import read_json
from pipeline.stage.metrics import RUN_PATIENCE
from tests.support import hang
from tests.support.fork_server import ForkServer
from tests.support.run_handle import RunHandle, start_run

ROOT = Path(__file__).parents[1]
TINY = ROOT / "configs" / "tiny.yaml"
SPEED = 12.0
LIMITS = SupervisorConfig()
PROGRESS_SECONDS = LIMITS.progress_seconds_max / SPEED
RUN_SECONDS = RUN_PATIENCE * PROGRESS_SECONDS + 60 / SPEED + 3
"""Longer than the run may stand still without RunStalled, if nobody is stopped or hangs."""
UPDATE_SECONDS = 480.0
LOOK_SECONDS = 0.1
SECONDS_MAX = 120.0
"""For anything to happen."""
CALM_SECONDS = 2.0
"""Without an alert, before the next fault."""
LAYER = "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward"
ROLES = {
    "engine-0": LAYER,
    "learner": LAYER,
    "replay": "pipeline.stage.core:StageCore.plan",
    "actor-0": "actors.process.actor:Actor.doing",
}
"""Processes, and the function that hangs: in the sampling or training thread, or the event loop."""
FAULTS = ("stopped", "killed", "hung")
EXPECTED = {"stopped": "TargetDown", "killed": "TargetDown", "hung": "RoleStuck", "left": "RoleStuck"}


@dataclass(slots=True)
class Outcome:
    """Alerts that one fault raised."""

    role: str
    fault: str
    expected: str = ""
    """Alert that must page, and nothing else; empty: none may."""
    fired_seconds: float = 0.0
    resolved_seconds: float = 0.0
    pages: set[tuple[str, str]] = field(default_factory=set)
    """Alerts of severity critical that fired, with their job."""
    warnings: set[str] = field(default_factory=set)

    @property
    def right(self) -> bool:
        """True if exactly the expected alert of this role paged."""
        job = "" if self.role == "run" else f"afterplay-{self.role.split('-')[0]}"
        return self.pages == ({(self.expected, job)} if self.expected else set())

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "pages": sorted(self.pages), "warnings": sorted(self.warnings), "right": self.right}


class WatchedRun:
    """A run of ``configs/tiny.yaml`` and the Prometheus that watches it."""

    def __init__(self, run: RunHandle, api: Api, hangs: Path) -> None:
        self.run = run
        self._api = api
        self._hangs = hangs

    def alerts(self) -> list[dict[str, str]]:
        """Labels of the alerts that fire now."""
        found = self._api.get("/api/v1/alerts")["alerts"]
        return [alert["labels"] for alert in found if alert["state"] == "firing"]

    def pages(self) -> set[tuple[str, str]]:
        return {(a["alertname"], a.get("job", "")) for a in self.alerts() if a["severity"] == "critical"}

    def until(self, what: str, look: Callable[[], bool], outcome: Outcome | None = None) -> float:
        """Seconds until ``look`` was true; all alerts until then are noted in ``outcome``."""
        begun = time.monotonic()
        while not look():
            if time.monotonic() > begun + SECONDS_MAX:
                raise TimeoutError(f"{what} did not come within {SECONDS_MAX:g} s:\n{self.run.tail()}")
            if outcome is not None:
                self._note(outcome)
            time.sleep(LOOK_SECONDS)
        return time.monotonic() - begun

    def calm(self, outcome: Outcome | None = None) -> None:
        """Wait until the run has made an update and nothing has fired for a while."""
        steps, since = len(self.run.steps()), time.monotonic()

        def look() -> bool:
            nonlocal since
            if self.pages():
                since = time.monotonic()
            return time.monotonic() > since + CALM_SECONDS and len(self.run.steps()) > steps

        self.until("calm", look, outcome)

    def during(self, seconds: float, outcome: Outcome) -> None:
        """Note the alerts of so many seconds."""
        begun = time.monotonic()
        self.until("the end", lambda: time.monotonic() > begun + seconds, outcome)

    def _note(self, outcome: Outcome) -> None:
        for alert in self.alerts():
            if alert["severity"] == "critical":
                outcome.pages.add((alert["alertname"], alert.get("job", "")))
            else:
                outcome.warnings.add(alert["alertname"])

    def fault(self, role: str, fault: str, hold_seconds: float = 0.0) -> Outcome:
        """Do it, wait for its alert and ``hold_seconds`` more, end it, wait until the alert is resolved and the run
        goes on."""
        outcome = Outcome(role, fault, EXPECTED[fault])
        with ExitStack() as undo:
            self._begin(role, fault, undo)
            fires = lambda: any(name == outcome.expected for name, _ in self.pages())  # noqa: E731
            outcome.fired_seconds = self.until(f"{outcome.expected} of {role}", fires, outcome)
            self.during(hold_seconds, outcome)
            if fault == "left":
                outcome.resolved_seconds = self.until("the end of the alert", lambda: not self.pages(), outcome)
        if fault != "left":
            outcome.resolved_seconds = self.until("the end of the alert", lambda: not self.pages(), outcome)
        self.calm(outcome)
        return outcome

    def _begin(self, role: str, fault: str, undo: ExitStack) -> None:
        pid = self._pid(role)
        if fault == "stopped":
            self._stop(pid, undo)
        elif fault == "killed":
            self._stop(int((read_json(self.run.directory.lock_file) or {})["pid"]), undo)
            os.kill(pid, signal.SIGKILL)
        else:
            undo.enter_context(hang.hang(self._hangs, pid, ROLES[role]))

    def _pid(self, role: str) -> int:
        return int((read_json(self.run.directory.processes_file) or {})[role]["pid"])

    def _stop(self, pid: int, undo: ExitStack) -> None:
        os.kill(pid, signal.SIGSTOP)
        undo.callback(_continue, pid)

    def slow(self, updates: int = 2) -> Outcome:
        """Updates that take 8 minutes, as fast as time passes here: each layer of the model is slow."""
        outcome, pause, learner = Outcome("run", "slow"), 0.2, self._pid("learner")
        with hang.hang(self._hangs, learner, LAYER, pause):  # shows how many layers an update passes
            self._update(outcome)
            seconds = self._update(outcome)
        with hang.hang(self._hangs, learner, LAYER, pause * UPDATE_SECONDS / SPEED / seconds):
            self._update(outcome)
            outcome.fired_seconds = sum(self._update(outcome) for _ in range(updates)) / updates
        return outcome

    def _update(self, outcome: Outcome) -> float:
        steps = len(self.run.steps())
        return self.until("an update", lambda: len(self.run.steps()) > steps, outcome)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextmanager
def watched_run(folder: Path, server: ForkServer, overrides: Sequence[str] = ()) -> Iterator[WatchedRun]:
    """A run that has begun to train, and about which no alert fires."""
    hangs = folder / "hangs"
    hangs.mkdir(parents=True, exist_ok=True)
    port = free_ports("127.0.0.1", 3)
    settings = [
        "run.total_steps=100000",
        f"metrics.port={port}",
        f"supervisor.progress_seconds_max={PROGRESS_SECONDS}",
        f"supervisor.stuck_seconds_max={LIMITS.stuck_seconds_max / SPEED}",
        f"environments.guess.max_seconds={RUN_PATIENCE * PROGRESS_SECONDS / 2}",
        *overrides,
    ]
    rules = folder / "alerts.yml"
    rules.write_text(alerts_yaml(SPEED))
    os.environ[hang.FOLDER] = str(hangs)
    try:
        with start_run(TINY, folder, "watched", settings, server=server) as run, ExitStack() as stack:
            run.until_step(2, SECONDS_MAX)
            targets = targets_of_run(run.directory.path)
            learner = int((read_json(run.directory.processes_file) or {})["learner"]["pid"])
            with hang.hang(hangs, learner, LAYER):  # a short run does not end before it is watched
                prometheus = PrometheusProcess(targets, rules=rules, scrape_interval="1s")
                api = Api(stack.enter_context(prometheus).url)
                watched = WatchedRun(run, api, hangs)
                watched.until("a scrape", lambda: _scraped(api, targets))
            watched.until("calm", lambda: not watched.pages())
            yield watched
    finally:
        os.environ.pop(hang.FOLDER, None)


def _scraped(api: Api, targets: Sequence[Target]) -> bool:
    return len(api.get("/api/v1/query", query="up == 1")["result"]) == len(targets)


def ended(folder: Path, server: ForkServer, how: str) -> Outcome:
    """A run that ends, *finished* or *given-up*, and what pages for longer than LearnerMissing waits."""
    overrides = ["run.total_steps=16"] if how == "finished" else ["supervisor.restarts_max=0"]
    outcome = Outcome("run", how, "" if how == "finished" else "RunDown")
    with watched_run(folder, server, overrides) as watched:
        begun = time.monotonic()
        if how == "given-up":
            os.kill(watched._pid("learner"), signal.SIGKILL)
        watched.run.finish(SECONDS_MAX)
        if how == "given-up":
            watched.until("RunDown", lambda: bool(watched.pages()), outcome)
            outcome.fired_seconds = time.monotonic() - begun
        watched.during(150 / SPEED, outcome)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = ["| role | fault | page | fires after s | resolved after s | warnings |", "|---|---|---|---|---|---|"]
    for o in outcomes:
        pages = ", ".join(f"{name} {job}".strip() for name, job in sorted(o.pages)) or "none"
        mark = "" if o.right else " (wrong)"
        times = f"{o.fired_seconds:.1f} | {o.resolved_seconds:.1f}"
        lines.append(f"| {o.role} | {o.fault} | {pages}{mark} | {times} | {', '.join(sorted(o.warnings)) or 'none'} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    cases = [f"{role}-{fault}" for role in ROLES for fault in FAULTS] + [
        "engine-0-left",
        "slow",
        "given-up",
        "finished",
    ]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=cases, choices=cases, metavar="CASE", help=", ".join(cases))
    parser.add_argument("--out", type=Path, help="a JSON file for the results; those of other cases in it are kept")
    options = parser.parse_args(arguments)
    outcomes = []
    with ForkServer() as server, tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        watched: WatchedRun | None = None
        for case in options.only:
            if case in ("given-up", "finished"):
                outcome = ended(Path(folder) / case, server, case)
            else:
                watched = watched or stack.enter_context(watched_run(Path(folder) / "run", server))
                role, _, fault = case.rpartition("-")
                outcome = (
                    watched.slow() if case == "slow" else watched.fault(role, fault, RUN_SECONDS * (fault == "killed"))
                )
            print(table([outcome]).splitlines()[-1], flush=True)
            outcomes.append(outcome)
            if options.out is not None:
                known = json.loads(options.out.read_text()) if options.out.exists() else {}
                options.out.write_text(json.dumps(known | {case: outcome.as_json()}, indent=1) + "\n")
    return int(not all(outcome.right for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
