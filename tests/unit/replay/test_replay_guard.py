"""The guard in the loop: what it plans follows what it is told of its plans."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.replay import EssGuardConfig
from pipeline.replay.mixing import RECOVERY, next_factor
from pipeline.replay.replay import Replay
from pipeline.replay.report import ReplayReport
from pipeline.tasks.sampler import TaskSampler

BATCH = 8
GUARD = {"enabled": True}


class Loop:
    """Plans a batch, and says of its replays that they carry weight or, where one is stale, that they do not."""

    def __init__(self, config, entries, stale=()):
        self.config, self.stale = config, set(stale)
        self.rows, self.tasks = {entry.row_id: entry for entry in entries}, {}
        self.replay = Replay(config, entries=entries)
        self.sampler = TaskSampler(config.environments, config.run.seed)

    def update(self) -> int:
        """One batch, planned and trained at once; how many groups were replays."""
        plans = [self.replay.next_group(self.sampler, progress=1.0, version=0) for _ in range(BATCH)]
        used = [c.entry.row_id for plan in plans for c in plan.candidates[: plan.k]]
        carried = None if not used else 0.01 if self.stale.intersection(used) else 0.9
        ess = {"all": 0.9, "fresh": 1.0, "replay": 1.0 if used else None, "carried": carried}
        self.replay.consumed(update=0, version=0, used=used, ess=ess, entropies={}, solve_rate=None)
        return sum(plan.k > 0 for plan in plans)

    def restart(self):
        changes = self.replay.take_changes()
        self.rows |= {entry.row_id: entry for entry in changes.entries}
        for row_id in changes.removed:
            self.rows.pop(row_id, None)
        self.tasks |= {record.task.task_id: record for record in changes.tasks}
        for task in changes.forgotten_tasks:
            self.tasks.pop(task, None)
        state = json.loads(json.dumps(dict(changes.state)))
        self.replay = Replay(self.config, entries=self.rows.values(), tasks=self.tasks.values(), state=state)


def test_a_pool_that_is_all_stale_is_replayed_a_fifth_as_much_or_less_and_never_given_up(make):
    entries = [make.entry(i, 100 + i) for i in range(40)]
    for guard, least, most in (({}, 6 * 100, 6 * 100), (GUARD, 20, 6 * 20)):
        loop = Loop(make.config(n=8, batch=BATCH, task_ratio=0.75, ess_guard=guard), entries, stale=range(40))
        assert least <= sum(loop.update() for _ in range(100)) <= most


def test_the_share_comes_back_in_full_once_what_is_stale_has_left_the_pool(make):
    config = make.config(n=8, batch=BATCH, task_ratio=0.5, capacity=30, ess_guard=GUARD)
    loop = Loop(config, [make.entry(i, 100 + i) for i in range(30)], stale=range(30))
    assert sum(loop.update() for _ in range(40)) <= 40
    assert loop.replay.factor < 0.5
    for task in range(30):
        make.play(loop.replay, 1000 + task, 1, 8, 100 + 8 * task)
    assert not any(row_id in loop.replay.pool for row_id in range(30))
    for _ in range(math.ceil(1 / RECOVERY)):
        loop.update()
    assert loop.replay.factor == 1.0
    assert loop.update() == 4


def test_a_shrunk_share_and_its_way_back_survive_a_restart_of_the_stage(make):
    config = make.config(n=8, batch=BATCH, task_ratio=0.75, ess_guard=GUARD)
    kept, restarted = (
        Loop(config, [make.entry(i, 100 + i) for i in range(40)], stale=range(0, 40, 2)) for _ in range(2)
    )
    shares = []
    for _ in range(60):
        shares.append((kept.update(), restarted.update()))
        restarted.restart()
        assert restarted.replay.factor == kept.replay.factor
        assert restarted.replay.share == kept.replay.share
    assert all(a == b for a, b in shares) and min(a for a, _ in shares) == 0


def test_what_carries_no_weight_shrinks_the_share_though_its_ess_is_perfect(make):
    """Kish's ESS does not see a common factor: replays whose ratios are all 0.01 have an ESS of 1."""
    told = dict(used=[], entropies={}, solve_rate=None)
    experience = Replay(make.config(ess_guard=GUARD), entries=[make.entry(0)])
    experience.consumed(update=0, version=0, **told, ess={"replay": 1.0, "carried": 0.01})
    assert experience.factor == 0.5
    experience.consumed(update=0, version=0, **told, ess={"replay": 0.1})
    assert experience.factor == 0.25
    experience.consumed(update=0, version=0, **told, ess={"replay": None, "carried": None})
    assert experience.factor == pytest.approx(0.3)


@given(st.lists(st.none() | st.floats(0, 1), max_size=60))
def test_whatever_it_is_told_the_factor_stays_in_bounds_and_finds_its_way_back(told):
    guard = EssGuardConfig(enabled=True)
    factor = 1.0
    for ess in told:
        factor = next_factor(guard, factor, ess)
        assert 0 <= factor <= 1
    for _ in range(math.ceil(1 / RECOVERY) + 1):
        factor = next_factor(guard, factor, 0.9)
    assert factor == 1.0


def test_a_run_that_switched_replay_off_reports_no_share(make):
    assert ReplayReport(started=True).json(make.config())["guard"]["share"] == 0.5
    assert ReplayReport(started=True).json(make.config(enabled=False))["guard"]["share"] == 0
