"""Gradients of the cross-entropy on demonstrations: one duty of the trainer, in warm start and beside RL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from learner.batching import collate, token_numbers
from learner.losses.supervised import cross_entropy
from learner.passes import shares
from learner.policy import Policy
from learner.report import Stopwatch
from learner.rows import Row


def add_gradients(
    policy: Policy,
    rows: Sequence[Row],
    weight: float,
    tokens_max: int,
    watch: Stopwatch,
    agree: Callable[[int], None],
    idle: Callable[[], Any],
) -> float:
    """Add the gradient of ``weight`` times the mean cross-entropy over the sampled tokens of ``rows``; returns the
    mean, nats.

    ``agree``: called with what was not finite in a micro-batch, as the trainer's; ``idle``: takes part in the
    micro-batch of another rank.
    """
    n_tokens, first = sum(row.n_sampled for row in rows), token_numbers(rows)
    with watch.stage("prepare"):
        parts = [
            collate([rows[i] for i in chosen], [0.0] * len(chosen), [int(first[i]) for i in chosen], form=policy.form)
            for chosen in shares(rows, tokens_max, policy.form, policy.ranks)
        ]
    total = 0.0
    for part in policy.ranks.padded(parts):
        if part is None:
            idle()
            continue
        with watch.stage("forward"), torch.enable_grad():
            logprobs, _ = policy.score(part)
            loss = cross_entropy(logprobs, torch.ones_like(logprobs, dtype=torch.bool), 1.0 / n_tokens)
            value = float(loss.detach())
            agree(0 if np.isfinite(value) else 2)
        with watch.stage("backward"):
            (weight * loss).backward()  # type: ignore[no-untyped-call]
        total += value
    return float(policy.ranks.summed([total])[0])
