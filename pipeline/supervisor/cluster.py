"""Several machines under one supervisor: the command that starts a process there, and the addresses of all processes.

Every machine has the run directory at the same path. It brings run file, keys and new weights to each process, and the
ports and logs of each to the supervisor, which runs on the first node.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipeline.config import RunConfig
from pipeline.config.explain import bracketed, split_address
from pipeline.config.load import ENVIRONMENT_PREFIX
from pipeline.config.rollouts import EngineConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_keys import is_loopback
from pipeline.runtime.process import ADDRESS
from pipeline.supervisor.inventory import Inventory
from pipeline.supervisor.plan import Place

ANY_HOST = "0.0.0.0"
Found = TypeVar("Found")


def require_own_addresses(engine: EngineConfig) -> None:
    """Raise :class:`ConfigurationError` where engines that a launcher places would be looked up elsewhere. One that
    joins is found in the run directory in any case (``engine.discovery: registry``)."""
    if engine.discovery is not None and engine.discovery != "registry":
        raise ConfigurationError(
            f"engine.discovery is {engine.discovery}, but this launcher places the engines and knows their addresses: "
            "omit engine.discovery, or set engine.kind: external for engines that are started elsewhere"
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machines of a run, for :func:`pipeline.supervisor.run.run`."""

    inventory: Inventory
    """The first node is the one of the supervisor and of the replay stage."""
    command: Callable[[Place, Sequence[str]], Sequence[str]]
    """Command on this machine that runs the given one of a place on the place's node, with the variables in
    ``place.environment``. It passes SIGTERM on, and ends with the exit code of the process there."""

    def addressed(self, config: RunConfig) -> RunConfig:
        """A copy in which the replay stage listens on TCP, and engines and metrics beyond loopback where nodes have
        such addresses. Ports of 0 are left to :func:`pipeline.config.explain.resolve`."""
        nodes = self.inventory.nodes
        changed: dict[str, dict[str, str]] = {}
        if config.stage.address.startswith("ipc://"):
            changed["stage"] = {"address": f"tcp://{bracketed(nodes[0].address)}:0"}
        if not all(is_loopback(node.address) for node in nodes):
            hosts = {"engine": config.engine.host, "metrics": config.metrics.host}
            everywhere = "::" if any(":" in node.address for node in nodes) else ANY_HOST
            changed |= {name: {"host": everywhere} for name, host in hosts.items() if is_loopback(host)}
        return config.updated(**changed)

    def at_store(self, look: Callable[[], Found]) -> Found:
        """``look``, called on the node with the store."""
        return look()

    def taken_ports(self, places: Iterable[Place]) -> frozenset[int] | None:
        """Ports in use on the nodes of the engines in ``places``; None where a node does not know its own."""
        names = {place.node for place in places if place.role == "engine"}
        taken = [node.taken_ports for node in self.inventory.nodes if node.name in names]
        return None if None in taken else frozenset().union(*(ports for ports in taken if ports is not None))

    def located(self, config: RunConfig, places: Iterable[Place]) -> RunConfig:
        """A copy with the address of each engine that the run starts. ``config`` has its ports."""
        engine = config.engine
        if engine.kind == "external" or engine.urls:
            return config
        require_own_addresses(engine)
        urls = tuple(
            f"http://{bracketed(self.inventory.addresses[place.node])}:{engine.port + place.index}"
            for place in places
            if place.role == "engine" and place.serves_health
        )
        return config.updated(engine={"urls": urls, "discovery": None})

    def environment(self, place: Place, config: RunConfig) -> dict[str, str]:
        """Variables of a place on its node: its address, and the interface that the replay stage binds."""
        variables = {ADDRESS: self.inventory.addresses[place.node]}
        if place.role == "replay":
            host, port = split_address(config.stage.address)
            try:
                host = str(ipaddress.ip_address(host))
            except ValueError:  # ZeroMQ binds no names
                host = ANY_HOST
            variables[f"{ENVIRONMENT_PREFIX}STAGE__ADDRESS"] = f"tcp://{bracketed(host)}:{port}"
        return variables
