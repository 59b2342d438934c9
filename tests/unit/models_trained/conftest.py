"""The learner's tiny models and rows, and trainers with everything that a run file can ask for."""

from __future__ import annotations

import contextlib
import threading
from functools import partial

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

import learner.checkpoints.checkpoint as checkpoints
from learner.checkpoints.checkpoint import find_checkpoints, restore_training
from learner.data.rows import Batch, TokenScores
from learner.policy.policy import Policy
from learner.process.build import make_trainer
from pipeline.config.learner import LoraConfig
from tests.unit.learner.conftest import _one_thread, kit, learner_config, make_rows, run_config, tiny_model

__all__ = ["_one_thread", "kit"]
LORA = {"rank": 2, "targets": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def initial(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def config_of():
    """A run file; ``learner`` is its section, ``needs`` what its estimator and loss will ask for."""

    def build(learner=None, **sections):
        return run_config(learner, **sections)

    return build


@pytest.fixture
def resume():
    """A trainer as the role makes it: from the newest checkpoint under a folder, else from the initial model."""

    def build(config, initial, root=None):
        torch.manual_seed(config.run.seed)
        found = find_checkpoints(root) if root is not None else []
        trainer = make_trainer(config, initial, found[0] if found else None)
        if found:
            restore_training(found[0], trainer)
        return trainer

    return build


@pytest.fixture
def train():
    """``count`` updates; which rows depends on the update only. Returns are 1 for even trajectories, else 0."""

    def run(trainer, count):
        reports = []
        for _ in range(count):
            u = trainer.updates
            rows = make_rows(6, seed=u)
            scores = trainer.token_scores(rows)
            returns = np.concatenate(
                [np.full(row.n_sampled, row.trajectory_index % 2 == 0, np.float32) for row in rows]
            )
            if scores.values is not None:
                scores = TokenScores(scores.logprobs, scores.entropies, scores.reference, scores.values, returns)
            reports.append(trainer.step(Batch(u, (), rows), u, scores))
        return reports

    return run


class Disk:
    """Holds each write until it is let go; ``started`` counts those that began, ``fault`` ends one half-way."""

    def __init__(self, monkeypatch, held=True):
        self.started = threading.Semaphore(0)
        self.ended = threading.Semaphore(0)
        self.go = threading.Semaphore(0 if held else 1000)
        self.fault = None
        monkeypatch.setattr(checkpoints, "atomic_folder", partial(self._folder, checkpoints.atomic_folder))

    def _folder(self, real, target):
        @contextlib.contextmanager
        def slow():
            try:
                with real(target) as folder:
                    yield folder
                    self.started.release()
                    assert self.go.acquire(timeout=20)
                    if self.fault is not None:
                        raise self.fault
            finally:
                self.ended.release()

        return slow()

    async def begun(self):
        assert await anyio.to_thread.run_sync(partial(self.started.acquire, timeout=20))

    async def over(self):
        assert await anyio.to_thread.run_sync(partial(self.ended.acquire, timeout=20))


def lora_policy(seed: int = 0, **lora) -> Policy:
    config = learner_config(lora=LoraConfig(**{**LORA, **lora}))
    torch.manual_seed(seed)
    return Policy(tiny_model(seed), config, torch.device("cpu"))


@pytest.fixture
def adapted():
    """A policy whose adapters are not zero."""

    def build(**lora):
        policy = lora_policy(**lora)
        with torch.no_grad():
            for parameter in policy.parameters:
                parameter.normal_(std=0.3)
        return policy

    return build


@pytest.fixture
def registry():
    from prometheus_client import CollectorRegistry

    return CollectorRegistry()
