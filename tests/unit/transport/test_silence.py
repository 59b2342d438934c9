"""Silence is judged by what could have been heard."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeline.transport.messages import Silence


def test_who_is_not_heard_for_the_limit_is_named_once_it_passes():
    silence = Silence(1.0, 3.0)
    silence.heard(b"a", 0.0)
    silence.heard(b"b", 0.0)
    assert [silence.tick(float(t)) for t in (1, 2, 3)] == [[], [], []]
    silence.heard(b"a", 3.5)
    assert silence.tick(4.0) == [b"b"]
    silence.forget(b"b")
    assert silence.tick(5.0) == []


def test_a_process_that_was_stopped_gives_its_peers_time_to_be_heard():
    silence = Silence(1.0, 3.0)
    silence.heard(b"a", 0.0)
    silence.tick(1.0)
    assert silence.tick(100.0) == []
    assert [silence.tick(t) for t in (101.0, 102.0)] == [[], [b"a"]]


def test_time_in_which_we_did_not_listen_counts_for_nobody():
    silence = Silence(1.0, 3.0)
    silence.heard(b"a", 0.0)
    for t in range(1, 50):
        assert silence.tick(float(t), deaf=True) == []
    assert [silence.tick(t) for t in (50.0, 51.0, 52.0)] == [[], [], [b"a"]]


@given(st.lists(st.tuples(st.floats(0.1, 30), st.booleans()), max_size=40))
def test_a_peer_heard_in_every_interval_is_never_dropped(intervals):
    silence, now = Silence(1.0, 3.0), 0.0
    for seconds, deaf in intervals:
        now += seconds
        silence.heard(b"a", now)
        assert silence.tick(now, deaf) == []
