"""Seeded schedules of faults: each is another run file, mixture of faults and order of events, checked at its end.

``AFTERPLAY_SCHEDULES`` says how many each file plays; hundreds more were played when these were written.
"""

from __future__ import annotations

import os
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pipeline.config import RunConfig
from pipeline.store.ledger import Ledger, read_ledger
from tests.support.simulated_roles import Faults
from tests.support.simulation import Simulation

PER_TEST = 10
Found = TypeVar("Found")


def blocks(schedules: int, per_test: int = PER_TEST) -> list[Any]:
    """Numbers of the tests that play so many schedules, unless the environment asks for another number. Only the first
    eighth runs in ``make test``."""
    count = max(1, int(os.environ.get("AFTERPLAY_SCHEDULES", schedules)) // per_test)
    return [pytest.param(i, marks=pytest.mark.slow) if i >= count / 8 else i for i in range(count)]


def ledger_at_the_end(sim: Simulation) -> Ledger:
    """The accounts of a stage that made all its updates. They add up, nothing is under way, no peer was refused, and
    the store has exactly the payloads that somebody needs."""
    updates = sim.learner.weights.updates
    assert updates == sim.config.run.total_steps, f"no progress: {updates} updates at {sim.now:.0f} s"
    assert not any(peer.refused for peer in sim.peers), [peer.refused for peer in sim.peers]
    with sqlite3.connect(sim.path) as connection:
        ids = [row[0] for row in connection.execute("SELECT trajectory_id FROM trajectories")]
        payloads = {row[0] for row in connection.execute("SELECT row_id FROM payloads")}
    connection.close()
    assert len(ids) == len(set(ids))
    assert sim.core is not None and payloads == sim.core.payloads.holders.keys()
    ledger = read_ledger(sim.path, rows=True)
    assert ledger.audit() == []
    assert ledger.trajectories.get("held", 0) == 0 and ledger.orders["in_flight"] == 0, ledger
    return ledger


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
        replay = config.replay.model_copy(update={"keep_trained": seed % 3})
        config = config.model_copy(update={"replay": replay})
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
