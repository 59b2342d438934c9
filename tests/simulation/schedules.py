"""Seeded schedules of faults: each is another run file, mixture of faults and order of events, checked at its end.

``AFTERPLAY_SCHEDULES`` says how many each file plays; hundreds more were played when these were written.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.config import RunConfig
from tests.support.simulated_roles import Faults
from tests.support.simulation import Simulation

PER_TEST = 10
Found = TypeVar("Found")


def blocks(schedules: int, per_test: int = PER_TEST) -> list[Any]:
    """Numbers of the tests that play so many schedules, unless the environment asks for another number. Only the first
    eighth runs in ``make test``."""
    count = max(1, int(os.environ.get("AFTERPLAY_SCHEDULES", schedules)) // per_test)
    return [pytest.param(i, marks=pytest.mark.slow) if i >= count / 8 else i for i in range(count)]


def play(
    block: int,
    folder: Path,
    config_of: Callable[[random.Random, int], RunConfig],
    check: Callable[[Simulation], Found],
) -> list[Found]:
    """What ``check`` found in each schedule of the block. Every fifth is without faults. Raises
    :class:`AssertionError` that names the schedule."""
    found = []
    for seed in range(block * PER_TEST, (block + 1) * PER_TEST):
        rng = random.Random(seed)
        config = config_of(rng, seed)
        faults = Faults() if seed % 5 == 0 else Faults.drawn(rng, until=200.0)
        path = folder / str(seed) / "replay.sqlite"
        path.parent.mkdir()
        sim = Simulation(config, path, seed, faults, actors=rng.randint(1, 3), slots=rng.randint(1, 8))
        try:
            sim.run()
            found.append(check(sim))
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        finally:
            sim.close()
    return found
