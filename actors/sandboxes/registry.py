"""Sandboxes by their ``kind`` in the run file: found before the first episode, made and ended one by one.

:class:`Sandboxes` owns none of them: ``async with sandboxes.one(...)`` *waits* for a free place and for its turn, makes
one, and ends it whatever happens. Each one that was begun is ended once, and counted once by its outcome.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from actors.sandboxes import bubblewrap, container
from actors.sandboxes.base import SANDBOX, Sandbox, SandboxOptions, SandboxSettings
from actors.sandboxes.unconfined import Unconfined
from pipeline.errors import ConfigurationError, PlugInError, boundary
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.plugins import attribute

log = logging.getLogger(__name__)
CONTAINERS = ("docker", "podman")
START_SECONDS_MAX = 60.0
END_SECONDS_MAX = 30.0


def given_as_word(value: Any) -> Any:
    """``sandbox: none`` is short for ``sandbox: {kind: none}``."""
    return {"kind": value} if isinstance(value, str) else value


def find_kind(options: SandboxOptions, where: str) -> type[Sandbox]:
    """The class behind ``options.kind``. ``where``: the key of the run file. Raises :class:`ConfigurationError` where
    it cannot work on this machine."""
    kind, remedy = options.kind, f"or set {where} to none, which gives programs all that this user has"
    if kind == "none":
        return Unconfined
    if kind in ("auto", "bubblewrap"):
        refusal = bubblewrap.refusal(bubblewrap.find())
        if refusal is None:
            return bubblewrap.Bubblewrap
        if kind == "auto":
            log.warning("%s: %s. Programs run without a sandbox, with all that this user has", where, refusal)
            return Unconfined
        raise ConfigurationError(f"{where}: {refusal}: install it, allow user namespaces here, {remedy}")
    if kind in CONTAINERS:
        if refusal := container.refusal(options):
            raise ConfigurationError(f"{where}: {refusal}, {remedy}")
        return container.Container
    if ":" not in kind:
        names = ", ".join(("auto", "bubblewrap", *CONTAINERS, "none"))
        raise ConfigurationError(f"{where}: there is no sandbox {kind!r}; there are {names}; or give module:Class")
    found = attribute(kind, where)
    if not (inspect.isclass(found) and issubclass(found, Sandbox)):
        raise ConfigurationError(f"{where}: expected {kind} to be a subclass of Sandbox, got {found!r}")
    return found


class Sandboxes:
    """The sandboxes of one agent loop. ``count`` is called with each outcome: ``started``, ``failed`` or ``ended``."""

    def __init__(self, options: SandboxOptions, where: str, reaper: OrphanReaper, count: Callable[[str], None]) -> None:
        """Raises :class:`ConfigurationError` where the kind cannot work here."""
        self.options = options
        self.kind = find_kind(options, where)
        self._reaper = reaper
        self._count = count
        self._places = anyio.Semaphore(options.live_max)
        self._next_start = 0.0
        self.live = 0
        """Sandboxes that were begun and have not ended."""

    @asynccontextmanager
    async def one(
        self,
        readable: tuple[Path, ...] = (),
        hidden: tuple[Path, ...] = (),
        folder: Path | None = None,
        gateway: tuple[str, int] | None = None,
    ) -> AsyncIterator[Sandbox]:
        """One that has started. Raises :class:`PlugInError` with the boundary ``sandbox`` where it does not."""
        async with self._places:
            await self._turn()
            with boundary(SANDBOX):
                sandbox = self.kind(SandboxSettings(self.options, gateway, readable, hidden, folder, self._reaper))
            self.live += 1
            started = False
            try:
                with boundary(SANDBOX), anyio.fail_after(START_SECONDS_MAX):
                    await sandbox.start()
                started = True
                self._count("started")
                yield sandbox
            finally:
                if not started:
                    self._count("failed")
                await self._end(sandbox)

    async def _turn(self) -> None:
        now = anyio.current_time()
        at = max(now, self._next_start)
        self._next_start = at + 1 / self.options.starts_per_second
        await anyio.sleep(at - now)

    async def _end(self, sandbox: Sandbox) -> None:
        """A failure is logged: what the program did stands."""
        try:
            with anyio.CancelScope(shield=True), boundary(SANDBOX), anyio.fail_after(END_SECONDS_MAX):
                await sandbox.end()
        except PlugInError as error:
            log.error("a sandbox may be left: %s\n%s", error, error.details)
        finally:
            self.live -= 1
            self._count("ended")
