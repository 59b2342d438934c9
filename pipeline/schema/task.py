"""Task: one problem that rollouts play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.schema.tokens import require, require_id

SEED_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. The same task gives every member of a group an identical start.

    >>> Task("arithmetic/17", "arithmetic", 17)
    Task(task_id='arithmetic/17', environment='arithmetic', seed=17, payload={})
    """

    task_id: str
    """Stable over the life of a run: difficulty and replay are kept per task id."""
    environment: str
    """Name of its environment section in the run file."""
    seed: int
    """Seeds the environment's start, 0 to 2**63 - 1. Never the sampler's seed."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON data for environments whose tasks are rows of a data set."""

    def __post_init__(self) -> None:
        require_id("task_id", self.task_id)
        require_id("environment", self.environment)
        require(isinstance(self.seed, int) and 0 <= self.seed <= SEED_MAX, "seed in 0..2**63-1", self.seed)
        require(isinstance(self.payload, Mapping), "payload to be a mapping", self.payload)
