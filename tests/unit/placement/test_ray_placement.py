"""Placement groups from plans: what Ray reserves is what the plan gave, and no GPU is reserved twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from pipeline.config import RunConfig
from pipeline.launchers.ray_placement import PlacementGroup, describe, lacking, placement_groups
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from tests.unit.placement.test_plan import INVENTORIES, changed, nodes, run_files


def groups_of(config: RunConfig, inventory: Inventory) -> dict[str, PlacementGroup]:
    found = placement_groups(plan(config, inventory).fitting().places, inventory.nodes)
    return {group.name: group for group in found}


def on_cpus(*cpus: int) -> Inventory:
    return Inventory(tuple(Node(f"n{i}", cpus=n, address=f"10.0.0.{i}") for i, n in enumerate(cpus)))


EMBEDDED = RunConfig.model_validate({"engine": {"kind": "embedded", "replicas": 2, "threads": 1}})


@settings(max_examples=100, deadline=None)
@given(run_files(), INVENTORIES)
def test_every_place_has_one_seat_and_no_gpu_is_reserved_twice(config: RunConfig, inventory: Inventory) -> None:
    places = plan(config, inventory).places
    groups = placement_groups(places, inventory.nodes)
    bundles = [bundle for group in groups for bundle in group.bundles]
    assert sorted(seat.place.name for bundle in bundles for seat in bundle.seats) == sorted(p.name for p in places)
    gpus = {(place.node, gpu) for place in places for gpu in place.gpus}
    assert sum(bundle.resources.get("GPU", 0) for bundle in bundles) == len(gpus)
    for bundle in bundles:
        assert sum(seat.gpus for seat in bundle.seats) == pytest.approx(bundle.resources.get("GPU", 0))
        assert sum(seat.cpus for seat in bundle.seats) == bundle.resources.get("CPU", 0)


def test_the_learner_is_packed_and_engines_and_actors_are_spread_with_a_bundle_each() -> None:
    sections: dict[str, Any] = {
        "placement": {"learner_gpus": 4, "engine_gpus": 4, "tensor_parallel": 2},
        "engine": {"weight_transfer": "files"},
        "actor": {"replicas": 3},
    }
    groups = groups_of(changed(**sections), nodes(4, 4))
    assert {name: (group.strategy, len(group.bundles)) for name, group in groups.items()} == {
        "replay": ("PACK", 1),
        "learner": ("PACK", 1),
        "engine": ("SPREAD", 2),
        "actor": ("SPREAD", 3),
    }
    assert [bundle.resources["GPU"] for bundle in groups["engine"].bundles] == [2, 2]
    assert groups["learner"].bundles[0].resources["GPU"] == 4
    assert next(iter(groups)) == "replay", "what can only be on one node is reserved first"


def test_ranks_on_two_nodes_are_two_bundles_of_one_group() -> None:
    config = changed(placement={"learner_gpus": 6, "engine_gpus": 2}, engine={"weight_transfer": "files"})
    assert [b.resources["GPU"] for b in groups_of(config, nodes(4, 4))["learner"].bundles] == [4, 2]


def test_the_replay_stage_is_on_the_node_with_its_disk() -> None:
    replay = groups_of(EMBEDDED, on_cpus(8, 8))["replay"]
    (bundle,) = replay.bundles
    assert bundle.resources == {"CPU": 2, "node:10.0.0.0": 0.001}
    assert [seat.place.name for seat in bundle.seats] == ["prepare", "replay"]


def test_processes_that_share_a_gpu_share_a_bundle() -> None:
    config = changed(engine={"colocate": "split", "weight_transfer": "files"}, placement={
        "engine_gpus": None, "learner_gpus": None})  # fmt: skip
    groups = groups_of(config, nodes(2))
    assert "engine" not in groups
    (bundle,) = groups["learner"].bundles
    assert {seat.place.name: seat.gpus for seat in bundle.seats} == {"learner": 0.5, "engine-0": 0.5}
    assert (bundle.resources["GPU"], bundle.resources["node:10.0.0.0"]) == (1, 0.001), "their address is fixed"


def test_several_gpus_that_processes_share_are_one_bundle_and_refused() -> None:
    shared = {"engine": {"colocate": "sleep", "weight_transfer": "files"}, "learner": {"offload": True}}
    groups = groups_of(changed(**shared, placement={"engine_gpus": "auto", "learner_gpus": "auto"}), nodes(2))
    (bundle,) = groups["learner"].bundles
    assert bundle.resources["GPU"] == 2 and len(bundle.seats) == 3
    assert "learner and engine-0 and engine-1 would share several" in lacking(groups.values(), nodes(2).nodes)


def test_a_cluster_that_is_too_small_gets_one_sentence_and_a_large_one_none() -> None:
    places = plan(EMBEDDED, on_cpus(4)).places
    groups = placement_groups(places, on_cpus(4).nodes)
    assert lacking(groups, on_cpus(4, 4).nodes) == ""
    assert lacking(groups, on_cpus(4).nodes).startswith("expected 7 CPUs, 2 of them for ")
    assert "the largest of the Ray cluster has 1" in lacking(groups, on_cpus(*[1] * 8).nodes)


def test_the_description_names_every_process_once() -> None:
    lines = describe(placement_groups(plan(EMBEDDED, on_cpus(8)).places, on_cpus(8).nodes))
    assert "engine (SPREAD) bundle 1: engine-1 with CPU 1" in lines
    assert sum(" and ".join(lines).count(name) for name in ("engine-0", "engine-1", "actor-0", "prepare")) == 4
