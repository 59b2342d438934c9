"""Fixtures of the tests with real processes: one process that has imported everything starts the others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.support.fork_server import ForkServer
from tests.support.run_handle import start_run

COMMAND_SECONDS_MAX = 400
"""A guard against hanging."""


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def forked_run(fork_server: ForkServer) -> partial:
    """``start_run`` with processes that are forked: real ones, which start without paying imports."""
    return partial(start_run, server=fork_server)


@pytest.fixture(scope="session")
def afterplay(fork_server: ForkServer) -> Callable[..., str]:
    """Runs a command of the command line, which must succeed; returns what it printed."""

    def run(*arguments: str) -> str:
        with tempfile.TemporaryFile() as output:
            process = fork_server.start(
                [sys.executable, "-m", "pipeline.cli.app", *arguments],
                forks=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            code = process.wait(COMMAND_SECONDS_MAX)
            output.seek(0)
            printed = output.read().decode()
        assert code == 0, printed
        return printed

    return run
