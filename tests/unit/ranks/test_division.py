"""Division of rows among ranks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.data.division import divide, divide_with_context
from learner.data.microbatch import Form, PassCost, collate
from learner.distributed.ranks import ALONE, IDLE
from tests.unit.packing.conftest import row_of

COST = PassCost(token=100, pair=1, sampled=7)
SHARED = Form(packed=True, shared_min=4, cost=COST)
PADDED = Form(cost=COST)
ranks = st.integers(1, 9)


@st.composite
def batches(draw):
    """Groups of rows with a prompt of their own behind one system prompt; some rows branch off another's answer."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    system = rng.integers(0, 50, draw(st.integers(0, 20)))
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        prompt = [*system, *rng.integers(0, 50, int(rng.integers(1, 40)))]
        for _ in range(int(rng.integers(1, 9))):
            answer = rng.integers(0, 50, int(rng.lognormal(3, 1)) + 1)
            rows.append(_row(prompt, answer))
            if rng.random() < 0.3:
                rows.append(_row([*prompt, *answer[: len(answer) // 2]], rng.integers(0, 50, 5)))
    return [rows[i] for i in rng.permutation(len(rows))]


def _row(prompt, answer):
    return row_of([*prompt, *answer], np.arange(len(prompt) + len(answer)) >= len(prompt))


def pass_of(rows, form, share=None):
    """One pass over the rows, or over those of a share."""
    chosen = rows if share is None else [rows[i] for i in share]
    return collate(chosen, [0.0] * len(chosen), [0] * len(chosen), form=form)


def loads_of(rows, form, count):
    return [pass_of(rows, form, share).operations for share in divide(rows, count, form) if share]


@given(batches(), ranks, st.sampled_from([SHARED, PADDED]))
def test_every_row_has_exactly_one_rank(rows, count, form):
    shares = divide(rows, count, form)
    assert len(shares) == count
    assert sorted(i for share in shares for i in share) == list(range(len(rows)))
    assert all(share == sorted(share) for share in shares)


@given(batches(), ranks)
def test_the_slowest_rank_is_within_graham_s_bound_of_rows_that_share_nothing(rows, count):
    alone = [pass_of([row], PADDED).operations for row in rows]
    loads = loads_of(rows, PADDED, count)
    assert max(loads, default=0) <= max(sum(alone) / count, 0) + max(alone, default=0)


@settings(derandomize=True)
@given(batches(), ranks)
def test_sharing_never_makes_the_slowest_rank_slower_than_rows_laid_whole(rows, count):
    whole = max(loads_of(rows, replace(SHARED, shared_min=None), count), default=0)
    assert max(loads_of(rows, SHARED, count), default=0) <= whole


@given(batches(), ranks)
def test_the_order_of_rows_changes_no_load(rows, count):
    assert sorted(loads_of(rows, SHARED, count)) == sorted(loads_of(rows[::-1], SHARED, count))


def group(rng, prompt, answers):
    start = rng.integers(0, 1000, prompt)
    return [_row(start, rng.integers(0, 1000, n)) for n in answers]


def test_groups_that_balance_stay_whole():
    rng = np.random.default_rng(0)
    rows = [row for _ in range(8) for row in group(rng, 50, [10] * 8)]
    shares = divide(rows, 4, SHARED)
    assert all(len({i // 8 for i in share}) == 2 and len(share) == 16 for share in shares)
    alone = pass_of(rows, SHARED).operations
    assert sum(loads_of(rows, SHARED, 4)) == alone


def test_one_group_is_divided_among_all_ranks():
    rng = np.random.default_rng(1)
    rows = group(rng, 20, [30] * 16)
    shares = divide(rows, 4, SHARED)
    assert [len(share) for share in shares] == [4] * 4


def test_a_group_is_cut_where_its_rows_share_least():
    """Two answers of one prompt, each with many branches: each rank gets one answer's."""
    rng = np.random.default_rng(2)
    prompt = rng.integers(0, 1000, 10)
    trunks = [[*prompt, *rng.integers(0, 1000, 80)] for _ in range(2)]
    rows = [_row(trunks[i % 2], rng.integers(0, 1000, 20)) for i in range(8)]
    assert sorted(divide(rows, 2, SHARED)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_a_common_system_prompt_does_not_bind_groups_together():
    rng = np.random.default_rng(3)
    system = rng.integers(0, 1000, 30)
    rows = []
    for _ in range(4):
        prompt = [*system, *rng.integers(0, 1000, 40)]
        rows += [_row(prompt, rng.integers(0, 1000, 20)) for _ in range(8)]
    assert sorted(sorted({i // 8 for i in share}) for share in divide(rows, 4, SHARED)) == [[0], [1], [2], [3]]


@pytest.mark.parametrize("form", [SHARED, PADDED])
def test_fewer_rows_than_ranks_leave_ranks_without(form):
    rows = group(np.random.default_rng(4), 5, [3])
    assert divide(rows, 3, form) == [[0], [], []]
    assert divide([], 2, form) == [[], []]


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 60), st.sampled_from([SHARED, PADDED]))
def test_a_context_group_has_the_long_rows_together_and_one_rank_each_short_one(rows, groups, context, most, form):
    shares = divide_with_context(rows, groups * context, context, most, form)
    together = [shares[rank][0] for rank in range(0, len(shares), context)]
    assert [long for long, _ in shares] == [long for long in together for _ in range(context)]
    alone = [i for _, short in shares for i in short]
    assert sorted([*itertools.chain(*together), *alone]) == list(range(len(rows)))
    assert all(len(rows[i]) > most and len(rows[i]) > context for long in together for i in long)
    assert context == 1 or all(len(rows[i]) <= max(most + 1, context) for i in alone)


def test_ranks_that_divide_a_long_row_get_fewer_short_ones():
    rows = [_row(range(i * 20, i * 20 + n), [0]) for i, n in enumerate([80, *[10] * 8])]
    shares = divide_with_context(rows, 4, 2, 20, PADDED)
    assert [len(short) for long, short in shares if long] == [0, 0]
    assert [len(short) for long, short in shares if not long] == [4, 4]


def test_operations_of_a_pass_are_those_of_its_tokens():
    """Against a count token by token."""
    rows = group(np.random.default_rng(5), 9, [4, 6])
    laid = [len(rows[0]) - 1, len(rows[1]) - 1 - 9]
    keys = [*range(1, laid[0] + 1), *range(10, 10 + laid[1])]
    assert pass_of(rows, SHARED).operations == 100 * sum(laid) + sum(keys) + 7 * 10
    assert pass_of(rows, PADDED).operations == 100 * (13 + 15) + sum(range(14)) + sum(range(16)) + 7 * 10


def test_a_window_bounds_the_keys_that_count():
    rows, cost = group(np.random.default_rng(5), 9, [4, 6]), PassCost(token=100, pair=1, windows=((4, 3), (99, 5)))
    keys = [np.arange(1, len(row)) for row in rows]
    expected = [sum(100 + k + 3 * min(k, 4) + 5 * k for k in laid.tolist()) for laid in keys]
    assert [cost.operations(laid, 0) for laid in keys] == expected
    lengths = [len(laid) for laid in keys]
    assert [cost.prefix(n) for n in lengths] == expected == cost.prefix(np.asarray(lengths)).tolist()


def test_one_rank_has_all_rows_and_changes_nothing(kit):
    rows = kit.make_rows(4)
    assert ALONE.mine(rows, SHARED, 1) == ([], [0, 1, 2, 3])
    assert ALONE.padded([1, 2]) == [1, 2]
    assert ALONE.agree(2) == 2
    with ALONE.together("step", rows):
        assert ALONE.summed([1.5]) == [1.5]


def test_the_idle_row_samples_one_token_and_teaches_nothing(kit):
    part = kit.tiny_policy().idle_part()
    assert part.n_sampled == IDLE.n_sampled == 1
    assert not IDLE.has_signal and float(np.sum(part.loss_weights_S)) == 0.0
