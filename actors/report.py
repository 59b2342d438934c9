"""What an actor counts about each finished rollout."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Trajectory


def count_trajectory(
    metrics: ActorMetrics,
    environments: Collection[str],
    trajectory: Trajectory,
    lessons: bool = False,
    *,
    evaluation: bool = False,
) -> None:
    """One terminal event per rollout. An unknown environment is labelled ``unknown``: label sets stay closed.

    ``lessons``: whether they are on, so that guided and other episodes are compared. ``evaluation``: what it says
    of a policy (reward, tokens, versions) is not of training, and is left out here; what it cost is counted."""
    name = trajectory.task.environment
    env = name if name in environments else "unknown"
    metrics.trajectories_total.labels(env=env, outcome=trajectory.status.value).inc()
    if trajectory.failure is not None:
        return
    metrics.episode_duration_seconds.labels(env=env).observe(trajectory.timings.duration_seconds)
    if evaluation:
        return
    metrics.episode_tokens.labels(env=env).observe(trajectory.n_sampled)
    score = trajectory.rewards.get("environment")
    if score is not None:
        metrics.episode_reward.labels(env=env).observe(score)
        if lessons:
            metrics.guidance_reward.labels(guided="no" if trajectory.guidance is None else "yes").observe(score)
    if trajectory.guidance is not None:
        metrics.guided_episodes_total.labels(train="keep" if trajectory.guidance.keep else "discard").inc()
    versions = trajectory.version_range()
    if versions is not None:
        metrics.trajectory_span_versions.observe(versions[1] - versions[0])
