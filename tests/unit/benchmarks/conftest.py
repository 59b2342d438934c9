"""Finished runs of the replay benchmark, made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.replay_efficiency.records import (
    Point,
    Result,
    Training,
)

TRAINING = Training(0.2, 0.9, 0.7, 1.0, 2, 6.5, 1.0)


@pytest.fixture
def run_of():
    """Makes results."""

    def made(arm="on", seed=0, tokens=100, hit=True, **changes):
        points = (Point(0, 0.1, 0, 0.0), Point(5, 0.5, tokens // 2, 4.0), Point(10, 0.9, tokens, 8.0))
        result = Result(arm, seed, "f", ("run.seed=0",), 10, tokens, 8.0, hit, TRAINING, points)
        return replace(result, **changes)

    return made
