import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from learner.process.session import GroupAssembler
from pipeline.errors import TrainingError
from pipeline.schema import GroupPlan, Task


def plan_of(name, n=3):
    return GroupPlan(name, Task(f"task/{name}", "toy", 0), n, n)


def deliver(assembler, kit, group, index, reward=0.5, trajectory=None):
    t = trajectory or kit.make_trajectory(f"{group}.{index}", group=group, reward=None)
    return assembler.deliver(group, index, t, reward, {"environment": reward})


def fill(assembler, kit, group, n=3):
    for i in range(n):
        deliver(assembler, kit, group, i)


def test_a_group_is_complete_at_exactly_n_rollout_and_taken_once(kit):
    a = GroupAssembler(2)
    a.plan(plan_of("b"), 0)
    a.plan(plan_of("a"), 0)
    fill(a, kit, "b")
    assert not a.ready(0)
    assert (a.progress(0).complete, a.progress(0).needed, a.progress(0).trajectories) == (1, 2, 3)
    fill(a, kit, "a")
    groups = a.take(0)
    assert [g.group_id for g in groups] == ["a", "b"]
    assert all(len(g.trajectories) == 3 and g.trajectories[0].reward == 0.5 for g in groups)
    assert a.holding() == ["a", "b"]
    assert a.consumed(0) == ["a", "b"]
    assert a.holding() == []
    with pytest.raises(TrainingError):
        a.take(0)


def test_repeated_plans_and_deliveries_change_nothing(kit):
    a = GroupAssembler(1)
    for _ in range(3):
        a.plan(plan_of("g"), 0)
        fill(a, kit, "g")
    assert not deliver(a, kit, "g", 0)
    assert len(a.take(0)[0].trajectories) == 3


def test_a_cancelled_group_makes_room_for_another(kit):
    a = GroupAssembler(1)
    a.plan(plan_of("g"), 0)
    deliver(a, kit, "g", 0)
    a.cancel(["g", "unknown"])
    assert not deliver(a, kit, "g", 1)
    a.plan(plan_of("h"), 0)
    fill(a, kit, "h")
    assert a.take(0)[0].group_id == "h"


def test_a_group_in_training_cannot_be_cancelled(kit):
    a = GroupAssembler(1)
    a.plan(plan_of("g"), 0)
    fill(a, kit, "g")
    a.take(0)
    a.cancel(["g"])
    assert a.consumed(0) == ["g"]


def test_one_group_too_many_for_an_update_is_an_error():
    a = GroupAssembler(1)
    a.plan(plan_of("g"), 4)
    with pytest.raises(TrainingError, match="same run file"):
        a.plan(plan_of("h"), 4)


def test_two_trajectories_of_one_index_are_an_error(kit):
    a = GroupAssembler(1)
    a.plan(plan_of("g"), 0)
    deliver(a, kit, "g", 0)
    with pytest.raises(TrainingError, match="index 0"):
        deliver(a, kit, "g", 0, trajectory=kit.make_trajectory("other", group="g", reward=None))
    with pytest.raises(TrainingError, match="index"):
        deliver(a, kit, "g", 3, trajectory=kit.make_trajectory("other", group="g", reward=None))


def test_an_unscored_trajectory_is_never_trained_as_zero(kit):
    a = GroupAssembler(1)
    a.plan(plan_of("g"), 0)
    with pytest.raises(TrainingError, match="scored"):
        deliver(a, kit, "g", 0, reward=None)


def test_another_plan_under_the_same_id_is_an_error():
    a = GroupAssembler(2)
    a.plan(plan_of("g"), 0)
    with pytest.raises(TrainingError, match="one plan"):
        a.plan(plan_of("g", n=5), 0)


def test_only_complete_groups_are_held(kit):
    a = GroupAssembler(2)
    a.plan(plan_of("g"), 0)
    a.plan(plan_of("h"), 0)
    fill(a, kit, "g")
    deliver(a, kit, "h", 1)
    assert a.holding() == ["g"]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), groups=st.integers(1, 3), updates=st.integers(1, 3), n=st.integers(1, 3))
def test_any_order_with_repeats_and_reconnections_gives_each_update_its_groups_once(kit, data, groups, updates, n):
    make_trajectory = kit.make_trajectory
    messages = []
    for u in range(updates):
        for g in range(groups):
            name = f"u{u}g{g}"
            messages.append((name, u, None))
            messages += [(name, u, i) for i in range(n)]
    order = data.draw(st.permutations(messages))
    repeats = data.draw(st.lists(st.sampled_from(messages), max_size=10))
    a, consumed = GroupAssembler(groups), []
    for name, u, index in [*order, *repeats, *sorted(messages, key=lambda m: m[2] is not None)]:
        if u in consumed:
            continue
        if index is None:
            a.plan(plan_of(name, n), u)
        else:
            a.deliver(name, index, make_trajectory(f"{name}.{index}", group=name, reward=None), 1.0, {})
        if a.ready(u):
            taken = a.take(u)
            assert [len(t.trajectories) for t in taken] == [n] * groups
            assert len({t.trajectory_id for g in taken for t in g.trajectories}) == n * groups
            assert a.consumed(u) == sorted(g.group_id for g in taken)
            consumed.append(u)
    assert sorted(consumed) == list(range(updates))
    assert a.holding() == []
