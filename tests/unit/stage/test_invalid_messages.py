"""Messages of any form leave the stage alive: its answers can be sent, its rows stored, and its ledger balances."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.errors import AfterplayError, WireError
from pipeline.schema import SCHEMA_VERSION
from pipeline.schema.codec import Limits, encode_trajectory
from pipeline.stage.groups import REASON_CHARACTERS_MAX
from pipeline.store.store import ReplayStore
from pipeline.tasks.splits import decode_splits
from pipeline.transport.hub import Peers, Reaction
from pipeline.transport.messages import EventKind, Kind, WireMessage, decode_message, encode_message
from tests.support.hostile_traffic import HELLO_OF_AN_ACTOR, as_json, messages, mutated_frames, values
from tests.support.simulated_roles import rollout
from tests.unit.stage.test_replay_core import Stage, started

MESSAGES = 120
"""Of one history; the seeds make several thousand."""


class Target:
    """Hub, stage and store, with a peer of each role that the key ``name`` allows."""

    def __init__(self, folder: Path, name: str) -> None:
        self.stage = started(environments={"guess": {"max_seconds": 10}})
        self.store = ReplayStore(folder / f"{name}.sqlite", "off")
        self.store.commit(self.stage.changes)
        self._peers = Peers(Limits(), identity=lambda connection: name)
        self._connections = 0

    def take(self, frames: list[Any], sender: str) -> None:
        """One multipart message; an exception would have ended the stage."""
        connection = str(self._connections).encode()
        self._connections += frames[0] == b"hello"
        answer = self._peers.accept(connection, frames)
        if answer.reply is not None:
            encode_message(answer.reply)
        try:
            message = decode_message(frames)
        except AfterplayError:
            return
        if message.kind is Kind.HELLO:
            self.stage.core.peer_up(sender, message.header)
        else:
            self.stage.core.message(sender, message)
        sent = self.stage.round()
        self.store.commit(self.stage.changes)
        for effect in sent:
            encode_message(WireMessage(effect.kind, effect.header))


@pytest.mark.parametrize("seed", range(12))
def test_no_mutated_message_ends_the_stage(tmp_path: Path, seed: int) -> None:
    logging.getLogger("pipeline").setLevel(logging.CRITICAL)
    rng, name = random.Random(seed), "learner" if seed % 2 else "actor-1"
    target = Target(tmp_path, name)
    orders = target.stage.orders()
    ids = [order.order_id for order in orders]
    payload = [bytes(frame) for frame in encode_trajectory(rollout(orders[0], 0))]
    try:
        for frames in islice(messages(rng, payload, ids, (name, name, "learner")), MESSAGES):
            target.take(frames, rng.choice((name, "actor-0")))
            order = rng.choice(target.stage.orders())
            payload = [bytes(frame) for frame in encode_trajectory(rollout(order, 0))]
            header = orjson.dumps({"trajectory_id": order.order_id})
            target.take([b"trajectory", header, *mutated_frames(rng, payload, values(rng, ids))], "actor-0")
        target.stage.ledger()
    finally:
        target.store.close()
        logging.getLogger("pipeline").setLevel(logging.NOTSET)


@pytest.mark.parametrize("levels", [255, 300, 1000])
@pytest.mark.parametrize("key", ["role", "name", "schema_version", "greeting", "slots", "splits", "holding"])
def test_a_hello_that_is_nested_too_deeply_to_be_shown_is_refused(tmp_path: Path, key: str, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    header = orjson.dumps({**HELLO_OF_AN_ACTOR, key: "here"}).replace(b'"here"', deep)
    with pytest.raises(WireError, match="nesting"):
        decode_message([b"hello", header])
    answer = Peers(Limits(), identity=lambda connection: "actor-1").accept(b"c", [b"hello", header])
    assert [event.kind for event in answer.events] == [EventKind.CORRUPT]


@pytest.mark.parametrize(
    "splits",
    [*("x", 3, [1], {"a": "x"}, {"a": [1]}, {"a": {"train": 5}}, {"a": {"train": [[1, 2]]}}),
     *({"a": {"train": [[0, end, step]]}} for end in (2**63, 2**64 - 1, 1e300) for step in (1, 0))],
)  # fmt: skip
def test_splits_that_are_none_are_refused(splits: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_splits(splits)
    stage = Stage()
    stage.core.peer_up("actor-0", {**HELLO_OF_AN_ACTOR, "schema_version": SCHEMA_VERSION, "splits": splits})
    assert [effect.kind for effect in stage.round()] == [Kind.REFUSED]


@pytest.mark.parametrize("key", ["finished_at", "requests"])
@pytest.mark.parametrize("time", [2**64 - 1, 1e300, -1e300])
def test_a_rollout_whose_times_fit_no_column_is_refused(tmp_path: Path, time: float, key: str) -> None:
    target = Target(tmp_path, "actor-0")
    order = target.stage.orders()[0]
    frames = list(encode_trajectory(rollout(order, 0)))
    frames[0] = as_json(
        {**orjson.loads(frames[0]), "timings": {"started_at": 0, key: [[0, time]] if key == "requests" else time}}
    )
    target.take([b"trajectory", orjson.dumps({"trajectory_id": order.order_id}), *frames], "actor-0")
    refused = [s.header["refused"] for s in target.stage.sent if s.kind is Kind.ACK and s.header.get("refused")]
    assert order.order_id in refused[0] and "times of at most" in refused[0][order.order_id]
    target.store.close()


def test_a_rollout_in_which_nothing_is_trained_is_not_kept_for_training() -> None:
    stage = started()
    order = stage.orders()[0]
    came = rollout(order, 0, turns=2)
    masked = replace(came, turns=tuple(replace(turn, trained=False) for turn in came.turns))
    frames = tuple(encode_trajectory(masked))
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, frames))
    stage.round()
    assert any("nothing to train was sampled" in str(row) for row in stage.changes.orders)
    stage.ledger()


def test_an_actor_cannot_answer_the_order_of_another() -> None:
    stage = started()
    stage.actor("actor-1", slots=1)
    order = stage.orders("actor-0")[0]
    assert stage.answer(order, "actor-1") == {"trajectory_ids": [], "refused": {order.order_id: "unknown"}}
    assert stage.answer(order)["trajectory_ids"] == [order.order_id], "its own actor's answer is taken"
    stage.ledger()


def test_what_an_actor_says_about_its_failure_is_logged_and_stored_in_part(caplog: pytest.LogCaptureFixture) -> None:
    stage = started()
    order = stage.orders()[0]
    frames = list(encode_trajectory(rollout(order, 0)))
    failure = {"boundary": "x", "kind": "y", "message": "m" * 10**6, "details": ""}
    changed = {"status": "error", "failure": failure, "rewards": {}}
    frames[0] = orjson.dumps({**orjson.loads(frames[0]), **changed})
    stage.core.message("actor-0", WireMessage(Kind.TRAJECTORY, {"trajectory_id": order.order_id}, tuple(frames)))
    stage.round()
    assert sum(len(record.getMessage()) for record in caplog.records) < 2 * REASON_CHARACTERS_MAX
    assert max(len(str(row)) for row in stage.changes.orders) < 2 * REASON_CHARACTERS_MAX


def test_a_greeting_that_comes_late_does_not_replace_the_newer_connection_of_its_process() -> None:
    peers = Peers(Limits())

    def greet(connection: bytes, link: str, greeting: int) -> Reaction:
        header = {"role": "learner", "name": "learner", "schema_version": SCHEMA_VERSION}
        hello = WireMessage(Kind.HELLO, {**header, "link": link, "greeting": greeting})
        return peers.accept(connection, encode_message(hello))

    greet(b"new", "one", 2)
    late = greet(b"old", "one", 1)
    assert (late.events, late.replaced) == ((), None)
    assert peers.find("learner") == peers.of(b"new")
    assert greet(b"other", "two", 1).replaced is not None, "another process takes the place"
