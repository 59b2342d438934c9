"""The committed dashboards and rules are what the code says, and name only what exists."""

from __future__ import annotations

import json

import pytest

from grafana import names, overview
from grafana.alerts import ALERTS
from grafana.dashboard_lint import metric_names, panels, queries, static_problems, substitute
from grafana.generate import outputs
from grafana.panels import threshold_steps
from grafana.prove import OVERVIEW
from grafana.thresholds import Band, Limit
from pipeline.metrics import ActorMetrics, CollectorRegistry, LearnerMetrics, ProcessMetrics, ReplayMetrics


@pytest.fixture(scope="module")
def exported() -> frozenset[str]:
    """Names of all series that our processes export."""
    registry = CollectorRegistry()
    ProcessMetrics(registry, "run", "grpo", "tiny")
    for metrics in (ActorMetrics, ReplayMetrics, LearnerMetrics):
        metrics(registry, environments=("arithmetic",))
    return frozenset(sample.name for family in registry.collect() for sample in family.samples)


@pytest.fixture(scope="module")
def dashboard() -> dict:
    return json.loads(OVERVIEW.read_text())


def test_committed_files_are_regenerated_identically() -> None:
    for path, text in outputs().items():
        assert path.read_text() == text, f"{path.name} is not current: run `python -m grafana.generate`"


def test_panels_have_ids_units_descriptions_and_metrics_that_exist(dashboard: dict, exported: frozenset[str]) -> None:
    assert static_problems(dashboard, exported | names.ENGINE | names.RUNTIME) == []


def test_alerts_name_only_metrics_that_exist(exported: frozenset[str]) -> None:
    for alert in ALERTS:
        unknown = metric_names(alert.expr) - exported - names.RUNTIME
        assert not unknown, f"{alert.name} names {sorted(unknown)}"


def test_first_row_has_six_to_eight_stats_whose_colours_change_where_their_alert_fires(dashboard: dict) -> None:
    first = [p for p in dashboard["panels"] if 100 < p["id"] < 200]
    assert 6 <= len(first) <= 8 and {p["type"] for p in first} == {"stat"}
    for panel, spec in zip(first, overview.GLANCE.panels, strict=True):
        alert = next(a for a in ALERTS if a.name == spec.runbook)
        judged = metric_names(alert.expr)
        assert metric_names(substitute(panel["targets"][0]["expr"])) == judged
        assert isinstance(spec.limit, Limit | Band)
        values = [s["value"] for s in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert values == [step.value for step in threshold_steps(spec.limit)]


def test_every_query_is_scoped_by_the_job_and_instance_variables(dashboard: dict) -> None:
    for query in queries(dashboard):
        assert query.expr.count("{") == query.expr.count('job=~"$job",instance=~"$instance"'), query.panel
    assert [v["name"] for v in dashboard["templating"]["list"]] == ["datasource", "job", "instance", "environment"]


def test_descriptions_say_what_is_normal_and_what_to_do(dashboard: dict) -> None:
    for panel in panels(dashboard):
        assert panel["description"].startswith("Normal: ") and " If not: " in panel["description"], panel["title"]


def test_a_metric_that_no_process_exports_is_a_problem(dashboard: dict) -> None:
    assert any("unknown metric" in p for p in static_problems(dashboard, frozenset({"up"})))
