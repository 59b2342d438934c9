"""With ``replay.shards`` there are so many stage processes; with one, names and ports are as they always were."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.config.resolve import is_free, resolve, shard_address, split_address
from pipeline.errors import ConfigurationError
from pipeline.role import metrics_port, role_name
from pipeline.rundir import RunDirectory
from pipeline.supervisor.machine import Machine, Signal, Start
from pipeline.supervisor.specs import specs_of
from pipeline.transport.open import open_hub, open_links


def config_of(shards: int, **sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"replay": {"shards": shards}, "groups": {"groups_per_step": 12}, **sections})


@pytest.mark.parametrize(("shards", "names"), [(1, ["replay"]), (3, ["replay-0", "replay-1", "replay-2"])])
def test_every_stage_is_a_process_that_all_others_wait_for(tmp_path: Path, shards: int, names: list[str]) -> None:
    config = config_of(shards, engine={"kind": "external", "urls": ["http://127.0.0.1:1"]})
    specs = {spec.name: spec for spec in specs_of(config, RunDirectory(tmp_path))}
    assert [name for name in specs if name.startswith("replay")] == names
    for index, name in enumerate(names):
        assert list(specs[name].command)[-2:] == ["--index", str(index)]
    for peer in ("learner", "actor-0"):
        assert set(specs[peer].rule.depends) == {"prepare", *names}


def test_a_stage_restarts_alone_and_all_stages_drain_after_the_learner(tmp_path: Path) -> None:
    config = config_of(2, engine={"kind": "external", "urls": ["http://127.0.0.1:1"]})
    machine = Machine([spec.rule for spec in specs_of(config, RunDirectory(tmp_path))])
    machine.begin(0)
    machine.exited("prepare", 0, 1)
    assert machine.healthy("replay-0", 1) == []
    assert set(machine.healthy("replay-1", 2)) == {Start("learner"), Start("actor-0")}
    for name in ("learner", "actor-0"):
        machine.healthy(name, 3)
    assert machine.exited("replay-1", -9, 4) == []
    assert machine.tick(5) == [Start("replay-1")]
    assert machine.stop(6, "done") == [Signal("actor-0")]
    assert machine.exited("actor-0", 0, 6.1) == [Signal("learner")]
    assert machine.exited("learner", 0, 6.2) == [Signal("replay-0"), Signal("replay-1")]


def test_names_and_metrics_ports() -> None:
    one, three = config_of(1), config_of(3)
    assert role_name("replay", 0, one) == role_name("replay", 0) == "replay"
    assert [role_name("replay", i, three) for i in range(3)] == ["replay-0", "replay-1", "replay-2"]
    assert role_name("learner", 0, three) == "learner"
    ports = [metrics_port(f"replay-{i}", i, 9400, actors=2) for i in range(3)]
    ports += [metrics_port("learner", 0, 9400, actors=2), *(metrics_port(f"actor-{i}", i, 9400, 2) for i in range(2))]
    assert ports == [9400, 9404, 9405, 9401, 9402, 9403]


def test_shards_listen_on_ports_in_a_row_that_are_free() -> None:
    config = resolve(config_of(4, engine={"kind": "external", "urls": ["http://127.0.0.1:1"]}))
    host, port = split_address(config.replay.address)
    assert all(is_free(host, port + i) for i in range(4))
    assert shard_address(config.replay.address, 3) == f"tcp://127.0.0.1:{port + 3}"
    assert shard_address("tcp://[::1]:7000", 2) == "tcp://[::1]:7002"
    assert shard_address("tcp://127.0.0.1:0", 2) == "tcp://127.0.0.1:0"
    with pytest.raises(ConfigurationError, match="up to 65534"):
        shard_address("tcp://127.0.0.1:65535", 1)


async def test_a_taken_port_of_any_shard_is_named() -> None:
    async with open_hub(config_of(1)) as hub:
        host, port = split_address(hub.address)
        with pytest.raises(ConfigurationError, match=rf"replay.address \(shard 1\).*{port}"):
            resolve(
                config_of(
                    2,
                    replay={"shards": 2, "address": f"tcp://{host}:{port - 1}"},
                    engine={"kind": "external", "urls": ["http://127.0.0.1:1"]},
                )
            )


async def test_one_link_leads_to_each_stage() -> None:
    base = split_address(resolve(config_of(2, engine={"kind": "external", "urls": ["http://127.0.0.1:1"]}))
                         .replay.address)[1]  # fmt: skip
    config = config_of(2, replay={"shards": 2, "address": f"tcp://127.0.0.1:{base}"})
    hubs = [open_hub(config, index) for index in range(2)]
    async with hubs[0], hubs[1]:
        links = open_links(config, "actor-0")
        async with links[0], links[1]:
            for index, (hub, link) in enumerate(zip(hubs, links, strict=True)):
                link.describe({"role": "actor", "index": index})
                event = await hub.receive()
                assert event.message is not None and event.message.header["index"] == index


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"replay": {"shards": 5}, "groups": {"groups_per_step": 12}}, "multiple of replay.shards"),
        ({"replay": {"shards": 4}, "groups": {"groups_per_step": 4}, "actor": {"concurrency": 3}}, "actor.concurrency"),
        ({"replay": {"shards": 0}}, "greater than or equal to 1"),
        ({"replay": {"shards": 65}}, "less than or equal to 64"),
    ],
)
def test_impossible_numbers_of_shards_are_refused_with_the_reason(sections: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(sections)
