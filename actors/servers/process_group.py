"""Runs a server in a process group of its own: ``python -m actors.servers.process_group COMMAND ...``, or
``... --ends-with RUN_DIRECTORY STEPS COMMAND ...``, which stops it once the run has made so many steps.

This process leads the group, which is killed when this process ends, however it ends. SIGTERM and SIGINT reach the
server as SIGTERM; ``GRACE_SECONDS`` later the whole group is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType

from pipeline.runtime.children import OrphanReaper, end_with_supervisor, signal_group
from pipeline.runtime.run_directory import RunDirectory

GRACE_SECONDS = 5.0
ENDS_WITH = "--ends-with"
LOOK_SECONDS = 2.0
"""Interval at which it looks whether the run has finished."""


def main(argv: Sequence[str]) -> int:
    """Run ``argv``. Returns its exit code, or 0 when a signal has stopped it. End the process with :func:`os._exit`:
    the reaper kills it as soon as the interpreter closes its files."""
    has_finished: Callable[[], bool] = lambda: False  # noqa: E731
    if argv[:1] == [ENDS_WITH]:
        has_finished = partial(RunDirectory(Path(argv[1])).has_finished, int(argv[2]))
        argv = argv[3:]
    if not argv:
        print("usage: python -m actors.servers.process_group COMMAND ...", file=sys.stderr)
        return 2
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    end_with_supervisor()
    stopping = False
    server: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        if server is not None and not stopping:
            server.terminate()
            signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    signal.signal(signal.SIGALRM, lambda *_: signal_group(os.getpid(), signal.SIGKILL))
    reaper = OrphanReaper(grace_seconds=0)
    reaper.start()
    reaper.watch(os.getpid())
    try:
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"{argv[0]} cannot be started: {error}", file=sys.stderr, flush=True)
        return 1
    if stopping:
        server.terminate()
        signal.setitimer(signal.ITIMER_REAL, GRACE_SECONDS)
    while True:
        with suppress(subprocess.TimeoutExpired):
            code = server.wait(LOOK_SECONDS)
            break
        if not stopping and has_finished():
            stop(signal.SIGTERM, None)
    if stopping:
        return 0
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
