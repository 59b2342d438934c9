"""Sections about a run's updates: groups, staleness, publication, checkpoints, rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section


class GroupsConfig(Section):
    """What one update is made of: ``groups_per_step`` groups of exactly ``n_rollout`` trajectories."""

    n_rollout: int = Field(8, ge=1, le=4096)
    groups_per_step: int = Field(8, ge=1, le=65_536)
    attempts_max: int = Field(3, ge=1)
    """Failed rollouts of one slot before its group is cancelled."""
    equal_rewards: Literal["keep", "drop", "refill"] = "keep"
    """What becomes of a finished group whose rewards are all equal: every estimator that compares a group gives it
    advantage 0. ``keep``: it is trained all the same. ``drop``: its update is made from the other groups; an update
    that loses all of them is counted and changes no weights. ``refill``: a newly admitted group takes its place in the
    update (dynamic sampling of DAPO, arXiv:2503.14476). The rewards are the scorer's, before ``advantage.shaping`` and
    the overlong penalty, with those of stored trajectories in the group and, for remax, of the greedy rollout. Groups
    that are left out still count for difficulty, retirement and the pool, but no lessons are written from them."""
    refill_max: float = Field(2.0, ge=0)
    """Most groups that ``refill`` replaces for one update, as a multiple of ``groups_per_step``; what is equal after
    that is trained. 2 lets an update cost three times its groups."""

    @property
    def trajectories_per_step(self) -> int:
        """B of DESIGN section 6."""
        return self.n_rollout * self.groups_per_step


class StalenessConfig(Section):
    max: int = Field(1, ge=0, le=1024)
    """η: how many updates behind the policy a trajectory may be when it is trained. 0 is strictly on-policy: play and
    training alternate. 1 lets them overlap."""
    late: Literal["train", "drop"] = "train"
    """What to do with a trajectory that exceeds the bound all the same (after a restart): train it with its importance
    weight, or drop its group. Both are counted."""


class PublishConfig(Section):
    """How new weights reach the engines."""

    keep: int = Field(2, ge=1)
    """Weight folders kept."""
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Type of the published weights; engines cast to their own on load."""
    lora: Literal["merged", "adapter"] = "merged"
    """With adapters (``learner.lora.rank``): ``merged`` publishes whole weights, for every engine; ``adapter`` only the
    adapters, for vLLM servers, which then serve them under a name of their own."""
    adapter_name: str = Field("adapter", pattern=r"^[A-Za-z0-9._-]+$", max_length=100)
    """Name under which engines serve published adapters; actors ask for it."""
    timeout_seconds: float = Field(120.0, gt=0)
    """An engine that takes longer to load a version is left behind (and tried again) while the run goes on."""


class CheckpointConfig(Section):
    every: int = Field(10, ge=1)
    """Updates between checkpoints. Updates after the last one are made again, from the same groups, if the learner is
    killed."""
    keep: int = Field(2, ge=1)
    at_end: bool = True


class ScoreFunction(Section):
    """One reward function beside the environment's score."""

    path: str
    """``module:function`` or ``file.py:function``; called with a Trajectory, returns a number or None. May be async."""
    name: str | None = None
    weight: float = 1.0
    timeout_seconds: float = Field(30.0, gt=0)
    worker: bool = False
    """Run in a worker process: for functions that are slow or use the CPU."""


class ScorerConfig(Section):
    environment_weight: float = 1.0
    """Weight of the environment's own score."""
    functions: tuple[ScoreFunction, ...] = ()
    concurrency: int = Field(64, ge=1)
    """Trajectories scored at once."""
    workers: int = Field(1, ge=1)
    """Worker processes for functions with ``worker: true``."""

    @model_validator(mode="after")
    def _unique_names(self) -> ScorerConfig:
        names = [f.name or f.path for f in self.functions]
        if len(set(names)) != len(names) or "environment" in names:
            raise ValueError(f"scorer.functions need different names, none of them 'environment', got {names}")
        return self
