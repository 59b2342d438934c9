"""From a run file to a hub or a link: the only place where a role gets its transport."""

from __future__ import annotations

from urllib.parse import urlsplit

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.transport.curve import CurveKeys, load_keys
from pipeline.transport.protocol import Hub, Limits, Link
from pipeline.transport.zeromq import ZmqHub, ZmqLink


def limits_of(config: RunConfig) -> Limits:
    """``transport.*_max`` as the transport wants them."""
    t = config.transport
    return Limits(
        header_bytes_max=t.header_bytes_max,
        message_bytes_max=t.message_bytes_max,
        frames_max=t.frames_max,
        tokens_max=t.tokens_max,
        queue_messages_max=t.queue_messages_max,
    )


def open_hub(config: RunConfig) -> Hub:
    """The end of the replay stage, at ``replay.address``. Raises :class:`ConfigurationError` (also on entering)."""
    t = config.transport
    return ZmqHub(config.replay.address, limits_of(config), t.heartbeat_seconds, t.silence_seconds_max, _keys(config))


def open_link(config: RunConfig, name: str) -> Link:
    """The end of an actor or the learner. ``name`` must be unique in the run and the same after a restart."""
    t, address = config.transport, config.replay.address
    if address.startswith("tcp://") and not urlsplit(address).port:
        raise ConfigurationError(
            f"replay.address {address} has no port to connect to: give the stage's real address, for example "
            "--set replay.address=tcp://127.0.0.1:7100 (`afterplay run` does it for its processes)"
        )
    return ZmqLink(address, name, limits_of(config), t.heartbeat_seconds, t.silence_seconds_max, _keys(config))


def _keys(config: RunConfig) -> CurveKeys | None:
    return None if config.transport.curve is None else load_keys(config.transport.curve)
