"""Hub and link over TCP, with ZeroMQ and CURVE: the transport between machines and containers.

ROUTER and DEALER are raw sockets that never wait; asyncio wakes them through the file descriptor of each.
``zmq.asyncio`` makes a future for each message; here one wake-up drains all messages that arrived. The descriptor of a
ZeroMQ socket is edge-triggered and any call on the socket may eat the edge, so after a call that others wait behind,
the signal is fired.

ZeroMQ bounds a frame, but not a message: it keeps the frames of an unfinished one without limit, and 4096 finished ones
of any size. So the hub compares what each connection has brought in all (the kernel counts it) with what it has read
from it, and cuts one that holds too much.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import zmq
from zmq.utils.monitor import parse_monitor_message

from pipeline.errors import ConfigurationError, HandshakeFailed, LimitExceeded, PeerGone, WireError
from pipeline.transport.channel import LINGER_SECONDS_MAX, Broadcast
from pipeline.transport.curve import PeerKeys, ServerKeys, serve_zap
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.protocol import Buffer, Limits

_NOW = int(zmq.NOBLOCK)
_IN = int(zmq.POLLIN)
_NOW_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_VIEW_BYTES_MIN = 8193
"""Frames from here on are views of ZeroMQ's memory, which is aligned. Smaller ones may be unaligned slices of a shared
receive buffer, so they are copied."""
_ZERO_COPY_SEND_BYTES_MIN = 256 * 1024
_SLASH = b"/"
"""Between the name of a connection's key, which has none, and its routing id."""
_LINGER_MS = int(LINGER_SECONDS_MAX * 1000)
_TERMINATE_SECONDS_MAX = 1.0
_HANDSHAKES_MAX = 5
"""Connections closed during the handshake, one after another, before it is taken for a matter of keys."""
_AUDIT_SECONDS = 0.1
"""Period in which the hub compares what its connections have brought with what it has read."""
_FRAME_BYTES = 33
"""Bytes that CURVE adds to a frame, beside ZMTP's length of 2 or 9 bytes."""
_HANDSHAKE_BYTES_MAX = 4096
_TCP_INFO_BYTES = 256
_BYTES_RECEIVED = struct.Struct("128xQ")
"""In Linux' ``struct tcp_info``."""
_FAILED: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not known",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak ZeroMQ with CURVE",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it ended or was too slow",
}
_MONITORED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(slots=True)
class _Line:
    """One TCP connection of the hub."""

    fd: int
    address: object
    accepted_at: float
    connection: bytes = b""
    """Empty until its first message."""
    n_read: int = 0
    """Bytes on the wire of the messages that were read."""
    trusted: bool = False

    def received(self) -> int | None:
        """Bytes that the kernel has taken; None where it does not tell, or the connection is gone."""
        with contextlib.suppress(OSError), self._socket() as sock:
            if sock.getpeername() == self.address and hasattr(sockets, "TCP_INFO"):
                info = sock.getsockopt(sockets.IPPROTO_TCP, sockets.TCP_INFO, _TCP_INFO_BYTES)
                if len(info) >= _BYTES_RECEIVED.size:
                    return int(_BYTES_RECEIVED.unpack_from(info)[0])
        return None

    def cut(self) -> None:
        """ZeroMQ has no call for this; it notices."""
        with contextlib.suppress(OSError), self._socket() as sock:
            if sock.getpeername() == self.address:
                sock.shutdown(sockets.SHUT_RDWR)

    def _socket(self) -> sockets.socket:
        return sockets.socket(fileno=os.dup(self.fd))


class HubSocketWire:
    """A bound ROUTER. ROUTER_MANDATORY turns a send to a lost connection into :class:`PeerGone`.

    A connection is known by the name of its key and ZeroMQ's routing id, which a client may choose.
    """

    def __init__(self, address: str, limits: Limits, silence_seconds_max: float, keys: ServerKeys) -> None:
        self.signal = Broadcast()
        self._address = address
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._socket: zmq.Socket[bytes]
        self._zap: zmq.Socket[bytes]
        self._monitor: zmq.Socket[bytes]
        self._lines: dict[int, _Line] = {}
        self._faults: deque[tuple[bytes, WireError]] = deque()

    @property
    def address(self) -> str:
        return self._address

    def open(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        _limit(socket, self._limits, self._silence_seconds_max, self._address)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._keys.apply(socket)
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor = socket.get_monitor_socket(_MONITORED | zmq.EVENT_ACCEPTED)
        try:
            socket.bind(self._address)
        except (zmq.ZMQError, OSError, TypeError) as error:
            socket.disable_monitor()
            for each in (self._zap, self._monitor, socket):
                each.close(0)
            context.term()
            raise ConfigurationError(
                f"replay.address {self._address} cannot be bound: {error}. Expected something like "
                "tcp://127.0.0.1:7100 whose port is free (another run may still use it; port 0 takes a free one)"
            ) from error
        self._address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._context, self._socket = context, socket
        _watch(self._zap, self._authenticate)
        _watch(self._monitor, self._observed)
        _watch(socket, self._woken)
        asyncio.get_running_loop().call_later(_AUDIT_SECONDS, self._audit)

    def receive(self) -> tuple[bytes, list[Buffer] | WireError] | None:
        if self._faults:
            return self._faults.popleft()
        try:
            frame = self._socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        connection = str(frame.get("User-Id")).encode() + _SLASH + frame.bytes
        fd = int(frame.get(zmq.SRCFD))
        if fd not in self._lines:
            self._observed()
        line = self._lines.get(fd)
        frames, n_bytes = _receive_rest(self._socket, frame, self._limits.frames_max + 3)
        if line is not None:
            line.connection = connection
            line.n_read += n_bytes
        return connection, frames

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        try:
            self._socket.send(connection.partition(_SLASH)[2], _NOW_MORE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTSOCK, zmq.ETERM):
                raise PeerGone(f"connection {connection.hex()} is closed") from error
            raise
        _send_all(self._socket, frames)
        self._eaten()
        return True

    def identity(self, connection: bytes) -> str | None:
        return connection.partition(_SLASH)[0].decode()

    def trust(self, connection: bytes) -> None:
        for line in self._of(connection):
            line.trusted = True

    def distrust(self, connection: bytes) -> None:
        for line in self._of(connection):
            if line.trusted:
                line.trusted, line.accepted_at = False, time.monotonic()

    def cut(self, connection: bytes) -> None:
        for line in self._of(connection):
            line.cut()

    async def wait(self, event: anyio.Event) -> None:
        await event.wait()

    async def close(self) -> None:
        if self._context is None:
            return
        context, self._context = self._context, None
        self._socket.disable_monitor()
        _forget(self._monitor)
        _forget(self._zap)
        _forget(self._socket, _LINGER_MS)
        await _terminate(context)

    def _of(self, connection: bytes) -> list[_Line]:
        return [line for line in self._lines.values() if line.connection == connection]

    def _woken(self) -> None:
        if self._socket.closed:
            return
        _events(self._socket)
        self.signal.fire()

    def _eaten(self) -> None:
        if self.signal.awaited and (self.signal.writers or _events(self._socket) & _IN):
            self.signal.fire()

    def _authenticate(self) -> None:
        if not self._zap.closed:
            serve_zap(self._zap, self._keys)

    def _observed(self) -> None:
        """Connections that come and go, and handshakes that fail."""
        while not self._monitor.closed:
            try:
                message = parse_monitor_message(self._monitor.recv_multipart(_NOW))
            except zmq.Again:
                return
            event, fd = message["event"], int(message["value"])
            if event == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), sockets.socket(fileno=os.dup(fd)) as sock:
                    self._lines[fd] = _Line(fd, sock.getpeername(), time.monotonic())
            elif event == zmq.EVENT_DISCONNECTED:
                self._lines.pop(fd, None)
            elif event in _FAILED:
                self._faults.append((b"?", HandshakeFailed(f"a connection was refused: {_FAILED[event]}")))
                self.signal.fire()

    def _audit(self) -> None:
        """Cut who holds too much, or does not say HELLO."""
        if self._context is None:
            return
        asyncio.get_running_loop().call_later(_AUDIT_SECONDS, self._audit)
        self._observed()
        now = time.monotonic()
        for line in list(self._lines.values()):
            if not line.trusted and now - line.accepted_at > self._silence_seconds_max:
                line.cut()
                continue
            bound = self._limits.unread_bytes_max if line.trusted else 2 * self._limits.header_bytes_max
            received = line.received()
            if received is not None and received - line.n_read > bound + _HANDSHAKE_BYTES_MAX:
                line.cut()
                held = received - line.n_read
                error = LimitExceeded(f"expected at most {bound} bytes on their way to the hub, got {held}")
                self._faults.append((line.connection or b"?", error))
                self.signal.fire()


class LinkSocketWire:
    """A DEALER that never reconnects: a lost connection is seen at once by a monitor, and a fresh socket greets again,
    so nothing that was queued for the old connection reaches a hub that does not know us."""

    def __init__(self, address: str, limits: Limits, silence_seconds_max: float, keys: PeerKeys) -> None:
        self.signal = Broadcast()
        self.address = address
        self.lost: str | None = None
        self.hopeless: str | None = None
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._keys = keys
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
        self._keys.apply(socket)
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
        if self._socket is None:
            return None
        try:
            frame = self._socket.recv(_NOW, copy=False)
        except zmq.Again:
            return None
        frames, _ = _receive_rest(self._socket, frame, self._limits.frames_max + 2)
        return [_buffer(frame), *frames]

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
            self.hopeless = f"{self.address} does not accept our CURVE key: its folder of keys needs our public key"
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


def _receive_rest(socket: zmq.Socket[bytes], frame: zmq.Frame, frames_max: int) -> tuple[list[Buffer], int]:
    """The frames of a multipart message after its first, and the bytes of those on the wire. Beyond ``frames_max``
    frames one more is kept, so that the check of limits sees it."""
    frames: list[Buffer] = []
    n_bytes = 0
    while frame.more:
        frame = socket.recv(_NOW, copy=False)
        sealed = len(frame) + _FRAME_BYTES
        n_bytes += sealed + (2 if sealed <= 255 else 9)
        if len(frames) <= frames_max:
            frames.append(_buffer(frame))
    return frames, n_bytes


def _buffer(frame: zmq.Frame) -> Buffer:
    return frame.bytes if len(frame) < _VIEW_BYTES_MIN else frame.buffer


def _send_all(socket: zmq.Socket[bytes], frames: Sequence[Buffer]) -> None:
    """The rest of a message whose first frame was taken: ZeroMQ promises to take it whole."""
    last = len(frames) - 1
    for index, frame in enumerate(frames):
        copy = len(frame) < _ZERO_COPY_SEND_BYTES_MIN
        socket.send(frame, _NOW if index == last else _NOW_MORE, copy=copy)


_LIMITS = Limits()


class ZmqHub(WireHub):
    """Binds ``address`` (``tcp://127.0.0.1:0`` takes a free port; see ``address`` once it is entered).

    Raises :class:`ConfigurationError` on entering when it cannot bind.
    """

    def __init__(
        self,
        address: str,
        keys: ServerKeys,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        wire = HubSocketWire(address, limits, silence_seconds_max, keys)
        super().__init__(wire, limits, heartbeat_seconds, silence_seconds_max)


class ZmqLink(WireLink):
    """Connects to a hub's ``address`` under ``name``, which must be that of the key."""

    def __init__(
        self,
        address: str,
        name: str,
        keys: PeerKeys,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        wire = LinkSocketWire(address, limits, silence_seconds_max, keys)
        super().__init__(wire, name, limits, heartbeat_seconds, silence_seconds_max)
