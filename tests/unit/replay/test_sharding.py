"""Several replay stages: together they own every task once, number groups apart, and never open each other's store."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config import RunConfig
from pipeline.config.play import EnvironmentConfig
from pipeline.errors import ConfigurationError
from pipeline.replay.accounts import audit, total
from pipeline.replay.core import StageCore
from pipeline.replay.ledger import Ledger
from pipeline.replay.records import parse_group_id
from pipeline.replay.sharding import WHOLE, Shard, store_paths
from pipeline.replay.snapshot import Snapshot
from pipeline.replay.tasks import TaskSampler
from pipeline.rundir import RunDirectory
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.base import Kind, Message

SHARDS = st.integers(1, 8)


def config_of(shards: int = 2, **sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "groups": {"n_rollout": 2, "groups_per_step": 8},
            "environments": {"a": {}},
            "replay": {"shards": shards},
            **sections,
        }
    )


def stage(config: RunConfig, index: int) -> StageCore:
    """A stage that an actor and a learner have greeted."""
    core = StageCore(config, shard=Shard.of(config, index))
    hello = {"schema_version": SCHEMA_VERSION, "slots": 64, "holding": []}
    core.peer_up("actor-0", {"role": "actor", **hello})
    core.peer_up("learner", {"role": "learner", "schema_version": SCHEMA_VERSION, "session": "s", "updates": 0,
                             "credit_groups": 8, "holding": [], "consumed": []})  # fmt: skip
    core.message("learner", Message(Kind.VERSION, {"policy_version": 0, "updates": 0}))
    core.plan()
    return core


@given(SHARDS, st.text(max_size=30))
def test_every_task_has_exactly_one_owner(n: int, task_id: str) -> None:
    assert [Shard(i, n).owns(task_id) for i in range(n)].count(True) == 1


@settings(max_examples=40)
@given(SHARDS, st.integers(16, 100), st.integers(0, 3))
def test_samplers_of_all_shards_are_disjoint_and_cover_every_task_once_an_epoch(n: int, tasks: int, seed: int) -> None:
    environments = {"a": EnvironmentConfig(tasks=tasks, seed=5), "b": EnvironmentConfig(tasks=tasks, weight=2)}
    every = {f"a/{5 + i}" for i in range(tasks)} | {f"b/{i}" for i in range(tasks)}
    seen: Counter[str] = Counter()
    for index in range(n):
        shard = Shard(index, n)
        own = {name for name in every if shard.owns(name)}
        if not own:
            continue
        sampler = TaskSampler(environments, seed, shard=shard)
        drawn = [sampler.draw().task_id for _ in range(12 * len(own))]
        assert set(drawn) == own
        first = {name: drawn.index(name) for name in own}
        for environment in "ab":
            part = [name for name in drawn if name.startswith(environment)]
            own_part = {name for name in own if name.startswith(environment)}
            assert len(set(part[: len(own_part)])) == len(own_part), first
        seen.update(own)
    assert set(seen) <= every and (not seen or max(seen.values()) == 1)
    if all(any(Shard(i, n).owns(name) for name in every) for i in range(n)):
        assert set(seen) == every


@given(st.integers(2, 6), st.integers(0, 60))
def test_a_shard_walks_the_sequence_of_the_whole_and_resumes_in_it(n: int, drawn: int) -> None:
    environments = {"a": EnvironmentConfig(weight=2), "b": EnvironmentConfig(tasks=100)}
    shard = Shard(1, n)
    one = TaskSampler(environments, 0, shard=shard)
    walk = TaskSampler(environments, 0)
    mine = [one.draw() for _ in range(drawn)]
    whole = []
    while len(whole) < drawn:
        if shard.owns((task := walk.draw()).task_id):
            whole.append(task)
    assert mine == whole
    two = TaskSampler(environments, 0, one.state(), shard)
    assert [one.draw() for _ in range(20)] == [two.draw() for _ in range(20)]


@pytest.mark.parametrize("n", [2, 4])
def test_environment_weights_keep_in_every_shard(n: int) -> None:
    environments = {"a": EnvironmentConfig(weight=3), "b": EnvironmentConfig(weight=1)}
    for index in range(n):
        sampler = TaskSampler(environments, 0, shard=Shard(index, n))
        share = Counter(sampler.draw().environment for _ in range(2000))["a"] / 2000
        assert share == pytest.approx(0.75, abs=0.04)


def test_a_shard_without_any_task_says_so() -> None:
    environments = {"a": EnvironmentConfig(tasks=1)}
    shards = [Shard(i, 2) for i in range(2)]
    idle = next(s for s in shards if not s.owns("a/0"))
    with pytest.raises(ConfigurationError, match="fewer shards"):
        TaskSampler(environments, 0, shard=idle)


@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_admits_its_share_under_its_own_numbers(index: int) -> None:
    core = stage(config_of(), index)
    bound = core.config.staleness.max
    assert len(core.records) == (bound + 1) * 4
    assert [n % 2 for n in core.records] == [index] * len(core.records)
    assert sorted(core.records) == list(range(index, 2 * len(core.records), 2))
    assert all(Shard(index, 2).owns(group.task.task_id) for group in core.records.values())
    assert all(parse_group_id(group.group_id) == number for number, group in core.records.items())


def test_two_stages_share_no_task_and_no_group() -> None:
    config = config_of()
    one, two = stage(config, 0), stage(config, 1)
    assert not set(one.records) & set(two.records)
    tasks = [{group.task.task_id for group in core.records.values()} for core in (one, two)]
    assert tasks[0] and tasks[1] and not tasks[0] & tasks[1]


@pytest.mark.parametrize(("meta", "index", "shards"), [
    ({"shard": [0, 2], "consumed": 3}, 1, 2),
    ({"shard": [0, 2], "consumed": 3}, 0, 1),
    ({"shape": {"n_rollout": 2, "groups_per_step": 8}}, 0, 2),
])  # fmt: skip
def test_the_store_of_another_stage_is_refused(meta: dict[str, object], index: int, shards: int) -> None:
    config = config_of(shards)
    with pytest.raises(ConfigurationError, match="number of shards is fixed"):
        StageCore(config, Snapshot(meta=meta), shard=Shard.of(config, index))


def test_a_store_from_before_there_were_shards_is_that_of_the_only_stage() -> None:
    core = StageCore(config_of(1), Snapshot(meta={"shape": {"n_rollout": 2, "groups_per_step": 8}}))
    assert core.collect()[0].meta["shard"] == WHOLE.record() == [0, 1]


def test_an_index_beyond_the_shards_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"in 0\.\.1"):
        Shard.of(config_of(), 2)


def test_every_stage_has_its_own_store(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert [p.name for p in store_paths(config_of(4), directory)] == [
        "replay.sqlite", "replay-1.sqlite", "replay-2.sqlite", "replay-3.sqlite",
    ]  # fmt: skip
    elsewhere = config_of(2, replay={"shards": 2, "store": str(tmp_path / "x" / "mine.db")})
    assert store_paths(elsewhere, directory) == [tmp_path / "x" / "mine.db", tmp_path / "x" / "mine-1.db"]
    for name in ("replay-10.sqlite", "replay-2.sqlite", "replay.sqlite", "replay-old.sqlite", "replay-1.sqlite-wal"):
        (tmp_path / name).touch()
    assert [p.name for p in directory.store_files] == ["replay.sqlite", "replay-2.sqlite", "replay-10.sqlite"]


def test_accounts_of_all_stages_add_up_and_each_is_audited() -> None:
    rows = {"orders": {"delivered": 2}}
    good = Ledger(orders={"issued": 2, "delivered": 2}, updates=4, policy_version=4, rows={})
    other = Ledger(orders={"issued": 3, "delivered": 2, "failed": 1}, updates=3, policy_version=5, rows=rows)
    both = total([good, other])
    assert both.orders == {"issued": 5, "delivered": 4, "failed": 1}
    assert (both.updates, both.policy_version, both.rows) == (3, 5, rows)
    less, more = Ledger(orders={"issued": 1}), Ledger(orders={"delivered": 1})
    assert total([less, more]).audit() == []
    assert [p[:8] for p in audit([less, more])] == ["stage 0:", "stage 1:"]
    assert audit([good]) == []
