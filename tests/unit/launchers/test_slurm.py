"""Jobs of SLURM: the script from the plan, the place of each step, and when a job goes back into the queue."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config import RunConfig
from pipeline.config.explain import resolve, taken_ports
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.launchers import slurm
from pipeline.launchers.launcher import Launch
from pipeline.launchers.slurm import JOB, choose_node, goes_back, job_script, step_command
from pipeline.runtime.children import module_command
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.cluster import Cluster
from pipeline.supervisor.history import Resumed, compare, write_start
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan

ROOT = Path(__file__).resolve().parents[3]
TINY, GPU = str(ROOT / "configs" / "tiny.yaml"), str(ROOT / "configs" / "gpu.yaml")
RUN = Path("/runs/a")


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(JOB, raising=False)


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["run", *arguments, "--on", "slurm"], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def options_in(script: str) -> dict[str, str]:
    lines = [shlex.split(line)[1] for line in script.splitlines() if line.startswith("#SBATCH")]
    return dict(line.removeprefix("--").partition("=")[::2] for line in lines)


def test_a_script_asks_for_what_the_plan_needs_and_for_time_to_drain() -> None:
    script = invoke(GPU, "--dry-run", "--nodes", "2", "--gpus", "4", "--set", "checkpoint.drain_seconds_max=9.5")
    options = options_in(script)
    chosen = plan(load(GPU, environment={}), Inventory(tuple(Node(f"n{i}", tuple("0123")) for i in range(2))))
    cores = [sum(p.cpus for p in chosen.places if p.node == node and not p.rule.once) for node in ("n0", "n1")]
    assert options["nodes"] == "2" and options["gpus-per-node"] == "4"
    assert options["cpus-per-task"] == str(max(cores))
    assert options["signal"] == "B:TERM@70"
    assert {"requeue", "no-kill"} <= options.keys()
    assert script.splitlines()[-1].startswith(f"exec {sys.executable} -P -m pipeline.cli.app run ")


def test_arguments_for_sbatch_come_last_so_that_they_win() -> None:
    arguments = ["--partition=gpu", "--comment=a b", "--cpus-per-task=99"]
    result = CliRunner().invoke(app, ["run", TINY, "--on", "slurm", "--dry-run", "--", *arguments])
    lines = [line for line in result.output.splitlines() if line.startswith("#SBATCH")]
    assert [shlex.split(line)[1] for line in lines[-3:]] == arguments


def test_variables_of_the_shell_that_submits_do_not_win_over_options() -> None:
    """sbatch hands them on, and the copy of the run file has the options."""
    *lines, last = invoke(TINY, "--dry-run").splitlines()
    assert last.startswith("exec ")
    for more in ({"AFTERPLAY__RUN__TOTAL_STEPS": "3"}, {}):
        environment = {"PATH": os.environ["PATH"], "AFTERPLAY_LOG_LEVEL": "DEBUG"} | more
        script = "\n".join([*lines, "env"])
        done = subprocess.run(["bash", "-e", "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert "AFTERPLAY_LOG_LEVEL=DEBUG" in done.stdout and "TOTAL_STEPS" not in done.stdout


def test_a_job_without_gpus_asks_for_none() -> None:
    assert "gpus-per-node" not in options_in(invoke(TINY, "--dry-run", "--nodes", "2"))


def test_what_does_not_fit_is_refused_before_a_job_waits_for_it() -> None:
    with pytest.raises(ConfigurationError, match="expected a GPU"):
        invoke(GPU, "--dry-run", "--nodes", "2")
    with pytest.raises(ConfigurationError, match="SLURM chooses the nodes"):
        invoke(GPU, "--dry-run", "--nodes", "a:8,b:8")


def test_without_sbatch_one_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"expected the program sbatch .* --dry-run"):
        invoke(TINY)


def stand_in_for_sbatch(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    sbatch = folder / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n{text}\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("fresh", [True, False])
def test_a_job_that_is_refused_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    stand_in_for_sbatch(tmp_path, monkeypatch, "echo Invalid partition name specified >&2; exit 1")
    directory = RunDirectory(tmp_path / "runs" / "tiny").create()
    config = load(TINY, [f"run.directory={tmp_path / 'runs'}"], environment={})
    write_start(directory, config, Resumed(0, {}))
    (directory.checkpoints / "u000001").mkdir()
    (directory.checkpoints / "u000001" / "state.json").write_text("{}")
    more = ["--fresh"] if fresh else ["--set", "learner.optimizer=adamw_8bit"]
    said = "Invalid partition" if fresh else "learner.optimizer is adamw_8bit, but"
    with pytest.raises(ConfigurationError, match=said):
        invoke(TINY, "--set", f"run.directory={tmp_path / 'runs'}", *more)
    assert not list(directory.path.glob("slurm*")) and compare(directory, config).step == 1


def test_a_submitted_run_is_a_copy_that_later_changes_do_not_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_for_sbatch(tmp_path, monkeypatch, "echo 17")
    output = invoke(TINY, "--set", f"run.directory={tmp_path / 'runs'}")
    run = tmp_path / "runs" / "tiny"
    assert "submitted as job 17" in output and "scancel 17" in output
    copy = load(run / "slurm.yaml", environment={})
    assert copy.run.path == run
    assert shlex.quote(str(run / "slurm.yaml")) in (run / "slurm.sh").read_text().splitlines()[-1]
    assert "submitted" in invoke(TINY, "--set", f"run.directory={tmp_path / 'runs'}", "--fresh"), "it never started"


def test_a_job_within_a_job_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, "3")
    with pytest.raises(ConfigurationError, match="already job 3"):
        invoke(TINY, "--nodes", "2")


def test_only_a_batch_job_that_nobody_cancelled_goes_back_into_the_queue() -> None:
    facts = {"JobState": "RUNNING", "Requeue": "1", "BatchFlag": "1"}
    assert goes_back(facts)
    for changed in ({"JobState": "CANCELLED"}, {"JobState": "PENDING"}, {"Requeue": "0"}, {"BatchFlag": "0"}):
        assert not goes_back(facts | changed)


class Controller:
    """Answers of SLURM's programs about a job that has the nodes ``n1`` and ``n2``; ``restarts``: how often SLURM has
    started it again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
        self.restarts = restarts
        self.facts = "Requeue=1 BatchFlag=1 BatchHost=n1"
        self.told: list[tuple[str, ...]] = []
        self.fresh: bool | None = None
        """The option ``fresh`` of the supervisor in this start."""
        monkeypatch.setenv(slurm.RESTARTS, "")  # whatever a job sets is undone
        monkeypatch.delenv(slurm.RESTARTS)
        monkeypatch.setattr(slurm, "command_output", self.answer)

    def answer(self, name: str, *arguments: str, seconds_max: float | None = None) -> str:
        if "job" in arguments:
            return f"JobState=RUNNING {self.facts} Restarts={self.restarts} ReqNodeList=n9 NodeList=n[1-2]"
        self.told.append((name, *arguments))
        return "n1\nn2\n" if "hostnames" in arguments else "7.3 actor-1@/runs/a\n7.4 actor-1@/runs/b\n"


def run_as(
    controller: Controller,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[[], ExitCode],
    folder: Path,
    fresh: bool = False,
) -> bool:
    """A job whose supervisor does ``run``; True if it went back into the queue."""

    def told(_: RunConfig, fresh: bool, **__: Any) -> ExitCode:
        controller.fresh = fresh
        return run()

    monkeypatch.setattr(slurm, "job_inventory", lambda: Inventory((Node("n1"), Node("n2"))))
    monkeypatch.setattr(slurm, "run", told)
    monkeypatch.setattr(slurm, "start_watch", lambda *_: None)
    before = signal.getsignal(signal.SIGTERM)
    try:
        slurm.run_job("7", Launch(load(TINY, [f"run.directory={folder}"], environment={}), fresh))
    finally:
        signal.signal(signal.SIGTERM, before)
    return ("scontrol", "requeue", "7") in controller.told


def test_a_start_of_a_job_that_hung_leaves_the_next_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job has the same number, and steps with the same names."""
    controller = Controller(monkeypatch, restarts=0)

    def hangs() -> ExitCode:
        assert slurm.node_names(slurm.job_facts("7")) == ["n1", "n2"]
        assert slurm.signal_steps("7", "actor-1@/runs/a", "TERM")
        assert [told for told in controller.told if told[0] == "scancel"] == [("scancel", "--signal=TERM", "7.3")]
        controller.restarts, controller.told = 1, []
        assert slurm.job_facts("7") == {} and not slurm.signal_steps("7", "actor-1@/runs/a", "KILL")
        return ExitCode.FINISHED

    assert not run_as(controller, monkeypatch, hangs, tmp_path)
    assert controller.told == []


def test_a_job_that_is_preempted_before_its_run_begins_goes_back_into_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starts() -> ExitCode:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError

    assert run_as(Controller(monkeypatch, restarts=0), monkeypatch, starts, tmp_path)


@pytest.mark.parametrize(("restarts", "fresh"), [(0, True), (1, False)])
def test_a_job_that_was_started_again_keeps_the_run_that_its_first_start_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, fresh: bool
) -> None:
    """The user's own batch script says ``--fresh`` at each start."""
    controller = Controller(monkeypatch, restarts)
    run_as(controller, monkeypatch, lambda: ExitCode.FINISHED, tmp_path, fresh=True)
    assert controller.fresh is fresh


@pytest.mark.parametrize(("restarts", "waits"), [(0, False), (1, True)])
def test_a_job_that_was_started_again_waits_for_the_lock_of_its_first_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: int, waits: bool
) -> None:
    assert run_as(Controller(monkeypatch, restarts), monkeypatch, lambda: ExitCode.BUSY, tmp_path) == waits


def test_a_run_that_has_finished_ends_its_job_without_the_controller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finishes() -> ExitCode:
        directory = RunDirectory(tmp_path / "tiny").create()
        directory.finished_file.write_text("{}")
        monkeypatch.setattr(slurm, "command_output", unreachable)
        return ExitCode.FINISHED

    assert not run_as(Controller(monkeypatch, restarts=0), monkeypatch, finishes, tmp_path)


def unreachable(*_: Any, **__: Any) -> Any:
    raise ConfigurationError("scontrol -o show failed: slurm_load_jobs error: Unable to contact slurm controller")


@pytest.mark.parametrize(("away", "answers"), [(0.9, True), (1.1, False)])
def test_the_controller_of_a_job_is_awaited_while_it_is_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], away: float, answers: bool
) -> None:
    clock = [0.0]

    def ask(*_: Any, **__: Any) -> Any:
        if clock[0] < away * slurm.AWAY_SECONDS_MAX:
            unreachable()
        return subprocess.CompletedProcess([], 0, "JobState=RUNNING", "")

    monkeypatch.setattr(slurm, "require_program", lambda name, _: name)
    monkeypatch.setattr(slurm, "run_program", ask)
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + 60 * seconds))
    if answers:
        assert slurm.command_output("scontrol", "show", "job", "7") == "JobState=RUNNING"
    else:
        with pytest.raises(ConfigurationError, match="Unable to contact"):
            slurm.command_output("scontrol", "show", "job", "7")
    assert capsys.readouterr().out.count("waiting for SLURM's controller") == 1
    clock[0] = 0.0
    with pytest.raises(ConfigurationError):
        slurm.command_output("scontrol", "show", "job", "7", seconds_max=5.0)
    assert clock[0] <= 60.0, "a drain has little time"


@pytest.mark.parametrize("folder", [".", "lost"], ids=["", "without the log's folder"])
@pytest.mark.parametrize(
    ("facts", "restarts", "told"),
    [
        ("Requeue=1 BatchFlag=1 BatchHost=n1", 0, None),
        ("Requeue=1 BatchFlag=1 BatchHost=n0", 1, None),
        ("Requeue=1 BatchFlag=1 BatchHost=n0", 0, ("scontrol", "requeue", "7")),
        ("Requeue=0 BatchFlag=1 BatchHost=n0", 0, ("scancel", "7")),
    ],
    ids=["it has it", "another start", "lost", "lost, --no-requeue"],
)
def test_a_job_without_its_first_node_does_not_stay(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    facts: str,
    restarts: int,
    told: tuple[str, ...] | None,
    folder: str,
) -> None:
    log = tmp_path / folder / "slurm.log"
    controller = Controller(monkeypatch, restarts)
    controller.facts = facts
    monkeypatch.setenv(slurm.JOB, "7")
    monkeypatch.setenv(slurm.RESTARTS, "0")
    looks = iter([None])

    def sleep(_: float) -> None:
        next(looks)  # StopIteration ends the watch

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(StopIteration):
        slurm.watch(log)
    assert [call for call in controller.told if call[-1] == "7"] == ([told] if told else [])
    assert log.exists() == (told is not None and log.parent.exists())


@pytest.mark.parametrize(
    ("alive", "pinned", "chosen"),
    [
        (["n1", "n2"], False, "n2"),
        (["n1"], False, "n1"),
        (["n1"], True, None),
        (["n1", "n2"], True, "n2"),
        ([], False, None),
    ],
)
def test_a_process_of_a_lost_node_moves_unless_it_needs_its_gpus(
    alive: list[str], pinned: bool, chosen: str | None
) -> None:
    assert choose_node(("n2", "n1"), alive, pinned) == chosen


def test_processes_of_a_lost_node_are_spread_over_the_others() -> None:
    inventory = Inventory(tuple(Node(f"n{i}", address=f"10.0.0.{i}") for i in range(4)))
    config = load(TINY, ["actor.replicas=12"], environment={})
    places = [p for p in plan(config, inventory).places if p.role == "actor" and p.node == "n3"]
    seconds = [step_command(inventory, RUN, place, ["x"])[6].split(",")[1] for place in places]
    assert len(set(seconds)) == 3
    command = step_command(inventory, RUN, places[0], ["x", "y"])
    assert command[5:8] == [f"{places[0].name}@{RUN}", "n3=10.0.0.3,n0=10.0.0.0,n1=10.0.0.1,n2=10.0.0.2", "free"]
    assert command[-3:] == ["--", "x", "y"]


def test_a_process_with_gpus_is_pinned_and_sees_only_them() -> None:
    inventory = Inventory((Node("n0", ("0", "1")), Node("n1", ("0", "1"))))
    engine = next(p for p in plan(load(GPU, environment={}), inventory).places if p.role == "engine")
    command = step_command(inventory, RUN, engine, ["x"])
    assert command[7] == "pinned" and f"CUDA_VISIBLE_DEVICES={','.join(engine.gpus)}" in command


def test_the_parts_of_an_engine_on_several_nodes_are_pinned_to_them(tmp_path: Path) -> None:
    config = load(GPU, ["placement.tensor_parallel=4"], environment={})
    inventory = Inventory(tuple(Node(f"n{i}", ("0", "1"), address=f"10.0.0.{i}") for i in range(3)))
    chosen = plan(config, inventory).fitting()
    commands = {p.name: step_command(inventory, RUN, p, p.command("FILE")) for p in chosen.places if p.role == "engine"}
    assert {name: (c[5], c[6].split("=")[0], c[7]) for name, c in commands.items()} == {
        "engine-0": (f"engine-0@{RUN}", "n1", "pinned"),
        "engine-0-node-1": (f"engine-0-node-1@{RUN}", "n2", "pinned"),
    }
    assert all("--master-addr=10.0.0.1" in command for command in commands.values())
    script = job_script(chosen, (), tmp_path)
    assert "--nodes=3" in script and "--gpus-per-node=2" in script


def test_an_engine_stays_where_others_look_for_it() -> None:
    config = load(TINY, ["engine.replicas=2"], environment={})
    for second, kind in (("10.0.0.1", "pinned"), ("127.0.0.1", "free")):
        inventory = Inventory((Node("n0", address="127.0.0.1"), Node("n1", address=second)))
        place = next(p for p in plan(config, inventory).places if p.name == "engine-1")
        assert step_command(inventory, RUN, place, ["x"])[7] == kind


def test_a_port_of_an_engine_is_free_on_its_own_node() -> None:
    """Whatever is in use on this machine, on which the head node's process decides."""
    ports = range(1024, 65_536)
    free = range(22_000, 30_000)
    nodes = (Node("n0", taken_ports=tuple(ports)), Node("n1", taken_ports=tuple(p for p in ports if p not in free)))
    cluster = Cluster(Inventory(nodes), lambda place, command: command)
    config = load(TINY, ["engine.replicas=2"], environment={})
    places = [replace(p, node="n1") for p in plan(config, Inventory(nodes)).places]
    taken = cluster.taken_ports(places)
    assert taken is not None
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        in_use_here = listener.getsockname()[1]
        set_by_hand = config.model_copy(update={"engine": config.engine.model_copy(update={"port": in_use_here})})
        with pytest.raises(ConfigurationError, match=f"port {in_use_here} on each node of an engine"):
            resolve(set_by_hand, {in_use_here})
        assert resolve(set_by_hand, frozenset()).engine.port == in_use_here
    assert all(resolve(config, taken).engine.port in free[:-1] for _ in range(20))
    assert Cluster(Inventory((Node("n0"),)), lambda place, command: command).taken_ports(places) == frozenset()
    assert Cluster(Inventory((Node("n1"),)), lambda place, command: command).taken_ports(places) is None


def test_a_node_knows_the_ports_where_something_listens() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert port in taken_ports()
    assert min(taken_ports(), default=1024) >= 1024


def test_a_node_describes_itself_in_lines_that_srun_does_not_mix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = tuple(range(1024, 65_536))
    monkeypatch.setattr(slurm, "taken_ports", lambda: ports)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    slurm.describe_node()
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) < 1024
    said = f"the prolog of this cluster says hello\n{printed}"
    monkeypatch.setattr(slurm, "command_output", lambda name, *_: said if name == "srun" else "NodeAddr=10.0.0.1")
    (node,) = slurm.job_inventory().nodes
    assert (node.name, node.address, node.taken_ports) == ("n1", "10.0.0.1", ports) and node.cpus


STAND_INS = {
    "squeue": '[ -e "$RECORD.asked" ] || { touch "$RECORD.asked"; exit 1; }; echo "7.3 actor-1"',
    "scontrol": """[ ! -e "$RECORD.away" ] || { echo Unable to contact slurm controller >&2; exit 1; }
case "$*" in *job*) echo NodeList='n[1-2]';; *) printf 'n1\\nn2\\n';; esac""",
    "scancel": 'echo "$@" >> "$RECORD"; pid=$(cat "$RECORD.pid"); [ -z "$pid" ] || kill -TERM "$pid"',
    "srun": 'while [ "$1" != env ]; do shift; done; echo $$ > "$RECORD.pid"; exec "$@"',
}
"""Programs of SLURM, for one step that is a process here. The controller does not answer at first, nor while there is
``$RECORD.away``."""


class Step:
    """A step whose process ends with 9 on SIGTERM and with 8 on SIGINT."""

    def __init__(self, folder: Path) -> None:
        for name, text in STAND_INS.items():
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        self.record, self.away, ready = folder / "record", folder / "record.away", folder / "ready"
        (folder / "record.pid").write_text("")
        os.mkfifo(ready)
        program = "import os, signal; signal.signal(15, lambda *_: os._exit(9)); "
        program += f"signal.signal(2, lambda *_: os._exit(8)); os.write(os.open({str(ready)!r}, os.O_WRONLY), b'r'); "
        program += "signal.pause()"
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "RECORD": str(self.record), JOB: "7"}
        environment["PYTHONPATH"] = str(ROOT)
        step = [*module_command("pipeline.launchers.slurm", "run"), "actor-1", "n1=127.0.0.1", "free", "A=1", "--"]
        command = [*step, sys.executable, "-c", program]
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)
        self.output = ready.open()
        assert self.output.read(1) == "r"

    def end(self) -> int:
        """The exit code of what runs the step, once the process of the step has ended too."""
        with self.output:
            assert not self.output.read()
        return self.process.wait(120)


@pytest.mark.slow
def test_sigterm_reaches_the_process_of_a_step_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.process.terminate()
    assert step.end() == 9
    assert step.record.read_text().splitlines() == ["--signal=KILL 7.3", "--signal=TERM 7.3"]


@pytest.mark.slow
def test_a_step_drains_while_the_controller_is_away(tmp_path: Path) -> None:
    step = Step(tmp_path)
    step.away.touch()
    step.process.terminate()
    assert step.end() == 8


@pytest.mark.slow
def test_no_process_of_a_step_outlives_what_runs_the_step(tmp_path: Path) -> None:
    step = Step(tmp_path)
    os.killpg(step.process.pid, signal.SIGKILL)
    assert step.end() == -signal.SIGKILL
