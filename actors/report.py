"""What an actor counts about each finished rollout."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Trajectory


def count_trajectory(metrics: ActorMetrics, environments: Collection[str], trajectory: Trajectory) -> None:
    """One terminal event per rollout. An unknown environment is labelled ``unknown``: label sets stay closed."""
    name = trajectory.task.environment
    env = name if name in environments else "unknown"
    metrics.trajectories_total.labels(env=env, outcome=trajectory.status.value).inc()
    if trajectory.failure is not None:
        return
    metrics.episode_duration_seconds.labels(env=env).observe(trajectory.timings.duration_seconds)
    metrics.episode_tokens.labels(env=env).observe(trajectory.n_sampled)
    score = trajectory.rewards.get("environment")
    if score is not None:
        metrics.episode_reward.labels(env=env).observe(score)
    versions = trajectory.version_range()
    if versions is not None:
        metrics.trajectory_span_versions.observe(versions[1] - versions[0])
