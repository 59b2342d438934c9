"""Runs of a comparison: arms, which are named sets of overrides of one run file, and seeds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.load import dump, dump_yaml, load


@dataclass(frozen=True, slots=True)
class Protocol:
    """Measurement of success and end of a run; the same for all arms."""

    goal: float = 0.8
    """Success rate to reach."""
    every: int = 5
    """Versions between two measurements."""
    plays: int = 64
    """Plays of each task in a measurement."""
    steps: int = 240
    """Updates of a run that never gets there."""
    held_out: int = 0
    """Held-out tasks of each environment that are measured beside; the run goes on until it solves them as well."""
    evaluated: bool = False
    """Success is the score of the run's own evaluations."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run."""

    arm: str
    seed: int
    overrides: tuple[str, ...]
    """Everything that differs from the run file."""
    fingerprint: str
    """Hash of what the run file and the overrides set and of the protocol, without directory and name."""
    run_file: str = ""
    """The complete configuration as YAML: a run file that is edited meanwhile changes nothing."""
    protocol: Protocol = Protocol()

    @property
    def name(self) -> str:
        return f"{self.arm}-{self.seed}"


def jobs_of(
    arms: dict[str, tuple[str, ...]], seeds: Sequence[int], common: Sequence[str], protocol: Protocol, base: Path
) -> list[Job]:
    """One job for each arm and seed, all arms of a seed together. An arm's own overrides win over ``common``.

    Raises :class:`ConfigurationError` when the run file does not load with them.
    """
    jobs = []
    for seed in seeds:
        for arm, own in arms.items():
            overrides = (*common, *own, f"run.total_steps={protocol.steps}", f"run.seed={seed}")
            overrides += ("checkpoint.at_end=false",)
            if not protocol.evaluated:
                overrides += ("publish.keep=100000",)
            config = load(base, overrides)
            if config.model.source == "tiny":
                overrides += (f"model.tiny.seed={seed}",)
                config = load(base, overrides)
            jobs.append(Job(arm, seed, overrides, fingerprint(config, protocol), dump(config), protocol))
    return jobs


def fingerprint(config: RunConfig, protocol: Protocol) -> str:
    """Changes with every setting that is not a default. A key that a later revision adds changes nothing, and neither
    does another default."""
    run = config.run.model_copy(update={"directory": Path("runs"), "name": "run"})
    settings = config.model_copy(update={"run": run}).model_dump(exclude_defaults=True)
    text = f"{protocol}\n{dump_yaml(settings)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
