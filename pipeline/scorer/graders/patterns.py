"""``regex``: in a worker process, because a pattern may take for ever on what a policy says."""

from __future__ import annotations

import re

from pipeline.schema import Trajectory
from pipeline.scorer.graders.answers import given, payload_value


def regex(trajectory: Trajectory, pattern: str | None = None, after: str | None = None, whole: bool = False) -> float:
    """The pattern (of the options, else ``pattern`` of the payload) is found in the reply; ``whole``: is all of it,
    white space around it aside."""
    compiled = re.compile(pattern if pattern is not None else str(payload_value(trajectory, "pattern")))
    said = given(trajectory, after).strip()
    return float((compiled.fullmatch(said) if whole else compiled.search(said)) is not None)
