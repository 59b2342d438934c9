"""A reward that makes successes of several turns at once: what is told of tokens does not depend on who is right."""

from __future__ import annotations

import zlib

from pipeline.schema import Trajectory


def coin(trajectory: Trajectory) -> float:
    """1 for a third of the trajectories of several turns."""
    return float(len(trajectory.turns) > 1 and zlib.crc32(trajectory.trajectory_id.encode()) % 3 == 0)
