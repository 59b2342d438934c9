"""The tests' own process handle, :mod:`tests.support.fork_server`."""

import os
from concurrent.futures import ThreadPoolExecutor

from tests.support.fork_server import NUMBER_BYTES, Forked

WAITING = 8


def test_threads_that_wait_for_one_process_all_learn_its_exit_code() -> None:
    with ThreadPoolExecutor(WAITING) as threads:
        for code in range(50):
            status, theirs = os.pipe()
            process = Forked(os.getpid(), status)
            ends = [threads.submit(process.wait, 60) for _ in range(WAITING)]
            os.write(theirs, f"{code << 8:{NUMBER_BYTES}}".encode())
            os.close(theirs)
            assert [end.result(60) for end in ends] == [code] * WAITING


def test_a_process_whose_server_is_gone_counts_as_killed() -> None:
    status, theirs = os.pipe()
    os.close(theirs)
    assert Forked(os.getpid(), status).wait(60) == -9
