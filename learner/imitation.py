"""Gradients of the cross-entropy on demonstrations, beside those of RL."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.agreement import agree, idle
from learner.batching import token_numbers
from learner.losses.supervised import cross_entropy
from learner.passes import microbatches
from learner.policy import Policy
from learner.report import Stopwatch
from learner.rows import Row


def add_gradients(policy: Policy, rows: Sequence[Row], weight: float, tokens_max: int, watch: Stopwatch) -> float:
    """Add the gradient of ``weight`` times the mean cross-entropy over the sampled tokens of ``rows``; returns the
    mean, nats. Raises as :func:`learner.agreement.agree`."""
    n_tokens = sum(row.n_sampled for row in rows)
    with watch.stage("prepare"):
        parts = microbatches(rows, [0.0] * len(rows), token_numbers(rows), tokens_max, policy.form, policy.ranks)
    total = 0.0
    for part in parts:
        if part is None:
            idle(policy, learn=True)
            continue
        with watch.stage("forward"), torch.enable_grad():
            logprobs, _ = policy.score(part)
            loss = cross_entropy(logprobs, torch.ones_like(logprobs, dtype=torch.bool), 1.0 / n_tokens)
            value = float(loss.detach())
            agree(policy.ranks, None if np.isfinite(value) else "loss")
        with watch.stage("backward"):
            (weight * loss).backward()  # type: ignore[no-untyped-call]
        total += value
    return float(policy.ranks.summed([total])[0])
