"""Run a server that starts processes of its own, and leave none behind.

``python -m actors.servers.guard COMMAND ...``

The command runs in the process group of a small shell, the sentry, which waits on a pipe. SIGTERM and SIGINT reach
the command as SIGTERM; after ``GRACE_SECONDS`` the group is killed. When the command ends, what is left of the group
is killed. When this process is killed itself, the sentry sees the pipe close and kills the group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

GRACE_SECONDS = 5.0
_SENTRY = "read -r line; kill -KILL 0"
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""


def main(argv: Sequence[str]) -> int:
    """Run ``argv``. Returns its exit code; 0 when it ended because we were asked to, 1 when it had to be killed."""
    if not argv:
        print("usage: python -m actors.servers.guard COMMAND ...", file=sys.stderr)
        return 2
    asked = {"stop": False, "forced": False}
    sentry = subprocess.Popen(
        ["/bin/sh", "-c", _SENTRY],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        first, asked["stop"] = not asked["stop"], True
        if child is not None and first:
            child.send_signal(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)

    def force(number: int, frame: FrameType | None) -> None:
        asked["forced"] = True
        kill_group(sentry.pid)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, force)
    parent = os.getpid()
    child = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, process_group=sentry.pid, preexec_fn=lambda: _die_with(parent)
    )
    if asked["stop"]:
        child.send_signal(signal.SIGTERM)
    code = child.wait()
    signal.setitimer(signal.ITIMER_REAL, 0)
    kill_group(sentry.pid)
    sentry.communicate()
    if asked["stop"]:
        return 1 if asked["forced"] else 0
    return code if code >= 0 else 128 - code


def kill_group(leader: int) -> None:
    """SIGKILL to every process of the group; harmless when there is none."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def group_is_gone(leader: int, seconds_max: float) -> bool:
    """Whether no process of the group is left, waiting at most ``seconds_max`` for the kernel to reap them."""
    deadline = time.monotonic() + seconds_max
    while time.monotonic() < deadline:
        try:
            os.killpg(leader, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def _die_with(parent: int) -> None:
    """In the child: get SIGTERM when the parent dies (Linux). The sentry makes sure of the rest."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
