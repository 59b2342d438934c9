"""A sandbox class of a user's own, as for a service elsewhere: processes in a folder of this machine."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from actors.sandboxes.base import Finished, Sandbox


class FolderService(Sandbox):
    """Keeps the contract and guards nothing. ``options.failing``: starts that fail, a list that is counted down."""

    folder: Path | None = None

    async def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="afterplay-service-"))
        failing = self.settings.options.options.get("failing", [])
        if failing:
            failing.pop()
            raise ConnectionError("the service is out of machines")

    async def put(self, files: Mapping[str, bytes]) -> None:
        assert self.folder is not None
        for name, data in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data)

    async def run(
        self, command: Sequence[str], *, environment: Mapping[str, str], seconds_max: float, output_bytes_max: int
    ) -> Finished:
        given = {"PATH": "/usr/bin:/bin", **environment, "HOME": str(self.folder)}
        process = await anyio.open_process(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=given, cwd=self.folder, start_new_session=True
        )
        outputs = [bytearray(), bytearray()]

        async def read(stream: anyio.abc.ByteReceiveStream, output: bytearray) -> None:
            async for data in stream:
                output += data

        with anyio.move_on_after(seconds_max) as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(read, process.stdout, outputs[0])
                group.start_soon(read, process.stderr, outputs[1])
                await process.wait()
        if scope.cancelled_caught:
            process.kill()
            with anyio.CancelScope(shield=True):
                await process.wait()
        await process.aclose()
        out, err = (bytes(output[-output_bytes_max:]) for output in outputs)
        assert process.returncode is not None
        return Finished(process.returncode, out, err, "time" if scope.cancelled_caught else None)

    async def take(self, paths: Sequence[str], bytes_max: int) -> dict[str, bytes]:
        assert self.folder is not None
        found = {path: self.folder / path for path in paths}
        for file in found.values():
            if file.is_symlink() or not file.is_file():
                raise FileNotFoundError(file)
        if sum(file.stat().st_size for file in found.values()) > bytes_max:
            raise ValueError(f"expected at most {bytes_max} bytes")
        return {path: file.read_bytes() for path, file in found.items()}

    async def end(self) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
