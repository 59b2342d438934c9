"""Plans: no GPU has two owners, every process has a place or a sentence, and the same input gives the same plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.config.load import load, loads
from pipeline.config.placement import PlacementConfig
from pipeline.errors import ConfigurationError
from pipeline.supervisor.division import choose_counts, place_engines, place_ranks, share_of
from pipeline.supervisor.inventory import VISIBLE, Inventory, Node
from pipeline.supervisor.plan import Plan, plan
from pipeline.supervisor.restarts import Machine
from pipeline.supervisor.run import run

ROOT = Path(__file__).resolve().parents[3]
GPU = load(ROOT / "configs" / "gpu.yaml", environment={})


def machine(gpus: int, *names: str) -> Inventory:
    return Inventory((Node("here", names or tuple(map(str, range(gpus)))),), "none is there")


def nodes(*gpus: int) -> Inventory:
    found = tuple(Node(f"n{i}", tuple(map(str, range(n))), address=f"10.0.0.{i}") for i, n in enumerate(gpus))
    return Inventory(found, "none is there")


def changed(**sections: dict[str, Any]) -> RunConfig:
    """``configs/gpu.yaml`` with other values."""
    raw = GPU.model_dump()
    for name, values in sections.items():
        raw[name] |= values
    return RunConfig.model_validate(raw)


def owners(found: Plan) -> dict[str, str]:
    """GPUs of the processes that have some, as ``CUDA_VISIBLE_DEVICES``."""
    return {place.name: place.environment[VISIBLE] for place in found.places if place.gpus}


COUNTS = st.sampled_from([None, "auto", 1, 2, 3, 4, 6])
DEVICES = st.sampled_from(["auto", "auto", "cuda", "cuda", "cpu"])


@st.composite
def run_files(draw: st.DrawFn) -> RunConfig:
    """Run files whose values do not contradict each other."""
    shared = draw(st.booleans()) and draw(st.booleans())
    colocate = draw(st.sampled_from(["split", "sleep"])) if shared else "none"
    kind = draw(st.sampled_from(["vllm", "vllm", "embedded", "external"]))
    size = (draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 1, 2])))
    tensor_parallel, data_parallel = size if kind == "vllm" and colocate != "split" else (1, 1)
    engine_gpus, learner_gpus = (draw(st.sampled_from([None, "auto", 1])) if shared else draw(COUNTS) for _ in range(2))
    turns = colocate == "sleep" and kind != "external"
    if isinstance(engine_gpus, int):
        engine_gpus *= tensor_parallel * data_parallel * (draw(st.integers(1, 4)) if turns else 1)
    urls = ["http://a:1", "http://b:2"][: 1 if shared else 2] if kind == "external" else []
    if urls and isinstance(engine_gpus, int):
        engine_gpus = len(urls)
    device = draw(DEVICES)
    replicas = draw(st.integers(1, 4)) if engine_gpus is None and colocate != "split" else 1
    ranks = draw(st.integers(1, 4)) if learner_gpus is None and not shared else 1
    if turns and "auto" not in (engine_gpus, learner_gpus):
        of_engines = engine_gpus or replicas * tensor_parallel * data_parallel
        learner_gpus, ranks = (None, of_engines) if learner_gpus is None else (of_engines, 1)
    elif turns and learner_gpus == 1:
        learner_gpus = None if engine_gpus is None else "auto"
    engine = {
        "kind": kind,
        "urls": urls,
        "device": device,
        "replicas": replicas,
        "colocate": colocate,
        "weight_transfer": "files" if shared else draw(st.sampled_from(["files", "nccl"])),
        "gpu_memory_share": 0.5,
        "sleep_external": True,
    }
    one_rank = ranks == 1 and learner_gpus in (None, "auto", 1)
    learner = {
        "device": device if shared else draw(DEVICES),
        "ranks": ranks,
        "optimizer": draw(st.sampled_from(["adamw", "adamw", "adamw", "adamw_8bit"] if one_rank else ["adamw"])),
    }
    placement = PlacementConfig(
        engine_gpus=engine_gpus,
        learner_gpus=learner_gpus,
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel,
    )
    return RunConfig.model_validate(
        {
            "engine": engine,
            "learner": learner,
            "placement": placement,
            "actor": {"replicas": draw(st.integers(1, 4))},
        }
    )


INVENTORIES = st.lists(st.integers(0, 8), min_size=1, max_size=3).map(lambda gpus: nodes(*gpus))


@pytest.mark.parametrize(
    ("gpus", "size", "expected"),
    [
        ((1,), 1, [["0"]]),
        ((8,), 2, [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]),
        ((3, 2), 2, [["0", "1"], ["0", "1"]]),
    ],
)
def test_engines_and_ranks_that_take_turns_share_all_gpus(gpus, size, expected) -> None:
    config = changed(
        engine={"colocate": "sleep", "weight_transfer": "files"},
        learner={"offload": True},
        placement={"engine_gpus": "auto", "learner_gpus": "auto", "tensor_parallel": size},
    )
    found = plan(config, nodes(*gpus)).fitting()
    engines = [place for place in found.places if place.role == "engine"]
    ranks = [(place.node, gpu) for place in found.places if place.role == "learner" for gpu in place.gpus]
    assert [list(place.gpus) for place in engines] == expected
    assert ranks == [(place.node, gpu) for place in engines for gpu in place.gpus]
    assert (found.config.learner.ranks, found.config.engine.replicas) == (len(ranks), len(engines))


def test_ranks_that_the_optimizer_cannot_have_are_a_problem_of_the_plan() -> None:
    found = plan(
        changed(
            engine={"colocate": "sleep", "weight_transfer": "files", "gpu_memory_share": 0.5},
            learner={"optimizer": "adamw_8bit"},
            placement={"engine_gpus": 2, "learner_gpus": "auto"},
        ),
        nodes(2),
    )
    assert "adamw_8bit" in found.problems[0]


@settings(max_examples=200, deadline=None)
@given(run_files(), INVENTORIES)
def test_no_gpu_has_two_owners_and_every_process_has_a_place_or_a_sentence(
    config: RunConfig, inventory: Inventory
) -> None:
    found = plan(config, inventory)
    by_name = {node.name: node for node in inventory.nodes}
    owned = [(place.node, gpu, place.role) for place in found.places for gpu in place.gpus]
    twice = {gpu for gpu, n in Counter((node, gpu) for node, gpu, _ in owned).items() if n > 1}
    if found.config.engine.colocate == "none":
        assert twice == set()
    else:
        by_role: dict[str, list[tuple[str, str]]] = {}
        for node, gpu, role in owned:
            by_role.setdefault(role, []).append((node, gpu))
        assert all(len(gpus) == len(set(gpus)) for gpus in by_role.values())
        assert len({tuple(sorted(gpus)) for gpus in by_role.values()}) <= 1, "each role has all that are shared"
    for place in found.places:
        assert set(place.gpus) <= set(by_name[place.node].gpus)
        expected = {VISIBLE: ",".join(place.gpus)} if by_name[place.node].gpus else {}
        assert {k: v for k, v in place.environment.items() if place.gang is None or k == VISIBLE} == expected

    indices: dict[str, list[int]] = {}
    for place in found.places:
        if place.role != "engine" or place.serves_health:
            indices.setdefault(place.role, []).append(place.index)
    assert all(sorted(numbers) == list(range(len(numbers))) for numbers in indices.values())
    assert len({place.name for place in found.places}) == len(found.places)

    assert all(sentence and "\n" not in sentence for sentence in found.problems)
    if found.problems:
        with pytest.raises(ConfigurationError):
            found.fitting()
        return
    final = found.config
    counted = {role: len(numbers) for role, numbers in indices.items()}
    engines = 0 if final.engine.kind == "external" else len(final.engine.addresses())
    assert (counted.get("engine", 0), counted["actor"]) == (engines, final.actor.replicas)
    assert counted["prepare"] == counted["replay"] == 1
    learner = [place for place in found.places if place.role == "learner"]
    assert sum(len(place.gpus) for place in learner) in (0, final.learner.ranks)
    for i in range(engines):
        parts = [place for place in found.places if (place.role, place.index) == ("engine", i)]
        size, most = final.placement.gpus_per_engine, max(len(node.gpus) for node in inventory.nodes)
        assert sum(len(place.gpus) for place in parts) in (0, size)
        assert [place.serves_health for place in parts] == [True] + [False] * (len(parts) - 1)
        if len(parts) > 1:
            assert size > most and {len(place.gpus) for place in parts} == {most}, "it takes whole nodes"
            assert {place.rule.gang for place in parts} == {parts[0].name}
            gangs = [place.gang for place in parts if place.gang is not None]
            address = by_name[parts[0].node].address
            assert [(gang.node, gang.nodes, gang.address) for gang in gangs] == [
                (node, len(parts), address) for node in range(len(parts))
            ]
    ports = [(place.node, place.ports["ranks"]) for place in found.places if "ranks" in place.ports]
    assert len(set(ports)) == len(ports), "no two gangs meet at one port"
    on_gpu = {"cuda": True, "cpu": False, "auto": inventory.gpus > 0}
    assert bool(learner[0].gpus) is on_gpu[final.learner.device]
    Machine([place.rule for place in found.places])

    assert plan(config, inventory) == found
    again = plan(RunConfig.model_validate(final.model_dump()), inventory)
    assert (again.places, again.config, again.problems) == (found.places, final, ()), "its own result is kept"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(0, 5)),
    st.one_of(st.none(), st.integers(0, 5)),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
)
def test_what_fits_is_placed(gpus: list[int], engines: int | None, ranks: int | None, size: int) -> None:
    """Compared with every way to lay the ranks over the nodes."""
    wanted, learner = choose_counts(gpus, engines, ranks, size, sum(gpus))
    assert engines in (None, wanted) and ranks in (None, learner)
    taken = place_ranks(gpus, learner, size)
    placed = place_engines(gpus, taken or [0] * len(gpus), wanted, size)
    share = share_of(gpus, size)
    used = [(i, gpu) for parts in placed for i, start in parts for gpu in range(start, start + share)]
    assert all(len(parts) == size // share for parts in placed)
    used += [(i, gpu) for i, n in enumerate(taken or []) for gpu in range(n)]
    assert len(set(used)) == len(used) and all(gpu < gpus[i] for i, gpu in used)
    if taken is None:
        assert learner > sum(gpus)
    elif max(taken) == sum(taken):  # on one node, or none
        room = [layout for layout in layouts(gpus, learner) if sum(n > 0 for n in layout) <= 1]
        assert len(placed) == min(wanted, max(engines_beside(gpus, layout, size) for layout in room))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(0, 5)),
    st.sampled_from([1, 2, 4, 8]),
    st.sets(st.integers(1, 18)),
)
def test_a_number_of_ranks_that_fits_is_chosen_where_one_leaves_the_engines(
    gpus: list[int], engines: int | None, size: int, fitting: set[int]
) -> None:
    wanted, ranks = choose_counts(gpus, engines, None, size, sum(gpus), sorted(fitting))
    taken = {n: place_ranks(gpus, n, size) for n in fitting}
    room = {n: engines_beside(gpus, there, size) for n, there in taken.items() if there is not None}
    least = 1 if engines is None else engines
    if any(n_engines >= least for n_engines in room.values()):
        assert ranks in fitting and room[ranks] >= wanted >= least


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.integers(2, 4),
)
def test_a_replica_has_one_node_where_nodes_have_room_for_all_replicas_whole(
    gpus: list[int], size: int, shards: int, replicas: int
) -> None:
    taken = place_ranks(gpus, replicas * shards, size, replicas)
    assert (taken is None) == (sum(gpus) < replicas * shards)
    if taken is not None:
        assert sum(taken) == replicas * shards and all(t <= n for t, n in zip(taken, gpus, strict=True))
        if sum(n // shards for n in gpus) >= replicas:
            assert all(t % shards == 0 for t in taken), "ranks are numbered node by node"


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_chosen_number_of_ranks_is_a_multiple_of_the_replicas(replicas: int) -> None:
    for gpus in ([8], [8, 8], [4, 6, 8]):
        engines, ranks = choose_counts(gpus, None, None, 1, sum(gpus), (), replicas)
        assert ranks and ranks % replicas == 0 and engines + ranks <= sum(gpus)
    assert choose_counts([2], None, None, 1, 2, (), 3) == (1, 3), "a division that does not fit is refused later"


def test_replicas_that_do_not_divide_the_ranks_are_refused() -> None:
    for section, replicas, key in (
        ("learner: {ranks: 4, replicas: 3}", 3, "learner.ranks \\(4\\)"),
        ("learner: {replicas: 2}", 2, "learner.ranks \\(1\\)"),
        ("learner: {replicas: 2}\nplacement: {learner_gpus: 3}", 2, "placement.learner_gpus \\(3\\)"),
    ):
        with pytest.raises(ConfigurationError, match=f"{key} must be a multiple of learner.replicas \\({replicas}\\)"):
            loads(f"model: {{source: tiny}}\nenvironments: {{any: {{name: arithmetic}}}}\n{section}", environment={})


def test_a_plan_keeps_replicas_whole() -> None:
    sections = {"learner": {"replicas": 2}, "placement": {"engine_gpus": 4, "learner_gpus": 8}}
    found = plan(changed(**sections), nodes(6, 6))
    assert [len(place.gpus) for place in found.places if place.role == "learner"] == [4, 4]


def layouts(gpus: Sequence[int], ranks: int) -> list[tuple[int, ...]]:
    return [layout for layout in product(*(range(n + 1) for n in gpus)) if sum(layout) == ranks]


def engines_beside(gpus: Sequence[int], layout: Sequence[int], size: int) -> int:
    share = share_of(gpus, size)
    parts = sum((n - t) // share for n, t in zip(gpus, layout, strict=True))
    return 0 if size % share else parts * share // size


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (1, {"learner": "0", "engine-0": "0"}),
        (2, {"learner": "0", "engine-0": "1"}),
        (3, {"learner": "0", "engine-0": "1", "engine-1": "2"}),
        (4, {"learner": "0", "engine-0": "1", "engine-1": "2", "engine-2": "3"}),
        (8, {"learner": "0,1"} | {f"engine-{i}": str(i + 2) for i in range(6)}),
    ],
)
def test_auto_uses_every_gpu_and_says_why(gpus: int, expected: dict[str, str]) -> None:
    found = plan(GPU, machine(gpus))
    assert owners(found) == expected
    assert len(found.reasons) == 1 and not found.problems
    assert found.config.learner.ranks == len(expected["learner"].split(","))
    assert found.config.engine.replicas == len(expected) - 1


def test_with_one_gpu_engine_and_learner_take_turns() -> None:
    found = plan(GPU, machine(1))
    engine, learner = found.config.engine, found.config.learner
    assert (engine.colocate, engine.weight_transfer, learner.offload) == ("sleep", "files", True)
    assert "take turns" in found.reasons[0] and "engine.weight_transfer: files" in found.reasons[0]
    default = plan(RunConfig(), machine(1))
    assert default.config.engine.colocate == "sleep", "a device of auto names no GPU"
    explicit = plan(RunConfig.model_validate({"engine": {"device": "cuda"}, "learner": {"device": "cuda"}}), machine(1))
    assert "expected 2 GPUs" in explicit.problems[0]
    refused = plan(changed(learner={"optimizer": "adamw_8bit"}), machine(1))
    assert "would take turns" in refused.problems[0] and "adamw_8bit" in refused.problems[0]
    assert owners(refused) == {}


def test_engines_of_several_gpus_are_aligned_and_the_learner_gets_what_they_cannot_use() -> None:
    tensor = changed(placement={"tensor_parallel": 2})
    assert owners(plan(tensor, machine(4))) == {"learner": "0,1", "engine-0": "2,3"}
    assert owners(plan(tensor, machine(3))) == {"learner": "0", "engine-0": "1,2"}
    both = changed(placement={"tensor_parallel": 2, "data_parallel": 2})
    assert owners(plan(both, machine(8))) == {"learner": "0,1,2,3", "engine-0": "4,5,6,7"}
    given_one = changed(placement={"tensor_parallel": 2, "learner_gpus": None})
    found = plan(given_one, machine(8))
    assert owners(found) == {"learner": "0", "engine-0": "2,3", "engine-1": "4,5", "engine-2": "6,7"}
    assert found.reasons[-1] == "without a process: GPU 1"


def test_given_numbers_are_kept() -> None:
    found = plan(changed(placement={"engine_gpus": 2, "learner_gpus": 4}), machine(8))
    assert owners(found) == {"learner": "0,1,2,3", "engine-0": "4", "engine-1": "5"}
    assert found.config.learner.ranks == 4 and found.config.engine.replicas == 2
    rest = plan(changed(placement={"engine_gpus": 5}), machine(8))
    assert owners(rest)["learner"] == "0,1,2" and rest.config.engine.replicas == 5
    old = changed(placement={"engine_gpus": None, "learner_gpus": None}, engine={"replicas": 3}, learner={"ranks": 2})
    assert owners(plan(old, machine(8))) == {"learner": "0,1", "engine-0": "2", "engine-1": "3", "engine-2": "4"}
    sized = old.updated(placement={"tensor_parallel": 1})
    assert plan(sized, machine(8)).config is sized


def test_uuids_and_mig_devices_are_handed_on() -> None:
    assert owners(plan(GPU, machine(0, "GPU-b", "GPU-a"))) == {"learner": "GPU-b", "engine-0": "GPU-a"}
    mig = machine(0, *(f"MIG-{i}" for i in range(8)))
    found = plan(GPU, mig)
    assert owners(found)["learner"] == "MIG-0" and found.config.engine.replicas == 7
    for section in ({"learner": {"ranks": 2}}, {"placement": {"tensor_parallel": 2}}):
        refused = plan(changed(**{"placement": {"learner_gpus": None}, **section}), mig)
        assert "MIG devices" in refused.problems[0]


@pytest.mark.parametrize(
    ("sections", "gpus", "words"),
    [
        ({}, 0, r"expected a GPU \(engine.device: cuda, learner.device: cuda\), found none on here: none is there"),
        ({"placement": {"engine_gpus": 8}}, 4, "expected 9 GPUs.*8 engines.*found 4"),
        ({"placement": {"tensor_parallel": 4}}, 4, "expected 5 GPUs.*1 engine of 4.*lower placement.tensor_parallel"),
        ({"placement": {"learner_gpus": 9}}, 8, "expected 10 GPUs, 9 for the learner"),
        ({"engine": {"env": {VISIBLE: "1"}}}, 2, "engine.env sets CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_the_machine_lacks_is_one_sentence(sections: dict[str, Any], gpus: int, words: str) -> None:
    found = plan(changed(**sections), machine(gpus))
    with pytest.raises(ConfigurationError, match=words) as refusal:
        found.fitting()
    assert "\n" not in str(refusal.value)


def test_a_run_that_does_not_fit_leaves_its_directory_alone(tmp_path: Path) -> None:
    config = changed(run={"directory": tmp_path})
    (config.run.path / "checkpoints").mkdir(parents=True)
    (config.run.path / "config.yaml").touch()
    with pytest.raises(ConfigurationError, match="expected a GPU"):
        run(config, fresh=True)
    assert (config.run.path / "checkpoints").exists()


def test_without_gpus_nothing_of_a_plan_reaches_a_process() -> None:
    for config in (RunConfig(), changed(engine={"device": "auto"}, learner={"device": "auto"})):
        found = plan(config, machine(0))
        assert [place.environment for place in found.places] == [{}] * len(found.places)
        assert (found.reasons, found.problems) == ((), ())
        assert found.config.engine == config.engine and found.config.learner == config.learner
    asked = changed(engine={"device": "auto"}, learner={"device": "auto"}, placement={"tensor_parallel": 2})
    assert "placement.tensor_parallel: 2" in plan(asked, machine(0)).problems[0]


def test_turns_on_cpus_whose_numbers_differ_are_refused_before_the_run_file_is_written() -> None:
    config = changed(
        engine={"colocate": "sleep", "weight_transfer": "files", "device": "cpu", "replicas": 2},
        learner={"offload": True, "device": "cpu"},
        placement={"engine_gpus": None, "learner_gpus": "auto"},
    )
    (problem,) = plan(config, machine(0)).problems
    assert "expected as many ranks as the engines have GPUs (2), got learner.ranks 1" in problem


def test_an_external_engine_or_one_on_cpus_leaves_the_gpus_to_the_learner() -> None:
    external = changed(engine={"kind": "external", "urls": ["http://a:1"], "weight_transfer": "files"})
    assert owners(plan(external, machine(4))) == {"learner": "0,1,2,3"}
    assert owners(plan(changed(engine={"device": "cpu"}), machine(2))) == {"learner": "0,1"}
    assert owners(plan(changed(learner={"device": "cpu"}), machine(2))) == {"engine-0": "0", "engine-1": "1"}
    assert owners(plan(GPU, machine(2), center="evaluator")) == {"engine-0": "0", "engine-1": "1"}


def test_ranks_are_packed_engines_stay_on_one_node_and_actors_spread() -> None:
    found = plan(changed(placement={"tensor_parallel": 4}, actor={"replicas": 3}), nodes(8, 8))
    at = {place.name: (place.node, place.environment[VISIBLE]) for place in found.places}
    assert at["learner"] == ("n0", "0,1,2,3")
    assert [at[f"engine-{i}"] for i in range(3)] == [("n0", "4,5,6,7"), ("n1", "0,1,2,3"), ("n1", "4,5,6,7")]
    assert [at[f"actor-{i}"][0] for i in range(3)] == ["n0", "n1", "n0"]
    places = {place.name: place for place in found.places}
    assert [name for name, place in places.items() if place.needs_disk] == ["replay"]
    assert (places["learner"].spread, places["engine-0"].spread) == (False, True)


def test_ranks_of_several_nodes_are_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    config = changed(placement={"learner_gpus": 12, "engine_gpus": 4})
    first, second = (place for place in plan(config, nodes(8, 8)).places if place.role == "learner")
    assert (first.node, second.node, first.rule.ends_run, second.rule.ends_run) == ("n0", "n1", True, False)
    assert first.gang is not None and second.gang is not None
    assert (first.gang.node, len(first.gpus), second.gang.node, len(second.gpus)) == (0, 8, 1, 4)
    command = second.command("run.yaml", "python")
    assert command[:4] == ["python", "-P", "-m", "torch.distributed.run"]
    assert {"--nnodes=2", "--node-rank=1", "--nproc-per-node=4", "--master-addr=10.0.0.0"} <= set(command)
    assert command[-7:] == ["--no-python", "python", "-P", "-m", "pipeline.cli.app", "learner", "run.yaml"]
    assert first.ports["ranks"] == 29500
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert next(p for p in plan(config, nodes(8, 8)).places if p.role == "learner").ports["ranks"] == 29501
    monkeypatch.setenv("MASTER_PORT", "0")
    with pytest.raises(ConfigurationError, match="MASTER_PORT: expected a port"):
        plan(config, nodes(8, 8))
    assert second.environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60", "torchrun would kill the ranks after 30 s"


def test_an_engine_that_exceeds_a_node_takes_whole_nodes_as_a_gang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    found = plan(changed(placement={"tensor_parallel": 16}, engine={"port": 8100}), nodes(8, 8, 8, 8, 8)).fitting()
    parts = [place for place in found.places if place.role == "engine"]
    assert [(place.name, place.node, place.index, len(place.gpus)) for place in parts] == [
        ("engine-0", "n3", 0, 8),
        ("engine-0-node-1", "n4", 0, 8),
    ]
    assert [place.rule.gang for place in parts] == ["engine-0"] * 2
    assert [place.ports for place in parts] == [{"http": 8100, "ranks": 29501}, {}]
    assert [place.serves_health for place in parts] == [True, False]
    command = parts[1].command("run.yaml", "python")
    assert command[:6] == ["python", "-P", "-m", "pipeline.cli.app", "engine", "run.yaml"]
    assert command[6:] == ["--index", "0", "--await-model", "--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.3",
                           "--master-port=29501"]  # fmt: skip
    assert found.config.engine.replicas == 1 and found.config.learner.ranks == 24
    many = plan(changed(placement={"tensor_parallel": 8, "data_parallel": 2, "learner_gpus": 8}), nodes(8, 8, 8, 8, 8))
    assert many.config.engine.replicas == 2, "each copy has a node"
    assert [place.name for place in many.fitting().places if place.role == "engine"] == [
        "engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1",
    ]  # fmt: skip
    assert {place.cpus for place in many.places if place.role == "engine"} == {1 + 1 + 8}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"placement": {"tensor_parallel": 12}}, "takes them whole: set placement.tensor_parallel to a multiple of 8"),
        ({"placement": {"tensor_parallel": 16, "data_parallel": 2}}, "2 copies.*data_parallel to 1.*engines of 16"),
        ({"placement": {"tensor_parallel": 6, "data_parallel": 4}}, "whole copies of the model.*a divisor of 8"),
        ({"placement": {"tensor_parallel": 16}, "engine": {"weight_transfer": "ipc"}}, "weight_transfer is ipc"),
        (
            {
                "placement": {"tensor_parallel": 16},
                "engine": {"colocate": "sleep", "weight_transfer": "files"},
                "learner": {"offload": True},
            },
            "colocate is sleep, which is for engine and learner on one machine: lower placement.tensor_parallel",
        ),
        ({"placement": {"tensor_parallel": 32}}, "expected 33 GPUs"),
        ({"placement": {"tensor_parallel": 24, "learner_gpus": 9, "engine_gpus": 24}}, "expected 33 GPUs"),
        ({"placement": {"tensor_parallel": 24, "learner_gpus": 8, "engine_gpus": 24}}, ""),
    ],
)
def test_an_engine_that_cannot_be_on_several_nodes_is_refused(sections: dict[str, Any], words: str) -> None:
    found = plan(changed(**sections), nodes(8, 8, 8, 8))
    if words:
        with pytest.raises(ConfigurationError, match=words) as refusal:
            found.fitting()
        assert "\n" not in str(refusal.value)
    else:
        assert not found.problems


def test_nodes_with_ranks_or_with_fewer_gpus_are_no_nodes_of_an_engine() -> None:
    config = changed(placement={"tensor_parallel": 16, "engine_gpus": 16, "learner_gpus": 4})
    at = {place.name: place.node for place in plan(config, nodes(8, 4, 8)).fitting().places}
    assert (at["learner"], at["engine-0"], at["engine-0-node-1"]) == ("n1", "n0", "n2")
    problem = plan(config, nodes(8, 8, 4)).problems
    assert not problem
    assert "found fewer than 2 nodes with 8 free for engine-0" in plan(config, nodes(8, 6, 6)).problems[0]


def test_metrics_and_engines_have_ports_of_their_own() -> None:
    config = changed(metrics={"port": 9400}, engine={"port": 8100}, stage={"address": "tcp://0.0.0.0:5555"})
    found = {place.name: place.ports for place in plan(config, machine(4)).places}
    assert found == {
        "prepare": {},
        "replay": {"metrics": 9400, "zeromq": 5555},
        "learner": {"metrics": 9401},
        "engine-0": {"http": 8100},
        "engine-1": {"http": 8101},
        "engine-2": {"http": 8102},
        "actor-0": {"metrics": 9402},
    }


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"placement": {"engine_gpus": 3, "tensor_parallel": 2}}, "multiple of the 2 GPUs"),
        ({"placement": {"engine_gpus": 4}, "engine": {"replicas": 3}}, "engine.replicas is 3: omit one"),
        ({"placement": {"learner_gpus": "auto"}, "learner": {"ranks": 2}}, "learner.ranks is 2: omit one"),
        ({"placement": {"engine_gpus": 0}}, "from 1 to 1024, auto or null"),
        ({"placement": {"engine_gpus": "most"}}, "auto or null, got 'most'"),
        ({"placement": {"tensor_parallel": 2}, "engine": {"kind": "embedded"}}, "are for engine.kind: vllm"),
        ({"engine": {"args": ["-tp=2"]}}, "set placement.tensor_parallel instead"),
        ({"engine": {"args": ["--data-parallel-size", "2"]}}, "set placement.data_parallel instead"),
        ({"engine": {"colocate": "split"}, "placement": {"learner_gpus": 2}}, "share one GPU"),
        ({"engine": {"colocate": "split"}, "placement": {"tensor_parallel": 2}}, "cannot share one"),
        ({"engine": {"urls": ["http://a:1"]}, "placement": {"engine_gpus": 2}}, "engine.urls lists 1"),
        ({"learner": {"optimizer": "adamw_8bit", "ranks": 2}}, "at least 2: .* adamw, or learner.ranks, "),
        ({"learner": {"optimizer": "adamw_8bit"}, "placement": {"learner_gpus": 4}}, "or placement.learner_gpus, "),
        (
            {"learner": {"optimizer": "adamw_8bit", "replicas": 2}, "placement": {"learner_gpus": "auto"}},
            "at least 2: .* learner.replicas and learner.context_ranks to 1",
        ),
    ],
)
def test_a_section_that_contradicts_itself_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(sections)
