"""Hub and link over a unix socket: the transport between the processes of one machine.

The socket lies in a folder that only its owner may enter; both ends check that. A message is, little-endian:

=======  ===  ============================================================
magic      4  ``AP01``
frames     4  number of frames
bytes      8  bytes of all that follows
lengths   8n  length of each frame
frames        one after the other, each padded to a multiple of 8 bytes
=======  ===  ============================================================

A connection is read only when its end is asked for a message, so a peer can make this process hold one unfinished
message and one read's worth of finished ones. Bytes that are no message end the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count, islice
from pathlib import Path

import anyio
import numpy as np

from pipeline.errors import ConfigurationError, LimitExceeded, PeerGone, WireError
from pipeline.transport.channel import Broadcast
from pipeline.transport.frames import n_bytes
from pipeline.transport.hub import WireHub
from pipeline.transport.link import WireLink
from pipeline.transport.protocol import Buffer, Limits

SCHEME = "ipc://"
_RECORD = "hub"
_SOCKET = "hub"
_PREFIX_OF_FOLDER = "afterplay-"
_PATH_BYTES_MAX = 103
"""Longest path of a unix socket: 104 bytes on macOS, 108 on Linux, with the closing zero."""
_MAGIC = b"AP01"
_PREFIX = struct.Struct("<4sIQ")
_READ_BYTES = 256 * 1024
_QUEUE_BYTES_MAX = 4 * 1024 * 1024
"""Bytes that wait for a peer beside those in the kernel, before its senders wait."""
_JOIN_BYTES_MAX = 64 * 1024
"""A message up to this is copied into one buffer, which is faster than a call with many."""
_VIEW_BYTES_MIN = 8193
"""Frames from here on are views of their message; smaller ones are copied, so that they do not hold it."""
_VECTORS_MAX = 256
_PADS = [bytes(-n % 8) for n in range(8)]
_BACKLOG = 128
_ACCEPT_PAUSE_SECONDS = 1.0
"""After the system refused another connection (no more file descriptors)."""
_LIMITS = Limits()


class Stream:
    """Whole messages over one connected socket, neither end of which ever waits."""

    def __init__(self, sock: socket.socket, bytes_max: int, frames_max: int, woken: Callable[[], None]) -> None:
        sock.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):  # macOS begins with 8 KB
            sock.setsockopt(socket.SOL_SOCKET, option, _READ_BYTES)
        self.bytes_max = bytes_max
        """Largest message that the peer may begin."""
        self.arrived: deque[list[Buffer] | WireError] = deque()
        self.ended = False
        """No byte more comes or goes."""
        self._socket = sock
        self._frames_max = frames_max
        self._woken = woken
        self._loop = asyncio.get_running_loop()
        self._start = b""
        self._message: memoryview | None = None
        self._n_frames = 0
        self._filled = 0
        self._queue: deque[memoryview] = deque()
        self._queued = 0
        self._told = self._reading = False
        self.listed = False
        """In its owner's list of connections to read."""
        self._watch()

    def fill(self, chunk: memoryview) -> bool:
        """Read once, into ``arrived``. False: nothing more is there."""
        self._told = False
        if self.ended:
            return False
        try:
            if self._message is None:
                n = self._socket.recv_into(chunk)
            else:
                n = self._socket.recvmsg_into((self._message[self._filled :], chunk))[0]
        except BlockingIOError:
            self._watch()
            return False
        except OSError:
            n = 0
        if n == 0:
            self.close()
            return False
        try:
            self._take(chunk, n)
        except WireError as error:
            self.arrived.append(error)
            self.close()
        return True

    def send(self, frames: Sequence[Buffer]) -> bool:
        """False while too much waits. Raises :class:`PeerGone`."""
        if self.ended:
            raise PeerGone("the connection is closed")
        if self._queued >= _QUEUE_BYTES_MAX:
            return False
        lengths = [n_bytes(frame) for frame in frames]
        size = 8 * len(lengths) + sum((length + 7) & ~7 for length in lengths)
        head = _PREFIX.pack(_MAGIC, len(lengths), size) + struct.pack(f"<{len(lengths)}Q", *lengths)
        buffers: list[Buffer] = [head]
        for frame, length in zip(frames, lengths, strict=True):
            buffers.append(frame)
            if length % 8:
                buffers.append(_PADS[length % 8])
        if size <= _JOIN_BYTES_MAX:
            buffers = [b"".join(buffers)]
        idle = not self._queue
        self._queue.extend(memoryview(buffer).cast("B") for buffer in buffers if n_bytes(buffer))
        self._queued += _PREFIX.size + size
        if idle:
            self._flush()
            if self._queue and not self.ended:
                self._loop.add_writer(self._socket.fileno(), self._writable)
        return True

    def close(self) -> None:
        """Write what the kernel takes at once, and end."""
        if self.ended:
            return
        self._flush()
        self.ended = True
        with contextlib.suppress(OSError, ValueError):
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._message, self._start = None, b""
        self._queue.clear()
        self._socket.close()
        self._woken()

    def _watch(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        """Wake the owner once. Stop watching if it has not read since, or it would be woken without end."""
        if self._told:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())
            return
        self._told = True
        self._woken()

    def _writable(self) -> None:
        self._flush()
        if not self._queue and not self.ended:
            self._loop.remove_writer(self._socket.fileno())
        if self._queued < _QUEUE_BYTES_MAX // 2:
            self._woken()

    def _flush(self) -> None:
        queue = self._queue
        try:
            while queue:
                sent = self._socket.sendmsg(list(islice(queue, _VECTORS_MAX)))
                self._queued -= sent
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.popleft())
                if sent:
                    queue[0] = queue[0][sent:]
        except BlockingIOError:
            pass
        except OSError:
            queue.clear()  # what the peer sent before it closed may still be read
            self._queued = 0

    def _take(self, chunk: memoryview, n: int) -> None:
        """Sort ``n`` bytes that came: to the end of the message that was under way, then from the chunk."""
        if self._message is not None:
            taken = min(n, len(self._message) - self._filled)
            self._filled += taken
            n -= taken
            if self._filled < len(self._message):
                return
            message, self._message = self._message, None
            self.arrived.append(self._split(message.toreadonly(), self._n_frames))
        data = chunk[:n]
        if self._start:
            data, self._start = memoryview(self._start + data.tobytes()), b""
        at, end = 0, len(data)
        while end - at >= _PREFIX.size:
            magic, n_frames, size = _PREFIX.unpack_from(data, at)
            if magic != _MAGIC:
                raise WireError(f"expected the beginning of a message, got {bytes(magic)!r}")
            if size > self.bytes_max:
                raise LimitExceeded(f"expected a message of at most {self.bytes_max} bytes, got one of {size}")
            if 8 * n_frames > size:
                raise WireError(f"expected {n_frames} frames to have a length each, got {size} bytes in all")
            at += _PREFIX.size
            if size > end - at:
                self._message, self._n_frames = np.empty(size, np.uint8).data, n_frames
                self._filled = end - at
                self._message[: self._filled] = data[at:]
                return
            self.arrived.append(self._split(memoryview(data[at : at + size].tobytes()), n_frames))
            at += size
        self._start = data[at:].tobytes()

    def _split(self, message: memoryview, n_frames: int) -> list[Buffer]:
        """The frames; beyond the limit one more is kept, so that the check of limits sees it."""
        at = 8 * n_frames
        frames: list[Buffer] = []
        for length in struct.unpack_from(f"<{min(n_frames, self._frames_max + 3)}Q", message):
            end = at + length
            if end > len(message):
                raise WireError(f"expected frames within {len(message)} bytes, got one that ends at {end}")
            frame = message[at:end]
            frames.append(frame.tobytes() if length < _VIEW_BYTES_MIN else frame)
            at = (end + 7) & ~7
        return frames


class LocalHubWire:
    """A listening unix socket. It is made on entering, in a new private folder that ``record`` links to, or at
    ``path``; and removed on leaving."""

    def __init__(self, address: str, run: Path, limits: Limits, silence_seconds_max: float) -> None:
        self.signal = Broadcast()
        self._address = address
        self._run = run
        self._limits = limits
        self._silence_seconds_max = silence_seconds_max
        self._path = Path()
        self._listener: socket.socket | None = None
        self._streams: dict[bytes, Stream] = {}
        self._ready: deque[bytes] = deque()
        self._chunk = memoryview(bytearray(_READ_BYTES))
        self._numbers = count()

    @property
    def address(self) -> str:
        return self._address

    def open(self) -> None:
        try:
            self._path = _place_to_bind(self._address, self._run)
            listener = self._listener = _listen(self._path)
        except OSError as error:
            raise ConfigurationError(f"replay.address {self._address} cannot be bound: {error}") from error
        self._address = f"{SCHEME}{self._path}"
        asyncio.get_running_loop().add_reader(listener.fileno(), self._accept)

    def receive(self) -> tuple[bytes, list[Buffer] | WireError] | None:
        """In turn from all that have something, a message from each."""
        ready = self._ready
        while ready:
            key = ready[0]
            stream = self._streams.get(key)
            if stream is None:
                ready.popleft()
            elif stream.arrived:
                ready.rotate(-1)
                return key, stream.arrived.popleft()
            elif not stream.fill(self._chunk):
                ready.popleft()
                stream.listed = False
                if stream.ended:
                    del self._streams[key]
        return None

    def send(self, connection: bytes, frames: Sequence[Buffer]) -> bool:
        stream = self._streams.get(connection)
        if stream is None:
            raise PeerGone(f"connection {connection.hex()} is closed")
        return stream.send(frames)

    def trust(self, connection: bytes) -> None:
        stream = self._streams.get(connection)
        if stream is not None:
            stream.bytes_max = 2 * self._limits.message_bytes_max

    def distrust(self, connection: bytes) -> None:
        stream = self._streams.get(connection)
        if stream is not None and stream.bytes_max != self._bytes_max_of_strangers:
            self._await_hello(connection, stream)

    def cut(self, connection: bytes) -> None:
        stream = self._streams.pop(connection, None)
        if stream is not None:
            stream.close()

    def identity(self, connection: bytes) -> str | None:
        return None

    async def wait(self, event: anyio.Event) -> None:
        await event.wait()

    async def close(self) -> None:
        if self._listener is None:
            return
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        for key in list(self._streams):
            self.cut(key)
        self._path.unlink(missing_ok=True)
        remove_place(self._run)

    def _accept(self) -> None:
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_ACCEPT_PAUSE_SECONDS, self._listen_again)
            return
        key = next(self._numbers).to_bytes(8, "big")

        def woken() -> None:
            if not stream.listed:
                stream.listed = True
                self._ready.append(key)
            self.signal.fire()

        stream = self._streams[key] = Stream(sock, 0, self._limits.frames_max, woken)
        self._await_hello(key, stream)

    def _await_hello(self, key: bytes, stream: Stream) -> None:
        stream.bytes_max = self._bytes_max_of_strangers
        asyncio.get_running_loop().call_later(self._silence_seconds_max, self._cut_stranger, key)

    @property
    def _bytes_max_of_strangers(self) -> int:
        return 2 * self._limits.header_bytes_max

    def _cut_stranger(self, key: bytes) -> None:
        stream = self._streams.get(key)
        if stream is not None and stream.bytes_max == self._bytes_max_of_strangers:
            self.cut(key)

    def _listen_again(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)


class LocalLinkWire:
    """A connected unix socket; a lost connection is seen at once."""

    def __init__(self, address: str, run: Path, limits: Limits) -> None:
        self.signal = Broadcast()
        self.address = address if address != SCHEME else f"the replay stage of {run}"
        self.lost: str | None = None
        self.hopeless: str | None = None
        self._place = address
        self._run = run
        self._limits = limits
        self._stream: Stream | None = None
        self._chunk = memoryview(bytearray(_READ_BYTES))

    def connect(self) -> None:
        self.lost = None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path = _place_to_connect(self._place, self._run)
            self.address = f"{SCHEME}{path}"
            sock.setblocking(False)
            sock.connect(str(path))
        except (OSError, ConfigurationError) as error:
            sock.close()
            if isinstance(error, ConfigurationError):
                self.hopeless = str(error)
            self.lost = f"{self.address} does not answer ({error})"
            return
        self._stream = Stream(sock, 2 * self._limits.message_bytes_max, self._limits.frames_max, self.signal.fire)

    def disconnect(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def receive(self) -> list[Buffer] | None:
        stream = self._stream
        if stream is None:
            return None
        while not stream.arrived:
            if not stream.fill(self._chunk):
                if stream.ended:
                    self.lost = self.lost or f"{self.address} has closed the connection"
                return None
        arrived = stream.arrived.popleft()
        if isinstance(arrived, WireError):
            self.lost = f"{self.address} sent what is no message: {arrived}"
            return None
        return arrived

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self._stream is None:
            return False
        try:
            return self._stream.send(frames)
        except PeerGone:
            return False

    async def wait(self, event: anyio.Event) -> None:
        await event.wait()

    async def close(self) -> None:
        self.disconnect()


class LocalHub(WireHub):
    """Binds ``ipc://PATH``; with ``ipc://`` a socket in a new private folder, which a link in the run directory
    ``run`` leads to. Raises :class:`ConfigurationError` on entering where others may enter the folder."""

    def __init__(
        self,
        address: str,
        run: Path,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        wire = LocalHubWire(address, run, limits, silence_seconds_max)
        super().__init__(wire, limits, heartbeat_seconds, silence_seconds_max)


class LocalLink(WireLink):
    """Connects to the hub at ``ipc://PATH``, or ``ipc://`` for that of the run directory ``run``."""

    def __init__(
        self,
        address: str,
        run: Path,
        name: str,
        limits: Limits = _LIMITS,
        heartbeat_seconds: float = 1.0,
        silence_seconds_max: float = 10.0,
    ) -> None:
        super().__init__(LocalLinkWire(address, run, limits), name, limits, heartbeat_seconds, silence_seconds_max)


def remove_place(run: Path) -> None:
    """Remove the folder of the socket of ``run`` and the link to it. Call it when no hub of the run lives."""
    record = run / _RECORD
    with contextlib.suppress(OSError):
        folder = record.readlink()
        record.unlink()
        (folder / _SOCKET).unlink(missing_ok=True)
        folder.rmdir()


def require_private(folder: Path) -> None:
    """Raise :class:`ConfigurationError` where anybody but this user may enter ``folder``."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"expected the folder of the replay stage's socket, {folder}, to be a folder that only this user (id "
            f"{os.geteuid()}) may enter, got owner {found.st_uid} and mode {stat.filemode(found.st_mode)}: chmod 700 "
            "it, or omit replay.address for one that is made for the run"
        )


def _place_to_bind(address: str, run: Path) -> Path:
    if address != SCHEME:
        path = _short_enough(Path(address.removeprefix(SCHEME)))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_private(path.parent)
        _remove_stale(path)
        return path
    if (run / _RECORD).is_symlink():
        _remove_stale(run / _RECORD / _SOCKET)
        remove_place(run)
    above = _runtime_folder()
    _short_enough(Path(above, f"{_PREFIX_OF_FOLDER}12345678", _SOCKET))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX_OF_FOLDER, dir=above))
    run.mkdir(parents=True, exist_ok=True)
    record, new = run / _RECORD, run / f".{_RECORD}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.replace(record)
    return folder / _SOCKET


def _place_to_connect(address: str, run: Path) -> Path:
    path = (run / _RECORD).readlink() / _SOCKET if address == SCHEME else Path(address.removeprefix(SCHEME))
    require_private(path.parent)
    return path


def _runtime_folder() -> str:
    """``XDG_RUNTIME_DIR`` where there is one, else the temporary folder."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    return folder if folder and os.access(folder, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _short_enough(path: Path) -> Path:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ConfigurationError(
            f"expected the path of a socket to have at most {_PATH_BYTES_MAX} bytes, got {path}: set TMPDIR or "
            "replay.address to a shorter one"
        )
    return path


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket that nobody listens on; one of a hub that is alive is an error."""
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink(missing_ok=True)
            return
    raise OSError(f"Address already in use: another replay stage listens at {path}")
