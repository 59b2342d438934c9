import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.microbatch import (
    SHARED_KEYS_MAX,
    Form,
    collate,
    common_prefix,
    lay_out,
    plan_packs,
    plan_rows,
    token_offsets,
)
from tests.unit.packing.conftest import PACKED, SHARED, grouped_rows

ROWS = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=9).map(lambda x: np.array(x, np.int32)), min_size=1)
SHARED_MIN = st.sampled_from([None, 1, 3])


@settings(deadline=None, max_examples=200)
@given(ROWS, SHARED_MIN)
def test_each_row_finds_its_tokens_its_positions_and_the_keys_of_itself(rows, shared_min):
    layout = lay_out(rows, shared_min)
    for row, places in zip(rows, layout.indices, strict=True):
        np.testing.assert_array_equal(layout.token_ids_N[places], row[:-1])
        np.testing.assert_array_equal(layout.positions_N[places], np.arange(len(row) - 1))
    laid = len(layout.token_ids_N)
    assert layout.query_lengths_R.min() >= 1 and layout.query_lengths_R.sum() == laid
    keys = np.arange(laid) if layout.keys_K is None else layout.keys_K
    assert len(keys) == layout.key_lengths_R.sum()
    runs = np.split(np.arange(laid), np.cumsum(layout.query_lengths_R)[:-1])
    for run, read in zip(runs, np.split(keys, np.cumsum(layout.key_lengths_R)[:-1]), strict=True):
        np.testing.assert_array_equal(read[len(read) - len(run) :], run)
        np.testing.assert_array_equal(layout.positions_N[read], np.arange(len(read)))
        assert any(np.array_equal(places, read) for places in layout.indices)
    if shared_min is None:
        assert laid == sum(len(row) - 1 for row in rows)
    if shared_min == 1:
        assert laid == len({tuple(row[:n]) for row in rows for n in range(1, len(row))})


@settings(deadline=None, max_examples=200)
@given(ROWS, SHARED_MIN, st.integers(1, 40))
def test_a_plan_holds_each_row_once_within_the_budget(rows, shared_min, tokens_max):
    plan = plan_packs(rows, tokens_max, shared_min)
    assert sorted(i for part in plan for i in part) == list(range(len(rows)))
    assert plan == plan_packs(rows, tokens_max, shared_min)
    for part in plan:
        laid = len(lay_out([rows[i] for i in part], shared_min).token_ids_N)
        assert laid <= tokens_max or len(part) == 1
        assert sum(len(rows[i]) - 1 for i in part) <= SHARED_KEYS_MAX * tokens_max or len(part) == 1


def test_predictors_point_at_the_token_before_the_target():
    rows = grouped_rows(0)
    for form in (PACKED, SHARED, Form()):
        for chosen in plan_rows(rows, 150, form):
            part = collate([rows[i] for i in chosen], [1.0] * len(chosen), [0] * len(chosen), form=form)
            flat = part.token_ids_BT.reshape(-1)
            before = np.concatenate([rows[i].token_ids[np.flatnonzero(rows[i].loss_mask) - 1] for i in chosen])
            np.testing.assert_array_equal(flat[part.predictors_S], before)
            assert part.n_padded - part.n_real == 0 or not form.packed


def test_a_group_lays_its_prompt_once():
    rows = grouped_rows(1, groups=1, members=4, prompt=50, longest=5)
    whole, shared = (collate(rows, [1.0] * 5, token_offsets(rows).tolist(), form=f) for f in (PACKED, SHARED))
    answers = sum(len(row) - 1 for row in rows) - 5 * 50
    assert whole.n_real == 5 * 50 + answers
    assert shared.n_real <= 50 + answers
    assert common_prefix(rows[0].token_ids, rows[1].token_ids) >= 50
