"""An accepted trajectory can be delivered: nothing waits at the stage for a message that no link can carry."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.store.records import GroupState
from pipeline.transport.messages import Kind, WireMessage, encode_message
from tests.support.simulated_roles import rollout
from tests.unit.stage.test_replay_core import started
from tests.unit.zero_variance.conftest import Stage


def test_a_payload_of_the_largest_size_fits_a_delivery() -> None:
    stage = started()
    order = stage.orders()[0]
    frames = encode_trajectory(rollout(order, 0))
    limits = Limits(message_bytes_max=sum(memoryview(f).nbytes for f in frames))
    for kind, header in ((Kind.TRAJECTORY, {}), (Kind.DELIVERY, {"rewards": dict.fromkeys(map(str, range(500)), 0.5)})):
        encode_message(WireMessage(kind, {"trajectory_id": order.order_id, **header}, frames), limits)


def test_rewards_that_fit_no_header_are_refused_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.stage.ingest.Limits.of", lambda config: Limits(header_bytes_max=2048))
    stage = started()
    order = stage.orders()[0]
    many = replace(rollout(order, 0), rewards={"environment": 1.0, **{f"signal_{n}": 0.5 for n in range(100)}})
    header = {"trajectory_id": order.order_id}
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, header, encode_trajectory(many)))
    (answer,) = (s.header for s in stage.round() if s.kind is Kind.ACK)
    assert "rewards that fit" in answer["refused"][order.order_id]
    assert stage.core.records[0].slots[order.slot].leased, "the slot is ordered again"


def test_groups_that_a_lowered_limit_keeps_from_delivery_are_made_again(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "r.sqlite", credit=1)
    order = next(iter(stage.holding.values()))
    header = {"trajectory_id": order.order_id}
    frames = encode_trajectory(rollout(order, 0, turns=40))
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, header, frames))
    stage.round()
    del stage.holding[order.order_id]
    stage.restart(stage={"message_bytes_max": 1024})
    assert stage.core.records[int(order.group_id[1:])].state is GroupState.CANCELLED
    assert stage.core.staleness.open > 0, "another group takes its place"
    stage.store.close()
