"""Prometheus accepts our files, alerts fire when they should and not otherwise, and each has a page in the runbook."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import promql_parser
import pytest
import yaml

from grafana.dashboard_lint import queries, substitute
from grafana.declarations import ALERTS, BOARDS, LATEST, SIGNALS
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
@pytest.mark.parametrize("examples", EXAMPLES, ids=lambda path: path.stem)
def test_alerts_fire_and_stay_silent_as_the_examples_say(tmp_path: Path, examples: Path) -> None:
    play(tmp_path, *yaml.safe_load(examples.read_text())["tests"], every="30s")


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
        where = f'run="{run}",job="j",instance="i"'
        counter = f'afterplay_actor_tokens_total{{{where},kind="generated"}}'
        series.append({"series": counter, "values": tokens[run]})
        series.append({"series": f'afterplay_learner_reward_mean{{{where},env="e"}}', "values": rewards[run]})
    samples = [{"labels": '{run="a"}', "value": 20_000}, {"labels": '{run="b"}', "value": 41_000}]
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


def test_an_alert_of_the_replay_stages_fires_once_a_run_and_not_once_a_stage() -> None:
    for alert in (alert for alert in ALERTS if alert.group == "experience"):
        node = promql_parser.parse(alert.expr)
        assert labels_are_gone(node), alert.name


def labels_are_gone(node: object) -> bool:
    """No series of a single process is left in the result: everything went through an aggregation by run alone."""
    if isinstance(node, promql_parser.AggregateExpr):
        return node.modifier is not None and node.modifier.labels == ["run"]
    if isinstance(node, promql_parser.BinaryExpr):
        sides = [node.lhs] if node.modifier and node.modifier.matching else [node.lhs, node.rhs]  # `and` keeps the left
        return all(labels_are_gone(side) for side in sides)
    if isinstance(node, promql_parser.ParenExpr | promql_parser.SubqueryExpr):
        return labels_are_gone(node.expr)
    if isinstance(node, promql_parser.Call):
        return all(labels_are_gone(argument) for argument in node.args)
    return isinstance(node, promql_parser.NumberLiteral)


SAMPLE_SECONDS = 30
FAILING = {
    'afterplay_learner_importance_ratio_sum{level="token",source="replay"}': 13_000,
    'afterplay_learner_importance_ratio_count{level="token",source="replay"}': 10_000,
    'afterplay_learner_importance_ratio_squared_total{level="token",source="replay"}': 338_000,
    'afterplay_learner_importance_ratio_bucket{level="token",source="replay",le="0.5"}': 1_000,
    'afterplay_learner_importance_ratio_bucket{level="token",source="replay",le="2.0"}': 8_000,
    "afterplay_learner_steps_total": 4,
    'afterplay_learner_logprob_diff_nats_bucket{le="0.3"}': 0,
    'afterplay_learner_logprob_diff_nats_bucket{le="3.0"}': 100,
    'afterplay_learner_logprob_diff_nats_bucket{le="+Inf"}': 100,
    'afterplay_learner_staleness_versions_bucket{le="8.0"}': 200,
    'afterplay_learner_staleness_versions_bucket{le="+Inf"}': 256,
    "afterplay_learner_wait_seconds_total": 60,
    'afterplay_learner_step_duration_seconds_sum{phase="wait"}': 60,
    'afterplay_learner_step_duration_seconds_sum{phase="forward"}': 40,
    'afterplay_learner_step_duration_seconds_count{phase="wait"}': 1,
    "afterplay_learner_weight_publish_failures_total": 1,
    'afterplay_replay_inserted_trajectories_total{env="e"}': 100,
    'afterplay_replay_dropped_trajectories_total{reason="stale"}': 30,
    'afterplay_replay_groups_total{outcome="trained"}': 10,
    'afterplay_replay_zero_variance_groups_total{action="kept"}': 9,
    'afterplay_replay_zero_variance_groups_total{action="refilled"}': 0,
    'afterplay_actor_trajectories_total{env="e",outcome="complete"}': 90,
    'afterplay_actor_trajectories_total{env="e",outcome="error"}': 10,
    "afterplay_replay_replays_trained_total": 100,
    "afterplay_replay_choice_failures_total": 10,
    'afterplay_replay_audit_tokens_sum{population="sampled"}': 1_000,
    'afterplay_replay_audit_tokens_count{population="sampled"}': 10,
    'afterplay_replay_audit_tokens_sum{population="trained"}': 600,
    'afterplay_replay_audit_tokens_count{population="trained"}': 10,
    'afterplay_actor_lesson_searches_total{outcome="found"}': 90,
    'afterplay_actor_lesson_searches_total{outcome="timeout"}': 10,
    'afterplay_replay_lesson_groups_total{outcome="written"}': 70,
    'afterplay_replay_lesson_groups_total{outcome="error"}': 30,
}
"""Increase of counters with each update of a run in which all that these alerts judge is wrong."""
HEALTHY = FAILING | {
    'afterplay_learner_importance_ratio_sum{level="token",source="replay"}': 10_000,
    'afterplay_learner_importance_ratio_squared_total{level="token",source="replay"}': 10_100,
    'afterplay_learner_importance_ratio_bucket{level="token",source="replay",le="0.5"}': 0,
    'afterplay_learner_importance_ratio_bucket{level="token",source="replay",le="2.0"}': 10_000,
    'afterplay_learner_logprob_diff_nats_bucket{le="0.3"}': 100,
    'afterplay_learner_staleness_versions_bucket{le="8.0"}': 256,
    "afterplay_learner_wait_seconds_total": 10,
    "afterplay_learner_weight_publish_failures_total": 0,
    'afterplay_replay_dropped_trajectories_total{reason="stale"}': 0,
    'afterplay_replay_zero_variance_groups_total{action="kept"}': 1,
    'afterplay_actor_trajectories_total{env="e",outcome="error"}': 0,
    "afterplay_replay_choice_failures_total": 0,
    'afterplay_replay_audit_tokens_sum{population="trained"}': 1_000,
    'afterplay_actor_lesson_searches_total{outcome="timeout"}': 0,
    'afterplay_replay_lesson_groups_total{outcome="error"}': 0,
}
OF_AN_UPDATE = {alert.name for alert in ALERTS if LATEST in alert.expr} | {"WeightUpdateFailing"}
"""Alerts about counters that move once an update."""


def labelled(series: str, labels: str) -> str:
    name, _, more = series.rstrip("}").partition("{")
    return f"{name}{{{','.join(filter(None, (labels, more)))}}}"


def updates(amounts: Mapping[str, float], step_seconds: int, hours: float, labels: str = "") -> list[dict[str, str]]:
    """Series of a run whose counters move with every update, as a learner with such steps exports them."""
    samples = step_seconds // SAMPLE_SECONDS
    steps = range(int(hours * 3600) // step_seconds)
    found = [
        {"series": labelled(series, labels), "values": " ".join(f"{amount * k}x{samples - 1}" for k in steps)}
        for series, amount in amounts.items()
    ]
    last = {
        "series": labelled("afterplay_learner_update_seconds", labels),
        "values": f"{step_seconds}x{len(steps) * samples - 1}",
    }
    return [*found, last]


def firing(
    name: str, series: Sequence[Mapping[str, str]], alerts: Iterable[str], at: Sequence[str]
) -> dict[str, object]:
    """A test of promtool: at these times exactly these alerts fire, each written ``Name`` or ``Name{run}``."""
    samples = []
    for alert in sorted(alerts):
        found, _, run = alert.rstrip("}").partition("{")
        labels = f'alertname="{found}"' + (f',run="{run}"' if run else "")
        samples.append({"labels": f"{{{labels}}}", "value": 1})
    expr = 'group by (alertname, run) (ALERTS{alertstate="firing"})'
    asked = [{"expr": expr, "eval_time": time, "exp_samples": samples} for time in at]
    return {"name": name, "interval": f"{SAMPLE_SECONDS}s", "input_series": list(series), "promql_expr_test": asked}


def play(tmp_path: Path, *tests: Mapping[str, object], every: str = "1m") -> None:
    """``every``: the rules are evaluated less often than they are, which takes promtool less time."""
    rules, path = tmp_path / "alerts.yml", tmp_path / "tests.yml"
    rules.write_text((FOLDER / "alerts.yml").read_text().replace("interval: 15s", f"interval: {every}"))
    document = {"rule_files": [str(rules)], "evaluation_interval": every, "tests": list(tests)}
    path.write_text(yaml.safe_dump(document))
    promtool("test", "rules", str(path))


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("step_seconds", [60, 240, 600, 1_800, 3_600])
def test_an_alert_fires_however_long_an_update_takes_and_for_the_run_that_it_is_about(
    tmp_path: Path, step_seconds: int
) -> None:
    hours = max(2, 3 * step_seconds // 1_800)
    at = [f"{(hours - 1) * 60 + minutes}m" for minutes in (0, 7, 14, 22, 31, 43, 52)]
    # three failures in three hours are not more than three
    expected = OF_AN_UPDATE - ({"WeightUpdateFailing"} if step_seconds == 3_600 else set())
    many = {series: 10 * amount for series, amount in HEALTHY.items()}
    two = updates(FAILING, step_seconds, hours, 'run="b"') + updates(many, step_seconds, hours, 'run="a"')
    play(
        tmp_path,
        firing("one run without a label", updates(FAILING, step_seconds, hours), expected, at),
        firing("a failing run beside a healthy one ten times its size", two, {f"{name}{{b}}" for name in expected}, at),
        firing("healthy", updates(HEALTHY, step_seconds, hours), (), at),
        every=f"{max(60, step_seconds // 15)}s",
    )


@pytest.mark.slow
@needs_promtool
def test_an_alert_of_an_update_ends_with_the_process_and_with_the_next_good_update(tmp_path: Path) -> None:
    bad = updates(FAILING, 600, 2)
    ended = [{**one, "values": f"{one['values']} _x60"} for one in bad]
    restarted = [{**one, "values": f"{one['values']} 0x60"} for one in bad[:-1]]
    mended = [bad[-1]]
    for series, amount in FAILING.items():
        steps = [11 * amount + HEALTHY[series] * k for k in range(3)]
        mended.append({"series": series, "values": f"0x219 {' '.join(f'{value}x19' for value in steps)}"})
    play(
        tmp_path,
        firing("lasts until its end", ended, OF_AN_UPDATE, ["118m"]),
        firing("ended", ended, ["LearnerMissing"], ["131m"]),
        firing("started again", restarted, (), ["131m"]),
        firing("mended", mended, ["ReplayDropsStale", "SelectionBias"], ["136m"]),  # of half an hour
    )


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("labels", ["", 'run="a",'])
def test_a_crash_loop_is_told_and_does_not_hide_that_nothing_happens(tmp_path: Path, labels: str) -> None:
    """45 s up and 15 s down in each minute, with no update for an hour. The stage measures its age itself."""
    learner, stage = (f'{labels}job="afterplay-{role}",instance="{role}"' for role in ("learner", "replay"))
    series = [
        {"series": f"up{{{learner}}}", "values": " ".join(["1 1 1 0"] * 60)},
        {"series": f"afterplay_learner_updates_total{{{learner}}}", "values": " ".join(["0 0 0 _"] * 60)},
        {"series": f"afterplay_heartbeat_age_seconds{{{learner}}}", "values": " ".join(["0 15 30 _"] * 60)},
        {"series": f"afterplay_heartbeat_limit_seconds{{{learner}}}", "values": "3600x240"},
        {"series": f"up{{{stage}}}", "values": "1x240"},
        {"series": f"afterplay_replay_progress_age_seconds{{{stage}}}", "values": "0+15x240"},
        {"series": f"afterplay_replay_progress_limit_seconds{{{stage}}}", "values": "600x240"},
    ]
    run = "{a}" if labels else ""
    test = firing("crash loop", series, {f"CrashLoop{run}", f"RunStalled{run}"}, ["30m", "30m15s", "30m30s", "30m45s"])
    play(tmp_path, {**test, "interval": "15s"}, every="15s")


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize("skew", [-900, 900])
def test_a_clock_that_is_wrong_by_a_quarter_of_an_hour_changes_nothing(tmp_path: Path, skew: int) -> None:
    """Of the machine of the learner, whose run ends after an hour."""
    start, end = 1_000 + skew, 4_600 + skew
    learner, stage = (f'job="afterplay-{role}",instance="{role}"' for role in ("learner", "replay"))
    series = [
        {"series": f"up{{{learner}}}", "values": "1x121 0x240"},
        {"series": f"up{{{stage}}}", "values": "1x121 0x240"},
        {"series": f"process_start_time_seconds{{{learner}}}", "values": f"{start}x121 _x240"},
        {"series": f"process_start_time_seconds{{{stage}}}", "values": "1000x121 _x240"},
        {"series": f"afterplay_run_finished_timestamp_seconds{{{learner}}}", "values": f"0x119 {end}x1 _x240"},
        {"series": f"afterplay_run_finished_timestamp_seconds{{{stage}}}", "values": "0x119 4600x1 _x240"},
        {"series": f"afterplay_learner_steps_total{{{learner}}}", "values": "0+1x121 _x240"},
        {"series": f"afterplay_learner_checkpoint_age_seconds{{{learner}}}", "values": "0+30x121 _x240"},
        {"series": f"afterplay_learner_checkpoint_limit_seconds{{{learner}}}", "values": "9000x121 _x240"},
        {"series": f'afterplay_role_state{{{learner},state="training"}}', "values": "1x121 _x240"},
        {"series": f"afterplay_heartbeat_age_seconds{{{learner}}}", "values": "5x121 _x240"},
        {"series": f"afterplay_heartbeat_limit_seconds{{{learner}}}", "values": "120x121 _x240"},
    ]
    play(tmp_path, firing("skewed", series, (), ["30m", "59m", "62m", "90m", "170m"]))


def test_replays_are_called_too_far_off_where_the_guard_of_a_run_would_shrink_their_share() -> None:
    assert SIGNALS["replay_ess"]["below"]["warning"] == EssGuardConfig().floor
