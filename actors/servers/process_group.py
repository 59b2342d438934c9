"""Runs a server in a process group of its own: ``python -m actors.servers.process_group COMMAND ...``.

SIGTERM and SIGINT reach the server as SIGTERM; after ``GRACE_SECONDS`` its process group is killed. However the server
or this process ends, the rest of the group is killed.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from pipeline.runtime.children import ChildGroup, OrphanReaper

GRACE_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    """Run ``argv``. Returns its exit code; after a signal to us 0, or 1 when the server had to be killed."""
    if not argv:
        print("usage: python -m actors.servers.process_group COMMAND ...", file=sys.stderr)
        return 2
    killed = False
    stopping: threading.Thread | None = None
    with OrphanReaper(grace_seconds=0) as reaper:
        server = ChildGroup(argv, reaper)

        def stop() -> None:
            nonlocal killed
            killed = not server.stop(GRACE_SECONDS)

        def on_signal(number: int, frame: FrameType | None) -> None:
            nonlocal stopping
            if stopping is None:
                stopping = threading.Thread(target=stop)
                stopping.start()

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
        code = server.end.result()
        if stopping is not None:
            stopping.join()
            return int(killed)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
