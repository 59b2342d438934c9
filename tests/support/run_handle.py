"""``afterplay run`` as a child process with a handle on it, for tests, benchmarks and tools."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.errors import AfterplayError
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.store.ledger import Ledger, read_ledger
from tests.support.fork_server import Forked, ForkServer

LOOK_SECONDS = 0.1
"""How often the files of the run are looked at: there is no event to wait for across processes."""
STOP_SECONDS_MAX = 15.0
TAIL_BYTES = 3000

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run that was started, and where it keeps its things."""

    process: subprocess.Popen[bytes] | Forked
    directory: RunDirectory
    output: Path
    """What the supervisor printed."""

    def steps(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` so far."""
        try:
            lines = self.directory.metrics_file.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines]

    def ledger(self, *, rows: bool = False) -> Ledger:
        """The accounts of the replay stage."""
        return read_ledger(self.directory.store_file, rows=rows)

    def pid(self, name: str) -> int | None:
        """Process id of a role (``actor-0``, ``replay``, ``learner``); None while it has none."""
        found = read_json(self.directory.process_file(name))
        return int(found["pid"]) if found else None

    def metrics_port(self, name: str) -> int | None:
        found = read_json(self.directory.process_file(name))
        return int(found["metrics_port"]) if found else None

    def metric(self, role: str, name: str, label: str = "") -> float:
        """Sum of the series of ``afterplay_NAME`` that have ``label`` in ``/metrics`` of a role; NaN while the role
        does not answer."""
        if (port := self.metrics_port(role)) is None:
            return math.nan
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return math.nan
        rows = re.findall(rf"^afterplay_{re.escape(name)}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
        return sum(float(number) for labels, number in rows if label in labels)

    def until(self, what: str, look: Callable[[], Value | None], seconds_max: float) -> Value:
        """Wait until ``look`` returns something true. Raises :class:`AfterplayError` when the run ends first or it
        takes too long, with the end of what the run printed."""
        deadline = time.monotonic() + seconds_max
        while time.monotonic() < deadline:
            value = look()
            if value:
                return value
            if self.process.poll() is not None:
                value = look()
                if value:
                    return value
                raise AfterplayError(
                    f"the run ended with exit code {self.process.returncode} before {what}:\n{self.tail()}"
                )
            time.sleep(LOOK_SECONDS)
        raise AfterplayError(f"{what} did not come within {seconds_max:g} s:\n{self.tail()}")

    def until_step(self, step: int, seconds_max: float) -> dict[str, Any]:
        """Wait for the line of ``step``; returns it."""
        return self.until(
            f"step {step}", lambda: next((s for s in self.steps() if s["step"] >= step), None), seconds_max
        )

    def finish(self, seconds_max: float) -> int:
        """Wait for the end of the run; returns its exit code."""
        try:
            return self.process.wait(seconds_max)
        except subprocess.TimeoutExpired as error:
            raise AfterplayError(f"the run did not finish within {seconds_max:g} s:\n{self.tail()}") from error

    def interrupt(self) -> float:
        """Ctrl-C; returns how many seconds the run took to end."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(STOP_SECONDS_MAX)
        return time.monotonic() - started

    def tail(self) -> str:
        """The end of what the run and its processes printed."""
        parts = [self.output.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")]
        for log in sorted(self.directory.logs.glob("*.log")):
            parts.append(f"--- {log.name}\n" + log.read_bytes()[-TAIL_BYTES // 2 :].decode("utf-8", "replace"))
        return "\n".join(parts)


@contextmanager
def start_run(
    file: Path, directory: Path, name: str, overrides: Sequence[str] = (), server: ForkServer | None = None
) -> Iterator[RunHandle]:
    """``afterplay run FILE`` with its run directory at ``directory/name``; stopped at the end of the block if it still
    runs. With ``server`` its processes are forked from that, else each is a Python of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pipeline.cli.app", "run", str(file)]
    for override in (f"run.directory={directory}", f"run.name={name}", *overrides):
        command += ["--set", override]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    output = directory / f"{name}.out"
    with output.open("wb") as sink:
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": sink, "stderr": subprocess.STDOUT}
        if server is None:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **how)
        else:
            process = server.start(command, env=environment, forks=True, **how)
    handle = RunHandle(process, RunDirectory(directory / name), output)
    try:
        yield handle
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
