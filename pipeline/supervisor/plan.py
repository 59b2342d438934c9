"""Plan of a run: its processes, and the node, GPUs, command and environment of each.

:func:`plan` is pure: the same configuration and inventory always give the same plan. ``afterplay plan FILE`` shows it,
and the supervisor starts it. A launcher for several machines starts the same places: it adds where the run file is, the
keys of the engines, and the addresses at which the processes reach each other.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from pipeline.config import RunConfig
from pipeline.config.explain import split_address
from pipeline.config.rollouts import ANSWERS_BYTES_MAX, OUTBOX_BYTES_MAX
from pipeline.config.stage import CACHE_BYTES
from pipeline.errors import ConfigurationError
from pipeline.runtime.process import metrics_port, role_name
from pipeline.runtime.run_directory import PREPARE_SECONDS_MAX
from pipeline.supervisor.division import Division, Share, divide
from pipeline.supervisor.inventory import VISIBLE, Inventory, Node
from pipeline.supervisor.restarts import Rule
from pipeline.transport.messages import CREDIT_BYTES

WORKERS, REPLAY, ENGINES = range(3)
"""Stages of the drain. The workers are actors and learner: none waits for what the other finishes last."""
TORCHRUN_GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Environment variable: seconds that torchrun gives its ranks after SIGTERM; 30 without it."""
PREPARE, PREFLIGHT, REPORTER = "prepare", "preflight", "reporter"


@dataclass(frozen=True, slots=True)
class Gang:
    """One of the nodes of a learner or an engine that is on several. Its parts start, fail and resume together."""

    node: int
    """Number of this node among those of the gang."""
    nodes: int
    address: str
    """Address of the first node."""
    port: int
    """Port there at which the ranks of a learner, or the workers of an engine, meet."""

    @property
    def options(self) -> list[str]:
        """Options of torchrun and of ``afterplay engine`` by which the parts meet."""
        return [
            f"--nnodes={self.nodes}",
            f"--node-rank={self.node}",
            f"--master-addr={self.address}",
            f"--master-port={self.port}",
        ]


@dataclass(frozen=True, slots=True)
class Place:
    """One process of a run, with the processes that it starts itself (ranks of a learner, workers of vLLM)."""

    role: str
    """Subcommand of ``afterplay``."""
    index: int
    """Number among those of the role, from 0."""
    node: str
    rule: Rule
    """Dependencies, restarts, time limits and order of the drain."""
    gpus: tuple[str, ...] = ()
    cpus: int = 1
    """Cores that it keeps busy. A scheduler should reserve them; on one machine processes share them."""
    memory_bytes: int = 0
    """Most bytes of the buffers that the run file bounds. Libraries and weights of the model come on top."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it needs besides those of its parent and the keys of the engines."""
    ports: dict[str, int] = field(default_factory=dict)
    """Ports that it binds, by use; 0: any free port."""
    needs_disk: bool = False
    """True if it can only be started where its files are."""
    spread: bool = False
    """True if those of the role should be on different nodes, so that one lost node does not stop all; else they are on
    as few as possible."""
    gang: Gang | None = None

    @property
    def name(self) -> str:
        return self.rule.name

    @property
    def serves_health(self) -> bool:
        """False for the parts of a gang without rank 0, which answer to rank 0 alone."""
        return self.gang is None or self.gang.node == 0

    def command(self, file: str, python: str = sys.executable) -> list[str]:
        """Its command for the run file ``file``. ``-P``: see :func:`pipeline.runtime.children.module_command`. Without
        ``--no-python`` torchrun would search the working folder for our packages first."""
        options = [] if self.gang is None else self.gang.options
        command = [python, "-P", "-m", "pipeline.cli.app", self.role, file]
        if self.role in ("actor", "engine", REPORTER):
            command += ["--index", str(self.index)]
        if self.role == "engine":
            return [*command, "--await-model", *options]
        if self.gang is None:
            return command
        ranks = f"--nproc-per-node={len(self.gpus)}"
        return [python, "-P", "-m", "torch.distributed.run", *options, ranks, "--no-python", *command]


@dataclass(frozen=True, slots=True)
class Plan:
    """The places of a run."""

    config: RunConfig
    """The configuration with the numbers of engines and ranks that were chosen, which every process must read."""
    places: tuple[Place, ...]
    reasons: tuple[str, ...]
    """Sentences about what was chosen."""
    problems: tuple[str, ...]
    """Sentences about what does not fit, and has no place."""

    def fitting(self) -> Plan:
        """This plan. Raises :class:`ConfigurationError` if something does not fit."""
        if self.problems:
            raise ConfigurationError("\n".join(self.problems))
        return self


def plan(config: RunConfig, inventory: Inventory, center: str = "learner") -> Plan:
    """Place preparation, replay stage, learner, engines and actors. ``center``: the role in place of the learner; the
    run ends with it.

    Engines and learner spend most of their start on imports, so they start beside the preparation of the model and
    wait for it afterwards.
    """
    if center == "learner" and not config.trained_environments:
        raise ConfigurationError(
            f"environments: expected one with a weight above 0 to train on, got weight: 0 for "
            f"{', '.join(config.environments)}"
        )
    division = divide(config, inventory, trains=center == "learner")
    config, head = division.config, inventory.nodes[0]
    stuck = config.supervisor.stuck_seconds_max
    ports = {"metrics": metrics_port("replay", 0, config.metrics.port)}
    if config.stage.address.startswith("tcp://"):
        ports["zeromq"] = split_address(config.stage.address)[1]
    memory = CACHE_BYTES + CREDIT_BYTES * config.actor.replicas
    rule = Rule("replay", REPLAY, stuck_seconds_max=stuck)
    places = [
        _place(PREPARE, 0, head, Rule(PREPARE, ENGINES, once=True, start_seconds_max=PREPARE_SECONDS_MAX)),
        _place("replay", 0, head, rule, cpus=2, memory_bytes=memory, ports=ports, needs_disk=True),
        *_learner(config, division, head, center),
        *_engines(config, division, inventory),
    ]
    for i, node in zip(range(config.actor.replicas), cycle(inventory.nodes), strict=False):
        rule = Rule(role_name("actor", i), WORKERS, depends=(PREPARE, "replay"), stuck_seconds_max=stuck)
        ports = {"metrics": metrics_port("actor", i, config.metrics.port)}
        memory = OUTBOX_BYTES_MAX + ANSWERS_BYTES_MAX
        places.append(_place("actor", i, node, rule, memory_bytes=memory, ports=ports, spread=True))
    for i, tracker in enumerate(config.report_to):
        # They end last, so that they see what the others write, and no failure of theirs ends the run.
        rule = Rule(f"report-{tracker}", ENGINES, depends=("replay",), stateless=True, optional=True)
        places.append(_place(REPORTER, i, head, rule, cpus=0, needs_disk=True))
    return Plan(config, tuple(places), division.reasons, division.problems)


def preflight_place(inventory: Inventory) -> Place:
    """The process that checks plug-ins beside the preparation of the model. Nothing waits for it, and it may take as
    long as it wants; if it finds something wrong, the run ends."""
    rule = Rule(PREFLIGHT, ENGINES, once=True, only_refuses=True, start_seconds_max=math.inf)
    return _place(PREFLIGHT, 0, inventory.nodes[0], rule)


def _place(role: str, index: int, node: Node, rule: Rule, gpus: tuple[str, ...] = (), **facts: Any) -> Place:
    """A process on ``node`` that sees ``gpus`` alone."""
    visible = {VISIBLE: ",".join(gpus)} if node.gpus else {}
    return Place(role, index, node.name, rule, gpus, environment=visible | facts.pop("environment", {}), **facts)


def _learner(config: RunConfig, division: Division, head: Node, role: str) -> Iterator[Place]:
    """One place, or one for each node with ranks."""
    if division.learner == ():
        return
    on_cpus, threads = config.learner.ranks if role == "learner" else 1, config.learner.threads or 1
    shares = division.learner or (Share(head, ()),)
    for i, (share, gang) in enumerate(zip(shares, _gangs(shares, 0), strict=True)):
        count = len(share.gpus) or on_cpus
        ports = {"metrics": metrics_port("learner", 0, config.metrics.port)}
        grace = {}
        if gang is not None:
            grace = {TORCHRUN_GRACE: str(math.ceil(config.checkpoint.drain_seconds_max))}
            ports["ranks"] = gang.port
        rule = Rule(
            role_name(role, i),
            WORKERS,
            depends=("replay",),
            awaits=(PREPARE,),
            ends_run=i == 0,
            gang="" if gang is None else role,
            stuck_seconds_max=config.supervisor.stuck_seconds_max,
        )
        facts = {"cpus": 1 + count * threads, "ports": ports if i == 0 else {}, "gang": gang}
        yield _place(role, i, share.node, rule, share.gpus, environment=grace, **facts)


def _gangs(shares: Sequence[Share], number: int) -> list[Gang | None]:
    """The gang's part on each of these nodes; None on one node. ``number``: of the gang among those of the run."""
    if len(shares) == 1:
        return [None]
    address, port = shares[0].node.address, _ranks_port(number)
    return [Gang(i, len(shares), address, port) for i in range(len(shares))]


def _ranks_port(number: int) -> int:
    """Port at which gang ``number`` meets, on its first node. Runs that share that node need different ones."""
    port, most = os.environ.get("MASTER_PORT", "29500"), 65535 - number
    if not port.isdecimal() or not 1 <= int(port) <= most:
        raise ConfigurationError(f"environment variable MASTER_PORT: expected a port from 1 to {most}, got {port!r}")
    return int(port) + number


def _engines(config: RunConfig, division: Division, inventory: Inventory) -> Iterator[Place]:
    """Engines that the run starts, without those that have no GPUs."""
    engine, placement = config.engine, config.placement
    if engine.kind == "external":
        return
    engines = division.engines
    if engines is None:
        engines = tuple((Share(node, ()),) for _, node in zip(engine.addresses(), cycle(inventory.nodes), strict=False))
    parts = [(i, part) for i, shares in enumerate(engines) for part in zip(shares, _gangs(shares, 1 + i), strict=True)]
    for i, (share, gang) in parts:
        name, on_gpu, nodes = role_name("engine", i), bool(share.gpus), 1 if gang is None else gang.nodes
        rule = Rule(
            f"{name}-node-{gang.node}" if gang is not None and gang.node else name,
            ENGINES,
            awaits=(PREPARE,),
            stateless=True,
            gang="" if gang is None else name,
            start_seconds_max=engine.start_seconds_max,
            stuck_seconds_max=config.supervisor.stuck_seconds_max,
        )
        # vLLM on GPUs: the server, an engine core for each copy, a worker for each GPU.
        cpus = 1 + math.ceil(placement.data_parallel / nodes) + len(share.gpus) if on_gpu else engine.threads or 1
        memory = 0 if on_gpu else int(engine.kv_cache_gib * 2**30)
        ports = {"http": engine.port + i if engine.port else 0}
        if gang is not None:
            ports = {} if gang.node else ports | {"ranks": gang.port}
        facts = {"cpus": cpus, "memory_bytes": memory, "ports": ports, "spread": True, "gang": gang}
        yield _place("engine", i, share.node, rule, share.gpus, **facts)
