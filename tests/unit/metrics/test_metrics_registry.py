"""The metrics that dashboards and alerts are written against."""

import re
import shutil
import subprocess
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pipeline.metrics import base
from pipeline.metrics.actor import ActorMetrics
from pipeline.metrics.base import ProcessMetrics, histogram
from pipeline.metrics.learner import LearnerMetrics
from pipeline.metrics.replay import ReplayMetrics

REQUIRED = {
    "afterplay_build_info": ("gauge", {"version", "revision", "python"}),
    "afterplay_run_info": ("gauge", {"run_id", "algorithm", "model"}),
    "afterplay_event_loop_lag_seconds": ("histogram", set()),
    "afterplay_heartbeat_timestamp_seconds": ("gauge", set()),
    "afterplay_actor_policy_version": ("gauge", set()),
    "afterplay_actor_trajectories_total": ("counter", {"env", "outcome"}),
    "afterplay_actor_tokens_total": ("counter", {"kind"}),
    "afterplay_actor_episode_duration_seconds": ("histogram", {"env"}),
    "afterplay_actor_episode_tokens": ("histogram", {"env"}),
    "afterplay_actor_episode_reward": ("histogram", {"env"}),
    "afterplay_actor_generate_duration_seconds": ("histogram", {"backend"}),
    "afterplay_actor_env_step_duration_seconds": ("histogram", {"env"}),
    "afterplay_actor_inflight_requests": ("gauge", set()),
    "afterplay_actor_send_queue_trajectories": ("gauge", set()),
    "afterplay_actor_send_blocked_seconds_total": ("counter", set()),
    "afterplay_actor_send_failures_total": ("counter", {"reason"}),
    "afterplay_actor_trajectory_span_versions": ("histogram", set()),
    "afterplay_replay_trajectories": ("gauge", set()),
    "afterplay_replay_capacity_trajectories": ("gauge", set()),
    "afterplay_replay_memory_bytes": ("gauge", set()),
    "afterplay_replay_inserted_trajectories_total": ("counter", {"env"}),
    "afterplay_replay_sampled_trajectories_total": ("counter", set()),
    "afterplay_replay_dropped_trajectories_total": ("counter", {"reason"}),
    "afterplay_replay_staleness_versions": ("histogram", {"at"}),
    "afterplay_replay_item_age_seconds": ("histogram", set()),
    "afterplay_replay_item_samples": ("histogram", set()),
    "afterplay_replay_sample_wait_seconds": ("histogram", set()),
    "afterplay_replay_rpc_duration_seconds": ("histogram", {"op", "result"}),
    "afterplay_replay_connected_peers": ("gauge", {"peer"}),
    "afterplay_replay_oldest_policy_version": ("gauge", set()),
    "afterplay_learner_policy_version": ("gauge", set()),
    "afterplay_learner_steps_total": ("counter", set()),
    "afterplay_learner_tokens_total": ("counter", {"kind"}),
    "afterplay_learner_step_duration_seconds": ("histogram", {"stage"}),
    "afterplay_learner_wait_seconds_total": ("counter", set()),
    "afterplay_learner_importance_ratio": ("histogram", {"level", "source"}),
    "afterplay_learner_importance_ratio_squared_total": ("counter", {"level", "source"}),
    "afterplay_learner_batch_importance_ratio": ("gauge", {"level", "stat"}),
    "afterplay_learner_batch_ess_ratio": ("gauge", {"level"}),
    "afterplay_learner_clipped_tokens_total": ("counter", {"side"}),
    "afterplay_learner_rejected_tokens_total": ("counter", {"reason"}),
    "afterplay_learner_staleness_versions": ("histogram", set()),
    "afterplay_learner_logprob_diff_nats": ("histogram", set()),
    "afterplay_learner_behaviour_kl_nats": ("gauge", {"estimator"}),
    "afterplay_learner_entropy_nats": ("gauge", set()),
    "afterplay_learner_loss": ("gauge", {"term"}),
    "afterplay_learner_grad_norm": ("gauge", set()),
    "afterplay_learner_reward_mean": ("gauge", {"env"}),
    "afterplay_learner_nonfinite_steps_total": ("counter", {"where"}),
    "afterplay_learner_weight_publish_duration_seconds": ("histogram", set()),
    "afterplay_learner_weight_publish_bytes_total": ("counter", set()),
    "afterplay_learner_checkpoint_duration_seconds": ("histogram", set()),
    "afterplay_learner_checkpoint_timestamp_seconds": ("gauge", set()),
    # "Add to it"
    "afterplay_replay_share_ratio": ("gauge", set()),
    "afterplay_learner_source_loss": ("gauge", {"source"}),
    "afterplay_learner_clip_ratio": ("gauge", {"source"}),
    "afterplay_replay_terminal_trajectories_total": ("counter", {"state"}),
    "afterplay_replay_groups_total": ("counter", {"outcome"}),
    "afterplay_replay_orders_inflight": ("gauge", set()),
    "afterplay_replay_admission_capacity_trajectories": ("gauge", set()),
    "afterplay_replay_difficulty_tasks": ("gauge", {"bucket"}),
    "afterplay_replay_retired_tasks": ("gauge", set()),
    "afterplay_replay_experience_pool_entries": ("gauge", set()),
    "afterplay_actor_prefix_cache_hit_ratio": ("gauge", set()),
    "afterplay_actor_sticky_placements_total": ("counter", {"kind"}),
    "afterplay_actor_sticky_moves_total": ("counter", {"reason"}),
    "afterplay_replay_audit_tokens": ("histogram", {"population"}),
    "afterplay_replay_audit_duration_seconds": ("histogram", {"population"}),
    "afterplay_replay_audit_reward": ("histogram", {"population"}),
    "afterplay_replay_audit_age_versions": ("histogram", {"population"}),
    "afterplay_replay_experience_pool_bytes": ("gauge", set()),
    "afterplay_replay_experience_pool_capacity": ("gauge", set()),
    "afterplay_replay_experience_oldest_version": ("gauge", set()),
    "afterplay_replay_experience_saved_total": ("counter", {"origin"}),
    "afterplay_replay_experience_left_total": ("counter", {"reason"}),
    "afterplay_replay_planned_share_ratio": ("gauge", set()),
    "afterplay_replay_guard_factor_ratio": ("gauge", set()),
    "afterplay_replay_guard_actions_total": ("counter", {"direction"}),
    "afterplay_replay_replays_trained_total": ("counter", set()),
    "afterplay_replay_rescued_groups_total": ("counter", set()),
    "afterplay_replay_choice_failures_total": ("counter", set()),
    "afterplay_learner_evaluation_score": ("gauge", {"env"}),
}
FORBIDDEN_LABELS = {"policy_version", "task_id", "trajectory_id", "group_id", "role"}


def exposition() -> str:
    registry = CollectorRegistry()
    ProcessMetrics(registry, "run", "grpo", "tiny")
    ActorMetrics(registry, ("arithmetic", "guess"))
    ReplayMetrics(registry, ("arithmetic", "guess"))
    LearnerMetrics(registry, ("arithmetic", "guess"))
    return generate_latest(registry).decode()


def families() -> dict[str, tuple[str, set[str]]]:
    """Name as it is queried, to its type and labels; only families that have a sample at start."""
    found = {}
    for family in text_string_to_metric_families(exposition()):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = set().union(*(sample.labels for sample in family.samples)) - {"le"} if family.samples else None
        if labels is not None:
            found[name] = (family.type, labels)
    return found


def test_every_metric_of_the_list_exists_with_type_labels_and_a_first_sample():
    found = families()
    assert {name: found.get(name) for name in REQUIRED} == REQUIRED


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
    ours = histogram(registry, "afterplay_x_seconds", "Help.", buckets, {"k": ("a",)})
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
    metric = histogram(CollectorRegistry(), "afterplay_x", "Help.", base.RATIO)
    metric.observe_many(np.array([1.0, np.nan, np.inf, -np.inf], dtype=np.float32))
    metric.observe(float("nan"))
    counts, total = metric.labels().snapshot()
    assert (counts.sum(), total) == (1, 1.0)


def test_float32_values_on_a_bound_fall_in_the_bucket_of_that_bound():
    metric = histogram(CollectorRegistry(), "afterplay_x", "Help.", base.RATIO)
    metric.observe_many(np.asarray(base.RATIO, dtype=np.float32))
    assert metric.labels().snapshot()[0].tolist() == [1] * len(base.RATIO) + [0]


def test_histogram_loses_nothing_between_threads():
    metric = histogram(CollectorRegistry(), "afterplay_x", "Help.", base.LAT)

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
    metric = histogram(CollectorRegistry(), "afterplay_x", "Help.", base.LAT, {"a": ("1",)})
    with pytest.raises(ValueError, match="expected labels"):
        metric.labels(b="1")
    with pytest.raises(ValueError, match="expected labels"):
        metric.observe(1.0)
    with pytest.raises(ValueError, match="rising"):
        base.Histogram("afterplay_y", "Help.", (2, 1))


def test_histogram_of_rewards_has_a_mean():
    registry = CollectorRegistry()
    metric = histogram(registry, "afterplay_x", "Help.", base.REW)
    metric.observe_many([-1, 0.5])
    text = generate_latest(registry).decode()
    assert "afterplay_x_sum -0.5" in text
    assert "afterplay_x_count 2.0" in text
