"""A forecast against the real stage in virtual time: with the same rollouts, the same staleness of each."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.schema import Order
from pipeline.stage import engine_watch
from pipeline.stage.staleness import StalenessRule
from pipeline.store.queries import GroupTimes, Span, order_times
from pipeline.store.records import parse_group_id
from pipeline.supervisor.forecast import play
from tests.support.simulated_roles import Faults, SimulatedActor, SimulatedLearner
from tests.support.simulation import Simulation

STEPS, ACTORS, SLOTS, N_ROLLOUT = 12, 2, 5, 3
UPDATE_SECONDS, PUBLISH_SECONDS = 4000.0, 1500.0
"""Times are so long that the simulation's delays of seconds change the order of no events."""


def seconds_of(group: int, slot: int) -> float:
    return random.Random(f"{group} {slot}").lognormvariate(7.5, 1.0)


class Actor(SimulatedActor):
    """Takes a given time for each order, and notes the version that it begins with."""

    def seconds_of(self, order: Order) -> float:
        self.sim.begun[order.order_id] = order.policy_version
        group = parse_group_id(order.group_id)
        assert group is not None
        return seconds_of(group, order.slot)


class Learner(SimulatedLearner):
    """Takes the same time for each update and each publication."""

    def update_seconds(self) -> float:
        self.sim.ends.append(self.sim.now + UPDATE_SECONDS)
        return UPDATE_SECONDS

    def publish_seconds(self) -> float:
        return PUBLISH_SECONDS


class Timed(Simulation):
    actor_kind, learner_kind = Actor, Learner

    def __init__(self, *arguments, **named) -> None:
        self.begun: dict[str, int] = {}
        self.ends: list[float] = []
        super().__init__(*arguments, **named)

    def _mischief(self) -> None:
        """Nothing goes wrong, and no time is lost on asking each second."""


@pytest.mark.parametrize(("bound", "groups_per_step"), [(0, 2), (1, 2), (1, 4), (2, 1), (3, 3)])
def test_forecast_is_what_the_real_stage_does(
    bound: int, groups_per_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_watch, "SILENT_SECONDS", 1e9)  # simulated actors watch no engines
    config = RunConfig.model_validate(
        {
            "run": {"total_steps": STEPS},
            "groups": {"n_rollout": N_ROLLOUT, "groups_per_step": groups_per_step},
            "staleness": {"max": bound},
            "environments": {"a": {"max_seconds": 1e6}},
        }
    )
    sim = Timed(config, tmp_path / "store.sqlite", bound, Faults(), ACTORS, SLOTS)
    sim.learner.credit = 2 * groups_per_step
    try:
        sim.run(seconds_max=1e9)
    finally:
        sim.close()
    first = min(parse_group_id(order.split(".")[0]) or 0 for order in sim.begun)
    groups = (GroupTimes(tuple(seconds_of(g, i) for i in range(N_ROLLOUT))) for g in itertools.count(first))
    rule, whole = StalenessRule(bound, groups_per_step), STEPS - bound  # the last updates have no younger groups
    found, staleness = play(rule, ACTORS * SLOTS, groups, itertools.repeat(UPDATE_SECONDS), PUBLISH_SECONDS, whole)
    seen = [sorted(u - sim.begun[t] for t in ids) for u, (_, ids) in enumerate(sim.learner.weights.history)]
    assert [sorted(ages) for ages in staleness] == seen[:whole]
    real = (sim.ends[whole - 1] - sim.ends[bound]) / (whole - bound - 1)
    assert found.update_seconds == pytest.approx(real, rel=1e-3)
    times, busy = order_times(sim.path, Span(0, STEPS - 1), [(0.0, sim.now)])
    assert [t.seconds for t in times] == [
        pytest.approx([seconds_of(g, i) for i in range(N_ROLLOUT)], abs=1) for g in range(first, first + len(times))
    ]
    assert len(times) == STEPS * groups_per_step and all(t.trained for t in times)
    assert busy == pytest.approx(sum(sum(t.seconds) for t in times))
