"""The supervisor with real, tiny processes: deaths, signals, exit codes, nothing left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import anyio
import orjson
import pytest

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.store.journal import Changes
from pipeline.store.store import ReplayStore
from pipeline.supervisor.history import compare
from pipeline.supervisor.processes import HealthAnswer, ProcessSpec, check_health
from pipeline.supervisor.restarts import RestartLimits, Rule
from pipeline.supervisor.run import RunIsAlive, empty_directory, require_unused_store, run_lock
from pipeline.supervisor.shell import Supervisor
from pipeline.views.step_lines import MetricsTail
from tests.support.fork_server import ForkServer

PROGRAM = """
import sys
from pathlib import Path
from pipeline.config.load import loads
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor import shell
from pipeline.supervisor.run import run_lock
from pipeline.supervisor.restarts import Rule
from pipeline.supervisor.run import supervise
from pipeline.supervisor.processes import ProcessSpec
from pipeline.runtime.children import OrphanReaper
from pipeline.views.tables import LastingConsole

root = Path(sys.argv[1])
shell.LOG_BYTES_MAX = 4096
config = loads(
    "run: {total_steps: 2}\\nenvironments: {arithmetic: {name: arithmetic}}\\n"
    "supervisor: {restarts_max: 2}\\n"
    "checkpoint: {drain_seconds_max: 2}"
)
directory = RunDirectory(root).create()

def spec(name, stage, code, **rule):
    probed = rule.pop("probed", False)
    return ProcessSpec(Rule(name, stage, **rule), [sys.executable, "-c", code, str(root), name], probed=probed)

PRELUDE = '''
import os, signal, subprocess, sys, time
from pathlib import Path
root, name = Path(sys.argv[1]), sys.argv[2]
def note(what):
    with (root / "notes").open("a") as f: f.write(f"{name} {what} {os.getpid()}\\\\n")
def stop(number, frame):
    note("stopped"); sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("started")
'''
STAYS = PRELUDE + "print('x' * 5000, flush=True)\\nsignal.pause()\\nwhile True: time.sleep(1)"
IGNORES = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\\nnote('deaf')\\nwhile True: time.sleep(1)"
PARENT = PRELUDE + '''
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
with (root / "notes").open("a") as f: f.write(f"grandchild started {child.pid}\\\\n")
while True: time.sleep(1)
'''
FINISHES = PRELUDE + r'''
line = '{"step": 1, "reward_mean": 0.25}'
last = '{"step": 2, "reward_mean": 0.5, "signals": {"first_right": 0.5}}'
(root / "metrics.jsonl").open("a").write(line + chr(10) + last + chr(10))
'''
FAILS = PRELUDE + "print('expected a pear'); sys.exit(1)"
FAILING = PRELUDE + "print('environment maze: all 100 rollouts failed'); sys.exit(6)"
MISCONFIGURED = PRELUDE + "print('wrong key'); sys.exit(2)"

def learner(code): return spec("learner", 1, code, ends_run=True)
def actor(code): return spec("actor-0", 0, code)
def engine(code): return spec("engine-0", 3, code, stateless=True)

scenes = {
    "stays": [engine(STAYS), learner(STAYS), actor(STAYS)],
    "finishes": [engine(STAYS), actor(STAYS), spec("learner", 1, FINISHES, ends_run=True)],
    "fails": [engine(STAYS), actor(FAILS)],
    "failing": [engine(STAYS), spec("replay", 2, FAILING)],
    "misconfigured": [engine(STAYS), learner(MISCONFIGURED)],
    "deaf": [engine(STAYS), learner(IGNORES)],
    "parent": [engine(PARENT), learner(IGNORES)],
    "prepares": [
        spec("prepare", 3, PRELUDE + "sys.exit(0)", once=True),
        spec("learner", 1, FINISHES, depends=("prepare",), ends_run=True),
    ],
}
with run_lock(directory) as lock, OrphanReaper(keep_open=(lock,)) as reaper:
    console = LastingConsole(force_terminal=len(sys.argv) > 3, highlight=False, soft_wrap=True)
    code = supervise(config, scenes[sys.argv[2]], directory, reaper, console)
sys.exit(code)
"""


IMPORTS = ("matplotlib.backends.backend_agg", "pipeline.supervisor.run", "pipeline.supervisor.shell")


class Scene:
    def __init__(self, server: ForkServer, root: Path, name: str, *more: str):
        self.root = root
        program = root.with_name("program.py")
        program.write_text(PROGRAM)
        self.process = server.open([sys.executable, str(program), str(root), name, *more], stderr=subprocess.STDOUT)

    def notes(self) -> list[tuple[str, str, int]]:
        path = self.root / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(a, b, int(c)) for a, b, c in (line.split() for line in lines)]

    def pids(self, name: str, what: str = "started") -> list[int]:
        return [pid for who, did, pid in self.notes() if (who, did) == (name, what)]

    def until(self, condition, seconds: float = 60):
        """Watching files of other processes: there is nothing to wait on but time."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"in vain: {self.notes()}"
            threading.Event().wait(0.02)
        return found

    def ended(self, seconds: float = 60) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out


@pytest.fixture(scope="module")
def server():
    with ForkServer(IMPORTS) as server:
        yield server


@pytest.fixture
def scene(server, tmp_path):
    scenes: list[Scene] = []

    def start(name: str, *more: str) -> Scene:
        scenes.append(Scene(server, tmp_path / "r", name, *more))
        return scenes[-1]

    yield start
    for one in scenes:
        one.process.kill()
        one.process.communicate()
        for _, _, pid in one.notes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return False


def test_a_killed_process_is_restarted_and_the_others_are_left_alone(scene):
    run = scene("stays")
    [first] = run.until(lambda: run.pids("actor-0"))
    [engine] = run.until(lambda: run.pids("engine-0"))
    os.kill(first, signal.SIGKILL)
    assert len(run.until(lambda: len(run.pids("actor-0")) == 2 and run.pids("actor-0"))) == 2
    run.until(lambda: (read_json(run.root / "processes.json") or {}).get("actor-0", {}).get("restarts") == 1)
    assert run.pids("engine-0") == [engine]
    assert not gone(engine)
    run.process.terminate()
    code, out = run.ended()
    assert code == ExitCode.FINISHED
    assert "actor-0 ended (killed by SIGKILL); restart 1 in" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_drains_in_order_and_leaves_no_process(scene, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("the tests run under nohup")
    run = scene("stays")
    run.until(lambda: len(run.notes()) == 3)
    run.process.send_signal(number)
    code, out = run.ended()
    assert code == ExitCode.FINISHED
    assert [name for name, did, _ in run.notes() if did == "stopped"] == ["actor-0", "learner", "engine-0"]
    assert all(gone(pid) for _, _, pid in run.notes())
    assert f"stopped by {signal.Signals(number).name}" in out


def test_a_run_that_nobody_reads_any_more_drains_in_order(scene):
    """Ctrl-C also ends the ``tee`` behind it."""
    run = scene("stays")
    run.until(lambda: len(run.notes()) == 3)
    run.process.stdout.close()
    run.process.stdout = None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(60) == ExitCode.FINISHED
    assert [name for name, did, _ in run.notes() if did == "stopped"] == ["actor-0", "learner", "engine-0"]
    assert read_json(run.root / "outcome.json")["reason"] == "stopped by SIGINT"


@pytest.mark.slow
def test_the_end_of_the_learner_is_the_end_of_the_run(scene):
    run = scene("finishes")
    code, out = run.ended()
    assert code == ExitCode.FINISHED
    assert "step 2/2  reward 0.500  first_right 0.500" in out
    assert "finished after" in out
    assert (run.root / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert all(gone(pid) for _, _, pid in run.notes())


@pytest.mark.slow
def test_a_preparation_comes_first(scene):
    run = scene("prepares")
    assert run.ended()[0] == ExitCode.FINISHED
    assert [name for name, did, _ in run.notes()] == ["prepare", "learner"]


@pytest.mark.slow
def test_a_process_that_keeps_failing_ends_the_run_with_its_last_words(scene):
    run = scene("fails")
    code, out = run.ended()
    assert code == ExitCode.GAVE_UP
    assert len(run.pids("actor-0")) == 3
    assert "actor-0 failed (exit code 1) after 2 restarts" in out
    assert "| expected a pear" in out


@pytest.mark.slow
def test_an_environment_that_never_succeeds_ends_the_run_with_its_code_and_the_reason(scene):
    run = scene("failing")
    code, out = run.ended()
    assert (code, len(run.pids("replay"))) == (ExitCode.ENVIRONMENT, 1)
    assert "every rollout of an environment failed" in out
    assert "| environment maze: all 100 rollouts failed" in out


@pytest.mark.slow
@pytest.mark.parametrize(("succeeded", "expected"), [(0, ExitCode.ENVIRONMENT), (1, ExitCode.FINISHED)])
def test_a_run_that_finishes_says_which_environments_failed_and_does_not_end_as_a_success_if_one_never_succeeded(
    scene, tmp_path, succeeded, expected
):
    directory = RunDirectory(tmp_path / "r").create()
    store = ReplayStore(directory.store_file)
    counters = {"failed.arithmetic/environment step: ValueError": 3, "succeeded.arithmetic": succeeded}
    store.commit(Changes(counters=counters))
    store.close()
    code, out = scene("finishes").ended()
    assert code == expected
    rate = "3 of 4" if succeeded else "all 3"
    assert f"environment arithmetic: {rate} rollouts failed, most often with environment step: ValueError" in out


@pytest.mark.slow
def test_a_wrong_configuration_is_not_tried_again(scene):
    run = scene("misconfigured")
    code, out = run.ended()
    assert (code, len(run.pids("learner"))) == (ExitCode.CONFIGURATION, 1)
    assert "| wrong key" in out


@pytest.mark.slow
def test_what_does_not_drain_is_killed_in_time_and_the_exit_says_so(scene):
    run = scene("deaf")
    run.until(lambda: run.pids("learner", "deaf"))
    begun = time.monotonic()
    run.process.terminate()
    code, out = run.ended()
    assert code == ExitCode.FORCED
    assert "learner had to be killed" in out
    assert time.monotonic() - begun < 6
    assert all(gone(pid) for _, _, pid in run.notes())


@pytest.mark.slow
def test_a_second_signal_kills_at_once(scene):
    run = scene("deaf")
    run.until(lambda: run.pids("learner", "deaf"))
    run.process.terminate()
    run.process.send_signal(signal.SIGINT)
    code, out = run.ended()
    assert code == ExitCode.FORCED
    assert "twice" in out or "had to be killed" in out
    assert all(gone(pid) for _, _, pid in run.notes())


async def test_sigterm_that_comes_twice_at_once_is_one_signal(tmp_path):
    """``timeout 1h afterplay run FILE`` sends it to the command, and then to its whole group."""
    said, supervisor = [], Supervisor([], RestartLimits(), RunDirectory(tmp_path), OrphanReaper())
    async with anyio.create_task_group() as group:
        supervisor._group, supervisor._say = group, said.append
        group.start_soon(supervisor._handle_signals)
        await anyio.wait_all_tasks_blocked()
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await anyio.wait_all_tasks_blocked()
        while len(said) < 2:
            await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert said == ["stopping (signal again to stop at once)", "second signal: killing all processes"]
    assert supervisor.machine.reason == "SIGINT twice"


@pytest.mark.slow
def test_killing_the_supervisor_leaves_nothing_not_even_grandchildren(scene):
    run = scene("parent")
    run.until(lambda: run.pids("grandchild") and run.pids("learner", "deaf"))
    run.process.kill()
    run.until(lambda: all(gone(pid) for _, _, pid in run.notes()))
    run.until(lambda: can_lock(run.root))


@pytest.mark.slow
def test_a_directory_belongs_to_one_run(scene):
    run = scene("stays")
    run.until(lambda: len(run.notes()) == 3)
    with pytest.raises(RunIsAlive, match=f"pid {run.process.pid}"), run_lock(RunDirectory(run.root)):
        pass
    run.process.terminate()
    run.ended()
    assert can_lock(run.root)


@pytest.mark.slow
def test_the_live_display_shows_processes_on_a_terminal(scene):
    run = scene("finishes", "terminal")
    code, out = run.ended()
    assert code == ExitCode.FINISHED
    assert "first_right" in out
    assert "waits for" in out


def can_lock(root: Path) -> bool:
    try:
        with run_lock(RunDirectory(root)):
            return True
    except RunIsAlive:
        return False


def test_fresh_removes_a_run_and_nothing_else(tmp_path):
    directory = RunDirectory(tmp_path / "r").create()
    directory.config_file.write_text("run: {name: r}\n")
    directory.model.mkdir()
    empty_directory(directory)
    assert list(directory.path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigurationError, match=r"thesis\.tex"):
        empty_directory(RunDirectory(tmp_path / "mine"))
    (tmp_path / "mine" / "config.yaml").write_text("defaults: [model]\n")
    (tmp_path / "mine" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(ConfigurationError, match=r"no config\.yaml of a run"):
        empty_directory(RunDirectory(tmp_path / "mine"))
    with pytest.raises(ConfigurationError, match=r"got one with a config\.yaml of another program"):
        compare(RunDirectory(tmp_path / "mine"), RunConfig())
    assert (tmp_path / "mine" / "thesis.tex").exists()
    for left in ("source", "logs", "evaluations", "model", ".model.x"):
        (directory.path / left).mkdir()
    (directory.path / "slurm.yaml").write_text("")
    empty_directory(directory)
    assert list(directory.path.iterdir()) == [], "what other commands and refused starts leave"
    empty_directory(directory.create())
    assert list(directory.path.iterdir()) == [], "a start that was ended before it wrote its configuration"
    (directory.create().checkpoints / "mine.pt").write_text("")
    with pytest.raises(ConfigurationError, match="a folder with checkpoints"):
        empty_directory(directory)


def test_a_run_that_begins_does_not_take_over_the_store_of_another(tmp_path):
    directory, store = RunDirectory(tmp_path / "r").create(), tmp_path / "s.sqlite"
    config = RunConfig().updated(stage={"store": store})
    with ReplayStore(store) as opened:
        require_unused_store(config, directory, fresh=True)
        opened.commit(Changes(counters={"orders.issued": 1}))
        with pytest.raises(ConfigurationError, match=r"stage\.store.*with s\.sqlite-wal and s\.sqlite\.ids"):
            require_unused_store(config, directory, fresh=True)
        require_unused_store(config, directory, fresh=False)  # it was killed before its first update
        opened.commit(Changes(meta={"consumed": 3}))
    for fresh in (True, False):
        with pytest.raises(ConfigurationError, match="a run with 3 updates"):
            require_unused_store(config, directory, fresh=fresh)
    directory.metrics_file.touch()
    require_unused_store(config, directory, fresh=False)
    (inside := directory.path / "s.sqlite").touch()
    require_unused_store(config.updated(stage={"store": inside}), directory, fresh=True)  # it goes with the directory


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", b"\xff\x00\n", b""],
)
def test_an_answer_that_is_no_http_is_no_health(answer):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.sendall(answer)
                connection.recv(4096)

        thread = threading.Thread(target=serve)
        thread.start()
        found = check_health(f"http://127.0.0.1:{server.getsockname()[1]}/health")
        thread.join()
    assert found == HealthAnswer(False)


@pytest.mark.slow
def test_states_are_there_for_others_and_logs_have_a_bound(scene):
    run = scene("stays")
    log = run.root / "logs" / "engine-0.log"
    run.until(lambda: log.with_name("engine-0.log.1").exists() and log.stat().st_size <= 4096)
    run.until(lambda: (read_json(run.root / "processes.json") or {}).get("engine-0", {}).get("pid"))
    states = orjson.loads((run.root / "processes.json").read_bytes())
    assert set(states) == {"engine-0", "learner", "actor-0"}
    run.process.terminate()
    run.ended()


async def test_the_number_of_a_process_is_in_the_states_before_it_answers_a_health_check(tmp_path):
    child = SimpleNamespace(pid=7, wait=anyio.sleep_forever, kill=lambda: None, terminate=lambda: None)
    host = SimpleNamespace(start=AsyncMock(return_value=child), check=AsyncMock(side_effect=anyio.sleep_forever))
    directory = RunDirectory(tmp_path).create()
    display = SimpleNamespace(say=print, refresh=lambda: None)
    async with anyio.create_task_group() as group:
        specs = [ProcessSpec(Rule("learner", 1), [], probed=True)]
        supervisor = Supervisor(specs, RestartLimits(), directory, OrphanReaper(), host=host)
        group.start_soon(supervisor.run, display, MetricsTail(directory.metrics_file))
        await anyio.wait_all_tasks_blocked()
        assert read_json(directory.processes_file)["learner"]["pid"] == 7
        group.cancel_scope.cancel()


async def test_the_end_of_the_reaper_is_printed(tmp_path):
    said, reaper = [], OrphanReaper()
    display = SimpleNamespace(say=said.append, refresh=lambda: None)
    directory = RunDirectory(tmp_path).create()
    async with anyio.create_task_group() as group:
        supervisor = Supervisor([], RestartLimits(), directory, reaper)
        group.start_soon(supervisor.run, display, MetricsTail(directory.metrics_file))
        await anyio.wait_all_tasks_blocked()
        reaper.on_restart(-signal.SIGKILL)
        group.cancel_scope.cancel()
    assert len(said) == 1 and "killed by SIGKILL" in said[0] and "runs again" in said[0]
