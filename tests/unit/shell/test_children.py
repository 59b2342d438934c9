"""Child groups: bounded output, the grace before SIGKILL, and the reaper's."""

import os
import shlex
import signal
import sys
import threading
from queue import Queue

import psutil
import pytest

from pipeline.runtime.children import SUPERVISOR, ChildGroup, OrphanReaper, signal_group


@pytest.fixture
def start():
    with OrphanReaper(grace_seconds=0) as reaper:
        yield lambda script: ChildGroup(["/bin/sh", "-c", script], reaper, output_bytes_max=16)


def soon(condition) -> bool:
    """Wait for output, or for the kernel to reap orphans: there is no event for either."""
    return any(condition() or threading.Event().wait(0.02) for _ in range(500))


async def test_the_end_of_the_output_is_kept(start):
    child = start("printf '%0100d\\n' 7; echo failed >&2; exit 3")
    assert await child.wait() == 3
    assert (child.stdout, child.stderr) == ("0" * 14 + "7\n", "failed\n")


def test_a_command_that_ignores_sigterm_is_killed_with_its_children(start):
    child = start("trap '' TERM; sleep 60 & echo ready; wait; sleep 60")
    assert soon(lambda: "ready" in child.stdout)
    assert not child.stop(0.1)
    assert child.end.result(0) == -signal.SIGKILL
    assert soon(lambda: not signal_group(child.pid, 0))


def test_a_command_that_obeys_sigterm_takes_the_rest_of_its_group_along(start):
    child = start("trap 'exit 4' TERM; sleep 60 & echo ready; wait")
    assert soon(lambda: "ready" in child.stdout)
    assert child.stop(10)
    assert child.end.result(0) == 4


def test_a_command_that_nothing_can_watch_is_not_started(start, monkeypatch):
    start("exit 0").end.result(10)  # the reaper runs

    def full(thread):
        raise RuntimeError("can't start new thread")

    others = set(psutil.Process().children(recursive=True))
    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(BlockingIOError, match="can't start new thread"):
        start("sleep 60 & sleep 60")
    assert set(psutil.Process().children(recursive=True)) - others == set()


def test_a_closed_reaper_leaves_no_group():
    with OrphanReaper(grace_seconds=0.2) as reaper:
        child = ChildGroup(["sleep", "60"], reaper)
    assert child.end.result(10) == -signal.SIGTERM


def test_a_reaper_that_is_killed_runs_again_with_every_group():
    again: Queue[int] = Queue()
    with OrphanReaper(grace_seconds=0) as reaper:
        reaper.on_restart = again.put
        child = ChildGroup(["sleep", "60"], reaper)
        for _ in range(2):
            os.kill(reaper.pid, signal.SIGKILL)
            assert again.get(timeout=10) == -signal.SIGKILL
    assert child.end.result(10) == -signal.SIGKILL


@pytest.mark.parametrize("supervised", [True, False])
def test_a_role_ends_with_its_supervisor_though_nobody_ends_it_and_one_started_by_hand_does_not(start, supervised):
    own = (
        "import pipeline.runtime.children as c, signal, os, threading; c.end_with_supervisor(); "
        "signal.signal(15, signal.SIG_IGN); print(os.getpid(), threading.active_count()); signal.pause()"
    )
    given = "str(os.getpid())" if supervised else "'0'"
    parent = (
        f"import os, subprocess; os.environ[{SUPERVISOR!r}] = {given}; "
        f"subprocess.run([{sys.executable!r}, '-uc', {own!r}], start_new_session=True)"
    )
    child = start(f"exec {sys.executable} -c {shlex.quote(parent)}")
    assert soon(lambda: child.stdout.endswith("\n"))
    pid, threads = map(int, child.stdout.split())
    grandchild = psutil.Process(pid)
    child.kill()
    if supervised:
        assert grandchild.wait(10) is None
    else:
        assert threads == 1, "nothing watches"
        grandchild.kill()


def test_a_process_in_a_session_of_its_own_ends_with_its_parent(start):
    own = "import pipeline.runtime.children as c, signal; c.end_with_parent(); print(c.os.getpid()); signal.pause()"
    parent = f"import subprocess; subprocess.run([{sys.executable!r}, '-uc', {own!r}], start_new_session=True)"
    child = start(f'exec {sys.executable} -c "{parent}"')
    assert soon(lambda: child.stdout.endswith("\n"))
    grandchild = psutil.Process(int(child.stdout))
    child.kill()
    assert grandchild.wait(10) is None
