"""The critic's loss against its formula."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from learner.losses.auxiliary import value_loss

number = st.floats(-50, 50, width=32)
token = st.tuples(number, number, number, st.booleans(), st.sampled_from([math.nan, math.inf, -math.inf]))


@settings(max_examples=150, deadline=None)
@given(st.lists(token, min_size=1, max_size=6), st.sampled_from([None, 0.2, 5.0]))
def test_value_loss_and_gradient_are_those_of_the_slow_reference(rows, clip):
    expected, slopes, cut = 0.0, [], []
    for v, old, r, mask, _ in rows:
        slope, clipped = 0.0, False
        if mask:
            plain = bounded = (v - r) ** 2
            if clip is not None:
                kept = min(max(v, old - clip), old + clip)
                bounded = (kept - r) ** 2
                clipped = bounded > plain and abs(v - old) > clip
            expected += 0.25 * 0.5 * max(plain, bounded)
            slope = 0.0 if clipped else 0.25 * (v - r)
        slopes.append(slope)
        cut.append(clipped)
    columns = [torch.tensor([row[i] if row[3] else row[4] for row in rows], dtype=torch.float64) for i in range(3)]
    values = columns[0].requires_grad_()
    mask = torch.tensor([row[3] for row in rows])
    terms = value_loss(values, columns[1], columns[2], torch.full((len(rows),), 0.25, dtype=torch.float64), mask, clip)
    (came,) = torch.autograd.grad(terms.loss, values)
    assert terms.loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    same = [i for i, (v, old, r, m, _) in enumerate(rows) if clip is None or abs(abs(v - old) - clip) > 1e-6]
    np.testing.assert_allclose(came.numpy()[same], np.asarray(slopes)[same], rtol=1e-9, atol=1e-12)
    assert [bool(terms.clipped[i]) for i in same] == [cut[i] for i in same]


def test_micro_batches_add_up():
    rng = np.random.default_rng(0)
    v, old, r, w = (torch.from_numpy(rng.normal(size=8)) for _ in range(4))
    mask = torch.ones(8, dtype=torch.bool)
    whole = value_loss(v, old, r, w, mask, 0.2).loss
    parts = [value_loss(v[s], old[s], r[s], w[s], mask[s], 0.2).loss for s in (slice(0, 3), slice(3, 8))]
    torch.testing.assert_close(sum(parts), whole)
