"""A Docker engine of a test's own, which it may restart. Its image is empty: programs come by what is mounted."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE = "afterplay/empty"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
"""Mounted, they hold what a program needs, Python included."""
ANSWER_SECONDS_MAX = 120.0


class DockerEngine:
    """``dockerd`` with a folder and a socket of its own, without bridges and rules of the firewall."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"unix://{folder}/socket"
        self._log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again where it ends, as a service is, and wait until it answers. Raises :class:`RuntimeError` where
        it does not."""
        folder = self.folder
        words = ["dockerd", "--host", self.address, "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec"]
        words += ["--pidfile", f"{folder}/pid", "--storage-driver", "vfs", "--bridge", "none"]
        words += ["--iptables=false", "--ip6tables=false"]
        until = time.monotonic() + ANSWER_SECONDS_MAX
        while time.monotonic() < until:
            if self._process is None or self._process.poll() is not None:
                (folder / "pid").unlink(missing_ok=True)  # of one that was killed
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
            if self.docker("version").returncode == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(self._log.read_bytes()[-500:].decode(errors="replace"))

    def stop(self, how: signal.Signals) -> None:
        """End it and wait for its end."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait()

    def docker(self, *words: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
        environment = {**os.environ, "DOCKER_HOST": self.address}
        return subprocess.run(["docker", *words], input=stdin, capture_output=True, env=environment)

    def containers(self) -> list[str]:
        """All that it knows, dead ones too."""
        return self.docker("ps", "--all", "--quiet").stdout.decode().split()

    def mounts(self) -> set[str]:
        """Places in its folder where something is mounted."""
        places = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
        return {place for place in places if place.startswith(f"{self.folder}/")}


@contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """One that runs, with :data:`IMAGE`. Skips the test where there can be none."""
    if os.geteuid() != 0 or shutil.which("dockerd") is None or shutil.which("docker") is None:
        pytest.skip("a Docker engine to restart needs root and the package docker.io")
    with tempfile.TemporaryDirectory(prefix="docker-", ignore_cleanup_errors=True) as folder:
        engine = DockerEngine(Path(folder))
        try:
            try:
                engine.start()
            except RuntimeError as error:
                pytest.skip(f"no Docker engine can be started here: {error}")
            packed = io.BytesIO()
            with tarfile.open(fileobj=packed, mode="w") as archive:
                entry = tarfile.TarInfo("tmp")
                entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
                archive.addfile(entry)
            imported = engine.docker(
                "import", "--change", "ENV PATH=/usr/bin:/bin", "-", IMAGE, stdin=packed.getvalue()
            )
            assert imported.returncode == 0, imported
            yield engine
        finally:
            engine.stop(signal.SIGTERM)
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if f"{folder}/exec".encode() in path.read_bytes():  # a shim of one that was killed
                        os.kill(int(path.parent.name), signal.SIGKILL)
            for place in sorted(engine.mounts(), reverse=True):  # its own, of one that was killed
                subprocess.run(["umount", "--lazy", place])
