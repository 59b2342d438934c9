"""The real router before simulated engines: no conversation is lost, and groups are not slower than by simple rules.

Long tables: ``python -m benchmarks.routing``."""

from __future__ import annotations

from dataclasses import replace

import pytest

from actors.engine.base import EngineReport
from benchmarks.routing.__main__ import WORKLOADS, play, simulate
from benchmarks.routing.conversations import coding, synthetic
from benchmarks.routing.simulation import Costs, Fixed, Result, Routed, Rule, Simulation
from tests.support.routing import in_flight

COSTS = Costs(first=0.04, each=0.002, prompt=0.001, batch_max=64, kv_tokens=46_000)
ACTORS, GROUPS, SEEDS = 2, 8, (0, 1)


def rules_of(kind: str, seed: int) -> list[Rule]:
    if kind == "router":
        return [Routed(4, 10 * seed + actor) for actor in range(ACTORS)]
    return [Fixed(kind, 4, 10 * seed + actor) for actor in range(ACTORS)]


def played(
    kind: str,
    seed: int,
    slow: float = 1.0,
    *,
    costs: Costs = COSTS,
    groups: int = GROUPS,
    concurrency: int = 32,
    concurrency_min: int | None = None,
) -> tuple[Simulation, Result]:
    simulation = Simulation(
        synthetic(groups, seed, 0.1),
        [costs] * 3 + [costs.slower(slow)],
        rules_of(kind, seed),
        concurrency=concurrency,
        concurrency_min=concurrency_min,
        update_seconds=100.0,
        seed=seed,
    )
    return simulation, simulation.run()


@pytest.mark.parametrize("seed", SEEDS)
def test_every_turn_is_played_and_nothing_is_left_at_routers_or_engines(seed: int) -> None:
    groups = synthetic(GROUPS, seed, 0.1)
    for slow in (1.0, 4.0):
        simulation, result = played("router", seed, slow)
        assert len(result.groups) == GROUPS
        assert result.turns == sum(len(rollout) for group in groups for rollout in group)
        assert not any(engine.in_flight for engine in simulation.engines)
        for rule in simulation.rules:
            assert isinstance(rule, Routed)
            assert in_flight(rule.router) == len(rule.router.sessions) == 0


def test_groups_are_not_slower_than_by_hashing_or_by_the_fewest_requests_of_each_turn() -> None:
    for slow, hashing, least in ((1.0, 1.05, 1.0), (4.0, 0.7, 1.0)):
        mean = {
            kind: sum(played(kind, seed, slow)[1].mean for seed in SEEDS) for kind in ("hashing", "least", "router")
        }
        assert mean["router"] < hashing * mean["hashing"] and mean["router"] < least * mean["least"], (slow, mean)


def test_one_slow_engine_of_four_makes_the_tail_of_groups_at_most_1_3_times_as_long() -> None:
    tails = {slow: sum(played("router", seed, slow)[1].quantile(0.9) for seed in SEEDS) for slow in (1.0, 2.0)}
    assert tails[2.0] <= 1.3 * tails[1.0], tails


@pytest.mark.parametrize("name", ["steady", "guess"])
def test_recorded_conversations_of_short_turns_stay_and_a_slow_engine_makes_their_tail_at_most_1_3_times_as_long(
    name: str,
) -> None:
    workload = next(w for w in WORKLOADS if w.name == name)
    equal, sticky = play(workload, "router", 1.0, 0), play(workload, "sticky", 1.0, 0)
    assert equal["p90"] <= 1.05 * sticky["p90"] and equal["hits"] >= 0.9 * sticky["hits"]
    assert equal["moves_per_turn"] < 0.03
    for slow in (2.0, 4.0):
        assert play(workload, "router", slow, 0)["p90"] <= 1.3 * equal["p90"], slow


def test_one_engine_of_four_at_a_third_of_the_speed_makes_the_tail_of_coding_agents_at_most_1_3_times_as_long() -> None:
    workload = next(w for w in WORKLOADS if w.name == "coding")
    tails = {}
    for slow in (1.0, 3.0):
        rollouts = sorted(t for seed in SEEDS for t in simulate(workload, "router", slow, seed).rollouts)
        tails[slow] = rollouts[int(0.99 * len(rollouts))]
    assert tails[3.0] <= 1.3 * tails[1.0], tails


def test_coding_agents_have_the_turns_and_the_prompts_of_published_trajectories() -> None:
    rollouts = [rollout for group in coding(60, 7) for rollout in group]
    assert sum(map(len, rollouts)) / len(rollouts) == pytest.approx(64.3, rel=0.1)
    assert max(map(len, rollouts)) == 100
    deepest = [sum(t.prompt + t.sampled for t in rollout) - rollout[-1].sampled for rollout in rollouts]
    assert sum(deepest) / len(deepest) == pytest.approx(27_000, rel=0.1)


def test_adaptive_concurrency_loses_fewer_prefixes_than_too_many_episodes_and_is_as_fast() -> None:
    small = replace(COSTS, kv_tokens=6000)
    constant = played("router", 0, costs=small, groups=40, concurrency=256)[1]
    adaptive = played("router", 0, costs=small, groups=40, concurrency=256, concurrency_min=16)[1]
    assert min(adaptive.concurrency) >= 16 // ACTORS and max(adaptive.concurrency) <= 256 // ACTORS
    assert adaptive.hits > 1.2 * constant.hits
    assert adaptive.seconds < constant.seconds and adaptive.mean < constant.mean


def test_many_actors_that_see_the_same_loads_do_not_all_choose_the_same_engine() -> None:
    actors, engines, each = 96, 16, 2
    rules = [Routed(engines, actor, shared=True) for actor in range(actors)]
    for wave in range(each):
        placed = [int(rule.place(f"{wave}", 1000, 1.0).engine) for rule in rules]
        most = max(map(placed.count, range(engines)))
        assert most <= 3 * actors / engines, f"wave {wave}: {most} of {actors} at one engine"
        for rule in rules:
            for engine in range(engines):
                rule.reported(engine, EngineReport(running=10.0 + engine), rule.asks(engine), 1.0)
