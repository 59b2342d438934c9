"""Opens the hub and the links of a run: over a unix socket on one machine, over TCP with CURVE between machines."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.transport.curve import peer_keys, server_keys
from pipeline.transport.local import SCHEME, LocalHub, LocalLink
from pipeline.transport.protocol import Hub, Limits, Link
from pipeline.transport.zeromq import ZmqHub, ZmqLink


def limits_of(config: RunConfig) -> Limits:
    """The limits in ``transport.*_max``."""
    t = config.transport
    return Limits(
        header_bytes_max=t.header_bytes_max,
        message_bytes_max=t.message_bytes_max,
        frames_max=t.frames_max,
        tokens_max=t.tokens_max,
        queue_messages_max=t.queue_messages_max,
        unread_bytes_max=t.message_bytes_max + t.credit_bytes,
    )


def open_hub(config: RunConfig) -> Hub:
    """The end of the replay stage, at ``replay.address``. Raises :class:`ConfigurationError` (also on entering)."""
    t, address = config.transport, config.replay.address
    times = (t.heartbeat_seconds, t.silence_seconds_max)
    if address.startswith(SCHEME):
        return LocalHub(address, config.run.path.absolute(), limits_of(config), *times)
    return ZmqHub(address, server_keys(_keys(config)), limits_of(config), *times)


def open_link(config: RunConfig, name: str) -> Link:
    """The end of an actor or the learner. ``name`` must be unique in the run and the same after a restart."""
    t, address = config.transport, config.replay.address
    times = (t.heartbeat_seconds, t.silence_seconds_max)
    if address.startswith(SCHEME):
        return LocalLink(address, config.run.path.absolute(), name, limits_of(config), *times)
    keys = _keys(config)
    if not urlsplit(address).port:
        raise ConfigurationError(
            f"replay.address {address} has no port to connect to: set the stage's actual address, for example "
            "--set replay.address=tcp://127.0.0.1:7100 (`afterplay run` does it for its processes)"
        )
    return ZmqLink(address, name, peer_keys(keys, name), limits_of(config), *times)


def _keys(config: RunConfig) -> Path:
    address, folder = config.replay.address, config.transport.curve
    if not address.startswith("tcp://"):
        raise ConfigurationError(f"replay.address: expected tcp://host:port, ipc://PATH or ipc://, got {address!r}")
    if folder is None:
        raise ConfigurationError(
            f"replay.address {address} can be reached by others, so it needs CURVE keys: run `afterplay keys DIR` and "
            f"set transport.curve to DIR in the run file of every process; or use {SCHEME} on one machine"
        )
    return folder
