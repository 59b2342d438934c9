"""Division of rows among ranks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from learner.distributed.ranks import ALONE, IDLE, divide
from learner.policy.passes import idle_part

lengths = st.lists(st.integers(1, 5000), max_size=60)
ranks = st.integers(1, 9)


@given(lengths, ranks)
def test_every_row_has_exactly_one_rank(lengths, ranks):
    shares = divide(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))


@given(lengths, ranks)
def test_loads_differ_by_at_most_the_longest_row(lengths, ranks):
    loads = [sum(lengths[i] for i in share) for share in divide(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(lengths, ranks)
def test_the_same_lengths_give_the_same_division(lengths, ranks):
    assert divide(lengths, ranks) == divide(list(lengths), ranks)


def test_fewer_rows_than_ranks_leave_ranks_without():
    assert divide([5], 3) == [[0], [], []]
    assert divide([], 2) == [[], []]


def test_one_rank_has_all_rows_and_changes_nothing(kit):
    rows = kit.make_rows(4)
    assert ALONE.mine(rows) == [0, 1, 2, 3]
    assert ALONE.padded([1, 2]) == [1, 2]
    assert ALONE.agree(2) == 2
    with ALONE.together("step", rows):
        assert ALONE.summed([1.5]) == [1.5]


def test_the_idle_row_samples_one_token_and_teaches_nothing(kit):
    part = idle_part(kit.tiny_policy().form)
    assert part.n_sampled == IDLE.n_sampled == 1
    assert not IDLE.has_signal and float(np.sum(part.loss_weights_S)) == 0.0
