"""The life of a role, as a real process."""

import contextlib
import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import orjson
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime.metrics_server import MetricsServer
from pipeline.runtime.process import ExitCode, RoleContext, metrics_port, parse_index, role_name
from pipeline.runtime.progress import RoleState
from pipeline.runtime.run_directory import RunDirectory, read_json, take_index, write_json_atomically
from tests.support.fork_server import ForkServer

PROGRAM = """
import sys, threading, time, anyio, anyio.to_thread
from pipeline.config import RunConfig
from pipeline.config.learner import CheckpointConfig
from pipeline.config.run import RunSection, SupervisorConfig
from pipeline.errors import CallsHang, ConfigurationError, FormatMismatch, StoreError
from pipeline.runtime.process import run_role
from pipeline.runtime.progress import RoleState

LIMITS = SupervisorConfig(stuck_seconds_max=1, progress_seconds_max=0.2)
DRAIN = CheckpointConfig(drain_seconds_max=1)
config = RunConfig(run=RunSection(directory=sys.argv[1], name="r"), supervisor=LIMITS, checkpoint=DRAIN)

async def drains(ctx):
    ctx.report(RoleState.PLAYING, "a signal", episodes=3)
    ctx.beat()
    print("ready", flush=True)
    await ctx.stopping.wait()

async def drains_until_told(ctx):
    print("ready", flush=True)
    await ctx.stopping.wait()
    print("stopping", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.readline)

async def never_drains(ctx):
    print("ready", flush=True)
    await anyio.sleep_forever()

async def blocks(ctx):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)

async def trains_in_a_thread_that_hangs(ctx):
    def hanging_step():
        threading.Event().wait()
    ctx.report(RoleState.TRAINING)
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, hanging_step)
        while True:
            await anyio.sleep(0.01)  # the event loop lives, which says nothing

async def misconfigured(ctx):
    async with anyio.create_task_group():
        raise ConfigurationError("expected a port, got a pear")

async def reads_an_old_file(ctx):
    raise FormatMismatch("expected format 3, got 2: move it away")

async def fails(ctx):
    raise StoreError("expected a database, got a pear")

async def hangs(ctx):
    raise CallsHang("environments.web: 64 blocking calls hang in a thread")

async def has_a_bug(ctx):
    return 1 / 0

async def returns(ctx):
    pass

sys.exit(run_role("actor-1", 1, config, globals()[sys.argv[2]], ends_with_run=len(sys.argv) > 3))
"""


@pytest.fixture(scope="module")
def server():
    with ForkServer(("pipeline.config", "pipeline.runtime.process", "uvloop")) as server:
        yield server


@pytest.fixture
def start(server, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    return lambda main, *alone: server.open([sys.executable, str(program), str(tmp_path), main, *alone])


def ended(process, seconds=20):
    try:
        _, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
        process.communicate()
    return process.returncode, err


def test_a_role_that_was_started_alone_drains_and_ends_with_0_when_the_run_has_made_its_steps(start, tmp_path):
    process = start("drains_until_told", "alone")
    assert process.stdout.readline() == "ready\n"
    directory, steps = RunDirectory(tmp_path / "r"), RunConfig().run.total_steps
    write_json_atomically(directory.finished_file, {"steps": steps - 1, "exit_code": 0})  # of a shorter run before it
    assert not directory.has_finished(steps) and process.poll() is None
    write_json_atomically(directory.finished_file, {"steps": steps, "exit_code": 0})
    assert process.stdout.readline() == "stopping\n"
    process.stdin.write("\n")
    code, err = ended(process)
    assert code == 0 and "the run has finished" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_and_exits_with_0_and_the_process_file_goes(start, tmp_path, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    process = start("drains")
    assert process.stdout.readline() == "ready\n"
    file = RunDirectory(tmp_path / "r").process_file("actor-1")
    record = read_json(file)
    assert record["pid"] == process.pid
    base = f"http://127.0.0.1:{record['metrics_port']}"
    with urllib.request.urlopen(base + "/metrics", timeout=5) as reply:
        assert b"afterplay_event_loop_lag_seconds_bucket" in reply.read()
    with urllib.request.urlopen(base + "/healthz", timeout=5) as reply:
        health = orjson.loads(reply.read())
    assert (health["name"], health["state"], health["reason"]) == ("actor-1", "playing", "a signal")
    assert health["details"] == {"episodes": 3}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(base + "/else", timeout=5)
    process.send_signal(number)
    assert ended(process)[0] == ExitCode.FINISHED
    assert not file.exists()


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGTERM])
def test_a_process_that_stood_still_while_another_took_its_place_ends_and_leaves_the_others_file(
    start, tmp_path, monkeypatch, number
):
    monkeypatch.setenv("AFTERPLAY_ADDRESS", "127.0.0.1")  # a launcher placed it
    process = start("drains")
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    file = RunDirectory(tmp_path / "r").process_file("actor-1")
    other = {**read_json(file), "pid": 1, "machine": "another"}
    write_json_atomically(file, other)
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    code, err = ended(process)
    if number == signal.SIGCONT:
        assert code == ExitCode.FORCED and "actor-1: process 1 of another took the place of this one" in err
    assert read_json(file) == other


def test_a_drain_over_its_time_is_forced_and_says_what_it_did(start):
    process = start("never_drains")
    process.stdout.readline()
    process.terminate()
    code, err = ended(process)
    assert code == ExitCode.FORCED
    assert "drain_seconds_max=1" in err


def test_a_second_signal_ends_at_once_even_a_blocked_loop(start):
    process = start("blocks")
    process.stdout.readline()
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.3)
    process.send_signal(signal.SIGINT)
    code, err = ended(process)
    assert code == ExitCode.FORCED and "second signal" in err


def test_sigterm_that_comes_twice_is_one_signal(start):
    process = start("drains_until_told")
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.stdout.readline() == "stopping\n"
    process.terminate()
    code, err = ended(process)  # closes its standard input
    assert (code, "second signal" in err) == (ExitCode.FINISHED, False)


@pytest.mark.slow
def test_a_blocked_loop_ends_by_force_after_one_signal(start):
    process = start("blocks")
    process.stdout.readline()
    process.terminate()
    code, err = ended(process)
    assert code == ExitCode.FORCED
    assert "blocked" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("main", "code", "words"),
    [
        ("misconfigured", ExitCode.CONFIGURATION, "expected a port, got a pear"),
        ("reads_an_old_file", ExitCode.CONFIGURATION, "expected format 3, got 2: move it away"),
        ("fails", ExitCode.FAILED, "expected a database, got a pear"),
        ("hangs", ExitCode.CALLS_HANG, "environments.web: 64 blocking calls hang in a thread"),
        ("has_a_bug", ExitCode.FAILED, "ZeroDivisionError: division by zero"),
        ("returns", ExitCode.FINISHED, ""),
    ],
)
def test_the_exit_code_says_how_it_ended(start, main, code, words):
    got, err = ended(start(main))
    assert got == code
    assert words in err
    assert ("Traceback" in err) == (code == ExitCode.FAILED)


def test_a_role_without_progress_is_not_well_and_its_metrics_say_since_when(tmp_path, monkeypatch):
    ctx = RoleContext("replay", 0, RunConfig(), RunDirectory(tmp_path))
    ctx.report(RoleState.SERVING)
    assert ctx.health()[0]
    now = time.monotonic()
    monkeypatch.setattr("pipeline.runtime.process.time.monotonic", lambda: now + 121)
    well, details = ctx.health()
    assert (well, details["state"], details["progress_limit_seconds"]) == (False, "stuck while serving", 120)
    monkeypatch.setattr("pipeline.runtime.process.time.time", lambda: 0.0)  # of the machine: no age goes by it
    silent = ctx.registry.get_sample_value("afterplay_heartbeat_age_seconds")
    assert silent > ctx.registry.get_sample_value("afterplay_heartbeat_limit_seconds") == 120
    states = {s: ctx.registry.get_sample_value("afterplay_role_state", {"state": s}) for s in RoleState}
    assert [state for state, value in states.items() if value] == [RoleState.SERVING]
    ctx.beat()
    assert ctx.health()[0]


@pytest.mark.slow
def test_a_thread_that_hangs_is_told_with_its_stack_and_ends_the_process(start):
    process = start("trains_in_a_thread_that_hangs")
    code, err = ended(process)
    assert code == ExitCode.STUCK
    assert re.search(r"actor-1: no progress for \d s while training \(limit 1 s\); the stacks of all threads:", err)
    assert "in hanging_step" in err
    assert "ending, to be started again" in err


async def test_who_reads_the_metrics_sees_that_a_run_has_finished_before_its_roles_end(tmp_path):
    ctx = RoleContext("learner", 0, RunConfig(), RunDirectory(tmp_path))
    assert ctx.registry.get_sample_value("afterplay_run_finished_timestamp_seconds") == 0
    with MetricsServer(ctx.registry, ctx.health) as server:
        ctx.server = server
        ctx.finished()
        await ctx.until_scraped()
        assert server.scrapes == 0, "nobody reads them, so nobody waits"
        url = f"http://127.0.0.1:{server.port}/metrics"

        async def scrape() -> bytes:
            return await anyio.to_thread.run_sync(lambda: urllib.request.urlopen(url, timeout=5).read())

        assert b"afterplay_run_finished_timestamp_seconds 1." in await scrape()
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(ctx.until_scraped)
            await anyio.lowlevel.checkpoint()
            for _ in range(2):
                await scrape()
        with anyio.fail_after(60):
            while server.scrapes < 3:  # counted once the answer is sent
                await anyio.sleep(0.01)


def test_ports_follow_the_documented_offsets():
    assert [
        metrics_port(role_name(r, i), i, 9100) for r, i in [("replay", 0), ("learner", 0), ("actor", 0), ("actor", 3)]
    ] == [
        9100,
        9101,
        9102,
        9105,
    ]
    assert metrics_port("actor-7", 7, 0) == 0
    with pytest.raises(ConfigurationError, match="65535"):
        metrics_port("actor-9", 9, 65530)


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "deep" / "x.json"
    assert read_json(path) is None
    write_json_atomically(path, {"a": 1})
    assert read_json(path) == {"a": 1}
    path.write_text("[1")
    assert read_json(path) is None
    assert [p.name for p in path.parent.iterdir()] == ["x.json"]


def test_versions_have_sortable_folders(tmp_path):
    assert RunDirectory(tmp_path).weights(7) == tmp_path / "weights" / "v000007"
    with pytest.raises(ValueError, match="at least 0"):
        RunDirectory(tmp_path).weights(-1)


def test_each_replica_holds_an_index_of_its_own_and_a_free_one_is_taken_again(tmp_path):
    directory = RunDirectory(tmp_path)
    (first, lock), (second, other) = take_index(directory, "actor"), take_index(directory, "actor")
    assert (first, second) == (0, 1)
    lock.release()
    (again, lock), (third, last) = take_index(directory, "actor"), take_index(directory, "actor")
    assert (again, third) == (0, 2)
    for held in (lock, other, last):
        held.release()


def test_an_index_belongs_to_one_process_whoever_gives_it(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    index, lock = take_index(directory, "actor", parse_index("HOSTNAME", {"HOSTNAME": "run-actor-0"}))
    assert index == 0
    with pytest.raises(StoreError, match=r"actor-0 of the run .* alive in another process"):
        take_index(directory, "actor", parse_index("SLURM_PROCID", {"SLURM_PROCID": "0"}))
    assert take_index(directory, "actor", 0, placed=True) == (0, None), "the other stands still on a lost machine"
    free, other = take_index(directory, "actor")
    assert free == 1, "a free index is none that was given"
    lock.release()
    assert take_index(directory, "actor", 0)[0] == 0
    other.release()

    def without_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    assert take_index(directory, "actor", 7) == (7, None)
    with pytest.raises(OSError, match="No locks"):
        take_index(directory, "actor")


def test_an_actor_that_may_not_write_to_the_run_directory_holds_the_key_of_its_index(tmp_path, monkeypatch):
    directory, keys, opened = RunDirectory(tmp_path / "run"), tmp_path / "keys", os.open
    keys.mkdir()
    for index in range(2):
        (keys / f"actor-{index}.key_secret").touch(0o400)

    def read_only(path, flags, *mode, **options):
        if Path(path).is_relative_to(directory.path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *mode, **options)

    monkeypatch.setattr(os, "open", read_only)
    found = [take_index(directory, "actor", keys=keys) for _ in range(2)]
    assert [index for index, _ in found] == [0, 1]
    with pytest.raises(ConfigurationError, match=r"expected a key of actor-2 .* --actors 3"):
        take_index(directory, "actor", keys=keys)
    with pytest.raises(StoreError, match="alive in another process"):
        take_index(directory, "actor", 1, keys=keys)
    found[1][1].release()
    assert take_index(directory, "actor", 1, keys=keys)[0] == 1
    with pytest.raises(OSError, match="Read-only"):
        take_index(directory, "actor")


@pytest.mark.parametrize(
    ("text", "words"),
    [("-1", "a number from 0"), ("NONE", "name of a variable, got 'NONE'"), ("HOSTNAME", "HOSTNAME='laptop'")],
)
def test_an_index_that_cannot_be_found_is_refused_with_what_came(text, words):
    with pytest.raises(ConfigurationError, match=words):
        parse_index(text, {"HOSTNAME": "laptop"})
