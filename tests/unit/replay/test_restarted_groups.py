"""Restarted groups at the stage: their orders carry the stored turns, their books balance, a kill changes nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pipeline.errors import NotReproducible
from pipeline.schema import Failure, Order, TrajectoryStatus
from pipeline.stage.core import StageCore
from pipeline.store.journal import Send
from pipeline.store.ledger import read_ledger
from pipeline.transport.codec import decode_order, encode_trajectory
from pipeline.transport.protocol import Kind, WireMessage
from tests.support.simulated_roles import rollout
from tests.unit.replay.test_replay_groups import Stage

TURNS = 5


class Restarting(Stage):
    """Rollouts have five turns. From the start one of four succeeds; after stored turns, ``succeeds`` says."""

    def __init__(self, path: Any, succeeds: Any = lambda order: order.slot % 2, **replay: Any) -> None:
        self.succeeds, self.unreproducible = succeeds, False
        self.restarted: list[Order] = []
        restart = {"rate_min": 0.3, "rate_max": 0.8}
        super().__init__(path, None, mode="restart", restart=restart, **replay)

    def play(self) -> list[dict[str, Any]]:
        plans = []
        while new := self.round():
            plans += [s.header for s in new if s.kind is Kind.PLAN]
            for send in new:
                if send.kind is Kind.ORDER:
                    self.answer(send)
        return plans

    def answer(self, send: Send) -> None:
        frames = self.store.payloads([send.payload])[send.payload] if send.payload is not None else ()
        order = decode_order(send.header, frames)
        if order.restart:
            self.restarted.append(order)
        success = self.succeeds(order) if order.restart else order.slot == 0
        played = rollout(order, order.policy_version, reward=float(success), turns=TURNS)
        if order.restart and self.unreproducible:
            error = NotReproducible("the prompt of turn 1 is another")
            failure = Failure(error.boundary, error.kind, error.message)
            played = replace(played, turns=(), status=TrajectoryStatus.ERROR, failure=failure, rewards={})
        message = {"trajectory_id": order.order_id}
        self.core.message("actor-0", WireMessage(Kind.TRAJECTORY, message, encode_trajectory(played)))

    def run(self, updates: int) -> None:
        for _ in range(updates):
            self.train(self.play())
        self.tell(Kind.CHECKPOINTED, updates=self.updates)
        self.play()


def test_every_order_of_a_restarted_group_has_the_same_turns_of_one_stored_success(tmp_path: Any) -> None:
    stage = Restarting(tmp_path / "s.sqlite")
    stage.run(6)
    groups: dict[str, list[Order]] = {}
    for order in stage.restarted:
        groups.setdefault(order.group_id, []).append(order)
    assert groups
    for orders in groups.values():
        assert [order.slot for order in orders] == [0, 1, 2, 3], "all are fresh"
        assert {len(order.restart) for order in orders} == {len(orders[0].restart)}
        assert 2 <= len(orders[0].restart) <= TURNS
    counters = stage.counters()
    assert counters["restarts.planned"] == len(groups)
    assert counters["restarts.successes"] == counters["restarts.failures"] == 2 * len(groups)
    plans = [s.header for s in stage.sent if s.kind is Kind.PLAN and s.header["group_id"] in groups]
    assert all(p["restarted"] for p in plans)
    assert not any("restarted" in s.header for s in stage.sent if s.header.get("group_id") not in groups)
    assert plans and all(p["n_fresh"] == p["n_rollout"] == 4 and not p["candidates"] for p in plans)
    stage.store.close()


def test_restarted_rollouts_count_neither_for_difficulty_nor_for_the_pool(tmp_path: Any) -> None:
    stage = Restarting(tmp_path / "s.sqlite", succeeds=lambda order: True, retire_after=1)
    stage.run(8)
    assert stage.restarted
    experience = stage.core.experience
    assert experience.retired == 0, "every restarted rollout succeeded"
    assert all(record.success_rate == 0.25 for record in experience.tasks.values() if record.visits)
    assert all(int(entry.trajectory_id.split(".")[1]) == 0 for entry in experience.entries)
    assert {o.order_id for o in stage.restarted}.isdisjoint(e.trajectory_id for e in experience.entries)
    stage.counters()
    stage.store.close()


def test_a_task_whose_turns_cannot_be_played_again_is_not_restarted_again(tmp_path: Any) -> None:
    stage = Restarting(tmp_path / "s.sqlite")
    stage.unreproducible = True
    stage.run(10)
    counters = stage.counters()
    assert 1 <= counters["groups.cancelled.unreproducible"] == counters["restarts.planned"] <= 3, "once for each task"
    assert counters["trajectories.dropped.failed"] >= counters["restarts.planned"]
    assert "groups.cancelled.attempts" not in counters and "restarts.failures" not in counters
    assert stage.updates == 10, "plain groups took their place"
    stage.store.close()


def test_a_kill_keeps_restarts_their_payloads_and_what_comes_next(tmp_path: Any) -> None:
    stage = Restarting(tmp_path / "s.sqlite")
    for _ in range(20):
        new = stage.round()
        if any("restart" in s.header for s in new if s.kind is Kind.ORDER):
            break
        for send in new:
            if send.kind is Kind.ORDER:
                stage.answer(send)
        plans = [s.header for s in stage.sent if s.kind is Kind.PLAN and s.header["update"] == stage.updates]
        if len(plans) == 2:
            stage.train(plans)
    number, group = next((n, g) for n, g in stage.core.records.items() if g.restart is not None)
    again = StageCore(stage.config, stage.store.load())
    assert again.records[number].restart == group.restart and again.records[number].replays == []
    assert again.payloads.held == stage.core.payloads.held and group.restart.row_id in again.payloads.held
    assert again.experience.tasks == dict(stage.core.experience.tasks)
    searches = [record.restart for record in again.experience.tasks.values() if record.restart is not None]
    assert searches and all(search.turn for search in searches)
    stage.store.close()


def test_rolled_up_rows_still_say_how_many_groups_were_restarted(tmp_path: Any) -> None:
    stage = Restarting(tmp_path / "s.sqlite")
    stage.run(6)
    planned = stage.counters()["restarts.planned"]
    assert planned
    stage.tell(Kind.CHECKPOINTED, updates=stage.updates)
    stage.round()
    stage.core.journal.meta("rolled_below", min(stage.core.records, default=stage.core.records.next_group))
    changes, _ = stage.core.collect()
    stage.store.commit(changes)
    assert read_ledger(stage.path, rows=True).rows["replays"]["restarted"] == planned
    stage.counters()
    stage.store.close()
