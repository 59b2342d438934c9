"""Arms of the comparison: named sets of overrides of one run file, and the seeds."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.config.load import dump, dump_yaml, load
from pipeline.errors import ConfigurationError

BASE = Path(__file__).parents[2] / "configs" / "replay_tiny.yaml"
OFF = "off"
"""The arm that the others are compared with."""
ARMS: dict[str, tuple[str, ...]] = {
    OFF: ("replay.enabled=false",),
    "on": ("replay.mode=mix",),
    "priority": ("replay.mode=mix", "replay.task_sampling=priority"),
    "guard": ("replay.mode=mix", "replay.ess_guard.enabled=true"),
    "both": ("replay.mode=mix", "replay.task_sampling=priority", "replay.ess_guard.enabled=true"),
}
"""Overrides of each arm, in the form of ``--set``."""
_NAME = re.compile(r"[A-Za-z0-9_.]{1,40}")


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


def split_overrides(text: str) -> tuple[str, ...]:
    """``a.b=1,c.d=[2, 3]`` as its parts; commas inside brackets do not split. Raises :class:`ConfigurationError`."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    parts = [part.strip() for part in parts]
    if bad := [part for part in parts if "=" not in part]:
        raise ConfigurationError(f"expected key=value,key=value, got {text!r} with {bad[0]!r} in it")
    return tuple(parts)


def arms_of(extra: Sequence[Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """The five arms and those of ``--extra NAME key=value,...``. Raises :class:`ConfigurationError`."""
    arms = dict(ARMS)
    for name, *texts in extra:
        if not _NAME.fullmatch(name) or name in arms:
            raise ConfigurationError(
                f"--extra {name}: expected a new name of letters, digits, '_' and '.', there are {', '.join(arms)}"
            )
        arms[name] = tuple(part for text in texts for part in split_overrides(text))
    return arms


def jobs_of(
    arms: dict[str, tuple[str, ...]], seeds: Sequence[int], common: Sequence[str], protocol: Protocol, base: Path = BASE
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
