"""Sections ``learner.warm_start`` and ``loss.supervised``: cross-entropy on demonstrations, before RL or beside it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section


class WarmStartConfig(Section):
    """Training on demonstrations before the first version is published: RL then begins with these weights, as do the
    reference policy, the critic's backbone and the average of the weights. It is done once in a run."""

    demonstrations: Path | None = None
    """What ``afterplay replay export`` writes, or JSONL as ``afterplay replay import`` takes it. Only trajectories with
    a reward of at least ``replay.success_threshold`` are trained. None: no warm start."""
    steps: int | None = Field(None, ge=1)
    """Optimizer steps; passes over the file go on as long as that takes. None: as ``epochs`` says."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the file. None: one, or as ``steps`` says."""
    batch: int = Field(16, ge=1)
    """Trajectories of each step."""
    learning_rate: float = Field(1e-5, gt=0)
    """Constant; its own optimizer state ends with the warm start."""

    @model_validator(mode="after")
    def _one_length(self) -> WarmStartConfig:
        if self.steps is not None and self.epochs is not None:
            raise ValueError("learner.warm_start: steps and epochs say the same thing twice, give one of them")
        return self

    def length(self, trajectories: int) -> int:
        """Optimizer steps for a file of so many trajectories.

        >>> WarmStartConfig(epochs=2, batch=4).length(7), WarmStartConfig(steps=5).length(7)
        (4, 5)
        """
        return self.steps if self.steps is not None else math.ceil((self.epochs or 1) * trajectories / self.batch)


class SupervisedConfig(Section):
    """Cross-entropy beside the policy loss, in every optimizer step of RL."""

    weight: float = Field(0.0, ge=0)
    """Of the mean over supervised tokens, which has a denominator of its own: that of the policy loss does not change.
    0: off."""
    source: Literal["replayed", "file"] = "replayed"
    """``replayed``: tokens of imported demonstrations without recorded log-probabilities that the update replays; they
    keep their off-policy loss too, and the temperature they came with. ``file``: trajectories drawn from
    ``demonstrations``, at temperature 1."""
    demonstrations: Path | None = None
    """As ``learner.warm_start.demonstrations``."""
    batch: int = Field(8, ge=1)
    """Trajectories of the file in each optimizer step."""

    @model_validator(mode="after")
    def _file_where_needed(self) -> SupervisedConfig:
        if self.weight and (self.source == "file") != (self.demonstrations is not None):
            raise ValueError(
                "loss.supervised.demonstrations belongs to source: file, and that needs it (a file of demonstrations)"
            )
        return self
