"""A role that hangs, is stopped or finishes, under a real Prometheus with the committed rules: exactly its alert."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

from grafana.prometheus_process import Api, PrometheusProcess, Target
from pipeline.runtime.process import ExitCode
from pipeline.runtime.rundir import RunDirectory, read_json

ROOT = Path(__file__).parents[2]
RULES = ROOT / "grafana" / "prometheus" / "alerts.yml"
LIMIT_SECONDS = 2.0

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus binary on PATH")

PROGRAM = """
import sys, threading, time, anyio, anyio.to_thread
from pipeline.config import RunConfig
from pipeline.config.run import RunSection, SupervisorConfig
from pipeline.metrics.learner import LearnerMetrics
from pipeline.runtime.process import run_role
from pipeline.schema.state import RoleState

limits = SupervisorConfig(progress_seconds_max=float(sys.argv[2]) / 6, stuck_seconds_max=120)
config = RunConfig(run=RunSection(directory=sys.argv[1], name="r"), supervisor=limits)

async def learns(ctx):
    metrics = LearnerMetrics(ctx.registry)
    command = []

    def step():
        while not command:
            ctx.beat()
            metrics.steps_total.inc()
            time.sleep(0.05)
        if command == ["hang"]:
            threading.Event().wait()

    def listen():
        command.append(sys.stdin.readline().strip())

    ctx.report(RoleState.TRAINING)
    threading.Thread(target=listen, daemon=True).start()
    await anyio.to_thread.run_sync(step)
    ctx.finished()
    await ctx.until_scraped()

sys.exit(run_role("learner", 0, config, learns))
"""


class Learner:
    """A role process that trains until it is told to hang or to finish."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", PROGRAM, str(folder), str(LIMIT_SECONDS)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        self._file = RunDirectory(folder / "r").process_file("learner")

    def target(self) -> Target | None:
        found = read_json(self._file)
        return Target("afterplay-learner", f"127.0.0.1:{found['metrics_port']}") if found else None

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()


@contextmanager
def watched(folder: Path) -> Iterator[tuple[Learner, Api]]:
    """A learner that trains, and a Prometheus with the committed rules whose alerts are impatient."""
    rules = folder / "alerts.yml"
    text = RULES.read_text().replace("interval: 15s", "interval: 1s")
    for pending in ("15s", "1m", "2m"):
        text = text.replace(f"for: {pending}\n", "for: 1s\n")
    rules.write_text(text)
    learner = Learner(folder)
    try:
        eventually(lambda: learner.target() is not None, "the role")
        target = learner.target()
        assert target is not None
        with PrometheusProcess([target], rules=rules) as prometheus:
            api = Api(prometheus.url)
            steps = "afterplay_learner_steps_total > 0"
            eventually(lambda: bool(api.get("/api/v1/query", query=steps)["result"]), "a scrape")
            eventually(lambda: not api.get("/api/v1/alerts")["alerts"], "silence: nothing was scraped at first")
            yield learner, api
    finally:
        learner.process.kill()
        learner.process.communicate()


def eventually(look: Callable[[], bool], what: str, seconds_max: float = 30) -> float:
    """Seconds until ``look`` was true."""
    begun, pause = monotonic(), Event()
    while not look():
        assert monotonic() - begun < seconds_max, f"{what} did not come within {seconds_max} s"
        pause.wait(0.1)
    return monotonic() - begun


def firing(api: Api) -> set[str]:
    alerts = api.get("/api/v1/alerts")["alerts"]
    return {a["labels"]["alertname"] for a in alerts if a["state"] == "firing"}


def look(api: Api) -> str:
    """Time of the newest evaluation of the rules."""
    return max(str(rule["lastEvaluation"]) for rule in api.get("/api/v1/rules")["groups"][0]["rules"])


def test_a_training_that_hangs_raises_exactly_its_alert_within_its_limit(tmp_path: Path) -> None:
    with watched(tmp_path) as (learner, api):
        learner.tell("hang")
        seconds = eventually(lambda: bool(firing(api)), "an alert")
        assert firing(api) == {"RoleStuck"}
        assert LIMIT_SECONDS <= seconds <= LIMIT_SECONDS + 10
        assert [a["labels"].get("state") for a in api.get("/api/v1/alerts")["alerts"]] == ["training"]


def test_a_role_that_is_stopped_raises_exactly_its_alert_and_is_well_when_it_goes_on(tmp_path: Path) -> None:
    with watched(tmp_path) as (learner, api):
        os.kill(learner.process.pid, signal.SIGSTOP)
        eventually(lambda: bool(firing(api)), "an alert")
        assert firing(api) == {"TargetDown"}
        os.kill(learner.process.pid, signal.SIGCONT)
        eventually(lambda: not firing(api), "the end of the alert")


def test_a_run_that_has_finished_raises_nothing_when_its_processes_are_gone(tmp_path: Path) -> None:
    with watched(tmp_path) as (learner, api):
        learner.tell("finish")
        assert learner.process.wait(20) == ExitCode.FINISHED
        eventually(lambda: bool(api.get("/api/v1/query", query="up == 0")["result"]), "a scrape in vain")
        looks = {look(api)}
        for _ in range(3):  # longer than the alerts wait
            eventually(lambda: look(api) not in looks, "another look at the rules")
            looks.add(look(api))
        assert api.get("/api/v1/alerts")["alerts"] == []
