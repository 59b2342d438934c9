"""Passes over an update's rows without gradient: one number, or several, for each sampled token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batching import MicroBatch, collate, plan_microbatches, token_numbers
from learner.report import Stopwatch
from learner.rows import Row

FloatArray = npt.NDArray[np.float32]
Scorer = Callable[[MicroBatch], tuple[Tensor, ...]]
"""Float ``[S]`` tensors of one micro-batch."""


def token_pass(
    rows: Sequence[Row], score: Scorer, n_outputs: int, tokens_max: int, watch: Stopwatch
) -> tuple[FloatArray, ...]:
    """What ``score`` gives for all sampled tokens of ``rows``, float32 ``[S]`` each, rows in order.

    ``tokens_max``: padded tokens of one forward pass.
    """
    with watch.stage("prepare"):
        first = token_numbers(rows)
        parts = [
            collate([rows[i] for i in chosen], [0.0] * len(chosen), [int(first[i]) for i in chosen])
            for chosen in plan_microbatches([len(row) for row in rows], tokens_max)
        ]
    outputs = tuple(np.zeros(sum(row.n_sampled for row in rows), dtype=np.float32) for _ in range(n_outputs))
    with torch.no_grad(), watch.stage("forward"):
        for part in parts:
            for output, values in zip(outputs, score(part), strict=True):
                output[part.tokens_S] = values.float().cpu().numpy()
    return outputs
