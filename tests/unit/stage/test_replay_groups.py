"""Groups with replays at the stage: planned, sent, trained, rolled back, cancelled."""

from __future__ import annotations

import dataclasses
from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from pipeline.config import RunConfig
from pipeline.replay.report import examine_run
from pipeline.replay.transfer import PoolWriter
from pipeline.schema import SCHEMA_VERSION, Order, PromptLessons, Task
from pipeline.schema.codec import decode_trajectory, encode_trajectory
from pipeline.schema.orders import GroupPlan, decode_request
from pipeline.schema.trajectory import Trajectory
from pipeline.scorer.verdict import combine
from pipeline.stage import core
from pipeline.stage.core import StageCore
from pipeline.store.effects import Send
from pipeline.store.ledger import read_ledger
from pipeline.store.records import facts_of
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage
from tests.support.simulated_roles import rollout

BASE: dict[str, Any] = {
    "run": {"total_steps": 40},
    "groups": {"n_rollout": 4, "groups_per_step": 2},
    "staleness": {"max": 0},
    "environments": {"a": {"tasks": 3}},
}


class Stage:
    """A core with a real store; one actor and one learner that answer at once."""

    def __init__(self, path: Any, rewards: Any, **replay: Any) -> None:
        self.path, self.rewards = path, rewards
        defaults = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 0.5, "retest_ratio": 0.0}
        replay = {**defaults, "keep_trained": 0, **replay}
        self.config = RunConfig.model_validate({**BASE, "replay": replay})
        self.updates, self.sent = 0, []
        self.store: ReplayStore
        self.start()

    def start(self, session: str = "s") -> None:
        self.store = ReplayStore(self.path, "NORMAL")
        self.core = StageCore(
            self.config, self.store.load(), score_now=lambda t: combine(t.rewards, {"environment": 1.0})
        )
        hello = {"schema_version": SCHEMA_VERSION}
        actor = {"role": "actor", "slots": 99, "holding": []}
        self.core.peer_up("actor-0", {**hello, **actor})
        learner = {"session": session, "updates": self.updates, "policy_version": -1, "credit_groups": 8}
        self.core.peer_up("learner", {**hello, "role": "learner", **learner})
        self.tell(Kind.VERSION, policy_version=self.updates, updates=self.updates)

    def tell(self, kind: Kind, **header: Any) -> None:
        number = self.core.control.applied + 1
        self.core.message("learner", WireMessage(kind, {"number": number, **header}))

    def round(self) -> list[Send]:
        self.core.plan()
        changes, effects = self.core.collect()
        self.store.commit(changes)
        new = [effect for effect in effects if isinstance(effect, Send)]
        for effect in new:
            if effect.payload is not None:
                assert effect.payload in self.store.payloads([effect.payload]), "a dispatched payload is there"
        self.sent += new
        return new

    def play(self) -> list[dict[str, Any]]:
        """Answer every order until nothing more is asked; the plans that were sent."""
        plans = []
        while new := self.round():
            plans += [s.header for s in new if s.kind is Kind.PLAN]
            for send in new:
                if send.kind is Kind.ORDER:
                    order = _order(send.header)
                    frames = encode_trajectory(rollout(order, order.policy_version, reward=self.rewards(order)))
                    self.core.message(
                        "actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames)
                    )
        return plans

    def train(self, plans: list[dict[str, Any]], **report: Any) -> None:
        ids = [p["group_id"] for p in plans if p["update"] == self.updates]
        self.tell(Kind.CONSUMED, update=self.updates, group_ids=ids, **report)
        self.updates += 1
        self.tell(Kind.VERSION, policy_version=self.updates, updates=self.updates)

    def until_replayed(self) -> dict[str, Any]:
        """Train until a plan has candidates; that plan (with its batch in ``self.plans``)."""
        for _ in range(20):
            self.plans = self.play()
            for plan in self.plans:
                if plan.get("replay_ids"):
                    return plan
            self.train(self.plans)
        raise AssertionError("nothing was replayed in 20 updates")

    def counters(self) -> dict[str, int]:
        assert read_ledger(self.path, rows=True).audit() == []
        return dict(self.core.journal.counters)


def _order(header: dict[str, Any]) -> Order:
    task = Task(**header["task"])
    return Order(**{**header, "task": task})


def half(order: Order) -> float:
    return float(order.slot % 2)


def test_a_replay_group_has_fewer_fresh_slots_and_sends_its_candidates_behind_them(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half)
    header = stage.until_replayed()
    plan = decode_request(GroupPlan, header)
    assert (plan.n_fresh, len(plan.replay_ids)) == (3, 1) and plan.candidates[:1] == plan.replay_ids
    sent = [s.header for s in stage.sent if s.kind is Kind.DELIVERY and s.header["group_id"] == plan.group_id]
    assert [d["index"] for d in sent] == list(range(plan.delivered))
    assert [d["trajectory_id"] for d in sent[3:]] == list(plan.candidates)
    assert all("replay" not in d for d in sent[:3])
    assert [set(d["replay"]) for d in sent[3:]] == [{"weight", "entropy", "entropy_age", "age", "success_rate"}] * len(
        plan.candidates
    )
    assert sent[3]["replay"]["entropy"] == pytest.approx(0.375)
    assert sent[3]["replay"]["success_rate"] == pytest.approx(0.5)
    assert sent[3]["reward"] == 1.0 and sent[3]["replay"]["age"] > 0
    stage.store.close()


def test_a_stored_group_comes_back_whole_with_its_failures_and_rewards(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, mode="groups", groups={"uses_max": 1})
    plan = decode_request(GroupPlan, stage.until_replayed())
    assert (plan.n_fresh, len(plan.replay_ids)) == (0, 4) and plan.candidates == plan.replay_ids
    source = plan.replay_ids[0].split(".")[0]
    assert list(plan.replay_ids) == [f"{source}.{slot}.0" for slot in range(4)], "in the order they were"
    sent = [s.header for s in stage.sent if s.kind is Kind.DELIVERY and s.header["group_id"] == plan.group_id]
    assert [(d["index"], d["reward"], d["replay"]["weight"]) for d in sent] == [
        (i, float(i % 2), 1.0) for i in range(4)
    ]
    counters = stage.counters()
    assert counters["stored_groups.evicted.uses"] >= 1 and counters.get("pool.saved", 0) == 0
    stage.train(stage.plans)
    stage.round()
    replayed = stage.core.records[int(plan.group_id[1:])]
    assert all(replay.chosen for replay in replayed.replays) and plan.group_id != source
    assert int(plan.group_id[1:]) not in [group.group_number for group in stage.core.replay.groups]
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    replays = {replay.entry.row_id for replay in replayed.replays}
    assert not stage.core.payloads.holders.keys() & replays, "nobody needs it any more"
    stage.store.close()


def test_stored_groups_and_their_payloads_survive_restart_rollback_and_roll_up(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "RETAIN_GROUPS", 1)
    stage = Stage(tmp_path / "s.sqlite", half, mode="groups", groups={"uses_max": 2})
    for _ in range(6):
        stage.train(stage.play())
        stage.tell(Kind.CHECKPOINTED, updates=stage.updates - 1)
    stage.round()
    before = list(stage.core.replay.groups)
    members = {entry.row_id for group in before for entry in group.members}
    assert before and stage.core.payloads.holders.keys() >= members
    stage.store.close()
    stage.start()
    assert list(stage.core.replay.groups) == before
    stage.core.peer_down("learner", left=False)
    stage.updates -= 1
    hello = {"session": "t", "updates": stage.updates, "policy_version": -1, "credit_groups": 8}
    stage.core.peer_up("learner", {"schema_version": SCHEMA_VERSION, "role": "learner", **hello})
    for _ in range(6):
        stage.train(stage.play())
    stage.round()
    assert stage.counters()["replays.rolled_back"] in (0, 4, 8)
    stage.store.close()


def test_a_group_whose_update_is_made_again_does_not_come_back_more_often_than_it_may(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, mode="groups", groups={"uses_max": 1})
    plans: dict[str, dict[str, Any]] = {}
    for _ in range(5):
        stage.train([plans.setdefault(p["group_id"], p) for p in stage.play()])
    stage.round()
    before = dict(stage.core.journal.counters)
    assert before["stored_groups.evicted.uses"] > 1, "some groups have had all their uses"
    stage.store.close()
    made, stage.updates = stage.updates, 1
    stage.start("t")  # the learner resumes from an older checkpoint, and the stage has started again too
    while stage.updates < made + 3:
        plans |= {plan["group_id"]: plan for plan in stage.play()}
        stage.train(list(plans.values()))
        if stage.updates == made:
            stage.round()
            assert stage.counters()["replays.rolled_back"], "updates were made again"
            assert stage.counters()["stored_groups.saved"] == before["stored_groups.saved"]
    sources = [p["replay_ids"][0].split(".")[0] for p in plans.values() if p.get("replay_ids")]
    assert len(sources) > made - 1 and len(set(sources)) == len(sources)
    stage.store.close()


def test_retired_tasks_of_an_earlier_run_file_do_not_keep_its_new_tasks_out(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", lambda order: 1.0, retest_ratio=0.25)
    for _ in range(4):
        stage.train(stage.play())
    stage.round()
    assert stage.core.replay.difficulty.exhausted == {"a"}, "all of its tasks are retired"
    stage.store.close()
    stage.config = RunConfig.model_validate(
        {**BASE, "environments": {"a": {"tasks": 3, "seed": 100}}, "replay": stage.config.replay.model_dump()}
    )
    stage.start()
    before, stage.sent = stage.core.records.next_group, []
    for _ in range(8):
        stage.train(stage.play())
    orders = [_order(send.header) for send in stage.sent if send.kind is Kind.ORDER]
    seeds = [order.task.seed for order in orders if int(order.group_id[1:]) >= before]
    assert set(seeds) == {100, 101, 102}
    assert list(stage.core.replay.difficulty.retired) == ["a/100", "a/101", "a/102"]
    stage.store.close()


def test_a_stored_group_is_sent_in_the_round_that_plans_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else may happen afterwards that would begin another round."""
    stage = Stage(tmp_path / "s.sqlite", half, mode="groups", groups={"uses_max": 9})
    plain, ready = stage.round, []

    def observed() -> list[Send]:
        new = plain()
        ready.append(stage.core.staleness.ready)
        return new

    monkeypatch.setattr(stage, "round", observed)
    whole = 0
    for _ in range(20):
        plans = stage.play()
        whole += sum(plan["n_fresh"] == 0 for plan in plans)
        stage.train(plans)
    assert whole > 5 and set(ready) == {0}
    stage.store.close()


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({"replay": {"groups": {"capacity": 1}}}, "capacity"),
        ({"replay": {"capacity_bytes": 1}}, "bytes"),
        ({"groups": {"n_rollout": 5}}, "reconfigured"),
        ({"replay": {"mode": "mix"}}, "reconfigured"),
        ({"replay": {"enabled": False}}, None),
    ],
)
def test_stored_groups_that_another_run_file_has_no_place_for_leave_with_their_payloads(
    tmp_path: Any, now: dict[str, Any], reason: str | None
) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, mode="groups", task_ratio=0.0)
    for _ in range(3):
        stage.train(stage.play())
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.play()
    before = list(stage.core.replay.groups)
    assert len(before) > 1 and stage.counters()
    stage.store.close()
    sections = stage.config.model_dump()
    for name, values in now.items():
        sections[name] |= {k: sections[name][k] | v if isinstance(v, dict) else v for k, v in values.items()}
    stage.config = RunConfig.model_validate(sections)
    stage.start()
    stage.round()
    left = len(before) - len(stage.core.replay.groups)
    counters = stage.counters()
    assert {k: n for k, n in counters.items() if k.startswith("stored_groups.evicted.") and n} == (
        {f"stored_groups.evicted.{reason}": left} if reason else {}
    )
    assert (left > 0) == (reason is not None)
    kept = {entry.row_id for group in stage.core.replay.groups for entry in group.members}
    of_groups = {entry.row_id for group in before for entry in group.members}
    assert stage.core.payloads.holders.keys() & of_groups == kept == set(stage.store.payloads(of_groups))
    stage.store.close()


def test_an_import_that_makes_room_in_the_pool_leaves_stored_groups_their_payloads(tmp_path: Any) -> None:
    """A group that the learner trains again after a change of ``replay.mode`` has members in the pool."""
    stage = Stage(tmp_path / "s.sqlite", half, capacity=12, task_ratio=0.0)
    for _ in range(3):
        stage.train(stage.play())
    stage.store.close()
    sections = stage.config.model_dump()
    stage.config = RunConfig.model_validate({**sections, "replay": {**sections["replay"], "mode": "groups"}})
    stage.start()
    stage.updates = 0
    hello = {"schema_version": SCHEMA_VERSION, "role": "learner", "session": "t", "updates": 0}
    stage.core.peer_down("learner", left=False)
    stage.core.peer_up("learner", {**hello, "policy_version": -1, "credit_groups": 8})
    stage.train(stage.play())
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.play()
    of_groups = {entry.row_id for group in stage.core.replay.groups for entry in group.members}
    entries = list(stage.core.replay.pool)
    assert of_groups & {entry.row_id for entry in entries}
    stage.store.close()
    with ReplayStore(stage.path, "NORMAL") as store:
        frames = store.payloads([entry.row_id for entry in entries])
        foreign = [
            dataclasses.replace(decode_trajectory(frame), trajectory_id=f"x{n}", group_id="x").scored(1.0, {})
            for n, frame in enumerate(frames.values())
        ]
        counts = PoolWriter(stage.config, store, stage.updates).add([(one, None) for one in foreign])
        assert counts["imported"] and counts["left.full"] + counts["left.capacity"]
        assert set(store.payloads(of_groups)) == of_groups
    assert stage.counters()


def test_what_grows_too_old_leaves_the_pool_and_not_the_group_that_holds_it(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, max_age=3)
    plan = stage.until_replayed()
    candidates = (replay for group in stage.core.records.values() for replay in group.replays)
    (replay,) = (r for r in candidates if r.entry.trajectory_id == plan["replay_ids"][0])
    born = replay.entry.version_min
    stage.core.control.announced = False
    stage.tell(Kind.VERSION, policy_version=born + 3, updates=stage.updates)
    assert replay.entry.row_id in stage.core.replay.pool
    stage.tell(Kind.VERSION, policy_version=born + 4, updates=stage.updates)
    stage.round()
    assert replay.entry.row_id not in stage.core.replay.pool and replay.entry.row_id in stage.core.payloads.holders
    counters = stage.counters()
    assert counters["pool.evicted.age"] >= 1 and not counters.get("pool.evicted.capacity")
    stage.store.close()
    stage.start()
    stage.round()
    assert stage.store.payloads([replay.entry.row_id]), "a restart does not lose it either"
    stage.train(stage.plans)
    stage.round()
    assert stage.counters()["replays.trained"] >= 1
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    assert not stage.store.payloads([replay.entry.row_id]) and stage.counters()
    stage.store.close()


def test_ages_in_the_audit_are_those_of_the_weights_that_were_updated(tmp_path: Any) -> None:
    """CONSUMED and VERSION may cross: what was trained is as old as the learner says, not as the newest version."""
    stage = Stage(tmp_path / "s.sqlite", half)
    plan = stage.until_replayed()
    stage.core.journal.take_observations()
    (group,) = (g for g in stage.core.records.values() if g.group_id == plan["group_id"])
    born = group.replays[0].entry.version_min
    stage.core.control.announced = False
    stage.tell(Kind.VERSION, policy_version=90, updates=stage.updates)
    members = [g for g in stage.core.records.values() if g.update == stage.updates and g.open]
    stage.train(stage.plans, policy_version=50)
    seen = stage.core.journal.take_observations()
    fresh = [slot.trajectory for g in members for slot in g.slots]
    known = seen["audit_age_versions", "trained"]
    assert known == [50 - record.facts.version_min for record in fresh]
    assert seen["audit_age_versions", "replayed"][0] == group.replays[0].age == 50 - born
    stage.round()
    audit = examine_run(stage.path).audit
    assert audit["trained"].count > len(known) and audit["trained"].age >= sum(known)
    assert audit["trained"].age - sum(known) == 0, "the updates before were trained from the weights that played them"
    assert audit["replayed"].age == sum(seen["audit_age_versions", "replayed"])
    stage.store.close()


@pytest.mark.parametrize("says", ["nothing", "another", "a stranger"])
def test_what_the_learner_says_it_trained_is_what_counts_as_used(tmp_path: Any, says: str) -> None:
    stage = Stage(tmp_path / "s.sqlite", half)
    plan = stage.until_replayed()
    assert len(plan["candidates"]) > 1
    chosen = {"nothing": plan["candidates"][0], "another": plan["candidates"][1], "a stranger": plan["candidates"][0]}
    told = {"nothing": {}, "another": {plan["group_id"]: [chosen["another"]]}, "a stranger": {plan["group_id"]: ["x"]}}
    stage.train(stage.plans, replayed=told[says], entropy={chosen[says]: 0.125}, ess={"all": 0.5}, choice_failed=2)
    stage.round()
    used = {e.trajectory_id: (e.uses, e.entropy) for e in stage.core.replay.pool if e.uses}
    assert used == {chosen[says]: (1, 0.125)}
    counters = stage.counters()
    assert counters["replays.trained"] == 1 and counters["replays.choice_failed"] == 2
    assert counters.get("learner.replayed_unknown", 0) == (says == "a stranger")
    stage.store.close()


def test_a_repeated_consumed_message_uses_nothing_twice(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half)
    stage.until_replayed()
    ids = [p["group_id"] for p in stage.plans]
    for _ in range(3):
        stage.tell(Kind.CONSUMED, update=stage.updates, group_ids=ids)
    stage.round()
    assert stage.counters()["replays.trained"] == 1
    assert sum(e.uses for e in stage.core.replay.pool) == 1
    stage.store.close()


def test_a_rolled_back_group_is_sent_again_with_the_choice_that_was_made(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, ess_guard={"enabled": True})
    plan = stage.until_replayed()
    before = stage.updates
    stage.round()
    entries, factor = deepcopy(list(stage.core.replay.pool)), stage.core.replay.factor
    chosen, *others = reversed(plan["candidates"])
    assert others
    stage.train(
        stage.plans,
        ess={"replay": 0.0},
        entropy={entry.trajectory_id: 7.0 for entry in entries},
        replayed={plan["group_id"]: [chosen]},
        policy_version=3,
    )
    stage.round()
    measured = {entry.trajectory_id: (entry.entropy, entry.entropy_version) for entry in stage.core.replay.pool}
    assert all(measured[name] == (7.0, 3) for name in plan["candidates"]), "also of those that were not chosen"
    hello = {"schema_version": SCHEMA_VERSION, "role": "learner", "session": "t", "updates": before}
    stage.core.peer_down("learner", left=False)
    stage.core.peer_up("learner", {**hello, "policy_version": -1, "credit_groups": 8})
    sent = stage.round()
    (again,) = [s.header for s in sent if s.kind is Kind.PLAN and s.header["group_id"] == plan["group_id"]]
    assert again["candidates"] == again["replay_ids"] == (chosen,)
    delivered = [s.header for s in sent if s.kind is Kind.DELIVERY and s.header["group_id"] == plan["group_id"]]
    assert [d["trajectory_id"] for d in delivered if "replay" in d] == [chosen]
    (kept,) = [g for g in stage.store.load().groups.values() if g.group_id == plan["group_id"]]
    assert [replay.entry.trajectory_id for replay in kept.replays] == [chosen]
    counters = stage.counters()
    assert counters["replays.trained"] == 0 and counters["replays.rolled_back"] == 1
    assert list(stage.core.replay.pool) == entries, "uses and entropies are those from before the update"
    assert stage.core.replay.factor == factor == 1.0
    assert stage.store.load().entries == entries, "in the store too"
    stage.store.close()


def test_groups_with_replays_survive_a_restart_of_the_stage(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half)
    plan = stage.until_replayed()
    stage.store.close()
    entries = list(stage.core.replay.pool)
    stage.start()
    again = [s.header for s in stage.round() if s.kind is Kind.PLAN]
    assert [p for p in again if p["group_id"] == plan["group_id"]] == [plan]
    assert list(stage.core.replay.pool) == entries
    stage.store.close()


def test_payloads_of_the_pool_outlive_their_group_and_pinned_ones_the_pool(tmp_path: Any) -> None:
    outcome = {"reward": half}
    stage = Stage(tmp_path / "s.sqlite", lambda order: outcome["reward"](order))
    plan = stage.until_replayed()
    pinned = {s.payload for s in stage.sent if s.kind is Kind.DELIVERY and "replay" in s.header}
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    owners = {int(t[1:7]) for t in plan["candidates"]}
    assert not owners & stage.core.records.keys(), "their own groups are forgotten"
    assert set(stage.store.payloads(pinned)) == pinned
    outcome["reward"] = lambda order: 1.0  # every task is solved from here on: the pool is emptied
    stage.train(stage.plans)
    stage.train(stage.play())
    stage.train(stage.play())
    gone = {row_id for row_id in pinned if row_id not in stage.core.replay.pool}
    assert gone, "the task was solved and its stored trajectories left the pool"
    assert set(stage.store.payloads(gone)) == gone, "kept while their group may have to be trained again"
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    for row_id in pinned:
        assert (row_id in stage.store.payloads([row_id])) == (row_id in stage.core.replay.pool)
    stage.counters()
    stage.store.close()


def test_with_replay_off_nothing_is_stored(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half, enabled=False)
    for _ in range(4):
        stage.train(stage.play())
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    assert not len(stage.core.replay.pool) and "pool.saved" not in stage.counters()
    assert not any(s.header.get("candidates") for s in stage.sent)
    stage.store.close()


def test_a_report_that_cannot_be_understood_changes_nothing(tmp_path: Any) -> None:
    stage = Stage(tmp_path / "s.sqlite", half)
    plans = stage.play()
    for report in ({"replayed": [1]}, {"ess": {"all": "much"}}, {"entropy": 3}):
        stage.tell(Kind.CONSUMED, update=0, group_ids=[p["group_id"] for p in plans], **report)
    refused = [s for s in stage.round() if s.kind is Kind.REFUSED]
    assert len(refused) == 3 and stage.core.staleness.consumed == 0
    stage.store.close()


def _trajectory(**more: Any) -> Trajectory:
    order = Order("g000000.0.0", "g000000", Task("a/0", "a", 0), 0, 0, 0, 1.0)
    played = rollout(order, 0, reward=1.0)
    fields = {name: getattr(played, name) for name in played.__dataclass_fields__}
    return Trajectory(**{**fields, **more})


@pytest.mark.parametrize(
    ("more", "entropy", "replayable"),
    [
        ({}, 0.375, True),
        ({"recorded": False}, None, False),
        ({"lessons": PromptLessons(("x",))}, 0.375, True),
        ({"lessons": PromptLessons(("x",), keep=False, plain_contexts={0: (1,)})}, 0.375, False),
    ],
)
def test_entropy_is_known_where_it_was_recorded_and_stripped_prompts_are_not_replayed(
    more: dict[str, Any], entropy: float | None, replayable: bool
) -> None:
    trajectory = _trajectory(**more)
    facts = facts_of(trajectory, encode_trajectory(trajectory))
    assert facts.entropy == (None if entropy is None else pytest.approx(entropy))
    assert facts.replayable is replayable
    assert np.isfinite(facts.n_sampled)


@pytest.mark.parametrize("mode", ["mix", "groups"])
def test_what_is_over_the_bound_on_bytes_leaves_and_is_counted(
    mode: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest leave, and the stage continues."""
    monkeypatch.setattr(core, "RETAIN_GROUPS", 1)
    stage = Stage(tmp_path / "s.sqlite", half, mode=mode, groups={"uses_max": 9}, capacity_bytes=5_000)
    for _ in range(8):
        stage.train(stage.play())
        stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    counters = stage.counters()
    left = {"mix": counters.get("pool.evicted.bytes"), "groups": counters.get("stored_groups.evicted.bytes")}
    assert left[mode], left
    assert stage.core.replay.bytes <= 5_000
    stage.store.close()
