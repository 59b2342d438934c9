from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.schema import FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn


def said(reply: str, number: int = 0, environment: str = "q", asked: str = "What?", **payload: Any) -> Trajectory:
    """A trajectory of one turn whose task has ``payload``."""
    turn = Turn(
        TokenSpan.context(np.array([1, 2], np.int32)),
        TokenSpan.sampled(np.array([3], np.int32), np.array([-0.5], np.float32), 0),
        (Message("user", asked),),
        Message("assistant", reply),
        FinishReason.STOP,
        1.0,
    )
    task = Task(f"{environment}/{number}", environment, number, payload)
    return Trajectory(
        f"g000000.{number}.0", "g000000", task, (turn,), TrajectoryStatus.COMPLETE, rewards={"environment": 0.0}
    )
