"""log π of the same responses had their prompts held a hint (CPO)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from learner.batching import token_numbers
from learner.evidence import TokenArray
from learner.rows import Batch, Row, trajectory_rows, with_contexts
from pipeline.errors import TrainingError

log = logging.getLogger(__name__)


def hinted_logprobs(batch: Batch, score: Callable[[Sequence[Row]], TokenArray]) -> TokenArray:
    """float32 ``[S]`` by token number; NaN at tokens of trajectories without a hint.

    ``score`` gives log π of all sampled tokens of rows, in order. Raises :class:`TrainingError` where the hinted rows
    of a trajectory do not sample what its own rows do.
    """
    out = np.full(batch.n_sampled, np.nan, dtype=np.float32)
    played: dict[int, list[int]] = {}
    for i, row in enumerate(batch.rows):
        played.setdefault(row.sequence, []).append(i)
    numbers = token_numbers(batch.rows)
    rows: list[Row] = []
    tokens = []
    sequence = 0
    for group in batch.groups:
        for trajectory in group.trajectories:
            if trajectory.hinted_contexts:
                replay = group.replay(trajectory) if group.replayed(trajectory) else None
                with_hint = with_contexts(trajectory, trajectory.hinted_contexts)
                hinted = trajectory_rows(with_hint, sequence, replay=replay)
                own = [batch.rows[i] for i in played[sequence]]
                if [_sampled(row) for row in hinted] != [_sampled(row) for row in own]:
                    raise TrainingError(
                        f"expected {trajectory.trajectory_id} to sample the same tokens with the hint as without"
                    )
                rows += hinted
                tokens += [np.arange(numbers[i], numbers[i] + batch.rows[i].n_sampled) for i in played[sequence]]
            sequence += 1
    if rows:
        out[np.concatenate(tokens)] = score(rows)
    else:
        log.warning("no trajectory of update %d has a hint: set Episode.hint in the environment", batch.update)
    return out


def _sampled(row: Row) -> list[int]:
    ids: list[int] = row.token_ids[row.loss_mask].tolist()
    return ids
