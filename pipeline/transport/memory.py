"""The in-memory twins of :mod:`pipeline.transport.zeromq`: same contract, same code above the wire, faults on demand.

Messages are encoded and decoded as on a socket, so limits, JSON headers and corrupt bytes behave the same. Time is
``anyio.current_time()`` alone.

>>> network = MemoryNetwork(Faults(seed=7, disconnect=0.01, delay_seconds=(0.0, 0.2)))
>>> async with MemoryHub(network) as hub, MemoryLink(network, "actor-0") as link: ...
>>> network.disconnect("actor-0")
"""

from __future__ import annotations

from pipeline.transport.base import Limits
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.memory_wire import Faults, MemoryHubWire, MemoryLinkWire, MemoryNetwork

__all__ = ["Faults", "MemoryHub", "MemoryLink", "MemoryNetwork"]

_LIMITS = Limits()


class MemoryHub(WireHub):
    """The hub of ``network``; one at a time."""

    def __init__(
        self,
        network: MemoryNetwork,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        super().__init__(MemoryHubWire(network), limits, heartbeat_seconds, silence_seconds_max)


class MemoryLink(WireLink):
    """A link to the hub of ``network``."""

    def __init__(
        self,
        network: MemoryNetwork,
        name: str,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        super().__init__(MemoryLinkWire(network, name), name, limits, heartbeat_seconds, silence_seconds_max)
