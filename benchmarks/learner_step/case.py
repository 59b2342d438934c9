"""The random rows that all sides of the benchmark train."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from learner.data.rows import Row


@dataclass(frozen=True, slots=True)
class Case:
    """Rows that all sides train. Lengths are in tokens."""

    model: str
    """Folder, or a name out of ``model.SHAPES``."""
    groups: int
    rollouts: int
    prompt: int
    """Median length of a group's prompt (log-normal, sigma 0.5)."""
    response: int
    """Median length of a response (log-normal, sigma 1: a long tail)."""
    longest: int
    """Longest row; longer ones are cut."""
    steps: int
    """Timed, after one that is not."""
    tokens_per_microbatch: int
    compute_dtype: str
    device: str
    threads: int
    checkpointing: bool
    seed: int = 0


def make_rows(case: Case, vocabulary: int) -> tuple[Row, ...]:
    """Random tokens; the rollouts of a group share a prompt, every row has an advantage."""
    rng = np.random.default_rng(case.seed)
    rows = []
    for g in range(case.groups):
        length = int(np.clip(rng.lognormal(np.log(case.prompt), 0.5), 2, case.longest // 2))
        prompt = rng.integers(2, vocabulary, length)
        for r in range(case.rollouts):
            answer = int(np.clip(rng.lognormal(np.log(case.response), 1.0), 1, case.longest - length))
            mask = np.arange(length + answer) >= length
            rows.append(
                Row(
                    trajectory_id=f"{g}.{r}",
                    trajectory_index=g * case.rollouts + r,
                    environment="none",
                    token_ids=np.concatenate([prompt, rng.integers(2, vocabulary, answer)]).astype(np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=np.where(mask, -np.log(vocabulary), 0.0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    temperatures=np.ones(len(mask), dtype=np.float32),
                    turns=np.zeros(len(mask), dtype=np.int32),
                    advantages=np.full(answer, 1.0 if r % 2 else -1.0, dtype=np.float32),
                )
            )
    return tuple(rows)
