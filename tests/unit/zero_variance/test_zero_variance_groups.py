"""Groups whose rewards are all equal: kept, dropped or replaced, each with one named end."""

from __future__ import annotations

from typing import Any

import pytest

from learner.process.preflight import with_options
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.replay.report import examine_run
from pipeline.store.records import GroupState
from pipeline.transport.messages import Kind


def groups(what: str, n: int = 2, per_step: int = 2, **more: Any) -> dict[str, Any]:
    return {"n_rollout": n, "groups_per_step": per_step, "zero_variance": what, **more}


def test_keep_trains_equal_groups_and_counts_them(stage) -> None:
    s = stage(groups=groups("keep"))
    equal, mixed = s.play(1, 1), s.play(0, 1)
    assert s.train() == [equal, mixed]
    ledger = s.ledger()
    assert ledger.trajectories["trained"] == 4 and ledger.groups["zero_variance_kept"] == 1


def test_one_rollout_alone_has_none_to_be_equal_to(stage) -> None:
    s = stage(groups=groups("keep", n=1))
    s.play(1)
    s.play(1)
    s.train()
    assert s.ledger().groups.get("zero_variance_kept", 0) == 0


def test_drop_ends_the_trajectories_at_once_and_makes_the_update_from_the_others(stage) -> None:
    s = stage()
    equal = s.play(0, 0)
    ledger = s.ledger()
    assert ledger.trajectories["dropped.zero_variance"] == 2 and ledger.trajectories.get("held", 0) == 0
    assert s.core.journal.counters["payload.bytes"] == 0
    mixed = s.play(0, 1)
    assert s.plans[equal][1].left_out and s.plans[equal][1].delivered == 0
    assert not s.plans[mixed][1].left_out
    s.train()
    ledger = s.ledger()
    assert ledger.groups["zero_variance"] == 1 and ledger.groups["trained"] == 1
    assert ledger.groups["zero_variance_dropped"] == 1
    assert ledger.trajectories["trained"] == 2 and ledger.trajectories["dropped.zero_variance"] == 2


def test_drop_of_a_whole_batch_lets_the_run_go_on(stage) -> None:
    s = stage()
    for _ in range(3):
        s.play(1, 1)
        s.play(0, 0)
        s.train()
    assert s.core.staleness.consumed == 3 and s.ledger().groups["zero_variance"] == 6
    s.play(0, 1)
    s.play(0, 1)
    s.train()
    assert s.ledger().groups["trained"] == 2


def test_a_dropped_group_keeps_its_place_over_a_restart_and_frees_nothing_twice(stage) -> None:
    s = stage()
    equal = s.play(0, 0)
    s.restart()
    assert s.core.records[int(equal[1:])].dropped
    assert s.plans[equal][1].left_out, "planned again or still held"
    s.play(0, 1)
    s.restart()
    s.train()
    s.restart()
    assert s.core.records[int(equal[1:])].state is GroupState.ZERO_VARIANCE
    s.tell(Kind.CHECKPOINTED, updates=1)
    assert int(equal[1:]) not in s.core.records
    s.restart()
    assert not s.core.payloads.holders and s.ledger().groups["zero_variance"] == 1


def test_a_learner_that_goes_back_makes_the_update_again_without_the_dropped_group(stage) -> None:
    s = stage()
    equal, mixed = s.play(0, 0), s.play(0, 1)
    s.train()
    s.play(0, 1)
    s.go_back(0)
    assert s.members() == [equal, mixed] and s.plans[equal][1].left_out
    ledger = s.ledger()
    assert ledger.groups["rolled_back"] == 2 and ledger.groups["zero_variance"] == ledger.groups["trained"] == 0
    assert ledger.trajectories["dropped.zero_variance"] == 2, "the trajectories had ended for good"
    assert s.train() == [equal, mixed]
    assert s.ledger().trajectories["trained"] == 2


def test_refill_replaces_the_group_in_the_same_update_within_the_bound(stage) -> None:
    s = stage(groups=groups("refill"), staleness={"max": 0})
    equal = s.play(0, 0)
    ledger = s.ledger()
    assert ledger.groups["cancelled.zero_variance"] == 1 and ledger.groups["zero_variance_refilled"] == 1
    assert ledger.trajectories["dropped.zero_variance"] == 2 and ledger.trajectories.get("held", 0) == 0
    assert s.core.records[int(equal[1:])].state is GroupState.CANCELLED
    assert len({o.group_id for o in s.holding.values()}) == 2, "the capacity came back: a new group is played"
    first, second = s.play(0, 1), s.play(1, 0)
    assert s.train() == [first, second]
    assert {s.core.records[int(g[1:])].admitted_update for g in (first, second)} == {0}
    assert s.ledger().groups["trained"] == 2


@pytest.mark.parametrize("refill_max, most", [(0.0, 0), (0.5, 1), (1.0, 2), (2.0, 4)])
def test_refill_is_bounded_for_each_update_and_then_keeps(stage, refill_max: float, most: int) -> None:
    s = stage(groups=groups("refill", refill_max=refill_max))
    for update in range(1, 3):
        for _ in range(most + 2):
            s.play(1, 1)
        s.train()
        ledger = s.ledger()
        assert ledger.groups.get("cancelled.zero_variance", 0) == most * update
        assert ledger.groups["zero_variance_kept"] == ledger.groups["trained"] == 2 * update


def test_the_refills_of_an_update_are_remembered_over_restarts(stage) -> None:
    s = stage(groups=groups("refill", refill_max=1.0))
    for _ in range(2):
        s.play(1, 1)
        s.restart()
    s.play(1, 1)
    s.play(1, 1)
    s.train()
    assert s.ledger().groups["cancelled.zero_variance"] == 2


def test_groups_played_ahead_are_refilled_for_their_own_updates(stage) -> None:
    """With a learner that does not train, each update's allowance is its own."""
    s = stage(groups=groups("refill", per_step=1, refill_max=1.0), staleness={"max": 2})
    for _ in range(6):
        s.play(1, 1)
    assert s.counted("groups.cancelled.zero_variance", "groups.zero_variance_kept") == [3, 3]
    assert s.core.staleness.update_ahead == 3
    for _ in range(3):
        s.train()


def test_stored_trajectories_in_a_group_count_among_its_rewards(stage) -> None:
    """A replay group whose fresh rollouts all fail still compares with the stored success; what is solved by all is
    left out with it. What the pool learns from groups that are left out does not change."""
    replay = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 1.0, "trajectories_per_task": 1,
              "max_age": None, "ess_guard": {"enabled": False}}  # fmt: skip
    s = stage(
        groups=groups("drop", n=3, per_step=1), replay=replay, environments={"a": {"tasks": 1, "max_seconds": 10}}
    )
    s.play(0, 1, 1)
    s.train()
    assert len(s.core.replay.pool) == 2
    failed = s.play(0, 0)
    assert not s.plans[failed][1].left_out and s.plans[failed][1].replay_ids
    s.train()
    for _ in range(2):
        assert len(s.core.replay.difficulty.retired) == 0, "two fresh successes are less than a group of three"
        solved = s.play(1, 1)
        assert s.plans[solved][1].left_out
        s.train()
    assert len(s.core.replay.difficulty.retired) == 1, "retired by groups that were left out"
    assert not len(s.core.replay.pool)
    s.restart()
    s.tell(Kind.CHECKPOINTED, updates=4)
    ledger = s.ledger()
    assert ledger.groups["zero_variance"] == 2 and ledger.replays["trained"] == 1
    assert not s.core.payloads.holders, "the replays of the left out groups were let go"


def test_success_rates_count_groups_that_were_left_out(stage) -> None:
    seen: list[float | None] = []
    replay = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 0.0, "trajectories_per_task": 1}
    s = stage(groups=groups("refill", refill_max=4), replay=replay)
    consumed = s.core.replay.consumed
    s.core.replay.consumed = lambda **about: (seen.append(about["solve_rate"]), consumed(**about))
    s.play(0, 0)
    s.play(0, 0)
    for _ in range(2):
        s.play(0, 1)
        s.play(0, 1)
        s.train()
    assert seen == [0.25, 0.5], "in the next update, and in no other"


def test_remax_compares_with_the_greedy_rollout(stage) -> None:
    s = stage(groups=groups("drop", per_step=1), advantage={"estimator": "remax"})
    differs = s.play(1, 1, 0)
    assert not s.plans[differs][1].left_out
    s.train()
    same = s.play(1, 1, 1)
    assert s.plans[same][1].left_out
    s.train()
    assert s.ledger().trajectories["baseline"] == 2


def test_the_bias_audit_tells_what_was_left_out(stage) -> None:
    s = stage()
    s.play(0, 0)
    s.play(0, 1)
    s.train()
    audit = examine_run(s.path).json(s.core.config)["audit"]
    assert audit["zero_variance"]["count"] == 2 and audit["zero_variance"]["reward"] == 0
    assert audit["sampled"]["count"] == 4 and audit["trained"]["count"] == 2 and audit["trained"]["reward"] == 0.5


def test_a_late_answer_to_a_group_that_was_left_out_is_a_duplicate(stage) -> None:
    s = stage(groups=groups("refill"))
    orders = dict(s.holding)
    gone = s.play(1, 1)
    order_id = next(i for i, o in orders.items() if o.group_id == gone)
    s.holding[order_id] = orders[order_id]
    s.take(order_id, 1)
    assert s.ledger().trajectories["dropped.duplicate"] == 1


@pytest.mark.parametrize(
    "sections, words",
    [
        ({"advantage": {"estimator": "gae"}}, "learns from groups with equal rewards"),
        ({"advantage": {"estimator": "cpo"}}, "learns from groups with equal rewards"),
        ({"advantage": {"estimator": "reinforce_pp"}}, "learns from groups with equal rewards"),
        ({"advantage": {"rewards": "turns"}}, "turn rewards may differ"),
        ({"groups": groups("drop", n=1)}, "n_rollout is 1"),
    ],
)
def test_run_files_that_would_lose_signal_are_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        with_options(RunConfig.model_validate({"groups": groups("drop"), **sections}))


@pytest.mark.parametrize("what", ["drop", "refill"])
def test_a_replay_group_that_is_left_out_does_not_change_the_pool(stage, what: str) -> None:
    """A replay group whose fresh rollouts succeed like its replay teaches nothing, and stores nothing, like a solved
    plain group."""
    replay = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 1.0, "trajectories_per_task": 1,
              "max_age": None, "retire_after": None, "ess_guard": {"enabled": False}}  # fmt: skip
    s = stage(groups=groups(what, n=3, per_step=1), replay=replay, environments={"a": {"tasks": 1, "max_seconds": 10}})
    s.play(0, 0, 1)
    s.train()
    assert len(s.core.replay.pool) == 1
    left_out = s.play(1, 1)
    assert len(s.core.replay.pool) == 1 and s.core.records[int(left_out[1:])].state != GroupState.TRAINED
    pooled = {entry.row_id for entry in s.core.replay.pool}
    assert pooled <= s.core.payloads.holders.keys()
    s.restart()
    assert {entry.row_id for entry in s.core.replay.pool} == pooled <= s.core.payloads.holders.keys()
    if what == "drop":
        s.train()
    s.play(0, 0)
    s.train()
    s.tell(Kind.CHECKPOINTED, updates=s.updates)
    s.restart()
    ledger = s.ledger()
    assert ledger.trajectories["dropped.zero_variance"] == 2 and ledger.pool["saved"] == 1
    assert ledger.replays["trained"] == 1
