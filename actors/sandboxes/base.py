"""The interface of a sandbox: make it, put files, run commands within limits, take files, end it.

A class of your own (``kind: module:Class``) for a service such as E2B, Modal or Daytona subclasses :class:`Sandbox`. It
is built once for each sandbox with a :class:`SandboxSettings`, and ended whatever happened, also after a start that
failed or was cancelled. What it raises is a failure of the sandbox: the rollout has no reward and is ordered again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from pipeline.runtime.children import OrphanReaper

SANDBOX = "sandbox"
"""Boundary of its failures, which are never those of the program inside."""
Limit = Literal["time", "memory", "processes", "disk"]


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True))
class SandboxOptions:
    """Options of ``sandbox``; a word alone is the ``kind``."""

    kind: str = "auto"
    """``bubblewrap``; ``docker`` or ``podman``, which need ``image``; ``none``: no sandbox; a class as ``module:Class``
    or ``path/file.py:Class``. ``auto``: bubblewrap where it works, else none with a warning."""
    memory_mib: int = Field(default=2048, ge=16)
    """Memory of all processes inside together."""
    processes_max: int = Field(default=512, ge=1)
    """Processes and threads inside."""
    disk_mib: int = Field(default=1024, ge=1)
    """Size of ``/tmp`` inside, the only place to write to. It is memory of the machine, beside ``memory_mib``."""
    readable: tuple[str, ...] = ()
    """More files and folders that the program may read."""
    image: str | None = None
    """Image of the container; it has ``python3``."""
    live_max: int = Field(default=256, ge=1)
    """Sandboxes of one actor at a time; a start beyond that waits."""
    starts_per_second: float = Field(default=50.0, gt=0)
    """Starts of one actor; more wait."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of a class of your own."""


@plain_dataclass(frozen=True, slots=True)
class SandboxSettings:
    """Settings that one sandbox is made from."""

    options: SandboxOptions
    gateway: tuple[str, int] | None
    """Host and port that are reached inside as ``127.0.0.1`` and the same port; nothing else is. None: nothing."""
    readable: tuple[Path, ...]
    """Absolute paths that may be read inside."""
    hidden: tuple[Path, ...]
    """Absolute paths that may not, although they are below one that may."""
    folder: Path | None
    """Working directory of commands. It exists inside, empty if it is not readable. None: ``HOME``."""
    reaper: OrphanReaper
    """Ends processes of this machine with this one."""


@plain_dataclass(frozen=True, slots=True)
class Finished:
    """Outcome of one command."""

    code: int
    """The exit code, or minus the number of the signal."""
    stdout: bytes
    stderr: bytes
    """The end of what it wrote, ``output_bytes_max`` each."""
    limit: Limit | None = None
    """The limit at which it was killed."""


def is_private(path: Path) -> bool:
    """True for a path that exists and that others than its owner may not read.

    >>> is_private(Path("/"))
    False
    """
    rights = 0o005 if path.is_dir() else 0o004
    return path.exists() and path.stat().st_mode & rights != rights


class Sandbox(ABC):
    """One sandbox. Calls follow one another, except that ``end`` may come at any time."""

    python = "python3"
    """The Python inside."""
    inherits = False
    """True if commands get the variables of this process too."""

    @classmethod
    def unreadable(cls, path: Path) -> bool:
        """True for a path that commands could not read, because they run as another user."""
        return False

    def __init__(self, settings: SandboxSettings) -> None:
        self.settings = settings

    @abstractmethod
    async def start(self) -> None:
        """Make it. Whoever calls it limits its time."""

    @abstractmethod
    async def put(self, files: Mapping[str, bytes]) -> None:
        """Write files below ``HOME``, with their folders, by relative paths."""

    @abstractmethod
    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], seconds_max: float, output_bytes_max: int
    ) -> Finished:
        """Run a command to its end; then everything that it started has ended too. Raises :class:`FileNotFoundError`
        and the like where there is no such program. After a cancellation only :meth:`end` may follow."""

    @abstractmethod
    async def take(self, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        """Contents of files below ``HOME`` by relative path, links not followed. Raises :class:`ValueError` for more
        than ``bytes_max``, :class:`FileNotFoundError` for one that is not there, or that commands cannot read."""

    @abstractmethod
    async def end(self) -> None:
        """Leave nothing behind: processes, files, containers. Idempotent."""
