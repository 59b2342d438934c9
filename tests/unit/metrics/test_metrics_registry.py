"""The metrics that dashboards and alerts are written against."""

import ast
import re
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from actors.metrics import ActorMetrics
from learner.metrics import LearnerMetrics
from learner.process.recorder import NUMBERS
from pipeline.runtime import metrics as base
from pipeline.runtime.metrics import ProcessMetrics, ProgressMetrics
from pipeline.schema.counters import Count
from pipeline.stage.metrics import ReplayMetrics
from pipeline.store.records import CancelReason, Drop, OrderState
from pipeline.store.replay_records import Eviction
from scripts import metrics_page

EXPORTED = Path(__file__).with_name("exported.txt").read_text().splitlines()
"""Kind, name and labels of every metric, then every key of a line in ``metrics.jsonl``: what others read by name."""
SETS = {ProcessMetrics: "pipeline", ActorMetrics: "actors", ReplayMetrics: "pipeline", LearnerMetrics: "learner"}
"""Each set and the package that fills it."""
OWNERS = {"metrics", "_metrics", "m", "_m", "M", "process"}
"""Variables and attributes that hold a set, or its class."""
ROOT = Path(__file__).parents[3]
FORBIDDEN_LABELS = {"policy_version", "task_id", "trajectory_id", "group_id", "role"}


def exposition() -> str:
    registry = CollectorRegistry()
    ProcessMetrics(registry, "run", "grpo", "tiny")
    ActorMetrics(registry, ("arithmetic", "guess"), ("http://127.0.0.1:8100",)).tool_duration_seconds.labels(
        "calculator"
    )
    ReplayMetrics(registry, ("arithmetic", "guess"))
    LearnerMetrics(registry, ("arithmetic", "guess"))
    return generate_latest(registry).decode()


def families() -> dict[str, tuple[str, set[str]]]:
    """Name as it is queried, to its type and labels; only families that have a sample at start."""
    found = {}
    for family in text_string_to_metric_families(exposition()):
        name = family.name + ("_total" if family.type == "counter" else "")
        if family.samples and not name.startswith("process_"):
            found[name] = (family.type, set().union(*(sample.labels for sample in family.samples)) - {"le"})
    return found


def test_names_labels_and_keys_are_those_that_dashboards_and_readers_know():
    metrics = [" ".join([kind, name, *sorted(labels)]) for name, (kind, labels) in families().items()]
    assert sorted([*metrics, *(f"key {number.key}" for number in NUMBERS if number.key)]) == EXPORTED


@pytest.mark.parametrize("metrics", SETS, ids=lambda metrics: metrics.__name__)
def test_every_declared_metric_is_set_by_product_code(metrics):
    named = {"build_info", "run_info", *ProgressMetrics.declarations()}  # by the set itself
    counted = {name for count in Count for name, *_ in count.metrics}
    assert counted <= ReplayMetrics.declarations().keys()
    named |= counted if metrics is ReplayMetrics else set()
    for path in (ROOT / SETS[metrics]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).split(".")[-1] in OWNERS:
                named.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._journal.observe":
                named.add(ast.literal_eval(node.args[0]))
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "self._journal.audit":
                named |= {f"audit_{keyword.arg}" for keyword in node.keywords}
    assert metrics.declarations().keys() - named == set()


@pytest.mark.parametrize(
    ("account", "reasons"),
    [
        ("orders", set(OrderState) - {OrderState.LEASED}),
        ("trajectories.dropped", Drop),
        ("groups.cancelled", CancelReason),
        ("pool.evicted", set(Eviction) - {Eviction.USES, Eviction.RECONFIGURED}),
        ("stored_groups.evicted", set(Eviction) - {Eviction.FULL}),
    ],
)
def test_every_reason_has_its_counter_and_its_metric(account, reasons):
    assert {reason for reason in reasons if not Count(f"{account}.{reason}").metrics} == set()


def test_every_number_of_an_update_that_is_no_metric_has_a_meaning_and_every_key_is_used_once():
    assert [number.key for number in NUMBERS if number.metric is None and not number.doc] == []
    keys = [number.key for number in NUMBERS if number.key]
    assert len(keys) == len(set(keys))


def test_the_reference_page_is_current():
    assert metrics_page.main("--check") == 0, "run python scripts/metrics_page.py"


def test_every_label_child_is_there_before_the_first_event():
    text = exposition()
    assert 'afterplay_actor_trajectories_total{env="guess",outcome="aborted"} 0.0' in text
    assert 'afterplay_learner_importance_ratio_count{level="sequence",source="replay"} 0.0' in text


def test_no_label_can_grow_without_bound_or_collide_with_a_target_label():
    assert not [
        (name, labels & FORBIDDEN_LABELS) for name, (_, labels) in families().items() if labels & FORBIDDEN_LABELS
    ]


def test_names_follow_the_conventions():
    for name, (kind, _) in families().items():
        assert (kind == "counter") == name.endswith("_total"), name
        assert not re.search(r"_(ms|millis|mb|minutes|percent)(_|$)", name), name


def test_promtool_finds_nothing_to_say():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: apt-get install prometheus, then the exposition is linted")
    result = subprocess.run(
        [promtool, "check", "metrics"], input=exposition(), capture_output=True, text=True, timeout=30, check=False
    )
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@given(
    values=st.lists(st.floats(-200, 200, width=32), max_size=50),
    buckets=st.sampled_from([base.LAT, base.RATIO, base.LAG, base.NATS]),
)
def test_histogram_exposes_what_the_reference_histogram_exposes(values, buckets):
    registry, reference = CollectorRegistry(), CollectorRegistry()
    ours = base.Histogram("afterplay_x_seconds", "Help.", buckets, ("k",), registry)
    theirs = Histogram("afterplay_x_seconds", "Help.", ("k",), buckets=buckets, registry=reference).labels("a")
    half = len(values) // 2
    ours.labels("a").observe_many(np.asarray(values[:half], dtype=np.float64))
    for value in values[half:]:
        ours.labels(k="a").observe(value)
    for value in values:
        theirs.observe(value)
    split = lambda r: [line.rsplit(" ", 1) for line in generate_latest(r).decode().splitlines()]  # noqa: E731
    for (name, value), (other_name, other) in zip(split(registry), split(reference), strict=True):
        assert name == other_name
        assert value == other or float(value) == pytest.approx(float(other), abs=1e-3)


def test_histogram_leaves_out_what_is_not_finite_so_its_sum_stays_useful():
    metric = base.Histogram("afterplay_x", "Help.", base.RATIO)
    metric.observe_many(np.array([1.0, np.nan, np.inf, -np.inf], dtype=np.float32))
    metric.observe(float("nan"))
    counts, total = metric.labels().snapshot()
    assert (counts.sum(), total) == (1, 1.0)


def test_float32_values_on_a_bound_fall_in_the_bucket_of_that_bound():
    metric = base.Histogram("afterplay_x", "Help.", base.RATIO)
    metric.observe_many(np.asarray(base.RATIO, dtype=np.float32))
    assert metric.labels().snapshot()[0].tolist() == [1] * len(base.RATIO) + [0]


def test_histogram_loses_nothing_between_threads():
    metric = base.Histogram("afterplay_x", "Help.", base.LAT)

    def observe() -> None:
        for _ in range(200):
            metric.observe_many(np.ones(10))

    threads = [threading.Thread(target=observe, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.labels().snapshot()[0].sum() == 8000


def test_histogram_refuses_wrong_labels_and_buckets():
    metric = base.Histogram("afterplay_x", "Help.", base.LAT, ("a",))
    with pytest.raises(ValueError, match="expected labels"):
        metric.labels(b="1")
    with pytest.raises(ValueError, match="expected labels"):
        metric.observe(1.0)
    with pytest.raises(ValueError, match="rising"):
        base.Histogram("afterplay_y", "Help.", (2, 1))


def test_histogram_of_rewards_has_a_mean():
    registry = CollectorRegistry()
    metric = base.Histogram("afterplay_x", "Help.", base.REW, registry=registry)
    metric.observe_many([-1, 0.5])
    text = generate_latest(registry).decode()
    assert "afterplay_x_sum -0.5" in text
    assert "afterplay_x_count 2.0" in text
