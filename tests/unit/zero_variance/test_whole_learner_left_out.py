"""The whole learner and the real stage, where half of all groups have equal rewards."""

from __future__ import annotations

import pytest

from pipeline.store.ledger import read_ledger
from tests.unit.learner.test_learner_role import kill_after, world

__all__ = ["world"]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["drop", "refill"])
async def test_a_run_ends_with_every_account_in_order(world, what: str) -> None:
    groups = {"n_rollout": 2, "groups_per_step": 2, "zero_variance": what}
    async with world(total_steps=8, groups=groups) as w:
        ctx = await w.learn()
        assert ctx.status.state == "finished"
    lines = w.lines()
    assert [line["step"] for line in lines] == list(range(1, 9))
    ledger = read_ledger(w.directory.store_file, rows=True)
    assert ledger.audit() == []
    left_out = sum(line["groups_left_out"] for line in lines)
    assert [line["n_groups"] + line["groups_left_out"] for line in lines] == [2] * 8
    if what == "drop":
        assert left_out == ledger.groups["zero_variance"] > 0
        assert any(line["n_groups"] == 0 for line in lines), "an update of nothing is among them"
        empty = next(line for line in lines if line["n_groups"] == 0)
        assert empty["optimizer_steps"] == 0 and empty["nonfinite"]["loss"] == 0
    else:
        assert left_out == 0 and ledger.groups["cancelled.zero_variance"] > 0
    assert ledger.groups["trained"] == 16 - left_out


@pytest.mark.slow
async def test_a_killed_learner_makes_the_same_updates_again_without_what_was_left_out(world) -> None:
    groups = {"n_rollout": 2, "groups_per_step": 2, "zero_variance": "drop"}
    async with world(total_steps=6, groups=groups, checkpoint={"every": 2}) as w:
        await kill_after(w, 3)
        await w.learn()
    assert [line["step"] for line in w.lines()] == [1, 2, 3, 4, 5, 6]
    assert read_ledger(w.directory.store_file, rows=True).audit() == []
