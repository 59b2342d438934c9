"""Random histories of answers, updates, crashes and restarts with groups that teach nothing."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store.records import GroupState
from pipeline.store.replay_records import EQUAL_REWARDS
from pipeline.transport.messages import Kind

SECTIONS = st.fixed_dictionaries(
    {
        "groups": st.fixed_dictionaries(
            {
                "n_rollout": st.integers(2, 3),
                "groups_per_step": st.integers(1, 3),
                "zero_variance": st.sampled_from(("keep", "drop", "refill")),
                "refill_max": st.sampled_from((0.0, 0.5, 1.0, 2.0)),
            }
        ),
        "staleness": st.fixed_dictionaries({"max": st.integers(0, 2)}),
    }
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("answer", "answer", "answer", "answer", "answer", "train", "publish", "back", "restart", "saved")
        ),
        st.integers(0, 30),
        st.integers(0, 1),
    ),
    max_size=60,
)


def step(s: Any, action: str, pick: int, reward: int) -> None:
    match action:
        case "answer":
            if s.holding:
                s.take(sorted(s.holding)[pick % len(s.holding)], reward)
        case "train":
            if len(s.members()) == s.core.staleness.rule.groups_per_step:
                s.trained[s.updates] = s.train(publish=bool(pick % 2))
        case "publish":
            s.publish()
        case "back":
            s.go_back(max(s.core.dispatch.durable_updates, s.updates - pick % 3))
        case "restart":
            s.restart()
        case "saved":
            s.tell(Kind.CHECKPOINTED, updates=s.updates)


def check(s: Any) -> None:
    """What holds after every event."""
    core = s.core
    rule, n = core.config.groups, core.staleness.rule.groups_per_step
    for group in core.records.values():
        rewards = [slot.trajectory.reward for slot in group.slots if slot.trajectory is not None]
        if group.dropped:
            assert rule.zero_variance == "drop" and not rewards
            assert group.state in (GroupState.READY, GroupState.PLACED, GroupState.ZERO_VARIANCE)
        elif group.state in (GroupState.READY, GroupState.PLACED, GroupState.TRAINED):
            same = max(rewards) - min(rewards) <= EQUAL_REWARDS
            assert not (same and rule.zero_variance == "drop"), "an equal group waits to be trained"
    held = [slot.trajectory for g in core.records.values() for slot in g.slots if slot.trajectory is not None]
    assert core.payloads.holders.keys() == {record.row_id for record in held}
    admitted = core.staleness.open + core.staleness.consumed * n
    assert admitted <= (core.staleness.rule.bound + s.updates_live_max + 1) * n, "what a learner lost stays admitted"
    for update, (plan_update, plan) in [(s.updates, p) for p in s.plans.values()]:
        assert plan_update >= update and plan_update <= plan.admitted_update + core.staleness.rule.bound


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SECTIONS, ACTIONS)
def test_every_account_adds_up_and_no_update_waits_for_ever(
    stage_class: Any, sections: dict[str, Any], script: list[tuple[str, int, int]]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        s = stage_class(Path(folder) / "r.sqlite", **sections)
        try:
            for action, pick, reward in script:
                step(s, action, pick, reward)
                check(s)
            s.ledger()
            _goes_on(s)
        finally:
            s.store.close()


def _goes_on(s: Any) -> None:
    """Played by agents that always fail, the next two updates are still made, with a bounded number of rollouts. The
    learner announces the weights that it has made in the end, and all that it makes from now on."""
    if s.core.staleness.live < s.updates:
        s.publish()
    rule, bound = s.core.config.groups, s.core.staleness.rule.bound
    most = (1 + rule.refill_max) * rule.groups_per_step * rule.n_rollout * (3 + bound)
    target, answers = s.updates + 2, 0
    while s.updates < target:
        if len(s.members()) == rule.groups_per_step:
            s.train()
        else:
            assert s.holding, f"nothing is played and update {s.updates} lacks groups"
            s.take(min(s.holding), 0)
            answers += 1
        check(s)
    assert answers <= most, (answers, most)
    ledger = s.ledger()
    assert ledger.groups.get("zero_variance", 0) == 0 or rule.zero_variance == "drop"
    assert ledger.groups.get("cancelled.zero_variance", 0) == ledger.groups.get("zero_variance_refilled", 0)
    assert ledger.trajectories.get("dropped.zero_variance", 0) == rule.n_rollout * (
        ledger.groups.get("zero_variance_dropped", 0) + ledger.groups.get("zero_variance_refilled", 0)
    )


@pytest.mark.parametrize("what", ["drop", "refill"])
def test_all_rollouts_succeed_for_ever(stage: Any, what: str) -> None:
    s = stage(groups={"n_rollout": 2, "groups_per_step": 2, "zero_variance": what}, staleness={"max": 1})
    for _ in range(60):
        if len(s.members()) == 2:
            s.train()
        s.take(min(s.holding), 1)
    assert s.updates >= (60 // 4 if what == "drop" else 60 // 12) - 1
    s.ledger()
