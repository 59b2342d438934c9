"""The line of an update for the witness of ``afterplay chaos`` (:mod:`pipeline.runtime.witness`)."""

from __future__ import annotations

from typing import Any

from learner.data.rows import Batch, Row
from learner.training.report import StepReport
from pipeline.runtime.witness import turn_digests


def trained_line(batch: Batch, report: StepReport) -> dict[str, Any]:
    """Groups and trajectories of ``batch``: what the rows hold, and how many of their tokens the optimizer steps had.

    A row whose prompt is not that of the rollout has no digest: its actor saw another one.
    """
    rows_of: list[list[Row]] = [[] for _ in batch.trajectories]
    for row in batch.rows:
        rows_of[row.trajectory_index].append(row)
    in_loss = [*report.tokens_by_trajectory, *([0] * len(rows_of))]
    groups, index = [], 0
    for group in batch.groups:
        rollouts = []
        for trajectory in group.trajectories:
            rows = rows_of[index]
            known = not any(row.discarded or not row.recorded for row in rows)
            rollouts.append(
                {
                    "id": trajectory.trajectory_id,
                    "replayed": group.is_replayed(trajectory),
                    "reward": trajectory.reward,
                    "environment": trajectory.rewards.get("environment"),
                    "digests": " ".join(digest for row in rows for digest in _digests(row)) if known else None,
                    "version_max": max((int(row.policy_versions[row.loss_mask].max()) for row in rows), default=-1),
                    "tokens": sum(row.n_sampled for row in rows),
                    "tokens_in_loss": in_loss[index],
                }
            )
            index += 1
        groups.append({"id": group.group_id, "rollouts": rollouts})
    return {
        "update": report.update,
        "version": report.policy_version,
        "skipped": any(report.nonfinite.values()),
        "groups": groups,
    }


def _digests(row: Row) -> list[str]:
    return turn_digests(row.token_ids, row.loss_mask, row.behaviour_logprobs, row.policy_versions, row.turns)
