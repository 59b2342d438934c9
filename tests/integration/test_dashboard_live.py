"""Every query of the dashboards returns data from a real Prometheus over live processes; alerts fire and resolve.

The processes export the real metrics without doing the work; ``test_lessons.py`` has the same over a real run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from time import monotonic

import pytest

from grafana.prometheus_process import Api, PrometheusProcess, Target
from grafana.prove import EVERY_DASHBOARD, FOLDER, load, prove, prove_within

SCRIPT = Path(__file__).with_name("metrics_process.py")
ROOT = FOLDER.parents[1]
RULES = ROOT / "grafana" / "prometheus" / "alerts.yml"
ROLES = ("replay", "learner", "actor", "engine")

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus binary on PATH")


class Process:
    """One role's metrics without the role (``metrics_process.py``)."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port = 0
        self.start()

    def start(self) -> None:
        """On the same port again, when it was started before."""
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), self.role, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    @property
    def target(self) -> Target:
        return Target(f"afterplay-{self.role}", f"127.0.0.1:{self.port}")

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=10)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Process]]:
    with ExitStack() as stack:
        found = {}
        for name in ROLES:
            found[name] = Process(name)
            stack.callback(found[name].kill)
        yield found


def eventually(look: Callable[[], bool], what: str, seconds_max: float = 30) -> None:
    deadline, pause = monotonic() + seconds_max, Event()
    while not look():
        assert monotonic() < deadline, f"{what} did not come within {seconds_max} s"
        pause.wait(0.2)


def problems(api: Api, seconds_max: float) -> str:
    """Of all dashboards, one a line."""
    found = []
    for uid in EVERY_DASHBOARD:
        left = prove_within(load(uid), api, seconds_max, pause_seconds=0.3)
        found += [f"{uid}: {problem}" for problem in left]
    return "\n".join(found)


def test_every_query_returns_data_from_processes_with_the_real_metric_classes(processes: dict[str, Process]) -> None:
    with PrometheusProcess([p.target for p in processes.values()], rules=RULES) as prometheus:
        api = Api(prometheus.url)
        assert problems(api, seconds_max=30) == ""
        rules = api.get("/api/v1/rules")["groups"][0]["rules"]
        assert {r["name"] for r in rules if r.get("health") == "err"} == set()


def test_a_panel_that_names_a_metric_nobody_exports_is_reported(processes: dict[str, Process]) -> None:
    dashboard = load("afterplay-overview")
    panel = next(p for p in dashboard["panels"] if p["id"] == 402)
    panel["targets"][0]["expr"] = "afterplay_learner_entropy_bits"
    with PrometheusProcess([processes["learner"].target]) as prometheus:
        found = prove(dashboard, Api(prometheus.url))
    assert any("entropy_bits" in problem for problem in found)


def test_target_down_fires_when_a_process_is_killed_and_resolves_when_it_is_back(tmp_path: Path) -> None:
    impatient = tmp_path / "alerts.yml"
    impatient.write_text(RULES.read_text().replace("for: 1m", "for: 1s").replace("interval: 15s", "interval: 1s"))
    actor = Process("actor")
    try:
        with PrometheusProcess([actor.target], rules=impatient) as prometheus:
            api = Api(prometheus.url)

            def firing() -> bool:
                alerts = api.get("/api/v1/alerts")["alerts"]
                return any(a["labels"]["alertname"] == "TargetDown" and a["state"] == "firing" for a in alerts)

            eventually(lambda: bool(api.get("/api/v1/query", query="up == 1")["result"]), "a first scrape")
            assert not firing()
            actor.kill()
            eventually(firing, "TargetDown")
            actor.start()
            eventually(lambda: not firing(), "the end of TargetDown")
    finally:
        actor.kill()
