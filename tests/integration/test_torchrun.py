"""A learner of two ranks under torchrun, beside a replay stage, an engine and an actor that were started by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import yaml

from learner.checkpoints.checkpoint import find_checkpoints, read_state
from pipeline.runtime.run_directory import RunDirectory
from tests.support.fork_server import Forked, ForkServer
from tests.support.run_handle import RunHandle

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
STEPS = 8
SECONDS_MAX, END_SECONDS_MAX = 240, 60
"""Guards against hanging, far above what it takes; a rank that hangs would take its group's timeout."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * SECONDS_MAX)]

Gang = Callable[[], AbstractContextManager[RunHandle]]


def free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        found = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in found]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    raw = yaml.safe_load(TINY.read_text())
    engine, meeting = free_ports(2)
    raw["run"] |= {"directory": str(tmp_path), "name": "gang", "total_steps": STEPS}
    raw["engine"] |= {"port": engine}
    raw["learner"] |= {"ranks_timeout_seconds": 2 * END_SECONDS_MAX}
    raw["checkpoint"] = {"every": 2}
    file = tmp_path / "gang.yaml"
    file.write_text(yaml.safe_dump(raw))
    (tmp_path / "port").write_text(str(meeting))
    return file


@pytest.fixture
def others(
    run_file: Path, fork_server: ForkServer, afterplay: Callable[..., str]
) -> Iterator[dict[str, Forked | subprocess.Popen[bytes]]]:
    """All roles but the learner."""
    afterplay("prepare", str(run_file))
    roles: dict[str, Forked | subprocess.Popen[bytes]] = {}
    for role in ("replay", "engine", "actor"):
        command = [sys.executable, "-m", "pipeline.cli.app", role, str(run_file)]
        with run_file.with_name(f"{role}.log").open("wb") as log:
            roles[role] = fork_server.start(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
    yield roles
    for process in roles.values():
        process.kill()
        process.wait()


@pytest.fixture
def gang(run_file: Path) -> Gang:
    """Starts the learner's ranks, and ends what is left of them."""
    port = (run_file.parent / "port").read_text()

    @contextmanager
    def start() -> Iterator[RunHandle]:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        command += ["--no-python", str(Path(sys.executable).with_name("afterplay")), "learner", str(run_file)]
        output = run_file.with_name("learner.log")
        with output.open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield RunHandle(process, RunDirectory(run_file.parent / "gang"), output)
        finally:
            if process.poll() is None:
                for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        each.kill()
                process.wait()

    return start


def rank(run: RunHandle, number: int) -> psutil.Process:
    for process in psutil.Process(run.process.pid).children(recursive=True):
        if process.environ().get("RANK") == str(number):
            return process
    raise AssertionError(f"torchrun has no rank {number}:\n{run.tail()}")


def test_all_ranks_end_when_one_or_torchrun_is_killed_and_go_on_from_the_checkpoint(
    gang: Gang, others: dict[str, Forked | subprocess.Popen[bytes]]
) -> None:
    for victim in ("rank 1", "torchrun"):
        with gang() as run:
            begun = len(run.steps())
            run.until("a step", lambda n=begun: len(run.steps()) > n, SECONDS_MAX)
            run.until("a checkpoint", lambda: find_checkpoints(run.directory.checkpoints), SECONDS_MAX)
            ranks = [rank(run, 0), rank(run, 1)]
            if victim == "rank 1":
                ranks[1].kill()
            else:
                os.killpg(run.process.pid, signal.SIGKILL)  # as a supervisor ends it; ranks have sessions of their own
            assert run.finish(END_SECONDS_MAX) != 0
            assert not psutil.wait_procs(ranks, END_SECONDS_MAX)[1], f"ranks outlive {victim}"
            if victim == "rank 1":
                assert "the learner has lost a rank" in run.output.read_text(), run.tail()
    with gang() as run:
        begun = len(run.steps())
        run.until("a step", lambda: len(run.steps()) > begun, SECONDS_MAX)
        run.process.terminate()
        run.finish(END_SECONDS_MAX)
        saved = read_state(find_checkpoints(run.directory.checkpoints)[0]).updates
        assert saved == run.steps()[-1]["step"], "a stop saves the last update"
    with gang() as run:
        saved = read_state(find_checkpoints(run.directory.checkpoints)[0]).updates
        assert run.finish(SECONDS_MAX) == 0, run.tail()
    assert f"starting with {saved} updates" in run.output.read_text()
    assert [step["step"] for step in run.steps()] == list(range(1, STEPS + 1))
    newest = find_checkpoints(run.directory.checkpoints)[0]
    assert read_state(newest).updates == STEPS and (newest / "shards" / ".metadata").is_file()
    for role, process in others.items():
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS_MAX) == 0, role
    ledger = run.ledger(rows=True)
    assert (ledger.audit(), ledger.updates) == ([], STEPS)
