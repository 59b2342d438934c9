"""The line of an update for the witness of ``afterplay chaos`` (:mod:`pipeline.runtime.witness`)."""

from __future__ import annotations

from typing import Any

from learner.data.rows import Batch
from learner.training.report import StepReport
from pipeline.runtime.witness import turn_digests


def trained_line(batch: Batch, report: StepReport) -> dict[str, Any]:
    """Groups and trajectories of ``batch``: what the rows hold, and how many of their tokens the optimizer steps had.

    A row whose prompt is not that of the rollout has no digest: its actor saw another one.
    """
    n = len(batch.trajectories)
    in_rows, version_max = [0] * n, [-1] * n
    digests: list[list[str] | None] = [[] for _ in range(n)]
    for row in batch.rows:
        i, sampled = row.trajectory_index, row.loss_mask
        in_rows[i] += row.n_sampled
        version_max[i] = max(version_max[i], int(row.policy_versions[sampled].max()))
        known = digests[i]
        if row.discarded or not row.recorded:
            digests[i] = None
        elif known is not None:
            arrays = row.token_ids, sampled, row.behaviour_logprobs, row.policy_versions, row.turns
            known += turn_digests(*arrays)
    in_loss = [*report.tokens_by_trajectory, *([0] * n)]
    groups, index = [], 0
    for group in batch.groups:
        rollouts = []
        for trajectory in group.trajectories:
            known = digests[index]
            rollouts.append(
                {
                    "id": trajectory.trajectory_id,
                    "replayed": group.is_replayed(trajectory),
                    "reward": trajectory.reward,
                    "environment": trajectory.rewards.get("environment"),
                    "digests": None if known is None else " ".join(known),
                    "version_max": version_max[index],
                    "tokens": in_rows[index],
                    "tokens_in_loss": in_loss[index],
                }
            )
            index += 1
        groups.append({"id": group.group_id, "rollouts": rollouts})
    return {
        "update": report.update,
        "version": report.policy_version,
        "skipped": report.skipped is not None,
        "groups": groups,
    }
