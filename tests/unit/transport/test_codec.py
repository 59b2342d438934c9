"""Bytes: any trajectory round-trips, foreign bytes raise our errors and nothing else, and nothing is copied."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.errors import LimitExceeded, SchemaError, VersionMismatch, WireError
from pipeline.schema import (
    EngineRecord,
    Failure,
    FinishReason,
    GroupPlan,
    Message,
    Order,
    Task,
    Timings,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
    codec,
)
from pipeline.schema.codec import Limits, decode_trajectory, encode_trajectory
from pipeline.schema.orders import decode_request, encode_request
from pipeline.schema.record_file import array_bytes
from pipeline.schema.trajectory import LOGPROB_MIN, DecodedTurns
from pipeline.transport.messages import Kind, WireMessage, decode_message, encode_message
from tests.support.tokens import flattened

names = st.text("abcxyz0189.-_/é", min_size=1, max_size=12)
texts = st.text(max_size=20)
finite = st.floats(-1e6, 1e6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | finite | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
payloads = st.dictionaries(texts, json_values, max_size=3)
tasks = st.builds(Task, names, names, st.integers(0, 2**63 - 1), payloads)
token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)


@st.composite
def completions(draw):
    ids = draw(st.lists(st.integers(0, 2**31 - 1), max_size=12))
    logprobs = draw(st.lists(st.floats(LOGPROB_MIN, 0, width=32), min_size=len(ids), max_size=len(ids)))
    cuts = sorted(draw(st.sets(st.integers(1, len(ids) - 1), max_size=3))) if len(ids) > 1 else []
    edges = [0, *cuts, len(ids)] if ids else []
    versions = sorted(draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(edges), max_size=len(edges))))
    spans = tuple(VersionSpan(a, b, v) for a, b, v in zip(edges, edges[1:], versions, strict=False))
    return TokenSpan.sampled(ids, logprobs, spans)


messages = st.builds(Message, texts, texts, st.dictionaries(texts, json_values, max_size=2))


@st.composite
def trajectories(draw):
    status = draw(st.sampled_from(TrajectoryStatus))
    failed = status in (TrajectoryStatus.ABORTED, TrajectoryStatus.ERROR)
    turns, branch, form = [], 0, draw(st.none() | st.tuples(st.sampled_from([np.uint8, np.uint16]), st.integers(1, 3)))
    for _ in range(draw(st.integers(0 if failed else 1, 4))):
        branch += draw(st.integers(0, 1))
        context, completion = TokenSpan.context(draw(token_ids)), draw(completions())
        turns.append(
            Turn(
                context,
                completion,
                tuple(draw(st.lists(messages, max_size=2))),
                draw(messages),
                draw(st.sampled_from(FinishReason)),
                draw(st.floats(0, 10)),
                draw(st.dictionaries(texts, finite, max_size=2)),
                branch,
                trained=draw(st.booleans()),
                experts=form and draw(arrays.arrays(form[0], (len(context) + len(completion), form[1], 2))),
            )
        )
    return Trajectory(
        draw(names),
        draw(names),
        draw(tasks),
        tuple(turns),
        status,
        failure=draw(st.builds(Failure, texts, texts, texts, texts)) if failed else None,
        rewards=draw(st.dictionaries(names, st.none() | finite, max_size=2)),
        reward=None if failed else draw(st.none() | finite),
        actor_id=draw(names),
        engine=draw(st.builds(EngineRecord, names, texts, st.lists(names, max_size=2).map(tuple))),
        timings=draw(
            st.builds(Timings, finite, finite, finite, finite, st.lists(st.tuples(finite, finite), max_size=2))
        ),
    )


def plain(value):
    """A dataclass as nested plain values that compare by content."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value


def example(n_turns: int = 3) -> Trajectory:
    turn = Turn(
        TokenSpan.context(range(4000)),
        TokenSpan.sampled(range(5000), -np.ones(5000), (VersionSpan(0, 7, 1), VersionSpan(7, 5000, 2))),
        (Message("user", "hi"),),
        Message("assistant", "yo"),
        FinishReason.STOP,
        1.0,
    )
    return Trajectory("t1", "g1", Task("a/1", "a", 1), (turn,) * n_turns, TrajectoryStatus.COMPLETE)


EXAMPLE = encode_trajectory(example())


def with_experts(experts: npt.NDArray[Any] | None, n_turns: int = 1) -> Trajectory:
    t = example(n_turns)
    return dataclasses.replace(t, turns=tuple(dataclasses.replace(turn, experts=experts) for turn in t.turns))


fast = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@fast
@given(trajectories())
def test_any_trajectory_round_trips(trajectory):
    decoded = decode_trajectory([bytes(f) for f in encode_trajectory(trajectory)])
    assert plain(decoded) == plain(trajectory)
    again = encode_trajectory(decoded)
    assert [bytes(f) for f in again] == [bytes(f) for f in encode_trajectory(trajectory)]


@fast
@given(trajectories())
def test_what_is_decoded_is_as_frozen_and_as_valid_as_what_is_built(trajectory):
    decoded = decode_trajectory([memoryview(bytearray(f)) for f in encode_trajectory(trajectory)])
    for turn in decoded.turns:
        for span in (turn.context, turn.completion):
            assert not span.token_ids.flags.writeable
            TokenSpan(span.source, span.token_ids, span.behaviour_logprobs, span.version_spans)  # checks pass
        dataclasses.replace(turn)
    dataclasses.replace(decoded)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_damaged_bytes_raise_our_errors_or_decode_to_something_valid(data):
    frames = [bytearray(f) for f in encode_trajectory(data.draw(trajectories()))]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = frames[data.draw(st.integers(0, 3))]
        if data.draw(st.booleans()):
            del frame[data.draw(st.integers(0, len(frame))) :]
        elif frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    decoded = None
    with contextlib.suppress(WireError, SchemaError):
        decoded = decode_trajectory([bytes(f) for f in frames])
    if decoded is not None:  # building its turns finds nothing that decoding did not
        encode_trajectory(decoded)
        dataclasses.replace(decoded, turns=tuple(decoded.turns))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_header_with_any_foreign_value_raises_our_errors_or_decodes(data):
    frames = list(encode_trajectory(data.draw(trajectories())))
    header = orjson.loads(frames[0])
    node, keys = header, []
    while isinstance(node, dict | list) and node and (not keys or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        keys.append((node, key))
        node = node[key]
    parent, key = keys[-1]
    if data.draw(st.booleans()):
        parent[key] = data.draw(json_values)
    else:
        del parent[key]
    came = (orjson.dumps(header), *frames[1:])
    found = outcome(came)
    with mock.patch.object(codec, "_are_sound", lambda *_: False):
        assert outcome(came) == found, "checked turn by turn"
    if not isinstance(found[0], type):
        decoded = decode_trajectory(came)
        encode_trajectory(decoded)
        flattened(decoded), decoded.timings.duration_seconds


def outcome(frames) -> list[Any]:
    """Result of decoding, or the error that it raises. Building the turns raises nothing."""
    try:
        decoded = decode_trajectory(frames)
    except (WireError, SchemaError) as error:
        return [type(error), str(error)]
    return [plain(dataclasses.replace(decoded, turns=tuple(decoded.turns))), decoded.version_range(), decoded.usable]


@fast
@given(st.lists(st.binary(max_size=40), max_size=6))
def test_foreign_frames_raise_wire_error(frames):
    with pytest.raises((WireError, SchemaError)):
        decode_trajectory(frames)
    with contextlib.suppress(WireError):
        decode_message(frames)


@fast
@given(payloads, st.lists(st.binary(max_size=30), max_size=5), st.sampled_from(Kind))
def test_any_message_round_trips(header, frames, kind):
    message = WireMessage(kind, header, tuple(frames))
    assert decode_message(encode_message(message)) == message


@fast
@given(tasks, st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.floats(0.1, 1e6))
def test_orders_and_plans_round_trip(task, slot, attempt, version, seconds):
    order = Order("o", "g", task, slot, attempt, version, seconds)
    assert decode_request(Order, orjson.loads(orjson.dumps(encode_request(order)))) == order
    replayed = tuple(f"r{i}" for i in range(slot))
    plan = GroupPlan("g", task, 4 + slot, 4, replayed, (*replayed, "other") if slot else (), attempt, version)
    assert decode_request(GroupPlan, orjson.loads(orjson.dumps(encode_request(plan)))) == plan


@fast
@given(st.dictionaries(st.sampled_from([*Order.__dataclass_fields__, *GroupPlan.__dataclass_fields__]), json_values))
def test_foreign_orders_and_plans_raise_our_errors(header):
    for kind in (Order, GroupPlan):
        with pytest.raises((WireError, SchemaError)):
            decode_request(kind, header)


def test_turns_are_built_once_when_one_is_asked_for():
    decoded = decode_trajectory(EXAMPLE)
    assert isinstance(decoded.turns, DecodedTurns)
    assert len(decoded.turns) == 3 and decoded.version_range() == (1, 2) and decoded.usable
    assert decoded.turns._turns is None
    assert (
        decoded.turns[-1] is decoded.graded_turn is list(decoded.turns)[2]
        and decoded.turns[:2] == (*decoded.turns,)[:2]
    )
    assert plain(pickle.loads(pickle.dumps(decoded))) == plain(example())  # score functions run in other processes


def test_decoded_arrays_are_views_of_the_received_bytes():
    decoded = decode_trajectory(EXAMPLE)
    ids, logprobs = np.frombuffer(EXAMPLE[1], np.int32), np.frombuffer(EXAMPLE[2], np.float32)
    for turn in decoded.turns:
        assert np.shares_memory(turn.context.token_ids, ids)
        assert np.shares_memory(turn.completion.token_ids, ids)
        assert np.shares_memory(turn.completion.behaviour_logprobs, logprobs)


def test_encoded_arrays_are_sent_without_another_copy():
    array = np.arange(1000, dtype=np.int32)
    assert np.shares_memory(np.frombuffer(array_bytes(array), np.int32), array)


@pytest.mark.parametrize(
    ("frame", "at", "value", "what"),
    [
        (1, 0, -1, "token ids >= 0"),
        (2, 7, np.nan, "log-probabilities of sampled tokens"),
        (2, 0, 0.5, "-100 to 0, got .* to 0.5"),
        (2, 7, -3e38, "-100 to 0, got -3e\\+38"),
        (2, 7, -np.inf, "-100 to 0, got -inf"),
        (2, 7, -100.1, "-100 to 0"),
        (3, 0, 1, "cover 5000 tokens without a gap"),
        (3, 1, 9, "without a gap, .* stop=9,"),
        (3, 2, 5, "never decrease, .*policy_version=5"),
        (3, 2, -5, "policy_version >= 0"),
        (3, 4, 4999, "cover 5000 tokens .* stop=4999,"),
    ],
)
def test_each_value_that_breaks_the_data_model_is_named(frame, at, value, what):
    frames = list(EXAMPLE)
    array = np.frombuffer(frames[frame], np.float32 if frame == 2 else np.int32).copy()
    array[at] = value
    frames[frame] = array_bytes(array)
    with pytest.raises(SchemaError, match=what):
        decode_trajectory(frames)


def test_lengths_limits_and_versions_are_checked():
    with pytest.raises(LimitExceeded, match="tokens_max=10"):
        decode_trajectory(EXAMPLE, Limits(tokens_max=10))
    header = orjson.loads(EXAMPLE[0])
    for lengths, what in (
        ([4001, 5000, 2], "add up"),
        ([3999, 5000, 2], "add up"),
        ([-1, 5001, 2], r"`int` >= 0 - at `\$.turns\[2\].n\[0\]`"),
        ([1, 2], r"`array` of length 3 - at `\$.turns\[2\].n`"),
    ):
        header["turns"][2]["n"] = lengths
        with pytest.raises(WireError, match=what):
            decode_trajectory([orjson.dumps(header), *EXAMPLE[1:]])
    with pytest.raises(VersionMismatch, match="same Afterplay everywhere"):
        decode_trajectory([orjson.dumps({**orjson.loads(EXAMPLE[0]), "schema_version": 99}), *EXAMPLE[1:]])


def test_unknown_header_keys_are_ignored_at_every_level():
    header = orjson.loads(EXAMPLE[0])
    for node in (
        header,
        header["task"],
        header["engine"],
        header["timings"],
        header["turns"][0],
        header["turns"][0]["completion"],
    ):
        node["from_the_future"] = {"x": 1}
    assert plain(decode_trajectory([orjson.dumps(header), *EXAMPLE[1:]])) == plain(example())


def test_what_is_not_json_is_refused_when_it_is_encoded():
    with pytest.raises(SchemaError, match="not JSON"):
        encode_trajectory(dataclasses.replace(example(), task=Task("a", "a", 1, {"x": object()})))


def test_experts_cost_their_bytes_where_recorded_and_nothing_elsewhere() -> None:
    frames = encode_trajectory(with_experts(np.zeros((9000, 3, 2), np.uint8)))
    without = encode_trajectory(with_experts(None))
    assert [bytes(f) for f in frames[1:3]] == [bytes(f) for f in without[1:3]]
    assert memoryview(frames[3]).nbytes - memoryview(without[3]).nbytes == 9000 * 3 * 2
    assert b"experts" not in bytes(without[0])


def test_experts_of_a_turn_that_has_none_are_unknown_and_the_others_their_tokens() -> None:
    """A turn has those of the token before each of its tokens; a branch those of each token itself."""
    experts = np.arange(9000 * 2, dtype=np.uint16).reshape(9000, 1, 2)
    first, second = with_experts(experts, 2).turns
    t = dataclasses.replace(example(), turns=(first, dataclasses.replace(second, experts=None)))
    for trajectory in (t, decode_trajectory(encode_trajectory(t))):
        (branch,) = trajectory.branches()
        assert branch.experts is not None
        np.testing.assert_array_equal(branch.experts[:8999], experts[1:])
        assert (branch.experts[8999:] == 2**16 - 1).all() and len(branch.experts) == len(branch) == 18000


@pytest.mark.parametrize("form", [["|u1", 3], ["|u1", 0, 2], ["<f4", 3, 2], ["|u1", 3, 2000], "|u1", ["<u2", 3, 20]])
def test_experts_in_another_form_are_refused(form: Any) -> None:
    frames = encode_trajectory(with_experts(np.zeros((9000, 3, 2), np.uint8)))
    header = orjson.loads(bytes(frames[0])) | {"experts": form}
    with pytest.raises(WireError, match="expected experts of 9000 tokens"):
        decode_trajectory((orjson.dumps(header), *frames[1:]))


def test_experts_fit_the_tokens_of_their_turn_and_one_model() -> None:
    with pytest.raises(SchemaError, match="expected experts of 9000 tokens"):
        with_experts(np.zeros((8999, 3, 2), np.uint8))
    one, other = (with_experts(np.zeros((9000, n, 2), np.uint8)).turns[0] for n in (1, 2))
    with pytest.raises(SchemaError, match="experts of one model"):
        dataclasses.replace(example(), turns=(one, other))
