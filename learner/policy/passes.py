"""Scoring passes over rows without gradient, and the micro-batches of a rank.

Dimension: S sampled tokens of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.data.microbatch import PADDED, MicroBatch, collate, plan_rows, token_offsets
from learner.data.packing import Form
from learner.data.rows import Row
from learner.distributed.ranks import ALONE, IDLE, Ranks
from learner.observability.report import Stopwatch

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
    """Outputs of ``score`` for all sampled tokens of ``rows``, float32 ``[S]`` each, rows in order.

    ``tokens_max``: tokens of one forward pass, laid out as ``form`` says, padding included. ``ranks`` divide
    the rows; each gets the whole result.
    """
    with watch.stage("prepare"):
        parts = microbatches(rows, [0.0] * len(rows), token_offsets(rows), tokens_max, form, ranks)
    outputs = tuple(np.zeros(sum(row.n_sampled for row in rows), dtype=np.float32) for _ in range(n_outputs))
    with torch.no_grad(), watch.stage("forward"):
        for part in parts:
            ranks.agree()
            for output, values in zip(outputs, score(part or idle_part(form)), strict=True):
                if part is not None:
                    output[part.token_index_S] = values.float().cpu().numpy()
    watch.operations += ranks.summed([sum(part.operations for part in parts if part is not None)])[0]
    return ranks.merged(outputs)


def microbatches(
    rows: Sequence[Row],
    weights: Sequence[float],
    offsets: Sequence[int] | npt.NDArray[np.int64],
    tokens_max: int,
    form: Form,
    ranks: Ranks,
) -> list[MicroBatch | None]:
    """Micro-batches of this rank; None: one without rows, because another rank has more. ``weights`` and ``offsets`` of
    each row are as :func:`learner.data.microbatch.collate` takes them. Several ranks wait for each other in each layer,
    so they compute costly ones first. Collective."""
    mine = ranks.mine(rows, form)
    plans = [[mine[i] for i in chosen] for chosen in plan_rows([rows[i] for i in mine], tokens_max, form)]
    parts = [
        collate([rows[i] for i in p], [weights[i] for i in p], [int(offsets[i]) for i in p], form=form) for p in plans
    ]
    if ranks.size > 1:
        parts.sort(key=lambda part: -part.operations)
    return ranks.padded(parts)


def idle_part(form: Form) -> MicroBatch:
    """See :data:`learner.distributed.ranks.IDLE`."""
    return collate([IDLE], [0.0], [0], form=form)
