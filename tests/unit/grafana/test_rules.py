"""Prometheus accepts our files, alerts fire when they should and not otherwise, and each has a page in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml

from grafana.dashboard_lint import queries, substitute
from grafana.declarations import ALERTS, BOARDS, SIGNALS
from grafana.prove import load
from pipeline.config.replay import EssGuardConfig

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "grafana" / "prometheus"
RUNBOOK = (ROOT / "docs" / "RUNBOOK.md").read_text()
EXAMPLES = sorted(FOLDER.glob("*_test.yml"))
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH")


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_promtool_accepts_rules_and_both_configurations() -> None:
    promtool("check", "rules", "alerts.yml")
    promtool("check", "config", "prometheus.yml")
    promtool("check", "config", "--syntax-only", "local.yml")


@pytest.mark.slow
@needs_promtool
def test_alerts_fire_and_stay_silent_as_the_examples_say() -> None:
    promtool("test", "rules", *(path.name for path in EXAMPLES))


@pytest.mark.slow
@needs_promtool
def test_no_alert_at_all_fires_in_a_run_whose_updates_take_eight_minutes(tmp_path: Path) -> None:
    """Nor for a replay stage that is full, as it is where the learner is the bottleneck."""
    examples = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())
    (healthy,) = (group for group in examples["tests"] if group["name"].startswith("an update takes eight minutes"))
    silent = [{"alertname": alert.name, "eval_time": "100m"} for alert in ALERTS]
    rules = [str(FOLDER / name) for name in examples["rule_files"]]
    path = tmp_path / "healthy.yml"
    path.write_text(yaml.safe_dump({"rule_files": rules, "tests": [{**healthy, "alert_rule_test": silent}]}))
    promtool("test", "rules", str(path))


@needs_promtool
def test_tokens_to_a_reward_are_counted_for_each_run_also_across_the_restart_of_an_actor(tmp_path: Path) -> None:
    """1,000 tokens a minute from minute 1 on. ``a`` has a reward of 1 from minute 20, hence a mean of 0.5 of five
    minutes in minute 22; its actor restarts in minute 12. ``b`` has it from minute 40, ``c`` never."""
    (query,) = [q for q in queries(load("afterplay-overview")) if q.panel == "Tokens to the reward to reach"]
    values = {"$__range": "60m", "$__interval": "1m", "$goal": "0.5"}
    tokens = {"a": "0 0+1000x10 0+1000x50", "b": "0 0+1000x60", "c": "0 0+1000x60"}
    rewards = {"a": "0x19 1x41", "b": "0x39 1x21", "c": "0x60"}
    series = []
    for run in "abc":
        for role in ("actor", "learner"):
            where = f'job="afterplay-{role}",instance="{run}-{role}:1"'
            series.append({"series": f'afterplay_run_info{{{where},run_id="{run}"}}', "values": "1x60"})
        actor, learner = (f'job="afterplay-{r}",instance="{run}-{r}:1"' for r in ("actor", "learner"))
        counter = f'afterplay_actor_tokens_total{{{actor},kind="generated"}}'
        series.append({"series": counter, "values": tokens[run]})
        series.append({"series": f'afterplay_learner_reward_mean{{{learner},env="e"}}', "values": rewards[run]})
    samples = [{"labels": '{run_id="a"}', "value": 20_000}, {"labels": '{run_id="b"}', "value": 41_000}]
    asked = {"expr": f"round({substitute(query.expr, values)}, 1000)", "eval_time": "60m", "exp_samples": samples}
    path = tmp_path / "tokens.yml"
    path.write_text(
        yaml.safe_dump({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": [asked]}]})
    )
    promtool("test", "rules", str(path))


def test_every_alert_has_an_example_that_fires_and_one_that_does_not() -> None:
    cases = [
        case
        for path in EXAMPLES
        for group in yaml.safe_load(path.read_text())["tests"]
        for case in group["alert_rule_test"]
    ]
    for alert in ALERTS:
        mine = [bool(case.get("exp_alerts")) for case in cases if case["alertname"] == alert.name]
        assert set(mine) == {True, False}, f"{alert.name}: {mine}"


def test_every_alert_and_every_panel_link_has_a_runbook_heading() -> None:
    headings = set(re.findall(r"^## (\w+)$", RUNBOOK, flags=re.MULTILINE))
    assert headings == {alert.name for alert in ALERTS}
    linked = {p.runbook for board in BOARDS for row in board.rows for p in row.panels if p.runbook}
    assert linked <= headings


def test_an_alert_of_the_replay_stages_fires_once_and_not_once_a_stage() -> None:
    for alert in (alert for alert in ALERTS if alert.group == "experience"):
        node = promql_parser.parse(alert.expr)
        assert labels_are_gone(node), alert.name


def labels_are_gone(node: object) -> bool:
    """No series of a single process is left in the result: everything went through an aggregation without ``by``."""
    if isinstance(node, promql_parser.AggregateExpr):
        return node.modifier is None
    if isinstance(node, promql_parser.BinaryExpr):
        return all(labels_are_gone(side) for side in (node.lhs, node.rhs))
    if isinstance(node, promql_parser.ParenExpr):
        return labels_are_gone(node.expr)
    if isinstance(node, promql_parser.Call):
        return all(labels_are_gone(argument) for argument in node.args)
    return isinstance(node, promql_parser.NumberLiteral)


def test_replays_are_called_too_far_off_where_the_guard_of_a_run_would_shrink_their_share() -> None:
    assert SIGNALS["replay_ess"]["below"]["warning"] == EssGuardConfig().floor
