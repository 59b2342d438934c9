"""Commands and rows as bytes."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from learner.data.rows import Row, TokenScores
from learner.distributed.messages import (
    CommandRows,
    pack,
    pack_command,
    pack_rows,
    unpack,
    unpack_command,
    unpack_rows,
)

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
        assert (len(row), row.n_sampled, row.has_signal) == (len(other), other.n_sampled, other.has_signal)
        same(row.loss_mask, other.loss_mask)
        same(row.advantages, other.advantages)
        same(row.behaviour_logprobs[row.loss_mask], other.behaviour_logprobs[row.loss_mask])
        for f in fields(Row):
            if not isinstance(a := getattr(row, f.name), np.ndarray):
                assert f.name == "experts" or a == getattr(other, f.name)
        assert (other.token_ids == -1).all(), "no model takes them"
    same(came_scores.logprobs, scores.logprobs)
    assert came_scores.values is None
    if count:
        for number, other in unpack_rows(pack_rows(dict(enumerate(rows)))).items():
            for f in fields(Row):
                a, b = getattr(rows[number], f.name), getattr(other, f.name)
                if isinstance(a, np.ndarray):
                    same(a, b)
                else:
                    assert a == b


@given(st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=7), max_size=5))
def test_a_rank_gets_each_row_that_it_computes_once_and_no_other(divisions):
    """``divisions``: of one command, rows by their number with the rank that computes each."""
    rows = [Row.plain(str(i), range(10, 12 + i)) for i in range(7)]
    sender, outlines = CommandRows(rows, 4), unpack_command(pack_command("step", rows))[1]
    receivers, sent = {rank: CommandRows(outlines) for rank in (1, 2, 3)}, set()
    for division in divisions:
        for rank, receiver in receivers.items():
            mine = sorted({i for i, owner in division if owner == rank})
            message = sender.message([rows[i] for i in mine], rank)
            assert bool(len(message)) == bool({(rank, i) for i in mine} - sent)
            if len(message):
                assert not {(rank, number) for number in unpack_rows(message)} & sent
                receiver.take(message)
            sent |= {(rank, i) for i in mine}
            for i, outline in enumerate(outlines):
                expected = rows[i].token_ids if (rank, i) in sent else np.full(len(rows[i]), -1, np.int32)
                same(receiver.whole(outline).token_ids, expected)
    other = Row.plain("demonstration", (1, 2))
    assert other not in sender and sender.whole(other) is other


def test_what_eight_ranks_are_sent_is_about_the_rows_once(kit):
    """32 rows of 2,000 tokens, of which 500 are sampled, with the experts of 8 layers, to 7 other ranks."""
    n, rng = 2000, np.random.default_rng(0)
    rows = [
        replace(
            Row.plain(str(i), rng.integers(0, 1000, n)),
            loss_mask=np.arange(n) >= n - 500,
            advantages=rng.normal(size=500).astype(np.float32),
            experts=rng.integers(0, 128, (n, 8, 4)).astype(np.uint8),
        )
        for i in range(32)
    ]
    whole = len(pack_rows(dict(enumerate(rows))))
    sender, outlines = CommandRows(rows, 8), len(pack_command("step", rows))
    came = sum(len(sender.message(rows[rank::8], rank)) for rank in range(1, 8)) + 7 * outlines
    before = 7 * whole
    assert came < before / 5, f"{came:,} bytes in place of {before:,}"
    assert outlines < whole / 20, f"{outlines:,} bytes of {whole:,}"


def test_a_command_may_be_nothing_but_its_name():
    assert unpack_command(pack_command("heartbeat")) == ({"command": "heartbeat"}, (), TokenScores())
