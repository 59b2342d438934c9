"""Processes on several machines: the address of each, and the command that starts it on its node."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, load, loads
from pipeline.errors import ConfigurationError
from pipeline.launchers.launcher import LAUNCHERS, Launch, launch, require_program
from pipeline.runtime.plugins import load_main
from pipeline.runtime.process import ADDRESS
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.journal import Changes
from pipeline.store.store import ReplayStore
from pipeline.supervisor.cluster import Cluster, Found
from pipeline.supervisor.history import Resumed, write_start
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from pipeline.supervisor.processes import ProcessSpec, health_url, specs_of
from pipeline.supervisor.run import run, with_keys

TINY = Path(__file__).resolve().parents[3] / "configs" / "tiny.yaml"
GPU = TINY.with_name("gpu.yaml")


def config_of(folder: Path, *sets: str) -> RunConfig:
    return load(TINY, [f"run.directory={folder}", *sets], environment={})


def cluster_of(*addresses: str) -> Cluster:
    nodes = tuple(Node(f"n{i}", address=address) for i, address in enumerate(addresses))
    return Cluster(Inventory(nodes), lambda place, command: ["on", place.node, *command])


def specs_on(cluster: Cluster, config: RunConfig) -> tuple[RunConfig, dict[str, ProcessSpec]]:
    """As ``afterplay run`` makes them."""
    chosen = plan(config, cluster.inventory).fitting()
    directory = RunDirectory(config.run.path).create()
    config = with_keys(resolve(cluster.addressed(chosen.config)), directory)
    config = cluster.located(config, chosen.places)
    specs = specs_of(plan(config, cluster.inventory).places, config, directory, cluster)
    return config, {spec.name: spec for spec in specs}


def test_the_run_file_of_a_cluster_can_be_read_whatever_finds_the_engines(tmp_path: Path) -> None:
    cluster = cluster_of("127.0.0.1", "127.0.0.2")
    config, _ = specs_on(cluster, config_of(tmp_path, "engine.discovery=registry", "engine.replicas=2"))
    assert len(loads(dump(config), "the processes").engine.urls) == 2
    with pytest.raises(ConfigurationError, match="this launcher places the engines"):
        specs_on(cluster, config_of(tmp_path, "engine.discovery='dns:engines:8100'"))


def test_every_process_of_a_cluster_is_started_on_its_node_and_found_there(tmp_path: Path) -> None:
    config, specs = specs_on(
        cluster_of("127.0.0.1", "127.0.0.2"), config_of(tmp_path, "actor.replicas=2", "engine.replicas=2")
    )
    assert {name: spec.command[1] for name, spec in specs.items()} == {
        "prepare": "n0", "replay": "n0", "learner": "n0", "engine-0": "n0", "engine-1": "n1", "actor-0": "n0",
        "actor-1": "n1",
    }  # fmt: skip
    port = config.engine.port
    assert config.engine.addresses() == (f"http://127.0.0.1:{port}", f"http://127.0.0.2:{port + 1}")
    assert specs["engine-1"].health_url == f"http://127.0.0.2:{port + 1}/health"
    assert not any(spec.here for spec in specs.values())


def test_an_engine_on_several_nodes_has_one_address_and_one_health_check(tmp_path: Path) -> None:
    nodes = tuple(Node(f"n{i}", ("0", "1"), address=f"127.0.0.{i + 1}") for i in range(5))
    cluster = Cluster(Inventory(nodes), lambda place, command: ["on", place.node, *command])
    sets = [f"run.directory={tmp_path}", "placement.tensor_parallel=4", "placement.engine_gpus=8"]
    config, specs = specs_on(cluster, load(GPU, [*sets, "engine.weight_transfer=files"], environment={}))
    parts = {name: spec for name, spec in specs.items() if name.startswith("engine")}
    assert {name: (spec.command[1], spec.probed, spec.rule.gang) for name, spec in parts.items()} == {
        "engine-0": ("n1", True, "engine-0"),
        "engine-0-node-1": ("n2", False, "engine-0"),
        "engine-1": ("n3", True, "engine-1"),
        "engine-1-node-1": ("n4", False, "engine-1"),
    }
    port = config.engine.port
    assert config.engine.addresses() == (f"http://127.0.0.2:{port}", f"http://127.0.0.4:{port + 1}")


def test_messages_between_machines_are_always_encrypted(tmp_path: Path) -> None:
    config, _ = specs_on(cluster_of("127.0.0.1", "127.0.0.2"), config_of(tmp_path, "actor.replicas=2"))
    assert config.stage.address.startswith("tcp://127.0.0.1:") and not config.stage.address.endswith(":0")
    assert config.stage.curve == tmp_path / "tiny" / "keys"
    assert (tmp_path / "tiny" / "keys" / "actor-1.key_secret").is_file()
    assert config.engine.actor_key and config.engine.learner_key


def test_servers_listen_beyond_loopback_only_where_nodes_do() -> None:
    near = cluster_of("127.0.0.1", "127.0.0.1").addressed(load(TINY, environment={}))
    far = cluster_of("10.0.0.1", "10.0.0.2").addressed(load(TINY, environment={}))
    assert (near.engine.host, near.metrics.host) == ("127.0.0.1", "127.0.0.1")
    assert (far.engine.host, far.metrics.host) == ("0.0.0.0", "0.0.0.0")
    assert far.stage.address == "tcp://10.0.0.1:0"
    newer = cluster_of("fd00::1", "fd00::2").addressed(load(TINY, environment={}))
    assert (newer.engine.host, newer.metrics.host) == ("::", "::")


@pytest.mark.parametrize(
    ("address", "bound"),
    [("10.0.0.1", "tcp://10.0.0.1:5555"), ("head", "tcp://0.0.0.0:5555"), ("fd00::1", "tcp://[fd00::1]:5555")],
)
def test_the_replay_stage_binds_a_numeric_address(address: str, bound: str) -> None:
    cluster = cluster_of(address, "10.0.0.9")
    config = cluster.addressed(load(TINY, environment={}))
    config = config.model_copy(
        update={"stage": config.stage.model_copy(update={"address": config.stage.address.removesuffix("0") + "5555"})}
    )
    place = next(p for p in plan(config, cluster.inventory).places if p.role == "replay")
    found = cluster.environment(replace(place, node="n0"), config)
    assert found == {ADDRESS: address, "AFTERPLAY__STAGE__ADDRESS": bound}


def test_a_process_elsewhere_is_found_by_its_record_under_any_process_id(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).create()
    record = {"pid": 7, "metrics_host": "10.0.0.2", "metrics_port": 9402}
    directory.process_file("actor-0").write_bytes(orjson.dumps(record))
    assert health_url(directory, "actor-0", 8) is None
    assert health_url(directory, "actor-0", None) == "http://10.0.0.2:9402/healthz"
    directory.process_file("actor-0").write_bytes(orjson.dumps(record | {"metrics_host": "fd00::2"}))
    assert health_url(directory, "actor-0", None) == "http://[fd00::2]:9402/healthz"


def test_the_store_of_another_node_is_asked_before_a_run_begins_anew(tmp_path: Path) -> None:
    class Elsewhere(Cluster):
        def at_store(self, look: Callable[[], Found]) -> Found:
            with ReplayStore(tmp_path / "s.sqlite") as store:
                store.commit(Changes(meta={"consumed": 3}))
            try:
                return look()
            finally:
                (tmp_path / "s.sqlite").unlink()

    directory = RunDirectory(tmp_path / "tiny").create()
    config = config_of(tmp_path, f"stage.store={tmp_path / 's.sqlite'}")
    write_start(directory, config, Resumed(0, {}))
    with pytest.raises(ConfigurationError, match="a run with 3 updates"):
        run(config, fresh=True, cluster=Elsewhere(Inventory((Node("n0"),)), lambda place, command: command))
    assert directory.config_file.exists()


def test_every_launcher_can_be_loaded() -> None:
    assert all(callable(load_main(path)) for path in LAUNCHERS.values())


def test_an_unknown_launcher_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(ConfigurationError, match=r"expected local.*got 'lsf'"):
        launch("lsf", Launch(load(TINY, environment={})))


def test_a_missing_program_is_named_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="expected the program no-such on the PATH, found none: install it"):
        require_program("no-such", "install it")


@pytest.mark.parametrize("option", [["--nodes", "2"], ["--gpus", "1"], ["--dry-run", "--out", "x"], ["--", "-p"]])
def test_options_for_clusters_are_refused_on_this_machine(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["run", str(TINY), *option])
    assert isinstance(result.exception, ConfigurationError)
    assert "several machines" in str(result.exception)


def test_a_dry_run_prints_the_command_of_each_process_and_starts_none(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["run", str(TINY), "--dry-run", "--set", f"run.directory={tmp_path}"])
    commands = dict(line.split(": ", 1) for line in result.output.splitlines())
    assert list(commands) == ["prepare", "replay", "learner", "engine-0", "actor-0"]
    assert shlex.split(commands["actor-0"])[-4:] == ["actor", f"{tmp_path}/tiny/config.yaml", "--index", "0"]
    assert list(tmp_path.iterdir()) == []
