"""A process from the fork server is what ``subprocess.Popen`` would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.fork_server import ForkServer

PROGRAM = """
import os, sys, time
print(sys.argv[1:], os.environ["WORD"], os.getcwd(), os.getpid() == os.getsid(0), __name__, sys.stdin.readline())
print("open:", sorted(set(map(int, os.listdir("/proc/self/fd"))) - {0, 1, 2})[1:], file=sys.stderr)
if sys.argv[1] == "wait":
    print("waiting", flush=True)
    time.sleep(60)
sys.exit(7)
"""


def test_a_forked_process_has_its_arguments_streams_environment_and_exit_code(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    program, output = tmp_path / "program.py", tmp_path / "output"
    program.write_text(PROGRAM)
    (tmp_path / "input").write_text("a line")
    with output.open("wb") as sink, (tmp_path / "input").open("rb") as source:
        process = fork_server.start(
            [sys.executable, str(program), "end"],
            stdin=source,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "WORD": "word"},
            cwd=tmp_path,
        )
    assert process.wait(60) == process.poll() == 7
    assert output.read_text().splitlines() == [f"['end'] word {tmp_path} True __main__ a line", "open: []"]


def test_a_forked_process_ends_by_a_signal_and_its_end_is_seen(tmp_path: Path, fork_server: ForkServer) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    reading, writing = os.pipe()
    try:
        process = fork_server.start(
            [sys.executable, str(program), "wait"],
            stdin=subprocess.DEVNULL,
            stdout=writing,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "WORD": "word"},
        )
        os.close(writing)
        with open(reading, closefd=False) as lines:
            assert "waiting\n" in iter(lines.readline, "")
        assert process.poll() is None
        process.terminate()
        assert process.wait(60) == -signal.SIGTERM
    finally:
        os.close(reading)
