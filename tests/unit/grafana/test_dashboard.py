"""The committed dashboards and rules are what the code says, and name only what exists."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from actors.metrics import ActorMetrics
from grafana.dashboard_lint import (
    ENGINE,
    NOT_SHOWN,
    RUNTIME,
    TOOLS_ONLY,
    annotation_expressions,
    base_name,
    metric_names,
    mixtures,
    panels,
    queries,
    static_problems,
    substitute,
)
from grafana.declarations import ALERTS, BOARDS, RECORDS, Band, Board, Limit
from grafana.generate import outputs, threshold_steps
from grafana.prove import FOLDER
from learner.metrics import LearnerMetrics
from pipeline.runtime.metrics import CollectorRegistry, ProcessMetrics
from pipeline.stage.metrics import ReplayMetrics

EVERY_BOARD = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.uid)


@pytest.fixture(scope="module")
def registry() -> CollectorRegistry:
    """All metrics of our processes."""
    registry = CollectorRegistry()
    ProcessMetrics(registry, "run", "grpo", "tiny")
    ActorMetrics(registry, environments=("arithmetic",), engines=("http://127.0.0.1:8100",))
    for metrics in (ReplayMetrics, LearnerMetrics):
        metrics(registry, environments=("arithmetic",))
    return registry


@pytest.fixture(scope="module")
def exported(registry: CollectorRegistry) -> frozenset[str]:
    """Names of all series that our processes export."""
    return frozenset(sample.name for family in registry.collect() for sample in family.samples)


def dashboard(board: Board) -> dict[str, Any]:
    return json.loads((FOLDER / f"{board.uid}.json").read_text())


def test_committed_files_are_regenerated_identically() -> None:
    for path, text in outputs().items():
        assert path.read_text() == text, f"{path.name} is not current: run `python -m grafana.generate`"
    assert set(FOLDER.glob("*.json")) <= outputs().keys()


@EVERY_BOARD
def test_panels_have_ids_units_descriptions_and_metrics_that_exist(board: Board, exported: frozenset[str]) -> None:
    assert static_problems(dashboard(board), exported | ENGINE | RUNTIME | TOOLS_ONLY) == []


def test_alerts_name_only_metrics_that_exist(exported: frozenset[str]) -> None:
    for alert in ALERTS:
        unknown = metric_names(alert.expr) - exported - RUNTIME
        assert not unknown, f"{alert.name} names {sorted(unknown)}"


def test_the_runbook_names_only_metrics_and_panels_that_exist(exported: frozenset[str]) -> None:
    """Names of panels, rows and dashboards are in italics with a capital; so are sentences that a log has."""
    runbook = " ".join((FOLDER.parents[1] / "docs" / "RUNBOOK.md").read_text().split())
    histograms = {name.removesuffix("_bucket") for name in exported if name.endswith("_bucket")}
    assert set(re.findall(r"\bafterplay_\w+", runbook)) <= exported | histograms
    titles = {panel["title"].split(" (")[0] for board in map(dashboard, BOARDS) for panel in board["panels"]}
    titles |= {board.title.removeprefix("Afterplay / ") for board in BOARDS}
    named = set(re.findall(r"(?<!\*)\*([A-Z][^*]*)\*(?!\*)", runbook))
    assert {name for name in named if "damaged" not in name} <= titles


def test_every_metric_is_in_a_panel_in_a_rule_or_on_the_list_of_those_that_need_neither(
    registry: CollectorRegistry,
) -> None:
    kinds = {f.name + ("_total" if f.type == "counter" else ""): f.type for f in registry.collect()}
    histograms = frozenset(name for name, kind in kinds.items() if kind == "histogram")
    shown = {alert.expr for alert in ALERTS} | set(RECORDS.values())
    for board in map(dashboard, BOARDS):
        shown |= {substitute(query.expr) for query in queries(board)}
        shown |= {substitute(expr) for expr in annotation_expressions(board)}
    used = {base_name(name, histograms) for expr in shown for name in metric_names(expr)}
    ours = {name for name in kinds if not name.startswith("process_")}
    assert ours - used - NOT_SHOWN.keys() == set(), "show these metrics, or say in NOT_SHOWN why not"
    assert NOT_SHOWN.keys() - (ours - used) == set(), "these are shown, or no longer exist"


@EVERY_BOARD
def test_first_row_has_six_to_eight_stats_whose_colours_change_where_their_alert_fires(board: Board) -> None:
    first = [p for p in dashboard(board)["panels"] if 100 < p["id"] < 200]
    assert 6 <= len(first) <= 8 and {p["type"] for p in first} == {"stat"}
    for panel, spec in zip(first, board.rows[0].panels, strict=True):
        alert = next(a for a in ALERTS if a.name == spec.runbook)
        judged = metric_names(alert.expr)
        shown = metric_names(substitute(panel["targets"][0]["expr"]))
        assert shown <= judged or alert.name == "StalenessHigh"  # shows the largest, judges the share above its limit
        assert isinstance(spec.limit, Limit | Band)
        values = [s["value"] for s in panel["fieldConfig"]["defaults"]["thresholds"]["steps"]]
        assert values == [step.value for step in threshold_steps(spec.limit)]
        bounds = [(f" {number:g}", f'{{le="{number:.1f}"}}') for number in alert_numbers(spec.limit)]
        assert any(alert.expr.endswith(last) or bucket in alert.expr for last, bucket in bounds), alert.expr


def alert_numbers(limit: Limit | Band) -> list[float]:
    if isinstance(limit, Band):
        return [limit.tolerance]
    return [value for value in (limit.warning, limit.critical) if value is not None]


@EVERY_BOARD
def test_every_query_is_scoped_by_the_job_and_instance_variables(board: Board) -> None:
    for query in queries(dashboard(board)):
        selectors = query.expr.replace("${window}", "300").count("{")
        assert selectors == query.expr.count('run=~"$run",job=~"$job",instance=~"$instance"'), query.panel


def test_links_between_dashboards_keep_time_range_and_variables_which_all_of_them_have() -> None:
    for board in map(dashboard, BOARDS):
        (link,) = board["links"]
        assert (link["type"], link["keepTime"], link["includeVars"]) == ("dashboards", True, True)
        assert set(link["tags"]) <= set(board["tags"])
        names = [v["name"] for v in board["templating"]["list"]]
        assert names[:6] == ["datasource", "run", "job", "instance", "environment", "window"]


@pytest.mark.parametrize(
    "expr",
    ["sum(a)", "sum without (run) (a)", "max by (env) (a)", "sum by (run) (a) / on () sum by (run) (b)",
     "a * on (job) b", "a + ignoring (run) b", "time() - a", "a or vector(0)", "-count(a)",
     "max_over_time((min(a) > 0)[1h:1m])"],
)  # fmt: skip
def test_an_expression_that_mixes_runs_or_clocks_is_found(expr: str) -> None:
    assert mixtures(expr)


def test_no_rule_mixes_runs_or_clocks() -> None:
    for name, expr in {alert.name: alert.expr for alert in ALERTS}.items() | RECORDS.items():
        assert mixtures(expr) == [], name


@EVERY_BOARD
def test_descriptions_say_what_is_normal_and_what_to_do(board: Board) -> None:
    for panel in panels(dashboard(board)):
        assert panel["description"].startswith("Normal: ") and " If not: " in panel["description"], panel["title"]


@EVERY_BOARD
def test_no_two_panels_lie_on_each_other_and_none_leaves_the_grid(board: Board) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in dashboard(board)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken, f"{panel['title']} lies on {taken[x, y]}"
                taken[x, y] = panel["title"]


def test_a_metric_that_no_process_exports_is_a_problem() -> None:
    assert any("unknown metric" in p for p in static_problems(dashboard(BOARDS[0]), frozenset({"up"})))
