"""From a run file to the processes of the run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.config import RunConfig
from pipeline.config.load import ENVIRONMENT_PREFIX
from pipeline.role import role_name
from pipeline.rundir import RunDirectory
from pipeline.supervisor.machine import Rule

ACTORS, LEARNER, REPLAY, ENGINES = range(4)
"""Stages of the drain."""
PREPARE = "prepare"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: how the machine treats it, what to run, how to ask whether it is well."""

    rule: Rule
    command: Sequence[str]
    health_url: str | None = None
    """Answers 200 when well. None: the process writes its port to ``processes/NAME.json``."""
    probed: bool = True
    """False: it is well while it lives."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rule.name


def specs_of(config: RunConfig, directory: RunDirectory, center: str = "learner") -> list[ProcessSpec]:
    """Preparation, engines, replay stage, learner, actors. Everything reads the resolved file in ``directory``.
    ``center``: the role in place of the learner, whose end is the end of the run."""
    stuck = config.supervisor.stuck_seconds_max
    depends = (PREPARE, "replay")
    specs = [
        _role(PREPARE, 0, directory, Rule(PREPARE, ENGINES, once=True, start_seconds_max=3600), probed=False),
        _role("replay", 0, directory, Rule("replay", REPLAY, stuck_seconds_max=stuck)),
        _role(center, 0, directory, Rule(center, LEARNER, depends=depends, ends_run=True, stuck_seconds_max=stuck)),
    ]
    if config.engine.kind != "external":
        for i, url in enumerate(config.engine.addresses()):
            rule = Rule(
                role_name("engine", i),
                ENGINES,
                depends=(PREPARE,),
                stateless=True,
                start_seconds_max=config.engine.start_seconds_max,
                stuck_seconds_max=stuck,
            )
            specs.append(_role("engine", i, directory, rule, health_url=f"{url}/health"))
    for i in range(config.actor.replicas):
        rule = Rule(role_name("actor", i), ACTORS, depends=depends, stuck_seconds_max=stuck)
        specs.append(_role("actor", i, directory, rule))
    return specs


def _role(
    role: str, index: int, directory: RunDirectory, rule: Rule, health_url: str | None = None, probed: bool = True
) -> ProcessSpec:
    command = [sys.executable, "-m", "pipeline.cli", role, str(directory.config_file)]
    if role in ("actor", "engine"):
        command += ["--index", str(index)]
    return ProcessSpec(rule, command, health_url, probed)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Ours without ``AFTERPLAY__…``: the resolved file holds those values already, with the ports that were 0.

    Engine and learner share the cores of one machine. OpenMP threads that spin at their barriers, which is the default,
    then take the cores from each other: generation falls to a small part of its speed. So they sleep, unless the
    environment says otherwise.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **inherited, "PYTHONUNBUFFERED": "1", **extra}
