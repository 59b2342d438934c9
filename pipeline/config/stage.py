"""Section ``stage``: the process between actors and learner."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeline.config.base import Section

CACHE_BYTES = 64 * 1024 * 1024
"""Memory of the stage for the newest payloads."""


class StageConfig(Section):
    """The replay stage: its address, its store, and the limits of the messages that actors and the learner exchange
    with it. A message above a limit is refused with an error that names the limit."""

    address: str = "ipc://"
    """Address that the stage binds. ``ipc://``: a unix socket in a new folder that only this user may enter, found
    through the run directory. ``ipc:///path``: that socket; its folder must be closed to others. ``tcp://host:port``:
    for several machines; requires ``stage.curve``, on loopback too (``afterplay run`` makes keys). Port 0: a free port,
    which ``afterplay run`` passes to the other processes."""
    curve: Path | None = None
    """Folder with CURVE keys, made by ``afterplay keys``: the stage's own, and one for each learner and actor. Required
    for ``stage.address: tcp://…``; ``afterplay run`` makes them in the run directory if it is None."""
    store: str | None = None
    """Path of the SQLite file. None: ``replay.sqlite`` in the run directory."""
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """SQLite durability. ``FULL`` survives a power loss, ``NORMAL`` a killed process."""
    message_bytes_max: int = Field(256 * 1024 * 1024, ge=1024)
    """Largest message, in bytes, without its header."""
    tokens_max: int = Field(1_048_576, ge=1)
    """Most tokens in one trajectory."""
    silence_seconds_max: float = Field(10.0, ge=2.0)
    """Seconds of silence after which a peer counts as lost. Its orders are then issued again. On an idle connection
    both ends are heard once a second."""
