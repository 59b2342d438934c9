"""Micro-batches: rows of one forward pass under a budget of tokens, and their arrays.

Dimensions: B rows, T padded length, S sampled tokens of the micro-batch.

Padded: rows of similar length, padded on the right. Under a causal mask no real token sees padding, so positions are
``0 … T-1`` in every row and no attention mask is needed. Packed: see :mod:`learner.data.packing`; B is 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.data.packing import Form, Layout, lay_out, plan_packs
from learner.data.rows import Row
from pipeline.errors import TrainingError

PADDED = Form()
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. Arrays ``_S`` follow the sampled tokens, row by row, in order of position."""

    token_ids_BT: npt.NDArray[np.int64]
    predictors_S: npt.NDArray[np.int64]
    """Index into the flattened ``[B·T]`` of the position whose output predicts the sampled token (the one before
    it)."""
    targets_S: npt.NDArray[np.int64]
    temperatures_S: npt.NDArray[np.float32]
    behaviour_logprobs_S: npt.NDArray[np.float32]
    policy_versions_S: npt.NDArray[np.int32]
    advantages_S: npt.NDArray[np.float32]
    loss_weights_S: npt.NDArray[np.float32]
    """Weight of the token in the loss of the optimizer step (``token_weights``)."""
    row_index_S: npt.NDArray[np.int64]
    """Index of the row in this micro-batch: sequence-level ratios are taken over it."""
    trajectory_index_S: npt.NDArray[np.int32]
    replayed_S: npt.NDArray[np.bool_]
    guided_S: npt.NDArray[np.bool_]
    discarded_S: npt.NDArray[np.bool_]
    """Guided, and trained on the prompt without the retrieved experience."""
    recorded_S: npt.NDArray[np.bool_]
    """log μ was recorded."""
    replay_weights_S: npt.NDArray[np.float32]
    """Weight of a replayed trajectory; 1 on fresh ones."""
    token_index_S: npt.NDArray[np.int64]
    """Index of the sampled token in its batch (``token_offsets``): joins values of different passes."""
    n_real: int
    """Tokens that are not padding."""
    layout: Layout | None = None
    """Layout of packed rows; None: the rows are padded."""
    n_shared: int = 0
    """Tokens that are not computed again because another row of the pass has them."""
    operations: int = 0
    """Operations of a forward pass (``Form.cost``), padding left out."""

    @property
    def n_padded(self) -> int:
        return int(self.token_ids_BT.size)

    @property
    def n_sampled(self) -> int:
        return len(self.targets_S)


def plan_microbatches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Row numbers of each micro-batch, longest rows first, so that rows × longest row stays within ``tokens_max``.

    A row that is longer than the budget travels alone. The same lengths always give the same plan.

    >>> plan_microbatches([10, 30, 29, 9], 60)
    [[1, 2], [0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[int]] = []
    for i in order:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= tokens_max:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def plan_rows(rows: Sequence[Row], tokens_max: int, form: Form = PADDED) -> list[list[int]]:
    """Row numbers of each micro-batch of at most ``tokens_max`` tokens, padding included where there is some."""
    if form.packed:
        return plan_packs([row.token_ids for row in rows], tokens_max, form.shared_min)
    return plan_microbatches([len(row) for row in rows], tokens_max)


def token_weights(rows: Sequence[Row], aggregation: Aggregation, length: int | None = None) -> list[float]:
    """Weight of each sampled token of each row, for one optimizer step over ``rows``. Tokens that the loss masks out
    later do not change them. The branches of a trajectory are one sequence.

    ``token_mean``: one over the number of sampled tokens. ``sequence_mean``: one over (sequences × the sequence's own
    sampled tokens). Of both all tokens' weights sum to 1. ``sequence_sum``: one over sequences. ``sequence_sum_norm``:
    one over (sequences × ``length``). Raises :class:`TrainingError` without a length there.
    """
    if aggregation == "token_mean":
        total = sum(row.n_sampled for row in rows)
        return [1.0 / total] * len(rows)
    n_sampled: Counter[int] = Counter()
    for row in rows:
        n_sampled[row.trajectory_index] += row.n_sampled
    if aggregation in ("sequence_sum", "sequence_sum_norm"):
        if aggregation == "sequence_sum_norm" and not length:
            raise TrainingError("expected loss.aggregation_length for sequence_sum_norm, got none")
        divisor = length if aggregation == "sequence_sum_norm" and length else 1
        return [1.0 / (len(n_sampled) * divisor)] * len(rows)
    return [1.0 / (len(n_sampled) * n_sampled[row.trajectory_index]) for row in rows]


def token_offsets(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """Index of each row's first sampled token among the sampled tokens of all rows, in order, int64 ``[rows]``."""
    counts = np.asarray([row.n_sampled for row in rows], dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)[:-1]]) if len(counts) else counts


def collate(
    rows: Sequence[Row],
    weights: Sequence[float],
    offsets: Sequence[int],
    pad_id: int = 0,
    form: Form = PADDED,
) -> MicroBatch:
    """Arrays of one micro-batch; ``offsets`` as :func:`token_offsets` gives them. ``pad_id`` may be any id of the
    vocabulary: nothing reads the outputs there."""
    positions = [np.flatnonzero(row.loss_mask) for row in rows]
    layout: Layout | None = None
    n_real = sum(len(row) for row in rows)
    if form.packed:
        layout = lay_out([row.token_ids for row in rows], form.shared_min)
        token_ids = layout.token_ids_N[None]
        n_shared, n_real = n_real - len(rows) - token_ids.size, token_ids.size
        pairs = int(layout.positions_N.sum()) + n_real
        predictors = [at[p - 1] for at, p in zip(layout.indices, positions, strict=True)]
    else:
        longest, n_shared = max(len(row) for row in rows), 0
        pairs = sum(len(row) * (len(row) + 1) // 2 for row in rows)
        token_ids = np.full((len(rows), longest), pad_id, dtype=np.int64)
        for b, row in enumerate(rows):
            token_ids[b, : len(row)] = row.token_ids
        predictors = [b * longest + p - 1 for b, p in enumerate(positions)]
    counts = [len(p) for p in positions]

    def per_token(values: Sequence[float | int | bool], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
        return np.repeat(np.asarray(values, dtype=dtype), counts)

    return MicroBatch(
        token_ids_BT=token_ids,
        predictors_S=np.concatenate(predictors),
        targets_S=np.concatenate([row.token_ids[p] for row, p in zip(rows, positions, strict=True)]).astype(np.int64),
        temperatures_S=np.concatenate([row.temperatures[p] for row, p in zip(rows, positions, strict=True)]),
        behaviour_logprobs_S=np.concatenate(
            [row.behaviour_logprobs[p] for row, p in zip(rows, positions, strict=True)]
        ),
        policy_versions_S=np.concatenate([row.policy_versions[p] for row, p in zip(rows, positions, strict=True)]),
        advantages_S=np.concatenate([row.advantages for row in rows]),
        loss_weights_S=per_token(list(weights), np.float32),  # type: ignore[arg-type]
        row_index_S=np.repeat(np.arange(len(rows)), counts),
        trajectory_index_S=per_token([row.trajectory_index for row in rows], np.int32),  # type: ignore[arg-type]
        replayed_S=per_token([row.replayed for row in rows], np.bool_),  # type: ignore[arg-type]
        guided_S=per_token([row.guided for row in rows], np.bool_),  # type: ignore[arg-type]
        discarded_S=per_token([row.discarded for row in rows], np.bool_),  # type: ignore[arg-type]
        recorded_S=per_token([row.recorded for row in rows], np.bool_),  # type: ignore[arg-type]
        replay_weights_S=per_token([row.replay_weight for row in rows], np.float32),  # type: ignore[arg-type]
        token_index_S=np.concatenate([np.arange(n) + offset for n, offset in zip(counts, offsets, strict=True)]).astype(
            np.int64
        ),
        n_real=n_real,
        layout=layout,
        n_shared=n_shared,
        operations=form.cost.operations(n_real, pairs, sum(counts)),
    )
