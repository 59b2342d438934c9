"""Which rank computes which rows. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from learner.rows import Row


def divide(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Row numbers of each rank, ascending: longest rows first, each to the rank with the fewest tokens so far (Graham
    1969). Loads differ by at most the longest row. The same lengths always give the same division.

    >>> divide([10, 30, 29, 9], 2)
    [[1, 3], [0, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, rank = heapq.heappop(loads)
        shares[rank].append(i)
        heapq.heappush(loads, (load + lengths[i], rank))
    return [sorted(share) for share in shares]


IDLE = Row(
    trajectory_id="idle",
    sequence=0,
    environment="",
    token_ids=np.zeros(2, np.int32),
    loss_mask=np.asarray([False, True]),
    behaviour_logprobs=np.zeros(2, np.float32),
    policy_versions=np.zeros(2, np.int32),
    temperatures=np.ones(2, np.float32),
    turns=np.zeros(2, np.int32),
    advantages=np.zeros(1, np.float32),
)
"""What a rank passes through the model when it has fewer micro-batches than another: every rank must take part in the
collectives of every layer. Its values are thrown away and its gradient is multiplied with 0."""
