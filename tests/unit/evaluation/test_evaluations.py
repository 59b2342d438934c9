"""Evaluations at the core: the share of places, restarts in the middle, what training sees of it (nothing)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import SCHEMA_VERSION, Order, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.verdict import combine
from pipeline.stage.core import StageCore
from pipeline.store.effects import Evaluated, Send, UntrainedRollout
from pipeline.store.evaluation_results import write_results
from pipeline.store.records import GroupState
from pipeline.transport.messages import Kind, WireMessage
from tests.support.simulated_roles import rollout
from tests.support.stored_stage import StoredStage

SPLITS = {"a": {"train": [[0, 10, 1]], "eval": [[10, 14, 1]]}}


OPENED: list[Stage] = []
"""Stages of the running test."""


@pytest.fixture(autouse=True)
def close_stores() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.pop().store.close()


class Stage(StoredStage):
    """Results are kept too, and the rollouts that are to be shown."""

    def __init__(self, path: Any, slots: int = 8, splits: Any = SPLITS, **evaluation: Any) -> None:
        self.slots, self.splits, self.now = slots, splits, 0.0
        self.results: list[dict[str, Any]] = []
        self.shown: list[str] = []
        OPENED.append(self)
        super().__init__(
            path, run={"total_steps": 4}, environments={"a": {"max_seconds": 10}},
            groups={"n_rollout": 2, "groups_per_step": 4, "attempts_max": 2},
            evaluation={"every": 2, "tasks": 4, **evaluation},
        )  # fmt: skip

    def start(self) -> None:
        super().start()
        self.up("actor-0", slots=self.slots, splits=self.splits, holding=[o.order_id for o in self.leased()])
        self.round()

    def version(self, version: int, updates: int) -> None:
        number = self.core.control.applied + 1
        self.up("learner", session="s", number=number, updates=updates, credit_groups=8)
        self.tell(Kind.VERSION, policy_version=version, updates=updates)

    def round(self) -> list[Send]:
        self.core.set_time(self.now, self.now)
        sent = super().round()
        self.results += [e.result for e in self.effects if isinstance(e, Evaluated)]
        self.shown += [e.trajectory_id for e in self.effects if isinstance(e, UntrainedRollout) and e.evaluated]
        return sent

    def evaluating(self) -> list[Order]:
        return [o for o in self.leased() if o.evaluation]

    def answer_all(self, version: int = 0, **more: Any) -> None:
        while orders := self.evaluating():
            self.answer(orders[0], version, **more)


@pytest.fixture
def stage(tmp_path):
    return Stage(tmp_path / "r.sqlite")


def test_it_holds_its_share_of_the_places_and_training_has_the_rest(stage: Stage) -> None:
    stage.version(0, 0)
    assert len(stage.evaluating()) == 2 and len(stage.leased()) == 8
    assert all(order.greedy and order.task.seed >= 10 for order in stage.evaluating())
    training = [order for order in stage.leased() if not order.evaluation]
    assert all(order.task.seed < 10 and not order.greedy for order in training)


def test_a_result_names_the_weights_and_the_versions_that_sampled_it(stage: Stage) -> None:
    stage.version(0, 0)
    first, second = stage.evaluating()
    stage.answer(first, 0, reward=1.0)
    stage.version(1, 0)
    stage.answer(second, 1, reward=0.0, status=TrajectoryStatus.TRUNCATED)
    stage.version(2, 0)
    stage.answer_all(2, reward=1.0)
    (result,) = stage.results
    assert (result["updates"], result["policy_version"], result["versions"]) == (0, 0, [0, 2])
    assert result["status"] == "complete" and result["score"] == 0.75
    told = result["environments"]["a"]
    assert (told["tasks"], told["rollouts"], told["truncated"], told["missing"]) == (4, 4, 1, 0)
    counters = stage.core.journal.counters
    assert counters["trajectories.evaluated"] == 4 and counters["trajectories.held"] == 0
    assert not any(g.evaluation for g in stage.core.records.values())
    last = [s.header for s in stage.sent if s.kind is Kind.EVALUATION][-1]
    assert last["evaluating"] is None and last["best"]["value"] == 0.75


def test_a_rollout_that_keeps_failing_is_missing(stage: Stage) -> None:
    stage.version(0, 0)
    task = stage.evaluating()[0].task.task_id
    while orders := [o for o in stage.evaluating() if o.task.task_id == task]:
        stage.answer(orders[0], status=TrajectoryStatus.ERROR)
    stage.answer_all(reward=1.0)
    told = stage.results[0]["environments"]["a"]
    assert (told["score"], told["failed"], told["missing"], told["scored_tasks"]) == (1.0, 2, 1, 3)
    assert not stage.core.groups.backoff.holds(0.0), "training is not slowed down by it"


def test_a_restart_in_the_middle_orders_nothing_twice(stage: Stage) -> None:
    stage.version(0, 0)
    before = [o.order_id for o in stage.evaluating()]
    stage.answer(stage.evaluating()[0], reward=1.0)
    stage.restart()
    assert set(before[1:]) <= {o.order_id for o in stage.evaluating()}
    stage.restart()
    stage.answer_all(reward=0.0)
    assert stage.results[0]["score"] == 0.25
    assert stage.core.journal.counters["evaluations.tasks_planned"] == 4
    stage.restart()
    assert len(stage.results) == 1 and stage.core.evaluations.active is None
    stage.version(1, 0)
    assert not stage.evaluating(), "the same weights are not evaluated again"


def test_other_tasks_than_before_end_what_was_played(stage: Stage) -> None:
    stage.version(0, 0)
    stage.restart(evaluation={**stage.sections["evaluation"], "tasks": 2})
    assert stage.results[0]["status"] == "abandoned" and not stage.evaluating()
    assert stage.core.evaluations.best is None


def test_over_its_time_it_ends_with_what_it_has(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", seconds_max=5.0)
    stage.version(0, 0)
    stage.answer(stage.evaluating()[0], reward=1.0)
    assert stage.core.evaluations.next_deadline() == 5.0
    stage.now = 6.0
    stage.round()
    (result,) = stage.results
    told = result["environments"]["a"]
    assert (result["status"], told["tasks"], told["rollouts"], told["missing"]) == ("timed_out", 4, 1, 3)
    assert not stage.evaluating() and any(s.kind is Kind.CANCEL for s in stage.sent)
    assert stage.core.evaluations.best is None


def test_time_in_which_no_stage_ran_does_not_end_an_evaluation(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", seconds_max=5.0)
    stage.version(0, 0)
    stage.answer(stage.evaluating()[0], reward=1.0)
    stage.now = 100.0
    stage.restart()
    assert not stage.results and stage.core.evaluations.next_deadline() == 105.0
    stage.now = 106.0
    stage.round()
    assert [result["status"] for result in stage.results] == ["timed_out"]


def test_a_wall_clock_that_is_set_does_not_end_an_evaluation(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", seconds_max=5.0)
    stage.version(0, 0)
    for wall in (1e9, 0.0):
        stage.core.set_time(1.0, wall)
        stage.core.plan()
        assert stage.core.evaluations.active is not None and stage.core.evaluations.next_deadline() == 5.0


def test_what_was_missed_while_one_played_falls_out_and_is_counted(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.sections["run"] = {"total_steps": 100}
    stage.restart()
    stage.version(0, 0)
    for updates in (1, 2, 3, 4, 5):
        stage.version(updates, updates)
    stage.answer_all(5, reward=0.0)
    assert stage.core.evaluations.active is None
    stage.version(6, 6)
    stage.answer_all(6, reward=1.0)
    assert [(r["updates"], r["skipped"]) for r in stage.results] == [(0, 0), (6, 2)]
    assert stage.core.evaluations.best["updates"] == 6


def test_strict_holds_the_update_back_until_the_weights_are_evaluated(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=40, strict=True)
    stage.version(0, 0)
    assert len(stage.evaluating()) == 4, "it may have every place"
    for order in [o for o in stage.leased() if not o.evaluation]:
        stage.answer(order, reward=float(order.slot))
    assert not [s for s in stage.sent if s.kind is Kind.PLAN]
    stage.answer_all(reward=1.0)
    assert {s.header["update"] for s in stage.sent if s.kind is Kind.PLAN} <= {0, 1}
    assert [s for s in stage.sent if s.kind is Kind.PLAN]


def test_the_first_update_waits_for_the_evaluation_of_the_start_and_later_ones_for_none(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=12)
    stage.restart(run={"total_steps": 100}, staleness={"max": 0})
    stage.version(0, 0)
    assert len(stage.evaluating()) == 4, "its share is 3: it has the place that training leaves empty too"
    for order in [o for o in stage.leased() if not o.evaluation]:
        stage.answer(order, reward=float(order.slot))
    assert not [s for s in stage.sent if s.kind is Kind.PLAN]
    stage.answer_all(reward=1.0)
    assert {s.header["update"] for s in stage.sent if s.kind is Kind.PLAN} == {0}
    stage.version(2, 2)
    assert stage.evaluating() and not any(stage.core.evaluations.holds_back(update) for update in range(2, 100))


@pytest.mark.parametrize("strict", [False, True])
def test_evaluation_that_is_switched_on_in_the_middle_holds_nothing_back_before_it_is_due(
    tmp_path: Any, strict: bool
) -> None:
    stage = Stage(tmp_path / "r.sqlite", every=20, strict=strict)
    stage.restart(run={"total_steps": 100})
    stage.core.staleness.consumed = 50
    stage.version(50, 50)
    assert not stage.evaluating()
    held = [update for update in range(50, 100) if stage.core.evaluations.holds_back(update)]
    assert held == (list(range(60, 100)) if strict else [])


def test_only_evaluating_orders_nothing_else(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite")
    stage.restart(environments={"a": {"max_seconds": 10, "weight": 0}})
    stage.version(0, 0)
    assert len(stage.evaluating()) == len(stage.leased()) == 4
    stage.answer_all(reward=1.0)
    assert stage.results[0]["reason"] == "command"


def test_samples_and_temperature_are_told_with_the_order(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=40, samples=4, temperature=0.5, pass_at=(1, 4))
    stage.version(0, 0)
    while orders := stage.evaluating():
        assert not orders[0].greedy and orders[0].temperature == 0.5
        stage.answer(orders[0], reward=float(orders[0].slot == 0))
    told = stage.results[0]["environments"]["a"]
    assert told["pass_at"] == {"1": 0.25, "4": 1.0} and told["rollouts"] == 16


def test_a_missing_split_ends_the_stage_with_the_remedy(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation.split is exam.*a has train, eval"):
        Stage(tmp_path / "r.sqlite", split="exam")


def test_an_actor_with_other_splits_is_refused(stage: Stage) -> None:
    header = {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": 1, "holding": [], "splits": {}}
    stage.core.peer_up("actor-1", header)
    stage.round()
    assert [s.peer for s in stage.sent if s.kind is Kind.REFUSED] == ["actor-1"]


def test_a_learner_that_goes_back_ends_the_evaluation_of_weights_that_are_gone(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.sections["run"] = {"total_steps": 100}
    stage.restart()
    stage.version(0, 0)
    stage.answer_all(reward=0.0)
    stage.version(2, 2)
    assert stage.evaluating()
    stage.core.control.session = "another"
    stage.core.staleness.consumed = 2
    stage.version(3, 1)
    assert stage.results[-1]["status"] == "abandoned" and not stage.evaluating()
    stage.version(4, 2)
    assert stage.evaluating() and stage.core.evaluations.active["updates"] == 2
    assert all(g.state is not GroupState.EVALUATED for g in stage.core.records.values())


def test_weights_of_a_learner_that_resumed_are_evaluated_once_they_are_live(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.restart(run={"total_steps": 100})
    stage.version(0, 0)
    stage.answer_all(reward=0.0)
    stage.core.staleness.consumed = 3
    stage.version(3, 3)
    stage.up("learner", session="another", updates=2, credit_groups=8)
    stage.round()
    assert not stage.evaluating(), "engines still serve the weights of 3 updates, which are gone"
    stage.tell(Kind.VERSION, policy_version=4, updates=2)
    assert stage.evaluating() and stage.core.evaluations.active["policy_version"] == 4


def test_a_learner_that_goes_back_takes_the_best_that_was_never_durable_with_it(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.sections["run"] = {"total_steps": 100}
    stage.restart()
    for updates, reward in ((0, 0.25), (2, 0.5), (4, 0.0), (6, 0.75)):
        stage.version(updates, updates)
        stage.answer_all(updates, reward=reward)
    assert stage.core.evaluations.best["updates"] == 6
    stage.restart()
    stage.core.staleness.consumed = 6
    stage.core.control.session = "another"
    stage.version(7, 4)
    assert stage.core.evaluations.best["updates"] == 2 and not stage.evaluating()
    stage.version(9, 6)
    stage.answer_all(9, reward=0.6)
    assert (stage.core.evaluations.best["updates"], stage.core.evaluations.best["policy_version"]) == (6, 9)


def test_scores_of_other_tasks_are_not_compared(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.sections["run"] = {"total_steps": 100}
    stage.restart()
    stage.version(0, 0)
    stage.answer_all(reward=0.75)
    stage.restart(evaluation={**stage.sections["evaluation"], "tasks": 2})
    assert stage.core.evaluations.best["updates"] == 0
    stage.version(2, 2)
    stage.answer_all(2, reward=0.5)
    assert (stage.core.evaluations.best["updates"], stage.core.evaluations.best["value"]) == (2, 0.5)


@pytest.mark.parametrize(
    "changed",
    [
        {"scorer": {"environment_weight": 0.5}},
        {"replay": {"success_threshold": 0.5}},
        {"evaluation": {"keep_best": "score"}},
        {"sampling": {"max_tokens": 8}},
        {"environments": {"max_turns": 2}},
    ],
    ids=["scorer", "threshold", "no checkpoint was kept", "sampling", "environment"],
)
def test_scores_by_other_terms_are_not_compared(tmp_path: Any, changed: dict[str, Any]) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200)
    stage.restart(run={"total_steps": 100})
    if "evaluation" in changed:
        changed = {"evaluation": {**stage.sections["evaluation"], **changed["evaluation"]}}
    if "environments" in changed:
        of_all = stage.sections["environments"].items()
        changed = {"environments": {name: {**section, **changed["environments"]} for name, section in of_all}}
    stage.version(0, 0)
    stage.answer_all(reward=0.75)
    stage.restart(**changed)
    stage.version(2, 2)
    stage.answer_all(2, reward=0.375)
    assert (stage.core.evaluations.best["updates"], stage.core.evaluations.best["value"]) == (2, 0.375)
    assert "terms" not in stage.results[-1]


def test_every_held_out_task_is_evaluated_once_and_training_goes_on_beside() -> None:
    config = RunConfig.model_validate(
        {
            "environments": {"a": {"held_out": {"eval": 7}}, "b": {"held_out": {"eval": 3}}},
            "groups": {"n_rollout": 2, "groups_per_step": 4}, "run": {"total_steps": 1},
            "evaluation": {"every": 1, "samples": 2, "temperature": 1, "strict": True},
        }
    )  # fmt: skip
    played: list[tuple[str, int]] = []
    results: list[dict[str, Any]] = []
    core = StageCore(config, score_now=lambda t: combine(t.rewards, {"environment": 1.0}))
    core.peer_up("actor-0", {"schema_version": SCHEMA_VERSION, "role": "actor", "slots": 5, "holding": []})
    learner = {"session": "s", "updates": 0, "policy_version": -1, "durable_updates": 0, "credit_groups": 8}
    core.peer_up("learner", {"role": "learner", "schema_version": SCHEMA_VERSION, **learner})
    core.message("learner", WireMessage(Kind.VERSION, {"number": 1, "policy_version": 0, "updates": 0}))
    waiting: list[Order] = []
    trained = 0
    for _ in range(60):
        core.plan()
        effects = core.collect()[1]
        waiting += [decode_request(Order, e.header) for e in effects if isinstance(e, Send) and e.kind is Kind.ORDER]
        results += [e.result for e in effects if isinstance(e, Evaluated)]
        if not waiting:
            break
        order = waiting.pop(0)
        trained += not order.evaluation
        if order.evaluation:
            played.append((order.task.task_id, order.slot))
        frames = encode_trajectory(rollout(order, 0, reward=float(order.slot)))
        core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
    assert trained > 0
    tasks = [f"a/eval/{i}" for i in range(7)] + [f"b/eval/{i}" for i in range(3)]
    assert sorted(played) == sorted((task, slot) for task in tasks for slot in (0, 1))
    (result,) = results
    assert result["status"] == "complete" and result["score"] == 0.5


@pytest.mark.parametrize("wanted", [0, 1, 3, 4, 6, 100])
def test_so_many_rollouts_are_shown_of_the_same_tasks_each_time(tmp_path: Any, wanted: int) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200, temperature=None, samples=2)
    stage.restart(run={"total_steps": 100}, traces={"evaluated": wanted})
    shown: list[set[tuple[str, int]]] = []
    for updates in (0, 2):
        stage.version(updates, updates)
        orders = {o.order_id: (o.task.task_id, o.slot) for o in stage.evaluating()}
        stage.shown = []
        stage.answer_all(updates, reward=1.0)
        shown.append({orders[name] for name in stage.shown})
        assert len(stage.shown) == min(wanted, 8)
    assert shown[0] == shown[1]
    assert wanted > 4 or all(slot == 0 for _, slot in shown[0]), "other tasks come before a second rollout of one"


def test_a_reward_function_of_whole_groups_never_waits_for_a_rollout_that_was_given_up(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200, temperature=None, samples=3)
    stage.sections["scorer"] = {"functions": [{"path": "tests.nowhere:group", "per": "group"}]}
    stage.restart()
    stage.core.ingest._score_now = None
    stage.version(0, 0)
    task = stage.evaluating()[0].task.task_id
    first, second, third = (o for o in stage.evaluating() if o.task.task_id == task)
    stage.answer(first, reward=1.0)
    stage.answer(second, status=TrajectoryStatus.ERROR)
    same = (second.task.task_id, second.slot)
    again = next(o for o in stage.evaluating() if (o.task.task_id, o.slot) == same)
    stage.answer(again, status=TrajectoryStatus.ERROR)
    (group,) = [g for g in stage.core.records.values() if g.evaluation and g.task.task_id == task]
    assert group.state is GroupState.EVALUATED and "needs all" in group.reason
    cancelled = [i for s in stage.sent if s.kind is Kind.CANCEL for i in s.header["order_ids"]]
    assert cancelled == [third.order_id], "its actor has the place back"
    assert stage.core.journal.counters["trajectories.dropped.cancelled"] == 1


def test_a_rollout_that_was_given_up_ends_no_other_where_functions_of_whole_groups_are_of_other_environments(
    tmp_path: Any,
) -> None:
    stage = Stage(tmp_path / "r.sqlite", slots=200, temperature=None, samples=3)
    stage.sections["environments"]["b"] = {"max_seconds": 10}
    functions = [{"path": "tests.nowhere:group", "per": "group", "environments": ["b"]}]
    stage.restart(scorer={"functions": functions})
    stage.version(0, 0)
    failing, *others = [o for o in stage.evaluating() if o.group_id == stage.evaluating()[0].group_id]
    for _ in range(2):
        (order,) = (o for o in stage.evaluating() if (o.group_id, o.slot) == (failing.group_id, failing.slot))
        stage.answer(order, status=TrajectoryStatus.ERROR)
    for order in others:
        stage.answer(order, reward=1.0)
    assert stage.core.journal.counters["trajectories.evaluated"] == 2


@pytest.mark.slow
def test_the_curves_hold_the_evaluations(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="install matplotlib to draw curves")
    from pipeline.views.plots import draw

    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "reward_mean": 0.5}\n{"step": 2, "reward_mean": 0.6}\n')
    assert draw(metrics, tmp_path / "without.png") is None
    lines = [{"evaluation": i, "updates": i, "score": s, "se": 0.1} for i, s in enumerate((0.2, 0.9, None))]
    write_results(tmp_path / "evaluations.jsonl", lines)
    assert draw(metrics, tmp_path / "with.png") is None
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()
