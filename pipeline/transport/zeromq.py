"""Hub and link over ZeroMQ sockets: the transport of a real run."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from pipeline.errors import ConfigurationError
from pipeline.transport.base import Limits
from pipeline.transport.curve import CurveKeys
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.zeromq_wire import HubSocketWire, LinkSocketWire

_LIMITS = Limits()


class ZmqHub(WireHub):
    """Binds ``address`` (``tcp://127.0.0.1:0`` takes a free port; see ``address`` once it is entered).

    Raises :class:`ConfigurationError` for anything but loopback without ``curve`` keys, and on entering when it cannot
    bind.
    """

    def __init__(
        self,
        address: str,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
        curve: CurveKeys | None = None,
    ) -> None:
        if curve is None and not is_local(address):
            raise ConfigurationError(
                f"replay.address {address} is reachable from other machines, so it needs CURVE keys: run "
                "`afterplay keys DIR`, set transport.curve to DIR in the run file of every process, or bind to tcp://127.0.0.1:0"
            )
        if curve is not None:
            curve.require_server()
        wire = HubSocketWire(address, limits, silence_seconds_max, curve)
        super().__init__(wire, limits, heartbeat_seconds, silence_seconds_max)


class ZmqLink(WireLink):
    """Connects to a hub's ``address`` under ``name``."""

    def __init__(
        self,
        address: str,
        name: str,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
        curve: CurveKeys | None = None,
    ) -> None:
        if curve is not None:
            curve.require_client()
        wire = LinkSocketWire(address, limits, silence_seconds_max, curve)
        super().__init__(wire, name, limits, heartbeat_seconds, silence_seconds_max)


def is_local(address: str) -> bool:
    """Whether only processes of this machine can reach ``address``."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
