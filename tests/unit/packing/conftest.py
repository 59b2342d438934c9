"""Models and rows for packing: rows that begin alike, of very different lengths."""

import numpy as np
import pytest
import torch

from learner.data.microbatch import Form
from learner.data.rows import Row
from learner.policy.policy import Policy
from tests.unit.learner.conftest import VOCABULARY, _one_thread, kit, learner_config, tiny_model

__all__ = ["_one_thread", "kit"]
PACKED, SHARED = Form(packed=True), Form(packed=True, shared_min=2)


def row_of(ids, mask, trajectory_index=0, advantage=1.0) -> Row:
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, bool)
    rng = np.random.default_rng(int(ids.sum()) + len(ids))
    return Row(
        trajectory_id=f"t{trajectory_index}",
        trajectory_index=trajectory_index,
        environment="toy",
        token_ids=ids,
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -rng.uniform(2.0, 4.0, len(ids)), 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.full(len(ids), 0.8, np.float32),
        turns=np.zeros(len(ids), np.int32),
        advantages=np.full(int(mask.sum()), advantage, np.float32),
    )


def grouped_rows(seed, groups=2, members=3, prompt=9, longest=60) -> tuple[Row, ...]:
    """Groups of rows with the group's prompt, and of the first a second branch that repeats half of its answer as
    context. The first answer of a group is one token, the last ``longest``."""
    rng = np.random.default_rng(seed)
    rows = []
    for g in range(groups):
        start = rng.integers(0, VOCABULARY, prompt + g)
        for m in range(members):
            length = (1, longest)[m > 0] if m in (0, members - 1) else int(rng.integers(2, 12))
            answer = rng.integers(0, VOCABULARY, length)
            trajectory_index = g * members + m
            advantage = float(rng.normal())
            mask = np.arange(len(start) + length) >= len(start)
            rows.append(row_of([*start, *answer], mask, trajectory_index, advantage))
            if m == members - 1:
                half = [*start, *answer[: length // 2]]
                more = rng.integers(0, VOCABULARY, 5)
                rows.append(row_of([*half, *more], np.arange(len(half) + 5) >= len(half), trajectory_index, advantage))
    return tuple(rows[i] for i in rng.permutation(len(rows)))


def branching_rows(groups, seed) -> tuple[Row, ...]:
    """Groups of eight rows with a prompt of 30 tokens; every fourth row branches off the one before it."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(groups):
        prompt = rng.integers(0, VOCABULARY, 30)
        for i in range(8):
            if i % 4 == 3:
                prompt = np.concatenate([rows[-1].token_ids[:-2], rng.integers(0, VOCABULARY, 2)])
            answer = rng.integers(0, VOCABULARY, int(rng.integers(3, 12)))
            mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
            rows.append(row_of([*prompt, *answer], mask, len(rows) // 2, advantage=float(rng.normal())))
    return tuple(rows[i] for i in rng.permutation(len(rows)))


@pytest.fixture
def policy_of():
    """A float32 policy on the CPU, of the tiny Llama unless told, whose rows are laid out as ``form`` says."""

    def build(form: Form, model=None, **options) -> Policy:
        packing = "packed" if form.packed else "padded"
        policy = Policy(model or tiny_model(), learner_config(packing=packing, **options), torch.device("cpu"))
        policy.form = form
        return policy

    return build
