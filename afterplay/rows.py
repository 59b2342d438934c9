"""Rollouts as flat rows, for data frames."""

from __future__ import annotations

from typing import Any

from pipeline.cli.viewer.reader import Found
from pipeline.cli.viewer.views import listed_json
from pipeline.scorer.conversation import conversation, reply


def rollout_row(found: Found) -> dict[str, Any]:
    """The facts of one rollout, and its text and sampled tokens where they are kept."""
    row = listed_json(found.listed)
    versions = row.pop("versions") or (None, None)
    failure = row.pop("failure") or {}
    row |= {f"reward_{part}": value for part, value in row.pop("rewards").items()}
    row |= {"version_min": versions[0], "version_max": versions[1], "failure": failure.get("message")}
    trajectory = None if found.transcript is None else found.transcript.trajectory
    if trajectory is None or not trajectory.turns:
        return {**row, "messages": None, "reply": None, "sampled_ids": None}
    return {
        **row,
        "messages": [{"role": m.role, "content": m.content} for m in conversation(trajectory)],
        "reply": reply(trajectory),
        "sampled_ids": [turn.completion.token_ids.tolist() for turn in trajectory.turns],
    }
