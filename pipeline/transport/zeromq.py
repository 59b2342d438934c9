"""Hub and link over ZeroMQ sockets: the transport of a real run, and what a role opens it with.

ROUTER and DEALER are raw sockets that never wait; asyncio wakes them through the file descriptor of each.
``zmq.asyncio`` makes a future for each message; here one wake-up drains all messages that arrived. The descriptor of a
ZeroMQ socket is edge-triggered and any call on the socket may eat the edge, so after a call that others wait behind,
the signal is fired.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

import anyio
import zmq
from zmq.utils.monitor import parse_monitor_message

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, PeerGone
from pipeline.transport.channel import LINGER_SECONDS_MAX, Broadcast
from pipeline.transport.curve import CurveKeys, load_keys, serve_zap
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.protocol import Buffer, Hub, Limits, Link

_NOW = int(zmq.NOBLOCK)
_IN = int(zmq.POLLIN)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_VIEW_BYTES_MIN = 8193
"""Frames from here on are views of ZeroMQ's memory, which is aligned. Smaller ones may be unaligned slices of a shared
receive buffer, so they are copied."""
_ZERO_COPY_SEND_BYTES_MIN = 256 * 1024
_LINGER_MS = int(LINGER_SECONDS_MAX * 1000)
_TERMINATE_SECONDS_MAX = 1.0
_HANDSHAKES_MAX = 5
"""Connections closed during the handshake, one after another, before it is taken for a matter of keys."""
_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class HubSocketWire:
    """A bound ROUTER. ROUTER_MANDATORY turns a send to a lost connection into :class:`PeerGone`."""

    def __init__(self, address: str, limits: Limits, silence_seconds_max: float, curve: CurveKeys | None) -> None:
        self.signal = Broadcast()
        self._address = address
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes]
        self._zap: zmq.Socket[bytes] | None = None

    @property
    def address(self) -> str:
        return self._address

    def open(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        _limit(socket, self._limits, self._silence_seconds_max, self._address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            if self._curve is not None:
                self._curve.apply_server(socket)
                self._zap = context.socket(zmq.REP)
                self._zap.bind("inproc://zeromq.zap.01")
                _watch(self._zap, self._authenticate)
            socket.bind(self._address)
        except (zmq.ZMQError, OSError, TypeError) as error:
            if self._zap is not None:
                _forget(self._zap)
            socket.close(0)
            context.term()
            raise ConfigurationError(
                f"replay.address {self._address} cannot be bound: {error}. Expected something like "
                "tcp://127.0.0.1:7100 whose port is free (another run may still use it; port 0 takes a free one)"
            ) from error
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._context, self._socket = context, socket
        _watch(socket, self._woken)

    def receive(self) -> tuple[bytes, list[Buffer]] | None:
        frames = _receive(self._socket, self._limits.frames_max + 3)
        return None if frames is None else (bytes(frames[0]), frames[1:])

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        try:
            self._socket.send(connection, _NOW_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                raise PeerGone(f"connection {connection.hex()} is closed") from error
            raise
        _send_all(self._socket, frames)
        self._eaten()
        return True

    async def wait(self, event: anyio.Event) -> None:
        await event.wait()

    async def close(self) -> None:
        if self._context is None:
            return
        context, self._context = self._context, None
        if self._zap is not None:
            _forget(self._zap)
        _forget(self._socket, _LINGER_MS)
        await _terminate(context)

    def _woken(self) -> None:
        if self._socket.closed:
            return
        _events(self._socket)
        self.signal.fire()

    def _eaten(self) -> None:
        if self.signal.awaited and (self.signal.writers or _events(self._socket) & _IN):
            self.signal.fire()

    def _authenticate(self) -> None:
        assert self._zap is not None and self._curve is not None
        if not self._zap.closed:
            serve_zap(self._zap, self._curve.clients)


class LinkSocketWire:
    """A DEALER that never reconnects: a lost connection is seen at once by a monitor, and a fresh socket greets again,
    so nothing that was queued for the old connection reaches a hub that does not know us."""

    def __init__(self, address: str, limits: Limits, silence_seconds_max: float, curve: CurveKeys | None) -> None:
        self.signal = Broadcast()
        self.address = address
        self.lost: str | None = None
        self.hopeless: str | None = None
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._curve = curve
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._shaking = False
        self._failed_handshakes = 0

    def connect(self) -> None:
        if self._context is None:
            self._context = zmq.Context()
        self.lost, self._shaking = None, False
        socket = self._socket = self._context.socket(zmq.DEALER)
        _limit(socket, self._limits, self._silence_seconds_max, self.address)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if self._curve is not None:
            self._curve.apply_client(socket)
        self._monitor = socket.get_monitor_socket(_MONITORED)
        try:
            socket.connect(self.address)
        except (zmq.ZMQError, OSError, TypeError) as error:
            self.hopeless = f"replay.address {self.address} cannot be connected to: {error}"
        _watch(self._monitor, self._observed)
        _watch(socket, self._woken)

    def disconnect(self) -> None:
        if self._socket is None or self._monitor is None:
            return
        self._socket.disable_monitor()
        _forget(self._monitor)
        _forget(self._socket, _LINGER_MS)
        self._socket = self._monitor = None

    def receive(self) -> list[Buffer] | None:
        return None if self._socket is None else _receive(self._socket, self._limits.frames_max + 2)

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self._socket is None:
            return False
        try:
            self._socket.send(frames[0], _NOW_MORE)
        except zmq.Again:
            return False
        _send_all(self._socket, frames[1:])
        if self.signal.awaited and _events(self._socket) & _IN:
            self.signal.fire()
        return True

    async def wait(self, event: anyio.Event) -> None:
        await event.wait()

    async def close(self) -> None:
        self.disconnect()
        context, self._context = self._context, None
        if context is not None:
            await _terminate(context)

    def _woken(self) -> None:
        if self._socket is not None:
            _events(self._socket)
            self.signal.fire()

    def _observed(self) -> None:
        while self._monitor is not None:
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(_NOW))["event"]
            except zmq.Again:
                return
            self._note(event)
            self.signal.fire()

    def _note(self, event: int) -> None:
        if event == zmq.EVENT_CONNECTED:
            self._shaking = True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._shaking, self._failed_handshakes = False, 0
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.hopeless = f"{self.address} does not accept our CURVE key: its folder of keys needs our client key"
        elif not self._shaking:
            closed = event == zmq.EVENT_CLOSED
            what = "does not answer" if closed else "has closed the connection"
            self.lost = self.lost or f"{self.address} {what}"
        elif self.lost is None:
            self._failed_handshakes += 1
            self.lost = f"{self.address} ended the handshake: expected the same transport.curve on both sides"
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or self._failed_handshakes >= _HANDSHAKES_MAX:
                self.hopeless = self.lost


async def _terminate(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Wait for ZeroMQ's threads for a bounded time.

    One that resolves a host name cannot be interrupted, and a name server that does not answer (the hub's machine is
    gone) holds it for tens of seconds. It is then left to a daemon thread.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=terminate, name="zeromq term", daemon=True).start()
    with anyio.move_on_after(_TERMINATE_SECONDS_MAX):
        await done.wait()


def _limit(socket: zmq.Socket[bytes], limits: Limits, silence_seconds_max: float, address: str) -> None:
    """Bounds of a socket. MAXMSGSIZE is the hard wall at which ZeroMQ closes a connection; what is between the limit
    and the wall is refused politely by ``decode_message``."""
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * limits.message_bytes_max)
    socket.setsockopt(zmq.SNDHWM, limits.queue_messages_max)
    socket.setsockopt(zmq.RCVHWM, limits.queue_messages_max)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, max(1, int(1000 * silence_seconds_max)))
    socket.setsockopt(zmq.IPV6, int("[" in address))


def _watch(socket: zmq.Socket[bytes], callback: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(int(socket.getsockopt(zmq.FD)), callback)
    loop.call_soon(callback)


def _forget(socket: zmq.Socket[bytes], linger_ms: int = 0) -> None:
    asyncio.get_running_loop().remove_reader(int(socket.getsockopt(zmq.FD)))
    socket.close(linger_ms)


def _events(socket: zmq.Socket[bytes]) -> int:
    """Also lets ZeroMQ process its commands, which quiets the descriptor."""
    return int(socket.getsockopt(zmq.EVENTS))


def _receive(socket: zmq.Socket[bytes], frames_max: int) -> list[Buffer] | None:
    """One multipart message; beyond ``frames_max`` frames one more is kept, so that the check of limits sees it."""
    try:
        frame = socket.recv(_NOW, copy=False)
    except zmq.Again:
        return None
    frames: list[Buffer] = []
    while True:
        if len(frames) <= frames_max:
            frames.append(frame.bytes if len(frame) < _VIEW_BYTES_MIN else frame.buffer)
        if not frame.more:
            return frames
        frame = socket.recv(_NOW, copy=False)


def _send_all(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """The rest of a message whose first frame was taken: ZeroMQ promises to take it whole."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        copy = len(frame) < _ZERO_COPY_SEND_BYTES_MIN
        socket.send(frame, _NOW if index == last else _NOW_MORE, copy=copy)


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
    """True if only processes of this machine can reach ``address``."""
    if address.startswith(("ipc://", "inproc://")):
        return True
    host = urlsplit(address).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def limits_of(config: RunConfig) -> Limits:
    """The limits in ``transport.*_max``."""
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
            f"replay.address {address} has no port to connect to: set the stage's actual address, for example "
            "--set replay.address=tcp://127.0.0.1:7100 (`afterplay run` does it for its processes)"
        )
    return ZmqLink(address, name, limits_of(config), t.heartbeat_seconds, t.silence_seconds_max, _keys(config))


def _keys(config: RunConfig) -> CurveKeys | None:
    return None if config.transport.curve is None else load_keys(config.transport.curve)
