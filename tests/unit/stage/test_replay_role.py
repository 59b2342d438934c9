"""The asynchronous shell over the in-memory transport: orders, acknowledgements, deliveries, restarts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage.role import serve
from pipeline.store.evaluation_results import read_results
from pipeline.store.ledger import read_ledger
from pipeline.store.snapshot import Snapshot
from pipeline.store.store import ReplayStore
from pipeline.transport.hub import Hub
from pipeline.transport.messages import MessageFault
from tests.support.instant_peers import InstantActor, InstantLearner
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryLinkWire, MemoryNetwork

PLUGINS = Path(__file__).parents[1] / "scorer" / "plugins_for_scorer.py"


def configuration(folder: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": str(folder), "name": "r", "total_steps": more.pop("total_steps", 4)},
            "groups": {"n_rollout": 3, "groups_per_step": 2},
            "environments": {"a": {}},
            **more,
        }
    )


@asynccontextmanager
async def stage(config: RunConfig, network: MemoryNetwork) -> AsyncIterator[RoleContext]:
    ctx = RoleContext("replay", 0, config, RunDirectory(config.run.path).create())
    hub = MemoryHub(network, heartbeat_seconds=0.1, silence_seconds_max=1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(serve, ctx, hub)
        yield ctx
        ctx.stopping.set()


@asynccontextmanager
async def playing(network: MemoryNetwork, trainer: InstantLearner, player: InstantActor) -> AsyncIterator[None]:
    """Learner and actor, until the block ends."""
    async with anyio.create_task_group() as group:
        for name, run in (("actor-0", player.run), ("learner", trainer.run)):
            group.start_soon(run, MemoryLink(network, name, heartbeat_seconds=0.1, silence_seconds_max=1.0))
        yield
        group.cancel_scope.cancel()


@pytest.mark.parametrize("functions", [[], [{"path": f"{PLUGINS}:slowly", "name": "slowly"}]])
async def test_a_run_is_served_to_its_end(tmp_path: Path, functions: list[Any]) -> None:
    config = configuration(tmp_path, scorer={"functions": functions})
    network, trainer, player = MemoryNetwork(), InstantLearner(4, 3, 2), InstantActor()
    with anyio.fail_after(60):
        async with stage(config, network) as ctx, playing(network, trainer, player):
            await trainer.done.wait()
        assert ctx.status.state == "stopping"
    for name, labels, value in (
        ("terminal_trajectories_total", {"state": "trained"}, 24),
        ("groups_total", {"outcome": "trained"}, 8),
        ("orders_total", {"outcome": "completed"}, 24),
        ("orders_issued_total", {}, 24),
        ("inserted_trajectories_total", {"env": "a"}, 24),
        ("sampled_trajectories_total", {}, 24),
        ("staleness_versions_count", {"at": "sample"}, 24),
        ("audit_reward_count", {"population": "trained"}, 24),
        ("item_age_seconds_count", {}, 24),
        ("sample_wait_seconds_count", {}, 8),
        ("orders_inflight", {}, 0),
    ):
        assert ctx.registry.get_sample_value(f"afterplay_replay_{name}", labels) == value, name
    assert len(set(trainer.trained)) == len(trainer.trained) == 4 * 2 * 3
    assert set(trainer.trained) <= set(player.acknowledged)
    assert set(trainer.rewards) == ({0.5, 1.5} if functions else {0.0, 1.0})
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == [] and ledger.updates == 4 and ledger.trajectories["trained"] == 24


async def test_an_invalid_message_is_counted_by_its_fault(tmp_path: Path) -> None:
    network = MemoryNetwork()
    wire = MemoryLinkWire(network, "raw")
    with anyio.fail_after(60):
        async with stage(configuration(tmp_path), network) as ctx:

            def counted(fault: MessageFault) -> float | None:
                labels = {"fault": fault.value}
                return ctx.registry.get_sample_value("afterplay_replay_invalid_messages_total", labels)

            while network.hub is None:
                await anyio.sleep(0.01)
            wire.connect()
            assert wire.send([b"nonsense", b"{}"]) and wire.send([b"trajectory", b"{}"])
            while not (counted(MessageFault.BYTES) == counted(MessageFault.HELLO) == 1):
                await anyio.sleep(0.01)
            await wire.close()


@pytest.mark.slow
async def test_the_stage_restarts_and_peers_go_on(tmp_path: Path) -> None:
    config = configuration(tmp_path, total_steps=30)
    network, trainer, player = MemoryNetwork(), InstantLearner(30, 3, 2), InstantActor()
    with anyio.fail_after(30):
        async with playing(network, trainer, player):
            for until in (5, 15):
                async with stage(config, network):
                    while trainer.updates < until:
                        await trainer.progress()
            async with stage(config, network):
                await trainer.done.wait()
    assert len(set(trainer.trained)) == len(trainer.trained) == 30 * 2 * 3
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []


async def test_counters_of_a_stage_that_starts_again_begin_with_what_they_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that a scrape finds at 0 in between would seem to grow by all of it."""
    config, network, seen = configuration(tmp_path), MemoryNetwork(), list[float | None]()
    with anyio.fail_after(60):
        trainer, player = InstantLearner(4, 3, 2), InstantActor()
        async with playing(network, trainer, player), stage(config, network):
            await trainer.done.wait()
        ctx = RoleContext("replay", 0, config, RunDirectory(config.run.path))

        def look() -> None:
            seen.append(ctx.registry.get_sample_value("afterplay_replay_orders_issued_total"))

        def loaded(store: ReplayStore) -> Snapshot:
            look()
            return load(store)

        def bound(hub: MemoryHub) -> Any:
            look()
            ctx.stopping.set()
            return Hub.__aenter__(hub)

        load = ReplayStore.load
        monkeypatch.setattr(ReplayStore, "load", loaded)
        monkeypatch.setattr(MemoryHub, "__aenter__", bound)
        await serve(ctx, MemoryHub(MemoryNetwork()))
    assert seen == [None, read_ledger(tmp_path / "r" / "replay.sqlite").orders["issued"]]


async def test_a_bad_score_function_ends_the_stage_before_it_binds(tmp_path: Path) -> None:
    config = configuration(tmp_path, scorer={"functions": [{"path": "no.such:thing"}]})
    ctx = RoleContext("replay", 0, config, RunDirectory(config.run.path).create())
    with pytest.raises(ConfigurationError, match=r"no\.such"):
        await serve(ctx, MemoryHub(MemoryNetwork()))


async def test_each_evaluation_has_its_line_where_an_empty_store_takes_the_place_of_the_first(tmp_path: Path) -> None:
    section = {"every": 100, "tasks": 2, "end": False}
    config = configuration(tmp_path, total_steps=2, evaluation=section, environments={"a": {"held_out": {"eval": 2}}})
    for _ in range(2):
        network, trainer = MemoryNetwork(), InstantLearner(2, 3, 2)
        with anyio.fail_after(60):
            async with stage(config, network) as ctx, playing(network, trainer, InstantActor()):
                await trainer.done.wait()
        for file in ctx.directory.path.glob("replay.sqlite*"):
            if file.suffix != ".ids":  # it stays, as docs/RUNBOOK.md says
                file.unlink()
    results = read_results(ctx.directory.evaluations_file)
    assert [(one["evaluation"], one["updates"], one["skipped"]) for one in results] == [(0, 0, 0), (1, 0, 0)]
