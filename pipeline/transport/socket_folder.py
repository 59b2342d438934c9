"""The folder of the replay stage's ``ipc://`` socket, which only this user may enter.

``ipc://`` is a new folder with a short name, which the link ``hub`` in the run directory leads to. ``ipc:///path`` is
that socket; its folder must be private. Both ends check the folder's owner and mode.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import tempfile
from pathlib import Path

from pipeline.errors import ConfigurationError

SCHEME = "ipc://"
_RECORD = "hub"
_SOCKET = "hub"
_PREFIX_OF_FOLDER = "afterplay-"
_PATH_BYTES_MAX = 103
"""Longest path of a unix socket: 104 bytes on macOS, 108 on Linux, with the closing zero."""


def address_to_bind(address: str, run: Path) -> str:
    """The address with its path, in a folder that is made if it is missing. Other schemes stay as they are.

    Raises :class:`ConfigurationError` where others may enter the folder, and OSError where another hub listens.
    """
    if not address.startswith(SCHEME):
        return address
    if address != SCHEME:
        path = Path(address.removeprefix(SCHEME))
        if not _is_short(path):
            raise ConfigurationError(
                f"stage.address: expected the path of a socket to have at most {_PATH_BYTES_MAX} bytes, got {path}: "
                "set a shorter one, or omit it for one that is made for the run"
            )
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_private(path.parent)
        _remove_stale(path)
        return address
    if (run / _RECORD).is_symlink():
        _remove_stale((run / _RECORD).readlink() / _SOCKET)  # short enough to connect to
        remove_socket_folder(run)
    name = f"{_PREFIX_OF_FOLDER}12345678/{_SOCKET}"
    above = Path(os.environ.get("XDG_RUNTIME_DIR") or "/")
    if above == Path("/") or not os.access(above, os.W_OK | os.X_OK) or not _is_short(above / name):
        above = folder_of_sockets(name)
    run.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX_OF_FOLDER, dir=above))
    try:
        _link(run, folder)
    except OSError:
        folder.rmdir()
        raise
    return f"{SCHEME}{folder / _SOCKET}"


def _link(run: Path, folder: Path) -> None:
    new = run / f".{_RECORD}.{os.getpid()}"
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.replace(run / _RECORD)


def restore(address: str, run: Path) -> bool:
    """Make the link to the folder of the bound ``address`` again where it was removed. True where the socket itself was
    removed, so that it must be bound again. Raises :class:`OSError`."""
    path = Path(address.removeprefix(SCHEME))
    try:
        linked = (run / _RECORD).readlink() == path.parent
    except FileNotFoundError:
        linked = False
    if not linked:
        _link(run, path.parent)
    if path.exists():
        return False
    path.parent.mkdir(mode=0o700, exist_ok=True)
    _require_private(path.parent)
    return True


def address_to_connect(address: str, run: Path) -> str:
    """The address with its path. Raises :class:`ConfigurationError` where others may enter the folder, and OSError
    where there is none."""
    if not address.startswith(SCHEME):
        return address
    path = (run / _RECORD).readlink() / _SOCKET if address == SCHEME else Path(address.removeprefix(SCHEME))
    _require_private(path.parent)
    return f"{SCHEME}{path}"


def remove_socket_folder(run: Path) -> None:
    """Remove the folder of the socket of ``run`` and the link to it. Call it when no hub of the run lives."""
    record = run / _RECORD
    with contextlib.suppress(OSError):
        folder = record.readlink()
        record.unlink()
        (folder / _SOCKET).unlink(missing_ok=True)
        folder.rmdir()


def _require_private(folder: Path) -> None:
    """Raise :class:`ConfigurationError` where anybody but this user may enter ``folder``."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"expected the folder of the replay stage's socket, {folder}, to be a folder that only this user (id "
            f"{os.geteuid()}) may enter, got owner {found.st_uid} and mode {stat.filemode(found.st_mode)}: chmod 700 "
            "it, or omit stage.address for one that is made for the run"
        )


def folder_of_sockets(name: str) -> Path:
    """The folder for temporary files (``TMPDIR``), or ``/tmp`` where the path of the socket ``name`` in it would be too
    long."""
    folder = Path(tempfile.gettempdir())
    return folder if _is_short(folder / name) else Path("/tmp")


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path)) <= _PATH_BYTES_MAX


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
