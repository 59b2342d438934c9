"""Commands and rows as bytes."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from learner.data.rows import Row, TokenScores
from learner.distributed.messages import pack, pack_command, unpack, unpack_command

kinds = st.sampled_from([np.float32, np.float64, np.int8, np.int32, np.int64, np.bool_, np.uint8])
any_array = kinds.flatmap(lambda kind: arrays.arrays(kind, arrays.array_shapes(min_dims=0, min_side=0, max_dims=3)))


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(a, b)


@given(st.dictionaries(st.text(max_size=5), any_array, max_size=5), st.dictionaries(st.text(), st.integers(0, 99)))
def test_arrays_come_back_with_type_shape_and_every_value(found, header):
    came_header, came = unpack(pack(header, found))
    assert came_header == header and came.keys() == found.keys()
    for name, array in found.items():
        same(came[name], array)
        assert came[name].flags.writeable, "torch takes it without a copy"


@pytest.mark.parametrize("count", [0, 1, 7])
def test_rows_come_back_as_they_were(kit, count):
    rows = kit.make_rows(count, replayed=[i % 2 == 0 for i in range(count)])
    rows = tuple(
        replace(
            r,
            with_lessons=i % 3 == 0,
            recorded=i != 1,
            replay_weight=0.25 * i,
            environment="größer",
            experts=np.full((len(r), 2, 3), i, np.uint16) if i % 2 else None,
        )
        for i, r in enumerate(rows)
    )
    scores = TokenScores(logprobs=np.asarray([np.nan, np.inf, -1.0], np.float32))
    facts, came, came_scores = unpack_command(pack_command("step", rows, {"update": 3, "kl": np.float64(0.1)}, scores))
    assert facts == {"command": "step", "update": 3, "kl": 0.1}
    assert len(came) == count
    for row, other in zip(rows, came, strict=True):
        for f in fields(Row):
            a, b = getattr(row, f.name), getattr(other, f.name)
            if isinstance(a, np.ndarray):
                same(a, b)
            else:
                assert a == b
    same(came_scores.logprobs, scores.logprobs)
    assert came_scores.values is None


def test_a_command_may_be_nothing_but_its_name():
    assert unpack_command(pack_command("heartbeat")) == ({"command": "heartbeat"}, (), TokenScores())
