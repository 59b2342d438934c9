"""A reward function that must see a whole group: every group is scored whole, whatever fails, restarts or is given
up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stage.ingest import GroupGate
from pipeline.store.ledger import read_ledger
from tests.support.instant_peers import InstantActor, InstantLearner
from tests.support.memory_transport import MemoryNetwork
from tests.unit.scorer.test_http_parts import answering, spoken
from tests.unit.stage.test_replay_role import PLUGINS, configuration, playing, stage


def config(folder: Path, path: str, **more: Any) -> Any:
    functions = [{"path": f"{PLUGINS}:{path}", "name": "together", "per": "group"}]
    return configuration(folder, scorer={"environment_weight": 0, "functions": functions}, **more)


@pytest.mark.parametrize("path", ["share_of_group", "fails_once_for_each_first_slot"])
async def test_every_group_is_scored_whole(tmp_path: Path, path: str) -> None:
    network, trainer, player = MemoryNetwork(), InstantLearner(4, 3, 2), InstantActor()
    with anyio.fail_after(60):
        async with stage(config(tmp_path, path), network) as ctx, playing(network, trainer, player):
            await trainer.done.wait()
    assert set(trainer.rewards) == ({1 / 3} if path == "share_of_group" else {3.0})
    assert len(trainer.trained) == len(set(trainer.trained)) == 4 * 2 * 3
    failures = ctx.registry.get_sample_value(
        "afterplay_replay_score_failures_total", {"function": "together", "reason": "missing"}
    )
    assert (failures == 0) if path == "share_of_group" else failures >= 8
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == []


async def test_a_restart_finds_groups_scored_or_not(tmp_path: Path) -> None:
    settings = config(tmp_path, "share_of_group", total_steps=20)
    network, trainer, player = MemoryNetwork(), InstantLearner(20, 3, 2), InstantActor()
    with anyio.fail_after(60):
        async with playing(network, trainer, player):
            for until in (2, 5, 9, 14):
                async with stage(settings, network):
                    while trainer.updates < until:
                        await trainer.progress()
            async with stage(settings, network):
                await trainer.done.wait()
    assert set(trainer.rewards) == {1 / 3}
    assert len(set(trainer.trained)) == len(trainer.trained) == 20 * 2 * 3
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []


async def test_groups_that_can_never_be_scored_are_given_up_and_kept_nowhere(tmp_path: Path) -> None:
    settings = config(tmp_path, "never_for_the_first_slot")
    network, trainer, player = MemoryNetwork(), InstantLearner(4, 3, 2), InstantActor()
    with anyio.fail_after(60):
        async with stage(settings, network) as ctx, playing(network, trainer, player):
            cancelled = 0.0
            while cancelled < 3:
                await anyio.sleep(0.02)
                cancelled = ctx.registry.get_sample_value(
                    "afterplay_replay_groups_total", {"outcome": "cancelled"}
                ) or 0.0  # fmt: skip
    assert trainer.trained == []
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []


async def test_a_judge_that_fails_at_times_costs_rollouts_and_no_trajectory_a_false_reward(tmp_path: Path) -> None:
    busy, junk, good = (lambda _: web.Response(status=503)), spoken("no idea"), spoken("Score: 5")
    async with answering(busy, junk, good, busy, good, junk, good) as server:
        judge = {"name": "judge", "url": server.url}
        settings = configuration(tmp_path, scorer={"environment_weight": 0, "judges": [judge]})
        network, trainer, player = MemoryNetwork(), InstantLearner(4, 3, 2), InstantActor()
        with anyio.fail_after(120):
            async with stage(settings, network) as ctx, playing(network, trainer, player):
                await trainer.done.wait()
    assert set(trainer.rewards) == {0.5} and len(trainer.trained) == 4 * 2 * 3
    for name, labels, value in (
        ("score_retries_total", {"function": "judge"}, 2),
        ("score_failures_total", {"function": "judge", "reason": "protocol"}, 2),
        ("score_failures_total", {"function": "judge", "reason": "unavailable"}, 0),
        ("terminal_trajectories_total", {"state": "unscored"}, 2),
    ):
        assert ctx.registry.get_sample_value(f"afterplay_replay_{name}", labels) == value, name
    values = ctx.registry.get_sample_value("afterplay_replay_score_value_count", {"function": "judge"})
    assert values is not None and values >= 24
    assert read_ledger(tmp_path / "r" / "replay.sqlite", rows=True).audit() == []


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["put", "drop", "end"]), st.integers(0, 5)), max_size=80))
def test_a_gathering_gives_a_group_exactly_when_it_is_whole(history: list[tuple[int, str, int]]) -> None:
    gathering: GroupGate[int] = GroupGate()
    waiting: dict[int, set[int]] = {}
    ended: set[int] = set()
    for group, what, row_id in history:
        if what == "put":
            members = gathering.put(group, row_id, row_id, 3)
            if group in ended:
                assert members is None
                continue
            mine = waiting.setdefault(group, set())
            mine.add(row_id)
            assert members == (sorted(mine) if len(mine) >= 3 else None)
        elif what == "drop":
            gathering.drop(group, {row_id})
            waiting.get(group, set()).discard(row_id)
        else:
            gathering.end(group)
            ended.add(group)
            waiting.pop(group, None)
        assert len(gathering) == sum(map(len, waiting.values()))
