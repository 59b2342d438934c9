"""Passes over an update's rows without gradient: one number, or several, for each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batching import PADDED, MicroBatch, collate, plan_rows, token_numbers
from learner.packing import Form
from learner.ranks.base import ALONE, Ranks
from learner.ranks.division import IDLE
from learner.report import Stopwatch
from learner.rows import Row

FloatArray = npt.NDArray[np.float32]
Scorer = Callable[[MicroBatch], tuple[Tensor, ...]]
"""Float ``[S]`` tensors of one micro-batch."""


def token_pass(
    rows: Sequence[Row],
    score: Scorer,
    n_outputs: int,
    tokens_max: int,
    watch: Stopwatch,
    form: Form = PADDED,
    ranks: Ranks = ALONE,
) -> tuple[FloatArray, ...]:
    """What ``score`` gives for all sampled tokens of ``rows``, float32 ``[S]`` each, rows in order.

    ``tokens_max``: tokens of one forward pass, laid out as ``form`` says, padding included. ``ranks``: who shares the
    rows; each gets the whole result.
    """
    with watch.stage("prepare"):
        first = token_numbers(rows)
        parts = [
            collate([rows[i] for i in chosen], [0.0] * len(chosen), [int(first[i]) for i in chosen], form=form)
            for chosen in shares(rows, tokens_max, form, ranks)
        ]
    outputs = tuple(np.zeros(sum(row.n_sampled for row in rows), dtype=np.float32) for _ in range(n_outputs))
    with torch.no_grad(), watch.stage("forward"):
        for part in ranks.padded(parts):
            ranks.agree()
            for output, values in zip(outputs, score(part or idle_part(form)), strict=True):
                if part is not None:
                    output[part.tokens_S] = values.float().cpu().numpy()
    return ranks.merged(outputs)


def shares(rows: Sequence[Row], tokens_max: int, form: Form, ranks: Ranks) -> list[list[int]]:
    """Row numbers of each micro-batch of this rank."""
    mine = ranks.mine(rows)
    return [[mine[i] for i in chosen] for chosen in plan_rows([rows[i] for i in mine], tokens_max, form)]


def idle_part(form: Form) -> MicroBatch:
    """See :data:`learner.ranks.division.IDLE`."""
    return collate([IDLE], [0.0], [0], form=form)
