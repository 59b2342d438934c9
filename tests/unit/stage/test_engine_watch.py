"""The actor that watches the engines for all: who is chosen, and what is passed on."""

from __future__ import annotations

from typing import Any

from pipeline.schema import SCHEMA_VERSION
from pipeline.stage.engine_watch import RELAY_SECONDS, RELAYED_MAX, SILENT_SECONDS
from pipeline.store.effects import Send
from pipeline.transport.messages import Kind, WireMessage
from tests.unit.stage.test_replay_core import Stage


def tell(stage: Stage, actor: str, engines: Any) -> list[Send]:
    stage.core.message(actor, WireMessage(Kind.ENGINES, {"engines": engines}))
    return stage.round()


def to(sent: list[Send], kind: Kind) -> list[str]:
    return [effect.peer for effect in sent if effect.kind is kind]


def with_actors(number: int) -> Stage:
    stage = Stage()
    for i in range(number):
        assert to(stage.actor(f"actor-{i}"), Kind.WATCH) == (["actor-0"] if i == 0 else [])
    return stage


def test_the_next_actor_is_chosen_when_the_chosen_one_leaves_greets_again_or_is_silent() -> None:
    stage = with_actors(3)
    stage.core.peer_down("actor-0", left=False)
    assert to(stage.round(), Kind.WATCH) == ["actor-1"]
    assert to(stage.actor("actor-1"), Kind.WATCH) != [], "a new process does not know that it was chosen"
    chosen = stage.core.engine_watch.chosen
    assert stage.core.next_deadline() == stage.now + SILENT_SECONDS
    tell(stage, str(chosen), {})
    assert to(stage.round(SILENT_SECONDS - 0.1), Kind.WATCH) == []
    assert to(stage.round(0.1), Kind.WATCH) == [{"actor-1": "actor-2", "actor-2": "actor-1"}[str(chosen)]]


def test_one_actor_alone_is_chosen_again() -> None:
    stage = with_actors(1)
    assert to(stage.round(SILENT_SECONDS), Kind.WATCH) == ["actor-0"]
    stage.core.peer_down("actor-0", left=True)
    stage.round()
    assert stage.core.engine_watch.chosen is None


def test_what_the_chosen_actor_saw_is_passed_on_to_all_others_and_to_those_that_connect() -> None:
    stage = with_actors(3)
    sent = tell(stage, "actor-0", {"http://a": {"alive": True}})
    assert to(sent, Kind.ENGINES) == ["actor-1", "actor-2"]
    assert sent[0].header == {"engines": {"http://a": {"alive": True}}}
    assert to(tell(stage, "actor-1", {}), Kind.ENGINES) == [], "it is not chosen"
    assert [s.header for s in stage.actor("actor-3") if s.kind is Kind.ENGINES] == [sent[0].header]
    assert to(tell(stage, "actor-0", ["http://a"]), Kind.REFUSED) == ["actor-0"]


def test_states_that_follow_at_once_are_passed_on_as_one_and_the_newest_is() -> None:
    stage = with_actors(2)
    tell(stage, "actor-0", {"http://a": 1})
    assert to(tell(stage, "actor-0", {"http://a": 2}) + tell(stage, "actor-0", {"http://a": 3}), Kind.ENGINES) == []
    assert stage.core.next_deadline() == RELAY_SECONDS
    (sent,) = [s for s in stage.round(RELAY_SECONDS) if s.kind is Kind.ENGINES]
    assert sent.header == {"engines": {"http://a": 3}}


def test_two_thousand_actors_are_told_no_more_than_the_stage_can_send() -> None:
    stage, sent = Stage(), 0
    for number in range(2000):
        hello = {"role": "actor", "schema_version": SCHEMA_VERSION, "slots": 1, "holding": []}
        stage.core.peer_up(f"actor-{number}", hello)
    stage.round()
    for _ in range(100):
        sent += len(to(tell(stage, "actor-0", {}) + stage.round(0.1), Kind.ENGINES))
    assert 10 * 1999 <= sent <= 10 * RELAYED_MAX + 1999


def test_the_chosen_actor_looks_when_there_is_a_new_version() -> None:
    stage = with_actors(2)
    assert to(stage.learner(version=0), Kind.WATCH) == ["actor-0"]
    stage.tell(Kind.VERSION, policy_version=1, updates=0)
    assert to(stage.round(), Kind.WATCH) == ["actor-0"]
    assert to(stage.round(), Kind.WATCH) == []
