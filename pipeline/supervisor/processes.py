"""The processes of a run, from its run file, and their health checks."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from pipeline.config import RunConfig
from pipeline.config.load import ENVIRONMENT_PREFIX
from pipeline.runtime.children import module_command
from pipeline.runtime.engine_keys import key_environments, make_actor_key
from pipeline.runtime.process import role_name
from pipeline.runtime.rundir import PREPARE_SECONDS_MAX, RunDirectory, read_json
from pipeline.supervisor.restarts import Rule

ACTORS, LEARNER, REPLAY, ENGINES = range(4)
"""Stages of the drain."""
PREPARE = "prepare"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its rule for the machine, its command and its health check."""

    rule: Rule
    command: Sequence[str]
    health_url: str | None = None
    """Answers 200 when healthy. None: the process writes its port to ``processes/NAME.json``."""
    probed: bool = True
    """False: it counts as healthy while it runs."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.rule.name


def specs_of(config: RunConfig, directory: RunDirectory, center: str = "learner") -> list[ProcessSpec]:
    """Preparation, engines, replay stage, learner, actors. Everything reads the resolved file in ``directory``.
    ``center``: the role in place of the learner; the run ends with it.

    Engines and learner spend most of their start on imports, so they start beside the preparation of the model and
    wait for it afterwards.
    """
    stuck = config.supervisor.stuck_seconds_max
    central = Rule(center, LEARNER, depends=("replay",), awaits=(PREPARE,), ends_run=True, stuck_seconds_max=stuck)
    specs = [
        _spec(
            PREPARE,
            0,
            directory,
            Rule(PREPARE, ENGINES, once=True, start_seconds_max=PREPARE_SECONDS_MAX),
            probed=False,
        ),
        _spec("replay", 0, directory, Rule("replay", REPLAY, stuck_seconds_max=stuck)),
        _spec(center, 0, directory, central),
    ]
    if config.engine.kind != "external":
        for i, url in enumerate(config.engine.addresses()):
            rule = Rule(
                role_name("engine", i),
                ENGINES,
                awaits=(PREPARE,),
                stateless=True,
                start_seconds_max=config.engine.start_seconds_max,
                stuck_seconds_max=stuck,
            )
            specs.append(_spec("engine", i, directory, rule, health_url=f"{url}/health"))
    for i in range(config.actor.replicas):
        rule = Rule(role_name("actor", i), ACTORS, depends=(PREPARE, "replay"), stuck_seconds_max=stuck)
        specs.append(_spec("actor", i, directory, rule))
    make_actor_key(config.engine, directory.path)
    keys = key_environments(config.engine)
    return [replace(spec, environment=keys.get(spec.name.split("-")[0], keys["other"])) for spec in specs]


def _spec(
    role: str, index: int, directory: RunDirectory, rule: Rule, health_url: str | None = None, probed: bool = True
) -> ProcessSpec:
    command = module_command("pipeline.cli.app", role, str(directory.config_file))
    if role in ("actor", "engine"):
        command += ["--index", str(index)]
    if role == "engine":
        command.append("--await-model")
    return ProcessSpec(rule, command, health_url, probed)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Our environment without ``AFTERPLAY__…``: the resolved file has those values, and the ports that were 0.

    Engine and learner share the cores of one machine. OpenMP threads that spin at their barriers, which is the default,
    then take the cores from each other, which slows generation several times. So they sleep, unless the environment
    says otherwise.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENVIRONMENT_PREFIX)}
    return {"OMP_WAIT_POLICY": "PASSIVE", **inherited, "PYTHONUNBUFFERED": "1", **extra}


PROBE_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class HealthAnswer:
    """Answer of a process to a health check. Without one ``healthy`` is False and ``state`` empty."""

    healthy: bool
    state: str = ""
    waiting_for: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    worked: bool = True
    """True if it has done work since it was started, and for a process that does not tell."""
    progress_age_seconds: float | None = None
    """Since its last progress. None for a process that does not tell."""


def check_health(url: str) -> HealthAnswer:
    """GET a health URL. Blocks; failures of the other side never raise."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_SECONDS_MAX) as reply:
            return _read(True, reply.read(65536))
    except urllib.error.HTTPError as error:
        with error:
            return _read(False, error.read(65536))
    except (OSError, ValueError):
        return HealthAnswer(False)


def health_url(directory: RunDirectory, name: str, pid: int) -> str | None:
    """URL of a role's ``/healthz``, once process ``pid`` has written its port."""
    record = read_json(directory.process_file(name))
    if record is None or record.get("pid") != pid:
        return None
    host = record.get("metrics_host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{record['metrics_port']}/healthz"


def _read(healthy: bool, body: bytes) -> HealthAnswer:
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        return HealthAnswer(healthy, "serving" if healthy else "")
    return HealthAnswer(
        healthy,
        str(answer.get("state", "serving" if healthy else "")),
        str(answer.get("waiting_for", "")),
        answer["details"] if isinstance(answer.get("details"), dict) else {},
        tuple(map(str, answer["notices"])) if isinstance(answer.get("notices"), list) else (),
        answer.get("worked") is not False,
        age if isinstance(age := answer.get("progress_age_seconds"), float) else None,
    )
