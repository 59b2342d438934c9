"""Prometheus accepts our files, alerts fire when they should and not otherwise, and each has a page in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from grafana.alerts import ALERTS
from grafana.overview import ROWS
from grafana.panels import PanelSpec

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "grafana" / "prometheus"
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text()
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH")


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_rules_and_both_configurations() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "--syntax-only", "local.yml")


@needs_promtool
def test_alerts_fire_and_stay_silent_as_the_examples_say() -> None:
    promtool("test", "rules", "alerts_test.yml")


def test_every_alert_has_an_example_that_fires_and_one_that_does_not() -> None:
    cases = [
        case
        for group in yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
        for case in group["alert_rule_test"]
    ]
    for alert in ALERTS:
        mine = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == alert.name]
        assert set(mine) == {True, False}, f"{alert.name}: {mine}"


def test_every_alert_and_every_panel_link_has_a_runbook_heading() -> None:
    headings = set(re.findall(r"^## (\w+)$", RUNBOOK, flags=re.MULTILINE))
    assert headings == {alert.name for alert in ALERTS}
    linked = {p.runbook for row in ROWS for p in row.panels if isinstance(p, PanelSpec) and p.runbook}
    assert linked <= headings
