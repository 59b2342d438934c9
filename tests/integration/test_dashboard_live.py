"""Every query of the dashboard returns data from a real Prometheus that scrapes live processes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grafana.prometheus_process import Api, PrometheusProcess, Target
from grafana.prove import OVERVIEW, prove, prove_within

SCRIPT = Path(__file__).with_name("metrics_process.py")
RULES = OVERVIEW.parents[1] / "prometheus" / "alerts.yml"
ROLES = ("replay", "learner", "actor", "engine")

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus binary on PATH")


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Target]]:
    with ExitStack() as stack:
        found = {}
        for role in ROLES:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), role],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={"PYTHONPATH": str(SCRIPT.parents[2])},
            )
            stack.callback(process.wait, timeout=10)
            assert process.stdin is not None and process.stdout is not None
            stack.callback(process.stdout.close)
            stack.callback(process.stdin.close)
            found[role] = Target(f"afterplay-{role}", f"127.0.0.1:{process.stdout.readline().strip()}")
        yield found


def test_every_query_returns_data_from_processes_with_the_real_metric_classes(processes: dict[str, Target]) -> None:
    dashboard = json.loads(OVERVIEW.read_text())
    with PrometheusProcess(list(processes.values()), rules=RULES) as prometheus:
        api = Api(prometheus.url)
        assert prove_within(dashboard, api, seconds=30, pause_seconds=0.3) == []
        rules = api.get("/api/v1/rules")["groups"][0]["rules"]
        assert {r["name"] for r in rules if r.get("health") == "err"} == set()


def test_a_panel_that_names_a_metric_nobody_exports_is_reported(processes: dict[str, Target]) -> None:
    dashboard = json.loads(OVERVIEW.read_text())
    panel = next(p for p in dashboard["panels"] if p["id"] == 402)
    panel["targets"][0]["expr"] = "afterplay_learner_entropy_bits"
    with PrometheusProcess([processes["learner"]]) as prometheus:
        found = prove(dashboard, Api(prometheus.url))
    assert any("entropy_bits" in problem for problem in found)
