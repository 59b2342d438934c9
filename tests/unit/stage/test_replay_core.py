"""The rules of docs/PROTOCOL.md at the stage, one at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import SCHEMA_VERSION, Order, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.orders import decode_request
from pipeline.scorer.verdict import combine
from pipeline.stage.core import StageCore
from pipeline.stage.metrics import Observer, ReplayMetrics
from pipeline.store.effects import Score, Send
from pipeline.store.journal import Changes
from pipeline.store.ledger import Ledger, build_ledger
from pipeline.store.records import GroupState
from pipeline.transport.messages import Kind, WireMessage
from tests.support.simulated_roles import rollout

ALONE = {"advantage": {"estimator": "reinforce_pp"}}
"""For groups of one rollout, which cannot be compared."""


class Stage:
    """A core whose messages are kept instead of sent."""

    def __init__(self, snapshot: Any = None, *, scored: bool = True, **sections: Any) -> None:
        sections.setdefault("environments", {"a": {"max_seconds": 10}})
        sections.setdefault("groups", {"n_rollout": 2, "groups_per_step": 2})
        sections["replay"] = {"keep_trained": 0, **sections.get("replay", {})}
        self.config = RunConfig.model_validate(sections)
        score = (lambda t: combine(t.rewards, {"environment": 1.0})) if scored else None
        self.core = StageCore(self.config, snapshot, score_now=score)
        self.now = 0.0
        self.sent: list[Send] = []
        self.to_score: list[Score] = []
        self.changes = Changes()

    def round(self, seconds: float = 0.0) -> list[Send]:
        self.now += seconds
        self.core.set_time(self.now, self.now)
        self.core.plan()
        self.changes, effects = self.core.collect()
        new = [e for e in effects if isinstance(e, Send)]
        self.to_score += [e for e in effects if isinstance(e, Score)]
        self.sent += new
        return new

    def actor(self, name: str = "actor-0", slots: int = 100, holding: tuple[str, ...] = ()) -> list[Send]:
        hello = {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": slots, "holding": list(holding)}
        self.core.peer_up(name, hello)
        return self.round()

    def learner(self, session: str = "s", updates: int = 0, version: int | None = 0, **more: Any) -> list[Send]:
        hello = {"session": session, "updates": updates, "policy_version": -1, "durable_updates": 0, "credit_groups": 8}
        self.core.peer_up("learner", {"role": "learner", "schema_version": SCHEMA_VERSION, **hello, **more})
        sent = self.round()
        if version is not None:
            self.tell(Kind.VERSION, policy_version=version, updates=updates)
            sent = sent + self.round()
        return sent

    def tell(self, kind: Kind, **header: Any) -> None:
        number = self.core.control.applied + 1
        self.core.message("learner", WireMessage(kind, {"number": number, **header}))

    def orders(self, to: str | None = None) -> list[Order]:
        return [decode_request(Order, s.header) for s in self.sent if s.kind is Kind.ORDER and to in (None, s.peer)]

    def answer(self, order: Order, actor: str = "actor-0", **more: Any) -> dict[str, Any]:
        version = more.pop("version", order.policy_version)
        frames = encode_trajectory(rollout(order, version, **more))
        self.core.message(actor, WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
        acks = [s for s in self.round() if s.kind is Kind.ACK and s.peer == actor]
        return acks[0].header

    def answer_all(self) -> None:
        seen = set()
        while fresh := [o for o in self.orders() if o.order_id not in seen]:
            for order in fresh:
                seen.add(order.order_id)
                live = self.core.records.get(int(order.group_id[1:]))
                if live is not None and live.slots[order.slot].leased:
                    self.answer(order)

    def ledger(self) -> Ledger:
        states = Counter(g.state.value for g in self.core.records.values())
        ledger = build_ledger(self.core.journal.counters, {k: states[k] for k in ("collecting", "ready", "placed")}, {},
                              pool_held=len(self.core.replay.pool))  # fmt: skip
        assert ledger.audit() == []
        return ledger


def started(**sections: Any) -> Stage:
    stage = Stage(**sections)
    stage.actor()
    stage.learner()
    return stage


def ids(sent: list[Send], kind: Kind) -> list[str]:
    return [s.header.get("order_id") or s.header.get("group_id") for s in sent if s.kind is kind]


def test_actor_gets_as_many_orders_as_the_slots_that_it_told_last() -> None:
    stage = Stage(groups={"n_rollout": 2, "groups_per_step": 16})
    stage.actor(slots=4)
    stage.learner()
    assert len(stage.orders()) == 4
    stage.core.message("actor-0", WireMessage(Kind.SLOTS, {"slots": 7}))
    stage.round()
    assert len(stage.orders()) == 7
    stage.core.message("actor-0", WireMessage(Kind.SLOTS, {"slots": 2}))
    for order in stage.orders()[:5]:
        stage.answer(order)
    assert len(stage.orders()) == 7, "two of the seven are still played"
    stage.answer(stage.orders()[5])
    assert len(stage.orders()) == 8
    for slots in (-1, 10**9, "many"):
        stage.core.message("actor-0", WireMessage(Kind.SLOTS, {"slots": slots}))
        assert [s.kind for s in stage.round()] == [Kind.REFUSED]
    assert stage.core.leases.actors["actor-0"].slots == 2
    stage.actor("actor-0", slots=4, holding=tuple(o.order_id for o in stage.orders()[6:]))
    assert stage.core.leases.actors["actor-0"].slots == 4


def test_an_actor_that_drains_gets_no_order_and_its_answers_count() -> None:
    stage = Stage(groups={"n_rollout": 2, "groups_per_step": 16})
    stage.actor(slots=4)
    stage.learner()
    stage.core.message("actor-0", WireMessage(Kind.SLOTS, {"slots": 0}))
    for order in stage.orders():
        stage.answer(order)
    assert len(stage.orders()) == 4 and stage.ledger().orders["delivered"] == 4
    stage.actor(slots=0)
    assert len(stage.orders()) == 4, "nor after a reconnection"


def test_no_order_is_issued_before_the_first_version() -> None:
    stage = Stage()
    stage.actor()
    stage.learner(version=None)
    assert stage.orders() == []
    stage.tell(Kind.VERSION, policy_version=0, updates=0)
    stage.round()
    assert [o.order_id for o in stage.orders()][:3] == ["g000000.0.0", "g000000.1.0", "g000001.0.0"]
    assert len(stage.orders()) == (1 + 1) * 2 * 2, "eta + 1 batches"


def test_orders_go_to_the_least_loaded_actor_and_never_over_its_slots() -> None:
    stage = Stage()
    stage.learner()
    for name, slots in (("actor-0", 1), ("actor-1", 4)):
        stage.core.peer_up(name, {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": slots, "holding": []})
    stage.round()
    assert len(stage.orders("actor-0")) == 1 and len(stage.orders("actor-1")) == 4
    assert [s.peer for s in stage.sent if s.kind is Kind.ORDER][:3] == ["actor-1"] * 3


def test_a_complete_group_is_sent_once_as_plan_and_deliveries() -> None:
    stage = started()
    first = [o for o in stage.orders() if o.group_id == "g000000"]
    stage.answer(first[0])
    assert not ids(stage.sent, Kind.PLAN)
    stage.answer(first[1])
    stage.round()
    assert ids(stage.sent, Kind.PLAN) == ["g000000"]
    deliveries = [s.header for s in stage.sent if s.kind is Kind.DELIVERY]
    assert [(d["trajectory_id"], d["index"], d["reward"]) for d in deliveries] == [
        ("g000000.0.0", 0, 0.0), ("g000000.1.0", 1, 1.0)
    ]  # fmt: skip


def test_a_duplicate_is_acknowledged_again_and_counted() -> None:
    stage = started()
    order = stage.orders()[0]
    for _ in range(3):
        assert stage.answer(order)["trajectory_ids"] == [order.order_id]
    ledger = stage.ledger()
    assert ledger.trajectories == {"received": 3, "held": 1, "dropped.duplicate": 2}


def test_a_failed_rollout_is_ordered_again_until_its_attempts_are_used_up() -> None:
    stage = started(groups={"n_rollout": 2, "groups_per_step": 1, "attempts_max": 2}, staleness={"max": 0})
    order = stage.orders()[0]
    assert stage.answer(order, status=TrajectoryStatus.ERROR)["trajectory_ids"] == [order.order_id]
    again = stage.orders()[-1]
    assert (again.order_id, again.attempt) == ("g000000.0.1", 1)
    stage.answer(again, status=TrajectoryStatus.ERROR)
    cancels = [s.header for s in stage.sent if s.kind is Kind.CANCEL]
    assert cancels == [{"order_ids": ["g000000.1.0"], "reason": "its group was cancelled: attempts"}]
    assert [o.order_id for o in stage.orders()[-2:]] == ["g000001.0.0", "g000001.1.0"], "the place is refilled"
    assert stage.answer(stage.orders()[1]) == {"trajectory_ids": [], "refused": {"g000000.1.0": "cancelled"}}
    ledger = stage.ledger()
    assert ledger.groups["cancelled.attempts"] == 1 and ledger.trajectories["dropped.failed"] == 2


def test_an_environment_that_always_fails_is_played_ever_more_slowly() -> None:
    stage = started(groups={"n_rollout": 1, "groups_per_step": 1, "attempts_max": 1}, staleness={"max": 0}, **ALONE)
    played = 0
    while stage.now < 120:
        for order in stage.orders()[played:]:
            played += 1
            stage.answer(order, status=TrajectoryStatus.ERROR)
        deadline = stage.core.next_deadline()
        assert deadline is not None
        stage.round(max(deadline - stage.now, 0.001))
    assert 5 < played < 30
    assert stage.core.groups.backoff.reason == "simulation: injected: as asked"
    stage.ledger()


def test_an_aborted_rollout_uses_up_no_attempt() -> None:
    stage = started(groups={"n_rollout": 1, "groups_per_step": 1, "attempts_max": 1}, staleness={"max": 0}, **ALONE)
    for serial in range(5):
        order = stage.orders()[-1]
        assert (order.order_id, order.attempt) == (f"g000000.0.{serial}", 0)
        stage.answer(order, status=TrajectoryStatus.ABORTED)
    assert stage.ledger().orders["aborted"] == 5


def test_hello_returns_lost_orders_and_cancels_unknown_ones() -> None:
    stage = started()
    held, lost = stage.orders()[:2]
    sent = stage.actor(holding=(held.order_id, "g000099.0.0", "nonsense"), slots=100)
    assert [s.header["order_ids"] for s in sent if s.kind is Kind.CANCEL] == [["g000099.0.0", "nonsense"]]
    assert f"{lost.group_id}.{lost.slot}.1" in ids(sent, Kind.ORDER)
    assert stage.answer(lost) == {"trajectory_ids": [], "refused": {lost.order_id: "expired"}}
    assert stage.answer(held)["trajectory_ids"] == [held.order_id]
    stage.ledger()


def test_orders_of_a_silent_actor_expire_and_go_to_another() -> None:
    stage = started(stage={"silence_seconds_max": 5.0})
    stage.answer(stage.orders()[0])
    n = len(stage.orders()) - 1
    stage.core.peer_down("actor-0", left=False)
    stage.actor("actor-1", slots=n)
    stage.round(4.9)
    assert not {o.order_id.rpartition(".")[0] for o in stage.orders("actor-1")} & {
        o.order_id.rpartition(".")[0] for o in stage.orders()
    }, "they wait for their actor"
    stage.round(0.2)
    assert stage.ledger().orders["expired"] == n


def test_orders_of_an_actor_that_never_answered_are_free_as_soon_as_its_connection_is_lost() -> None:
    stage = started(stage={"silence_seconds_max": 5.0})
    n = len(stage.orders())
    stage.core.peer_down("actor-0", left=False)
    stage.actor("actor-1")
    assert len(stage.orders("actor-1")) == n
    assert stage.ledger().orders["expired"] == n


def test_orders_of_an_actor_that_leaves_are_free_at_once() -> None:
    stage = started()
    n = len(stage.orders())
    stage.core.peer_down("actor-0", left=True)
    stage.actor("actor-1")
    assert len(stage.orders("actor-1")) == n


def test_an_order_that_is_never_answered_expires_while_its_actor_lives() -> None:
    stage = started()
    n = len(stage.orders())
    deadline = stage.core.leases.next_deadline()
    assert deadline == pytest.approx(1.5 * 10 + 30)
    sent = stage.round(deadline)
    assert len([s for s in sent if s.kind is Kind.ORDER]) == n
    assert sum(len(s.header["order_ids"]) for s in sent if s.kind is Kind.CANCEL) == n


@pytest.mark.parametrize(
    ("hello", "says"),
    [
        ({"role": "actor", "schema_version": 99, "slots": 1, "holding": []}, "same Afterplay"),
        ({"role": "cook", "schema_version": SCHEMA_VERSION}, "role actor or learner"),
        ({"role": "actor", "schema_version": SCHEMA_VERSION, "slots": 257, "holding": []}, "slots of 0 to 256"),
        ({"role": "actor", "schema_version": SCHEMA_VERSION}, "slots to be a whole number"),
        ({"role": "learner", "schema_version": SCHEMA_VERSION, "session": "t", "updates": 0}, "connected already"),
    ],
)
def test_a_wrong_hello_is_refused_with_the_reason(hello: dict[str, Any], says: str) -> None:
    stage = started()
    stage.core.peer_up("stranger", hello)
    refused = [s for s in stage.round() if s.kind is Kind.REFUSED]
    assert [s.peer for s in refused] == ["stranger"] and says in refused[0].header["reason"]


def test_garbage_from_a_peer_is_refused_and_its_order_goes_on() -> None:
    stage = started()
    first, second = stage.orders()[:2]
    good = encode_trajectory(rollout(second, 0))
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": first.order_id}, (b"garbage",)))
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": first.order_id}, good))
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": None}, good))
    stage.core.message("learner", WireMessage(Kind.CONSUMED, {}))
    stage.core.message("nobody", WireMessage(Kind.TRAJECTORY, {"trajectory_id": second.order_id}, good))
    sent = stage.round()
    acks = [s.header for s in sent if s.kind is Kind.ACK]
    assert acks[0]["trajectory_ids"] == [] and set(acks[0]["refused"]) == {first.order_id, "None"}
    assert [s.peer for s in sent if s.kind is Kind.REFUSED] == ["learner", "nobody"]
    assert f"{first.group_id}.{first.slot}.1" in ids(sent, Kind.ORDER)
    assert stage.answer(second)["trajectory_ids"] == [second.order_id]
    stage.ledger()


def train(stage: Stage, update: int) -> list[str]:
    """The learner trains what was planned for ``update``; returns the groups."""
    groups = sorted({s.header["group_id"] for s in stage.sent if s.kind is Kind.PLAN and s.header["update"] == update})
    stage.tell(Kind.CONSUMED, update=update, group_ids=groups)
    stage.tell(Kind.VERSION, policy_version=update + 1, updates=update + 1)
    stage.round()
    return groups


def test_a_learner_that_starts_again_trains_the_same_groups_for_the_same_updates() -> None:
    stage = started(staleness={"max": 1})
    made = []
    for update in range(3):
        stage.answer_all()
        made.append(train(stage, update))
    stage.core.peer_down("learner", left=False)
    sent = stage.learner(session="t", updates=1, version=None, durable_updates=1)
    plans = {s.header["group_id"]: s.header["update"] for s in sent if s.kind is Kind.PLAN}
    assert {g: u for g, u in plans.items() if u < 3} == {g: u for u in (1, 2) for g in made[u]}
    assert [s.header["policy_version"] for s in sent if s.kind is Kind.WELCOME] == [3]
    ledger = stage.ledger()
    assert ledger.trajectories["rolled_back"] == 8 and ledger.trajectories["trained"] == 4


def test_what_is_exported_does_not_fall_where_the_stage_starts_again_after_a_roll_back() -> None:
    def exporting() -> tuple[Observer, CollectorRegistry]:
        return Observer(ReplayMetrics(registry := CollectorRegistry())), registry

    def trained(registry: CollectorRegistry) -> list[float | None]:
        labels = {"groups_total": "outcome", "terminal_trajectories_total": "state"}
        return [registry.get_sample_value(f"afterplay_replay_{n}", {of: "trained"}) for n, of in labels.items()]

    stage = started(staleness={"max": 1})
    observer, registry = exporting()
    for update in (0, 1):
        stage.answer_all()
        train(stage, update)
    observer.update(stage.core)
    assert trained(registry) == [4, 8]
    stage.core.peer_down("learner", left=False)
    stage.learner(session="t", updates=1, version=None, durable_updates=1)
    observer.update(stage.core)
    train(stage, 1)
    observer.update(stage.core)
    assert trained(registry) == [6, 12], "two groups were trained twice"
    other, registry = exporting()
    other.update(stage.core)
    assert trained(registry) == [6, 12]


def test_the_same_session_gets_only_what_it_misses() -> None:
    stage = started()
    stage.answer_all()
    groups = sorted({s.header["group_id"] for s in stage.sent if s.kind is Kind.PLAN})
    sent = stage.learner(version=None, holding=groups[1:])
    assert ids(sent, Kind.PLAN) == groups[:1]


def test_consumed_twice_is_consumed_once() -> None:
    stage = started()
    stage.answer_all()
    groups = train(stage, 0)
    stage.tell(Kind.CONSUMED, update=0, group_ids=groups, number=2)
    sent = stage.round()
    assert [s.header for s in sent if s.kind is Kind.ACK and s.peer == "learner"] == [{"number": 3}]
    assert stage.ledger().groups["trained"] == 2


def test_what_a_checkpoint_had_not_yet_seen_acknowledged_is_no_surprise_when_it_is_resumed() -> None:
    stage = started()
    stage.answer_all()
    groups = train(stage, 0)
    stage.tell(Kind.CHECKPOINTED, updates=1)
    stage.round()
    stage.core.peer_down("learner", left=False)
    stage.learner(session="t", updates=1, version=None, durable_updates=1, consumed=[[0, groups]])
    assert stage.core.journal.counters.get("learner.consumed_unknown", 0) == 0
    stage.tell(Kind.CONSUMED, update=1, group_ids=groups)
    stage.round()
    assert stage.core.journal.counters["learner.consumed_unknown"] == len(groups)


def test_payloads_are_kept_until_the_checkpoint_covers_them() -> None:
    stage = started()
    stage.answer_all()
    groups = train(stage, 0)
    assert not stage.changes.forgotten_payloads
    stage.tell(Kind.CHECKPOINTED, updates=1)
    stage.round()
    assert len(stage.changes.forgotten_payloads) == 4
    assert stage.changes.forgotten_groups == [int(g[1:]) for g in groups]
    late = next(o for o in stage.orders() if o.group_id == groups[0])
    assert stage.answer(late)["refused"] == {late.order_id: "ended"}


def test_the_run_ends_after_its_updates() -> None:
    stage = started(run={"total_steps": 2}, staleness={"max": 3})
    assert len(stage.orders()) == 2 * 2 * 2, "never more groups than the run needs"
    stage.answer_all()
    train(stage, 0)
    train(stage, 1)
    assert stage.core.finished
    assert stage.ledger().groups["trained"] == 4
    assert not [g for g in stage.core.records.values() if g.open]


@pytest.mark.parametrize("late", ["train", "drop"])
def test_a_late_group_is_counted_and_trained_or_dropped(late: str) -> None:
    stage = Stage(staleness={"max": 0, "late": late})
    stage.actor()
    stage.learner(version=4)
    old = [o for o in stage.orders() if o.group_id in ("g000000", "g000001")]
    for order in old:
        stage.answer(order, version=3)
    planned = [g for g in ids(stage.sent, Kind.PLAN) if g in ("g000000", "g000001")]
    ledger = stage.ledger()
    assert ledger.trajectories["late"] == 4
    assert len(planned) == (2 if late == "train" else 0)
    assert ledger.groups.get("cancelled.late", 0) == (0 if late == "train" else 2)


def test_an_engine_behind_its_order_makes_the_group_late() -> None:
    stage = Stage()
    stage.actor()
    stage.learner(version=4)
    for order in stage.orders()[:2]:
        stage.answer(order, version=3)
    assert stage.ledger().groups["late"] == 1


def test_tokens_of_a_version_that_nobody_published_are_refused_and_ordered_again() -> None:
    stage = started()
    order, later = stage.orders()[:2]
    header = stage.answer(order, version=10**6)
    assert list(header["refused"]) == [order.order_id] and "unpublished" in header["refused"][order.order_id]
    again = [o for o in stage.orders() if (o.group_id, o.slot) == (order.group_id, order.slot)]
    assert [o.order_id for o in again] == [order.order_id, again[1].order_id]
    assert stage.answer(again[1])["trajectory_ids"] == [again[1].order_id]
    assert stage.answer(order, version=10**6)["refused"] == {order.order_id: "unpublished"}
    assert stage.answer(later)["trajectory_ids"] == [later.order_id]
    assert stage.ledger().trajectories["dropped.unpublished"] == 2


def test_version_is_known_as_soon_as_the_learner_can_have_published_it() -> None:
    stage = started(staleness={"max": 1})
    stage.answer_all()
    assert stage.core.staleness.version_max == 2, "two updates are at the learner, their versions not announced"
    train(stage, 0)
    stage.tell(
        Kind.CONSUMED, update=1, group_ids=sorted(g.group_id for g in stage.core.records.values() if g.update == 1)
    )
    stage.round()
    assert stage.core.policy_version == 1 and stage.core.staleness.version_max >= 2, "made, not announced"
    before = stage.core.staleness.version_max
    stage.core.peer_down("learner", left=False)
    assert stage.core.staleness.version_max >= 2, "it may publish while it is cut off"
    stage.learner(session="t", updates=2, version=None)
    assert stage.core.staleness.version_max == before + 1, "a learner that starts again may skip one"


def test_a_trajectory_without_a_reward_is_a_failed_rollout() -> None:
    stage = Stage(scored=False)
    stage.actor()
    stage.learner()
    order = stage.orders()[0]
    assert stage.answer(order)["trajectory_ids"] == [order.order_id]
    stage.core.ingest.scored(stage.to_score[0].record, combine({"environment": None}, {"environment": 1.0}))
    sent = stage.round()
    assert ids(sent, Kind.ORDER) == [f"{order.group_id}.{order.slot}.1"]
    assert stage.ledger().trajectories == {"received": 1, "held": 0, "dropped.unscored": 1}


def test_groups_of_another_shape_are_cancelled_on_restart(tmp_path: Any) -> None:
    from pipeline.store.store import ReplayStore

    stage = started()
    with ReplayStore(tmp_path / "s.sqlite", "NORMAL") as store:
        fresh = Stage()
        fresh.actor()
        store.commit(fresh.changes)
        fresh.learner(version=None)
        store.commit(fresh.changes)
        fresh.tell(Kind.VERSION, policy_version=0, updates=0)
        fresh.round()
        store.commit(fresh.changes)
        again = Stage(store.load(), groups={"n_rollout": 3, "groups_per_step": 2})
        again.actor()
        again.learner()
    cancelled = [g for g in again.core.records.values() if g.state is GroupState.CANCELLED]
    assert len(cancelled) == 4 and {g.reason for g in cancelled} == {"reconfigured"}
    assert {o.group_id for o in again.orders()} == {"g000004", "g000005", "g000006", "g000007"}
    again.ledger()
    assert stage.config != again.config


def test_every_order_key_reads_back() -> None:
    from pipeline.store.records import OrderKey

    assert OrderKey.parse("g000012.3.0") == (12, 3, 0) and OrderKey(12, 3, 0).text == "g000012.3.0"
    for wrong in ("g12.3.0", "g000012.3", "g000012.03.0", "", None, 7, "g0000012.3.0"):
        assert OrderKey.parse(wrong) is None
