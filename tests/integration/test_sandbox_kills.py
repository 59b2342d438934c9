"""Roles that are killed, and a container engine that is restarted, leave no sandbox behind: no process, no mount, no
folder, no container."""

from __future__ import annotations

import json
import os
import secrets
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.docker_engine import IMAGE, SYSTEM, docker_engine
from tests.support.run_handle import RunHandle
from tests.support.sandbox_kinds import options_of

RUN_FILE = Path(__file__).parents[2] / "configs" / "agent.yaml"
PROGRAM = """
import os, sys
try: seen = os.listdir(sys.argv[1])
except OSError: seen = []
os.execvp("sleep", ["seen" if seen else "unseen", "1000" + sys.argv[2]])
"""
"""Tells by its name whether it can see into the run directory."""
SANDBOXES = 8
START_SECONDS_MAX = 300.0
GONE_SECONDS_MAX = 60.0


def processes(mark: str) -> dict[int, str]:
    """Programs that carry ``mark`` in their arguments, sandboxed or not, and the names they gave themselves."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if len(words) > 1 and words[1] == f"1000{mark}":
            found[int(path.parent.name)] = words[0]
    return found


def beside(programs: Iterable[int]) -> set[int]:
    """Processes in the mount namespaces of programs, each of which has one of its own: all of their sandboxes."""
    spaces = {os.readlink(f"/proc/{pid}/ns/mnt") for pid in programs}
    assert len(spaces) == SANDBOXES
    found = set()
    for path in Path("/proc").glob("[0-9]*/ns/mnt"):
        try:
            if os.readlink(path) in spaces:
                found.add(int(path.parts[2]))
        except OSError:
            continue
    return found


def are_gone(pids: Iterable[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def folders() -> set[str]:
    """Folders for sandboxes and tools among the temporary files."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("afterplay-*-*")}


@contextmanager
def at_work(forked_run: partial, folder: Path, sandbox: Mapping[str, Any]) -> Iterator[tuple[RunHandle, str]]:
    """A run whose sandboxes are all at work, none of which sees the run directory, and the mark of their programs. None
    of these is left after it."""
    mark = f".{secrets.randbelow(10**12)}"
    for path in (folder, folder.parent):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)
    (folder / "program.py").write_text(PROGRAM)
    options = {"sandbox": sandbox, "command": ["python", f"{folder}/program.py", f"{folder}/run", mark]}
    more = [f"environments.agent.loop.options.{name}={json.dumps(value)}" for name, value in options.items()]
    before = folders()
    with forked_run(RUN_FILE, folder, "run", [*more, f"actor.concurrency={SANDBOXES}"]) as run:
        run.until("all sandboxes", lambda: list(processes(mark).values()) == ["unseen"] * SANDBOXES, START_SECONDS_MAX)
        yield run, mark
    until_true(lambda: not processes(mark) and folders() <= before)


def until_true(look: Callable[[], bool]) -> None:
    until = time.monotonic() + GONE_SECONDS_MAX
    while time.monotonic() < until and not look():
        time.sleep(0.1)
    assert look()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["actor-0", "supervisor"])
def test_a_killed_role_leaves_no_sandbox(victim: str, tmp_path: Path, forked_run: partial) -> None:
    with at_work(forked_run, tmp_path / "agent", options_of("bubblewrap")) as (run, mark):
        there = beside(processes(mark))
        pid = run.process.pid if victim == "supervisor" else run.pid("actor-0")
        os.kill(pid, signal.SIGKILL)
        until_true(lambda: are_gone(there))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_restarted_docker_leaves_no_sandbox_and_no_reward(
    how: signal.Signals, tmp_path: Path, forked_run: partial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rollouts are ordered again, in sandboxes of their own."""
    with docker_engine() as engine:
        monkeypatch.setenv("DOCKER_HOST", engine.address)
        mounts = engine.mounts()
        sandbox = {"kind": "docker", "image": IMAGE, "readable": SYSTEM}
        with at_work(forked_run, tmp_path / "agent", sandbox) as (run, mark):
            there, containers = beside(processes(mark)), set(engine.containers())
            assert len(containers) == SANDBOXES
            engine.stop(how)
            engine.start()
            until_true(lambda: are_gone(there) and not set(engine.containers()) & containers)
            run.until("new sandboxes", lambda: len(processes(mark)) == SANDBOXES, START_SECONDS_MAX)
            outcomes = run.until("the lost ones", lambda: run.ledger().outcomes.get("agent"), START_SECONDS_MAX)
            assert outcomes.succeeded == 0 and set(outcomes.causes) == {"sandbox: Lost"}
        until_true(lambda: not engine.containers() and engine.mounts() <= mounts)
