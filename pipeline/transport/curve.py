"""CURVE encryption: keys on disk, and authentication of connections.

A folder of keys holds ``server.key`` / ``server.key_secret`` and ``client.key`` / ``client.key_secret`` (ZeroMQ's
certificate format). The hub lets in whoever owns the secret of a ``*.key`` beside ``server.key``; a machine that only
connects needs ``server.key`` and the two client files. To let a machine in with a key of its own, copy its public
``NAME.key`` here.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from pipeline.errors import ConfigurationError

_SERVER, _CLIENT = "server", "client"
_PUBLIC, _SECRET = ".key", ".key_secret"
_DOMAIN = b"afterplay"


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys as bytes of length 40. A secret that is not in the folder is None."""

    folder: Path
    server_public: bytes
    server_secret: bytes | None
    client_public: bytes | None
    client_secret: bytes | None
    clients: frozenset[bytes]
    """Public keys that the hub accepts."""

    def require_server(self) -> None:
        """Raises :class:`ConfigurationError` where the folder cannot serve a hub."""
        if self.server_secret is None:
            raise ConfigurationError(
                f"the hub needs {self.folder / (_SERVER + _SECRET)}: copy it here or run `afterplay keys`"
            )

    def require_client(self) -> None:
        """Raises :class:`ConfigurationError` where the folder cannot serve a link."""
        if self.client_secret is None or self.client_public is None:
            raise ConfigurationError(
                f"a link needs {self.folder / (_CLIENT + _SECRET)} and its public half: run `afterplay keys`"
            )

    def apply_server(self, socket: zmq.Socket[bytes]) -> None:
        """Make a ROUTER accept only known clients."""
        socket.curve_secretkey = self.server_secret
        socket.curve_publickey = self.server_public
        socket.curve_server = True
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)

    def apply_client(self, socket: zmq.Socket[bytes]) -> None:
        """Make a DEALER prove who it is, and talk to no other server."""
        socket.curve_secretkey = self.client_secret
        socket.curve_publickey = self.client_public
        socket.curve_serverkey = self.server_public


def make_keys(folder: Path) -> CurveKeys:
    """Write a server and a client pair; secrets are readable by their owner alone.

    Raises :class:`ConfigurationError` rather than overwrite: processes that hold the old keys would lock each other
    out.
    """
    existing = sorted(p.name for p in folder.glob("*.key*")) if folder.is_dir() else []
    if existing:
        raise ConfigurationError(
            f"{folder} already has keys ({', '.join(existing)}): choose another folder, or remove them first"
        )
    mask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_SERVER, _CLIENT):
            zmq.auth.create_certificates(folder, name)
            (folder / (name + _SECRET)).chmod(0o600)
            (folder / (name + _PUBLIC)).chmod(0o644)
    except OSError as error:
        raise ConfigurationError(f"keys cannot be written to {folder}: {error}") from error
    finally:
        os.umask(mask)
    return load_keys(folder)


def load_keys(folder: Path) -> CurveKeys:
    """Read a folder of keys. Raises :class:`ConfigurationError` that names the missing or unsafe file."""
    if not (folder / (_SERVER + _PUBLIC)).is_file():
        raise ConfigurationError(
            f"transport.curve: expected server.key in {folder}: make the folder with `afterplay keys {folder}`"
        )
    server_public, server_secret = _pair(folder, _SERVER)
    client_public, client_secret = _pair(folder, _CLIENT)
    known = [path for path in folder.glob("*" + _PUBLIC) if path.stem != _SERVER]
    clients = frozenset(_read(path)[0] for path in known)
    assert server_public is not None
    return CurveKeys(folder, server_public, server_secret, client_public, client_secret, clients)


def serve_zap(socket: zmq.Socket[bytes], clients: frozenset[bytes]) -> None:
    """Answer the authentication requests (ZeroMQ RFC 27) that wait on a REP socket: 200 for known keys, 400 for
    others."""
    while True:
        try:
            request = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        version, request_id = [*request, b"", b""][:2]
        known = len(request) == 7 and request[5] == b"CURVE" and zmq.utils.z85.encode(request[6]) in clients
        status = [b"200", b"OK", b"known"] if known else [b"400", b"unknown client key", b""]
        socket.send_multipart([version, request_id, *status, b""])


def _pair(folder: Path, name: str) -> tuple[bytes | None, bytes | None]:
    public, secret = folder / (name + _PUBLIC), folder / (name + _SECRET)
    if not secret.is_file():
        return (_read(public)[0] if public.is_file() else None), None
    if secret.stat().st_mode & 0o077:
        raise ConfigurationError(f"{secret} can be read by others: chmod 600 {secret}")
    return _read(secret)


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{path} is not a CURVE certificate: {error}. Create a new folder with `afterplay keys DIR`"
        ) from error
