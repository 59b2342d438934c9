"""An accepted trajectory can be delivered: nothing waits at the stage for a message that no link can carry."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ConfigurationError
from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.stage.core import StageCore
from pipeline.store.store import ReplayStore
from pipeline.transport.messages import Kind, WireMessage, encode_message
from tests.support.simulated_roles import rollout
from tests.unit.stage.test_replay_core import started
from tests.unit.stage.test_store_that_went_back import StoredStage


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


@pytest.mark.parametrize("where", ["open", "trained", "pool"])
@pytest.mark.parametrize("key", ["message_bytes_max", "tokens_max"])
def test_a_limit_below_what_is_stored_is_refused_at_the_start(tmp_path: Path, where: str, key: str) -> None:
    replay = {"enabled": where == "pool", "mode": "mix", "start_ratio": 0.0}
    stage = StoredStage(tmp_path / "r.sqlite", replay=replay, run={"total_steps": 100})
    if where == "open":
        stage.answer_all()
        stage.round()
    else:
        stage.train(2, durable=where == "pool")
    stage.store.close()
    with ReplayStore(stage.store.path) as store:
        snapshot = store.load()
    assert bool(snapshot.entries) == (where == "pool")
    fields = {"message_bytes_max": "n_bytes", "tokens_max": "n_tokens"}
    held = [slot.trajectory.facts for g in snapshot.groups.values() for slot in g.slots if slot.trajectory is not None]
    largest = max(getattr(one, fields[key]) for one in [*held, *snapshot.entries])
    for limit in (largest - 1, largest):
        config = stage.core.config.updated(stage={key: limit})
        with nullcontext() if limit == largest else pytest.raises(ConfigurationError, match=f"stage.{key}.*{largest}"):
            StageCore(config, snapshot)
