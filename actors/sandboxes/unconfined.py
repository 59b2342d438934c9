"""``kind: none``: commands run as this user, with its files, variables and network; only their process group is
ended."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from actors.sandboxes.base import Finished, Limit, Sandbox, SandboxSettings
from pipeline.runtime.children import KILL_SECONDS_MAX, ChildGroup


class Unconfined(Sandbox):
    """No sandbox."""

    python = sys.executable
    inherits = True

    def __init__(self, settings: SandboxSettings) -> None:
        super().__init__(settings)
        self._child: ChildGroup | None = None
        self._home: tempfile.TemporaryDirectory[str] | None = None

    async def start(self) -> None:
        if self.settings.folder is None:
            self._home = tempfile.TemporaryDirectory(prefix="afterplay-program-")

    async def put(self, files: Mapping[str, bytes]) -> None:
        for path, data in files.items():
            file = self._inside(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)

    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], seconds_max: float, output_bytes_max: int
    ) -> Finished:
        child = self._child = ChildGroup(
            command,
            self.settings.reaper,
            environment={**os.environ, **environment},
            folder=str(self.settings.folder or self._inside("")),
            output_bytes_max=output_bytes_max,
        )
        try:
            with anyio.move_on_after(seconds_max) as scope:
                await child.wait()
        finally:
            await self._end_child()
        limit: Limit | None = "time" if scope.cancelled_caught else None
        return Finished(child.end.result(), child.stdout.encode(), child.stderr.encode(), limit)

    async def take(self, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        found, room = dict[str, bytes](), bytes_max
        for path in paths:
            file = self._inside(path)
            if not os.access(file, os.R_OK) or not file.is_file() or file.is_symlink():
                raise FileNotFoundError(f"there is no file {path}")
            if (room := room - file.stat().st_size) < 0:
                raise ValueError(f"expected files of at most {bytes_max} bytes together, got more")
            found[path] = file.read_bytes()
        return found

    def _inside(self, path: str) -> Path:
        if self._home is None:
            raise NotImplementedError("a program that has a folder of its own has no place for more files")
        return Path(self._home.name) / path

    async def end(self) -> None:
        await self._end_child()
        if self._home is not None:
            self._home.cleanup()

    async def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            with anyio.move_on_after(KILL_SECONDS_MAX, shield=True):
                await self._child.wait()
