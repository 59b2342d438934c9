"""The parts of the Ray launcher that need no Ray: nodes, addresses, the disk of the replay stage, keepers."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import pytest

from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.launchers import ray_placement
from pipeline.launchers.ray import RayChild, RayCluster, RayHost, connect, engine_urls, inventory_of, lost
from pipeline.launchers.ray_placement import Keeper, claim_disk, has_disk, placement_groups
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.inventory import VISIBLE, Node
from pipeline.supervisor.plan import plan

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"
NODES: list[dict[str, Any]] = [
    {"NodeID": "aaaaaaaaaa", "NodeName": "n", "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": 8.0, "GPU": 2.0}},
    {"NodeID": "bbbbbbbbbb", "NodeName": "n", "NodeManagerAddress": "10.0.0.2", "Resources": {"CPU": 4.0, "memory": 9}},
]


def located(folder: Path, *sets: str) -> RunConfig:
    """The configuration that the processes of a run on two nodes read."""
    config = load(TINY, [f"run.directory={folder}", *sets], environment={})
    cluster = RayCluster(inventory_of(NODES), lambda place, command: command, 5555)
    chosen = plan(config, cluster.inventory).fitting()
    return cluster.located(resolve(cluster.addressed(chosen.config)), chosen.places)


def test_nodes_of_ray_are_an_inventory_with_names_of_their_own() -> None:
    first, second = inventory_of(NODES).nodes
    assert (first.name, first.gpus, first.cpus, first.address) == ("n-aaaaaaaa", ("0", "1"), 8, "10.0.0.1")
    assert (second.name, second.gpus, second.memory_bytes) == ("n-bbbbbbbb", (), 9)


def test_the_replay_stage_has_the_address_of_its_node_and_engines_are_looked_up(tmp_path: Path) -> None:
    config = located(tmp_path, "engine.device=cpu", "learner.device=cpu")
    assert config.stage.address == "tcp://10.0.0.1:5555"
    assert config.engine.discovery == f"file:{engine_urls(RunDirectory(tmp_path / 'tiny'))}"
    RunConfig.model_validate(config.model_dump())


def test_an_engine_that_shares_a_device_has_a_fixed_address(tmp_path: Path) -> None:
    config = located(tmp_path, "engine.colocate=split", "engine.port=8100")
    assert (config.engine.discovery, config.engine.addresses()) == (None, ("http://10.0.0.1:8100",))


def test_a_replay_stage_never_starts_beside_another_disk(tmp_path: Path) -> None:
    directory, here, elsewhere = RunDirectory(tmp_path / "run"), tmp_path / "here", tmp_path / "elsewhere"
    for folder in (directory.path, here, elsewhere):
        folder.mkdir()
    assert "which has the folder" in claim_disk(tmp_path / "none" / "s", directory), "nothing is made for it"
    assert has_disk(str(here / "s"), str(directory.path)) and not has_disk(
        str(tmp_path / "none/s"), str(directory.path)
    )
    assert claim_disk(here / "s", directory) == ""
    assert claim_disk(here / "s", directory) == "", "it comes back to the same disk"
    assert claim_disk(elsewhere / "s", directory) == f"its disk, which has {here / 's.disk'}".replace(
        "here", "elsewhere"
    )
    assert has_disk(str(here / "s"), str(directory.path)) and not has_disk(str(elsewhere / "s"), str(directory.path))


async def test_a_keeper_takes_its_process_down_and_tells_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VISIBLE, "3,5")
    directory = RunDirectory(tmp_path).create()
    keeper = Keeper(str(tmp_path), str(tmp_path), 3600, 1)
    program = f"import os, time; print(os.getcwd(), os.environ['{VISIBLE}'], flush=True); time.sleep(600)"
    pid = await keeper.begin("engine-0", [sys.executable, "-I", "-S", "-c", program], {VISIBLE: "0,1"}, True)
    while not (said := directory.log_file("engine-0").read_text()):
        await anyio.sleep(0.01)
    assert said.split() == [str(tmp_path), "3,5"], "it has the GPUs that Ray chose"
    assert not (await keeper.check("engine-0", None, False)).healthy
    await keeper.kill()
    assert await keeper.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_keeper_waits_while_the_disk_of_a_log_or_mark_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.ENOSPC, "No space left on device") for _ in range(2)]

    def once_full(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if failures and call not in full:
                full.append(call)
                raise failures.pop()
            return function(*args)

        return call

    full: list[Any] = []
    monkeypatch.setattr(ray_placement, "claim_disk", once_full(lambda *_: ""))
    monkeypatch.setattr(ray_placement, "open_log", once_full(ray_placement.open_log))
    RunDirectory(tmp_path).create()
    keeper = Keeper(str(tmp_path), str(tmp_path), 3600, 1)
    assert await keeper.claim(str(tmp_path / "s")) == ""
    await keeper.begin("actor-0", ["true"], {}, False)
    assert await keeper.wait() == 0 and not failures


async def test_a_keeper_without_a_driver_drains_its_process_and_ends(tmp_path: Path) -> None:
    program = f"""
import asyncio, sys
from pipeline.launchers.ray_placement import Keeper
async def main():
    keeper = Keeper({str(tmp_path)!r}, {str(tmp_path)!r}, 0.5, 20)
    child = "import signal; signal.sigwait([signal.SIGTERM]); print('drained')"
    await keeper.begin("actor-0", [sys.executable, "-I", "-S", "-c", "import signal; signal.pthread_sigmask("
        "signal.SIG_BLOCK, [signal.SIGTERM]);" + child], {{}}, False)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    done = await anyio.run_process([sys.executable, "-c", program], check=False)
    assert done.returncode == 1
    assert RunDirectory(tmp_path).log_file("actor-0").read_text() == "drained\n"


async def test_a_process_whose_keeper_stands_still_is_given_up_soon_after_its_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.launchers.ray.KILL_SECONDS_MAX", 0.01)
    given_up, ended = anyio.Event(), []
    host = object.__new__(RayHost)
    host._ray = SimpleNamespace(kill=lambda keeper: (ended.append(keeper), given_up.set()))
    silent, quick = (SimpleNamespace(kill=SimpleNamespace(remote=lambda: None)) for _ in range(2))
    children = [RayChild(keeper, 1, Node("n"), None, False, host) for keeper in (quick, silent)]
    host._children = set(children[1:])  # the other has ended
    for child in children:
        child.kill()
    with anyio.fail_after(30):
        await given_up.wait()
    assert ended == [silent]


def test_a_cluster_of_another_version_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with: Python: 3.12.1")

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(init=init))
    with pytest.raises(ConfigurationError, match=r"takes this process, got: Version mismatch.*Python: 3\.12\.1"):
        connect("afterplay:/runs/a")


def test_a_node_without_afterplay_is_not_told_as_lost_alone() -> None:
    said = "The actor died because of an error raised in its creation task\n\n  No module named 'pipeline'\n"
    assert str(lost(Node("n7"), Exception(said))).endswith(
        "n7 is lost, or Ray's process for it: No module named 'pipeline'"
    )
    assert str(lost(Node("n7"), Exception())).endswith("for it: Exception")


def test_the_ranks_of_a_gang_meet_at_the_node_of_the_first(tmp_path: Path) -> None:
    config = load(TINY, ["placement.learner_gpus=2", "engine.device=cpu", "learner.device=cuda"], environment={})
    nodes = [node | {"Resources": {"CPU": 8.0, "GPU": 1.0}, "NodeName": node["NodeID"]} for node in NODES]
    places = [p for p in plan(config, inventory_of(nodes)).fitting().places if p.role == "learner"]
    assert [place.rule.gang for place in places] == ["learner", "learner"]
    assert places[1].gang is not None
    moved = replace(places[1], gang=replace(places[1].gang, address="10.0.0.9"))
    assert "--master-addr=10.0.0.9" in moved.command("FILE")


def test_the_parts_of_each_engine_meet_where_ray_has_put_its_first(tmp_path: Path) -> None:
    sets = ["placement.learner_gpus=1", "placement.tensor_parallel=2", "placement.engine_gpus=4", "engine.kind=vllm"]
    ids = [f"node-{i}" for i in range(5)]
    nodes = [
        {"NodeID": one, "NodeName": one, "NodeManagerAddress": f"10.0.0.{i}", "Resources": {"CPU": 9.0, "GPU": 1.0},
         "Alive": True}
        for i, one in enumerate(ids)
    ]  # fmt: skip
    inventory = inventory_of(nodes)
    config = load(TINY, [*sets, f"run.directory={tmp_path}"], environment={})
    chosen = plan(config, inventory).fitting()
    RunDirectory(chosen.config.run.path).create()
    moved = {"bundles_to_node_id": dict(enumerate(reversed(ids)))}
    util = SimpleNamespace(
        list_named_actors=list,
        placement_group=lambda *_, **__: "group",
        placement_group_table=lambda group=None: moved if group else {},
    )
    context = SimpleNamespace(namespace="afterplay")
    ray = SimpleNamespace(remote=lambda what: what, get_runtime_context=lambda: context, util=util, nodes=lambda: nodes)
    host = RayHost(ray, chosen.places, chosen.config, 0, inventory)
    bundles = [seat.place for group in placement_groups(chosen.places, inventory.nodes) if group.name == "engine"
               for bundle in group.bundles for seat in bundle.seats]  # fmt: skip
    assert [place.name for place in bundles] == ["engine-0", "engine-0-node-1", "engine-1", "engine-1-node-1"]
    met = [found.gang.address for place in bundles if (found := host._gang(place)).gang is not None]
    assert met == ["10.0.0.4", "10.0.0.4", "10.0.0.2", "10.0.0.2"]
