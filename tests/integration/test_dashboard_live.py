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
from pipeline.config.explain import free_ports

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


def test_an_alert_is_a_line_in_the_log_of_the_webhook_and_so_is_its_end(tmp_path: Path) -> None:
    """Prometheus, an Alertmanager with the configuration of the composition, and the receiver."""
    manager = shutil.which("prometheus-alertmanager") or shutil.which("alertmanager")
    if manager is None:
        pytest.skip("no alertmanager on PATH: install the package prometheus-alertmanager")
    impatient = tmp_path / "alerts.yml"
    impatient.write_text(RULES.read_text().replace("for: 1m", "for: 1s").replace("interval: 15s", "interval: 1s"))
    receiver = subprocess.Popen(
        [sys.executable, str(ROOT / "grafana" / "alert_log.py"), "0"], stdout=subprocess.PIPE, text=True
    )
    actor = Process("actor")
    with ExitStack() as stack:
        stack.callback(actor.kill)
        stack.callback(receiver.communicate)
        stack.callback(receiver.terminate)
        assert receiver.stdout is not None
        port = receiver.stdout.readline().split()[-1]
        shipped = (ROOT / "grafana" / "alertmanager" / "alertmanager.yml").read_text()
        quick = shipped.replace("alerts:9095", f"127.0.0.1:{port}").replace("10s", "100ms").replace("1m", "200ms")
        (tmp_path / "alertmanager.yml").write_text(quick)
        address = f"127.0.0.1:{free_ports('127.0.0.1', 1)}"
        files = [f"--config.file={tmp_path / 'alertmanager.yml'}", f"--storage.path={tmp_path / 'data'}"]
        where = [f"--web.listen-address={address}", "--cluster.listen-address="]
        managing = subprocess.Popen([manager, *files, *where], stderr=subprocess.DEVNULL)
        stack.callback(managing.communicate)
        stack.callback(managing.terminate)
        stack.enter_context(PrometheusProcess([actor.target], rules=impatient, alertmanager=address))
        actor.kill()
        assert "firing critical TargetDown: afterplay-actor 127.0.0.1:" in receiver.stdout.readline()
        actor.start()
        assert "resolved critical TargetDown: " in receiver.stdout.readline()
