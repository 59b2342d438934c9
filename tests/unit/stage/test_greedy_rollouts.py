"""One greedy rollout more for each group: ordered, scored, its reward told with the plan, never trained."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from pipeline.schema import GroupPlan, Order, Task, TrajectoryStatus
from pipeline.schema.orders import decode_request, encode_request
from pipeline.store.ledger import Ledger, build_ledger
from pipeline.store.records import TrajectoryState
from pipeline.transport.messages import Kind
from tests.support.stored_stage import StoredStage


class Stage(StoredStage):
    """An actor holds what it was ordered; the learner has trained nothing."""

    def __init__(self, path: Any, **sections: Any) -> None:
        defaults: dict[str, Any] = {
            "environments": {"a": {"max_seconds": 10}},
            "groups": {"n_rollout": 2, "groups_per_step": 1, "attempts_max": 2},
            "staleness": {"max": 0},
            "advantage": {"estimator": "remax"},
            "replay": {"keep_trained": 0},
        }
        super().__init__(path, **defaults | sections)

    def start(self) -> None:
        super().start()
        self.up("actor-0", slots=100, holding=[o.order_id for o in self.leased()])
        self.up("learner", session="s", updates=0, policy_version=-1, durable_updates=0, credit_groups=8)
        self.tell(Kind.VERSION, policy_version=0, updates=0)

    def plans(self) -> list[GroupPlan]:
        return [decode_request(GroupPlan, s.header) for s in self.sent if s.kind is Kind.PLAN]

    def ledger(self) -> Ledger:
        states = Counter(g.state.value for g in self.core.records.values())
        ledger = build_ledger(self.core.journal.counters, {k: states[k] for k in ("collecting", "ready", "placed")}, {})
        assert ledger.audit() == []
        return replace(ledger, trajectories={k: n for k, n in ledger.trajectories.items() if k != "sent"})


@pytest.fixture
def make_stage(tmp_path):
    """Makes stages, closed at the end."""
    with ExitStack() as stack:

        def make(**sections: Any) -> Stage:
            stage = Stage(tmp_path / "r.sqlite", **sections)
            stack.callback(lambda: stage.store.close())
            return stage

        yield make


@pytest.fixture
def stage(make_stage):
    return make_stage()


def test_the_greedy_rollout_is_ordered_behind_the_group_and_says_so(stage):
    assert [(o.order_id, o.greedy) for o in stage.orders()] == [
        ("g000000.0.0", False), ("g000000.1.0", False), ("g000000.2.0", True)
    ]  # fmt: skip


def test_a_group_is_complete_with_its_baseline_and_delivers_only_what_is_trained(stage):
    fresh, fresh2, greedy = stage.orders()
    stage.answer(fresh)
    stage.answer(fresh2)
    assert not stage.plans()
    stage.answer(greedy, reward=0.75)
    (plan,) = stage.plans()
    assert (plan.baseline, plan.n_rollout, plan.n_fresh) == (0.75, 2, 2)
    delivered = [s.header["trajectory_id"] for s in stage.sent if s.kind is Kind.DELIVERY]
    assert delivered == ["g000000.0.0", "g000000.1.0"]
    ledger = stage.ledger()
    assert ledger.trajectories == {"received": 3, "held": 2, "baseline": 1}


def test_the_baseline_is_counted_once_whatever_becomes_of_its_group(stage):
    for order in stage.orders():
        stage.answer(order, reward=1.0)
    stage.tell(Kind.CONSUMED, update=0, group_ids=["g000000"])
    assert stage.ledger().trajectories == {"received": 3, "held": 0, "baseline": 1, "trained": 2}
    stage.tell(Kind.CHECKPOINTED, updates=1)
    assert "g000000" not in [g.group_id for g in stage.core.records.values()]
    assert not stage.core.payloads.holders


def test_only_the_reward_of_a_baseline_is_kept_and_survives_a_restart(stage):
    fresh, fresh2, greedy = stage.orders()
    stage.answer(greedy, reward=0.5)
    stage.answer(fresh)
    group = stage.core.records[0]
    assert group.greedy.trajectory.state is TrajectoryState.BASELINE
    assert group.greedy.trajectory.row_id not in stage.core.payloads.holders
    stage.restart()
    assert stage.core.records[0].baseline == 0.5
    assert [o.order_id for o in stage.leased()] == [fresh2.order_id], "nothing is ordered twice"
    stage.answer(fresh2)
    assert [p.baseline for p in stage.plans()] == [0.5]
    assert stage.ledger().trajectories == {"received": 3, "held": 2, "baseline": 1}


def test_a_failed_greedy_rollout_is_ordered_again_and_uses_up_its_own_attempts(stage):
    greedy = stage.orders()[2]
    stage.answer(greedy, status=TrajectoryStatus.ERROR)
    again = stage.orders()[-1]
    assert (again.order_id, again.greedy, again.attempt) == ("g000000.2.1", True, 1)
    stage.answer(again, status=TrajectoryStatus.ERROR)
    assert stage.ledger().groups["cancelled.attempts"] == 1


def test_a_cancelled_group_keeps_no_payload_and_its_scored_baseline_stays_counted_as_one(stage):
    fresh, _, greedy = stage.orders()
    stage.answer(greedy, reward=1.0)
    for _ in range(2):
        stage.answer(next(o for o in reversed(stage.orders()) if o.slot == fresh.slot), status=TrajectoryStatus.ERROR)
    assert stage.ledger().trajectories == {"received": 3, "held": 0, "baseline": 1, "dropped.failed": 2}
    assert not stage.core.payloads.holders


def test_greedy_rollouts_are_no_part_of_what_the_bias_audit_compares(stage):
    stage.core.journal.take_observations()
    for order in stage.orders():
        stage.answer(order, reward=1.0)
    seen = stage.core.journal.take_observations()
    audited = {metric: len(values) for (metric, *label), values in seen.items() if label == ["sampled"]}
    assert audited == dict.fromkeys(("audit_reward", "audit_tokens", "audit_age_versions", "audit_duration_seconds"), 2)


def test_groups_from_before_the_run_file_asked_for_baselines_get_one_or_are_given_up(make_stage):
    stage = make_stage(advantage={"estimator": "grpo"}, staleness={"max": 1})
    first = [o for o in stage.orders() if o.group_id == "g000000"]
    assert [o.greedy for o in stage.orders()] == [False] * 4
    for order in first:
        stage.answer(order)
    stage.restart(advantage={"estimator": "remax"})
    assert stage.ledger().groups["cancelled.reconfigured"] == 1, "it was complete without a baseline"
    assert [o.order_id for o in stage.orders() if o.greedy and o.group_id == "g000001"] == ["g000001.2.0"]


def test_orders_and_plans_without_the_new_fields_read_as_before():
    order = Order("g000000.0.0", "g000000", Task("t", "a", 0), 0, 0, 0, 1.0)
    header = encode_request(order)
    assert "greedy" not in header and decode_request(Order, header) == order
    plan = GroupPlan("g000000", Task("t", "a", 0), 2, 2)
    header = encode_request(plan)
    assert "baseline" not in header and decode_request(GroupPlan, header) == plan


def test_baselines_may_be_ordered_for_an_estimator_of_ones_own(make_stage):
    stage = make_stage(advantage={"estimator": {"name": "mine.py:estimate", "greedy_rollouts": True}})
    assert sum(o.greedy for o in stage.orders()) == 1
