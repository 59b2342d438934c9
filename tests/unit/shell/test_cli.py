"""The command line teaches, refuses with the remedy, and does what it says."""

import errno
import fcntl
import io
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import get_type_hints

import orjson
import pytest
import typer
from rich.console import Console
from rich.live import Live
from typer.testing import CliRunner

from learner.process.preflight import with_options
from pipeline.cli.app import allow_descriptors, app
from pipeline.cli.status import is_alive
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.runtime.engine_addresses import EngineRegistry
from pipeline.runtime.folders import set_aside
from pipeline.runtime.plugins import load_main
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically, write_json_atomically
from pipeline.supervisor.display import Display
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from pipeline.supervisor.processes import HealthAnswer
from pipeline.supervisor.restarts import Machine, Rule
from pipeline.supervisor.run import run_lock
from pipeline.views.plots import curve_style, draw, figure
from pipeline.views.step_lines import MetricsTail, Pace, describe, read_lines, step_of
from pipeline.views.tables import LastingConsole

ROOT = Path(__file__).resolve().parents[3]
TINY, GPU = str(ROOT / "configs" / "tiny.yaml"), str(ROOT / "configs" / "gpu.yaml")


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), catch_exceptions=True)


def test_help_reads_well_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 80)
    _, begun = invoke("--help").stdout.split("Start here")
    first = begun.partition("Change the configuration")[0].strip().splitlines()
    assert all(line.lstrip().startswith("afterplay ") for line in first), "no example is broken"
    paragraph = invoke("compare", "--help").stdout.partition("Each run is ")[2].partition("\n \n")[0]
    assert "finished runs are read, unfinished ones resume." in paragraph, "a line of the source is no line here"
    for command in ("inspect", "import", "export"):
        shown = invoke("replay", command, "--help").stdout.partition("╭")[0].splitlines()
        assert not [line for line in shown if re.match(r" \S{1,12} *$", line)], "no word is left alone"


def test_help_tells_every_exit_code():
    shown = " ".join(invoke("--help").stdout.split()).partition("Exit codes")[2]
    assert [int(code) for code in re.findall(r"(?:^|·) (\d) ", shown)] == list(ExitCode)


def line(step, **more):
    return {
        "step": step,
        "reward_mean": 0.1 * step,
        "reward_std": 0.2,
        "ratio_mean": 1.0,
        "ratio_min": 0.8,
        "ratio_max": 1.2,
        "ess_ratio": 0.98,
        "kl_k3": 0.001,
        "entropy": 1.5,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "tokens_per_second": 1234.5,
        "seconds": {"wait": 0.5, "forward": 0.2, "backward": 0.4},
        "signals": {"first_right": 0.25 + 0.1 * step},
        **more,
    }


def write_lines(directory, *lines):
    directory.create()
    directory.metrics_file.write_bytes(b"".join(orjson.dumps(x) + b"\n" for x in lines))


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "engine",
        "actor",
        "replay",
        "learner",
        "prepare",
        "keys",
        "status",
        "plot",
        "compare",
        "config show",
        "env list",
    ],
)
def test_every_command_explains_itself(command):
    result = invoke(*command.split(), "--help")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) > 6


def numbers_of(command):
    """Each option of a command and of its subcommands whose value is a real number, with its command."""
    for inner in getattr(command, "commands", {}).values():
        yield from numbers_of(inner)
    kinds = get_type_hints(command.callback) if command.callback else {}
    yield from ((command, p) for p in command.params if kinds.get(p.name) in (float, float | None))


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e300"])
def test_no_option_takes_a_number_without_end(text):
    options = list(numbers_of(typer.main.get_command(app)))
    assert len(options) >= 11
    for command, option in options:
        with pytest.raises(typer.BadParameter):
            option.process_value(typer.Context(command), text)


def test_a_checked_file_is_summed_up():
    result = invoke("config", "check", TINY, "--set", "groups.n_rollout=4")
    assert result.exit_code == 0
    assert "groups of 4 rollouts" in result.output


def test_what_show_prints_is_a_run_file_with_equal_meaning(tmp_path):
    for options in ([], ["--plain"]):
        shown = invoke("config", "show", TINY, "--set", "run.seed=7", *options).output
        (tmp_path / "shown.yaml").write_text(shown)
        again = with_options(load(tmp_path / "shown.yaml", environment={}))
        assert again == with_options(load(TINY, ["run.seed=7"], environment={}))


def test_an_example_is_named_with_an_at_sign_and_finds_its_data_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load("@tiny", environment={}) == load(TINY, environment={})
    tasks = load("@questions", environment={}).environments["questions"].tasks_from
    assert Path(tasks.path).is_file()
    with pytest.raises(ConfigurationError, match=r"got @tinny; there are .*@tiny"):
        load("@tinny", environment={})


def test_the_version_is_printed():
    assert re.fullmatch(r"afterplay \d+\.\d+\.\d+\n", invoke("--version").output)


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-8"])
def test_a_locale_without_our_characters_ends_no_command(tmp_path, encoding):
    (tmp_path / "run.yaml").write_text(
        'environments: {a: {name: arithmetic}}\nmodel: {chat_template: "π.jinja"}', "utf-8"
    )
    command = [sys.executable, "-m", "pipeline.cli.app", "config", "show", str(tmp_path / "run.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    found = subprocess.run(command, capture_output=True, env=environment, cwd=ROOT, check=False)
    assert found.returncode == 0, found.stderr
    assert ("π.jinja" if encoding == "utf-8" else "?.jinja") in found.stdout.decode(encoding)


def test_two_runs_are_drawn_over_each_other(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(orjson.dumps(line(1)) + b"\n")
    (tmp_path / "none").mkdir()
    picture = tmp_path / "both.png"
    assert invoke("plot", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(picture)).exit_code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert invoke("plot", str(tmp_path / "a"), str(tmp_path / "none")).exit_code != 0


def test_no_name_is_taken_for_a_formula(tmp_path):
    odd = "$_^$"
    for name in ("a", odd):
        write_lines(RunDirectory(tmp_path / name), line(1, signals={odd: 1.0}))
    assert draw(tmp_path / odd / "metrics.jsonl", tmp_path / "one.png") is None
    assert invoke("plot", str(tmp_path / "a"), str(tmp_path / odd), "-o", str(tmp_path / "both.png")).exit_code == 0


def test_a_picture_has_the_form_that_its_name_ends_in(tmp_path):
    write_lines(RunDirectory(tmp_path), line(1))
    assert invoke("plot", str(tmp_path), "-o", str(tmp_path / "curves.pdf")).exit_code == 0
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")
    refused = invoke("plot", str(tmp_path), "-o", str(tmp_path / "curves.txt"))
    assert isinstance(refused.exception, ConfigurationError) and "curves.txt" in str(refused.exception)


def test_no_two_runs_of_a_picture_look_alike():
    assert len({tuple(curve_style(number).values()) for number in range(36)}) == 36


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", TINY, "--set", "run.sed=1"], "--set run.sed=1: unknown key run.sed; did you mean run.seed?"),
        (
            ["--log-format", "xml", "run", TINY],
            "invalid value for '--log-format': 'xml' is not one of 'text', 'json'; see afterplay --help",
        ),
    ],
)
def test_a_refusal_is_one_message_and_exit_code_2(arguments, message):
    result = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.app", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == ExitCode.CONFIGURATION
    assert result.stderr == f"afterplay: {message}\n"


def test_environments_are_listed():
    output = invoke("env", "list").output
    assert "arithmetic" in output
    assert "number_guess" in output


def test_keys_are_made_once(tmp_path):
    assert invoke("keys", str(tmp_path / "k")).exit_code == 0
    assert (tmp_path / "k" / "server.key").exists()
    before = {path.name: path.read_bytes() for path in (tmp_path / "k").iterdir()}
    assert "actor-7.key_secret" in before and "actor-8.key" not in before
    assert invoke("keys", str(tmp_path / "k"), "--actors", "9").output.startswith("1 new CURVE keys")
    assert before.items() <= {path.name: path.read_bytes() for path in (tmp_path / "k").iterdir()}.items()


def test_status_refuses_what_is_no_run_and_tells_of_one_without_a_store(tmp_path):
    assert isinstance(invoke("status", str(tmp_path)).exception, ConfigurationError)
    directory = RunDirectory(tmp_path / "r").create()
    directory.config_file.write_text("run: {total_steps: 9}\nenvironments: {guess: {name: number_guess}}")
    write_lines(directory, line(0), line(1))
    (directory.checkpoints / "u000003").mkdir()
    set_aside(directory.checkpoints / "u000003", {"sentence": "checkpoint u000003 is damaged (x)"})
    result = invoke("status", str(directory.path))
    assert result.exit_code == 0
    told = " ".join(result.output.split())  # the lines of long paths are wrapped
    assert "checkpoint u000003 is damaged (x)" in told
    assert "not running" in told and "step 1/9 reward 0.100 first_right 0.350 ratio 1.000" in told


def test_a_run_whose_roles_are_started_one_by_one_has_its_configuration_and_its_end(tmp_path, monkeypatch):
    place = ["--set", f"run.directory={tmp_path}", "--set", "run.name=r"]
    directory, started = RunDirectory(tmp_path / "r"), []
    monkeypatch.setattr("pipeline.cli.roles.load_main", lambda path: lambda *_: SimpleNamespace(path="model"))
    monkeypatch.setattr("pipeline.runtime.logs.configure_logging", lambda *_: None)  # onto a stream of this test
    assert invoke("prepare", TINY, *place).exit_code == 0
    assert "not running" in " ".join(invoke("status", str(directory.path)).output.split())

    def run_role(name, index, config, main, ends_with_run):
        started.append((name, ends_with_run))
        write_json_atomically(directory.process_file(name), {"pid": 1})
        return 0

    monkeypatch.setattr("pipeline.runtime.process.run_role", run_role)
    monkeypatch.setattr(os, "_exit", sys.exit)
    own = str(directory.config_file)  # what the supervisor gives to its roles
    for command in (["replay", "start"], ["learner"], ["actor", "--index", "0"]):
        invoke(*command, TINY, *place)
    told = " ".join(invoke("status", str(directory.path)).output.split())
    assert "roles that were started one by one: actor-0, learner, replay" in told
    for command in (["replay", "start"], ["learner"], ["actor", "--index", "1"]):
        invoke(*command, own)
    invoke("replay", "start", "--stay", TINY, *place)
    assert [ends for _, ends in started] == [True, False, True, *[False] * 4]
    steps = load(TINY, environment={}).run.total_steps
    for made, finished in ((steps - 1, False), (steps, True)):
        write_lines(directory, line(made))
        invoke("learner", TINY, *place)
        assert directory.has_finished(steps) is finished
    ended = []
    monkeypatch.setattr("pipeline.cli.roles.load_main", lambda path: ended.append)
    assert invoke("learner", TINY, *place, "--job", "mine").exit_code == 0 and ended == ["mine"]
    assert invoke("learner", TINY, *place, "--job", "-").exit_code == 0 and ended == ["mine"]
    longer = [*place, "--set", f"run.total_steps={steps + 1}"]
    assert invoke("learner", TINY, *longer, "--job", "mine").exit_code == 143, "stopped, and no job is done"
    assert invoke("learner", TINY, *longer).exit_code == 0 and ended == ["mine"]
    assert not directory.finished_file.exists(), "continues"
    (directory.checkpoints / "u000003").mkdir()
    (directory.checkpoints / "u000003" / "state.json").write_text("{}")
    refused = invoke("learner", TINY, *place, "--set", "model.tiny.hidden_size=96").exception
    assert isinstance(refused, ConfigurationError) and "its weights belong to one model" in str(refused)


def test_status_names_the_engines_that_joined_and_those_that_are_gone(tmp_path):
    directory = RunDirectory(tmp_path / "run").create()
    directory.config_file.write_text("environments: {guess: {name: number_guess}}")
    registry = EngineRegistry(directory.engines)
    registry.announce("engine-3", "http://b:8103")
    registry.announce("engine-4", "http://c:8104")
    hour_ago = time.time() - 3600
    os.utime(directory.engines / "engine-4.json", (hour_ago, hour_ago))
    shown = invoke("status", str(directory.path)).output
    assert re.search(r"engine-3 at http://b:8103: announced \d+ s ago", shown)
    assert re.search(r"engine-4 at http://c:8104: not heard from for \d+ s, counts as gone", shown)


def test_a_run_is_alive_while_its_directory_is_claimed(tmp_path):
    directory = RunDirectory(tmp_path)
    assert not is_alive(directory)
    with run_lock(directory):
        assert is_alive(directory)
    assert not is_alive(directory)


def test_a_run_in_a_folder_that_may_only_be_read_has_a_status(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run").create()
    directory.config_file.write_text("environments: {guess: {name: number_guess}}")
    with run_lock(directory):
        pass
    opened = os.open

    def refusing(path, flags, *rest, **more):
        if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(str(tmp_path)):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refusing)
    assert "not running" in " ".join(invoke("status", str(directory.path)).output.split())


def test_a_run_whose_lock_cannot_be_tested_has_a_status(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path / "run").create()
    directory.config_file.write_text("environments: {guess: {name: number_guess}}")
    directory.lock_file.touch()

    def refuse(file, how):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = " ".join(invoke("status", str(directory.path)).output.split())
    assert "whether it is alive cannot be seen: Operation not supported (its file system has no locks" in said


def test_the_picture_is_drawn_from_full_partial_and_odd_lines(tmp_path, monkeypatch):
    directory = RunDirectory(tmp_path)
    write_lines(
        directory, line(0), line(1), line(1, reward_mean=None), {"step": 2}, line(3, seconds=None, signals=None)
    )
    result = invoke("plot", str(tmp_path))
    assert (result.exit_code, result.output.strip()) == (0, str(tmp_path / "curves.png"))
    assert directory.curves_file.read_bytes().startswith(b"\x89PNG")
    elsewhere = tmp_path / "elsewhere" / "one.png"
    elsewhere.parent.mkdir()
    with monkeypatch.context() as patch:
        titles = []
        patch.setattr("pipeline.views.plots.figure", lambda file, name: titles.append(name) or figure(file, name))
        assert invoke("plot", str(tmp_path), "-o", str(elsewhere)).output.strip() == str(elsewhere)
    assert elsewhere.read_bytes().startswith(b"\x89PNG") and titles == [tmp_path.name]


@pytest.mark.parametrize(("n", "title"), [(9, "environment signals"), (12, "environment signals (9 of 12)")])
def test_the_picture_says_how_many_signals_it_leaves_out(tmp_path, n, title):
    directory = RunDirectory(tmp_path)
    write_lines(directory, line(0, signals={f"s{i:02d}": float(i) for i in range(n)}))
    panel = figure(directory.metrics_file, "run").axes[1]
    assert panel.get_title() == title
    assert [curve.get_label() for curve in panel.get_lines()] == [f"s{i:02d}" for i in range(9)]


def test_a_run_without_steps_has_no_picture_and_says_so(tmp_path):
    assert "no steps yet" in str(draw(tmp_path / "metrics.jsonl", tmp_path / "curves.png"))
    assert isinstance(invoke("plot", str(tmp_path)).exception, ConfigurationError)


def test_a_terminal_that_is_gone_ends_no_display(monkeypatch):
    monkeypatch.setattr("pipeline.supervisor.display.Live", partial(Live, auto_refresh=False))

    class Terminal(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    terminal = Terminal()
    with Display("run", 2, {}, {}, Console(file=terminal, force_terminal=True)) as display:
        terminal.gone = True
        display.say("stopping")


def test_a_console_whose_terminal_is_gone_says_no_more_and_raises_nothing():
    terminal, ours = pty.openpty()
    with open(ours, "w") as output:
        console = LastingConsole(file=output)
        os.close(terminal)
        console.print("the run has ended")
        console.print("its directory")


def test_a_console_in_a_file_speaks_again_when_its_disk_does(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "Input/output error")

    with (tmp_path / "out").open("w") as output:
        console = LastingConsole(file=output)
        with monkeypatch.context() as faulty, pytest.raises(OSError, match="Input/output"):
            faulty.setattr(Console, "print", refuse)
            console.print("nobody reads this")
        console.print("going on")
    assert (tmp_path / "out").read_text() == "going on\n"


def test_the_tail_gives_each_whole_line_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read() == []
    path.write_bytes(b'{"step": 0}\n{"st')
    assert tail.read() == [{"step": 0}]
    with path.open("ab") as file:
        file.write(b'ep": 1}\nnot json\n[1]\n')
    assert tail.read() == [{"step": 1}]
    assert tail.read() == []
    path.write_bytes(b'{"step": 0}\n')
    assert tail.read() == [{"step": 0}]


def test_a_file_of_equal_length_that_takes_the_place_of_another_is_read(tmp_path):
    """The second of two files that follow each other often has the inode that the one before them had."""
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    for n in range(1, 9):
        write_bytes_atomically(path, b"")
        write_bytes_atomically(path, b'{"step": 1, "reward_mean": %d}\n' % n)
        assert tail.read() == [{"step": 1, "reward_mean": n}]


def test_a_learner_that_resumes_brings_back_only_the_steps_that_it_makes_again(tmp_path):
    directory = RunDirectory(tmp_path)
    first, second, again, third = (line(s, finished=t) for s, t in ((0, 1.5), (1, 2.5), (1, 7.5), (2, 8.5)))
    write_lines(directory, first, second)
    tail = MetricsTail(directory.metrics_file)
    assert tail.read() == [first, second]
    directory.metrics_file.unlink()
    write_lines(directory, first)
    assert tail.read() == [] and tail.last == first
    write_lines(directory, first, again, third)
    assert tail.read() == [again, third]


def test_a_step_that_was_made_again_counts_once(tmp_path):
    directory = RunDirectory(tmp_path)
    write_lines(directory, line(0), line(1), line(1, reward_mean=9.0), line(2))
    assert [(x["step"], x["reward_mean"]) for x in read_lines(directory.metrics_file)][1] == (1, 9.0)


def test_the_end_is_reached_with_the_last_step():
    lines = (None, {}, {"step": 2}, {"step": 3}, {"step": 4})
    assert [step_of(x) >= 3 for x in lines] == [False, False, False, True, True]
    assert describe({"step": 1}, 3) == "step 1/3"


def test_a_role_that_cannot_be_imported_is_a_clear_refusal():
    with pytest.raises(ConfigurationError, match="expected nowhere:main to be importable"):
        load_main("nowhere:main")


def test_without_a_terminal_a_silence_is_broken_by_what_everything_waits_for(monkeypatch):
    machine = Machine((Rule("engine-0", 3), Rule("learner", 1), Rule("actor-0", 0)))
    machine.begin(0)
    answers = {
        "learner": HealthAnswer(True, "waiting for engines", "one that serves version 0"),
        "actor-0": HealthAnswer(True, "playing", "", {"playing": 64, "unacknowledged": 0}),
    }
    now = [0.0]
    monkeypatch.setattr("pipeline.supervisor.display.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    display = Display("run", 2, machine.processes, answers, console, "vLLM")
    display.refresh()
    now[0] = 16.0
    display.refresh()
    display.refresh()
    assert console.file.getvalue().splitlines() == [
        "0:00  starting vLLM",
        "0:00  playing the first episodes (64 at once)",
        "0:16  engine-0, learner, actor-0 load programs and model, for 16 s so far; engine-0: starting for 16 s; "
        "learner: waiting for engines: one that serves version 0; actor-0: playing 64 episodes",
    ]


def test_an_engine_on_several_nodes_is_one_engine_to_the_reader():
    parts = (Rule("engine-0", 3, gang="engine-0"), Rule("engine-0-node-1", 3, gang="engine-0"))
    machine = Machine(parts)
    machine.begin(0)
    machine.healthy("engine-0-node-1", 0)
    console = Console(file=io.StringIO(), width=200)
    Display("run", 2, machine.processes, {}, console, "vLLM").refresh()
    assert console.file.getvalue().splitlines() == ["0:00  starting vLLM"]


@pytest.mark.parametrize("node", [0, 1])
def test_an_engine_is_told_its_node_as_the_plan_says(node, monkeypatch):
    config = load(GPU, ["placement.tensor_parallel=4"], environment={})
    nodes = Inventory(tuple(Node(f"n{i}", ("0", "1"), address=f"10.0.0.{i}") for i in range(3)))
    place = [place for place in plan(config, nodes).fitting().places if place.role == "engine"][node]
    heard = {}
    monkeypatch.setattr("pipeline.cli.roles.load_main", lambda path: lambda *_, **how: heard.update(how) or 0)
    assert CliRunner().invoke(app, place.command(GPU)[4:]).exit_code == 0
    assert (heard["gang"], heard["await_model"]) == (place.gang, True)


def test_steps_carry_an_estimate_of_the_time_left_from_the_third_on(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pipeline.supervisor.display.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    display = Display("run", 5, {}, {}, console)
    for step in range(1, 6):
        now[0] += 70
        display.progress({"step": step})
    ends = [text.split("step", 1)[1] for text in console.file.getvalue().splitlines()]
    assert ends == [" 1/5", " 2/5", " 3/5  about 2:20 left", " 4/5  about 1:10 left", " 5/5"]


def test_the_time_left_is_that_of_the_steps_that_are_left_after_a_resume(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("pipeline.supervisor.display.time.monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    display = Display("run", 20, {}, {}, console, line={"step": 12})
    now[0] = 300.0  # the processes start again
    for step in range(13, 17):
        now[0] += 10
        display.progress({"step": step})
    ends = [text.split("step", 1)[1] for text in console.file.getvalue().splitlines()]
    assert ends == [" 13/20", " 14/20", " 15/20  about 0:50 left", " 16/20  about 0:40 left"]


def test_the_time_left_follows_the_last_steps_and_begins_again_when_a_step_is_made_again():
    pace = Pace(20)
    for step in range(1, 15):
        pace.finished(step, 100.0 * step if step <= 3 else 300.0 + step)
    assert pace.left(314.0) == 6.0
    assert pace.left(330.0) == 0.0
    pace.finished(9, 400.0)
    assert pace.left(400.0) is None


def test_processes_of_a_run_may_open_as_many_files_as_the_system_allows():
    code = (
        "import resource, subprocess, sys; limit = resource.RLIMIT_NOFILE; "
        "resource.setrlimit(limit, (256, resource.getrlimit(limit)[1])); "
        "from pipeline.cli.app import allow_descriptors; allow_descriptors(); "
        "soft, hard = resource.getrlimit(limit); sys.exit(soft != (10_240 if sys.platform == 'darwin' else hard))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("soft, allowed", [(256, 10_240), (20_000, 20_000)])
def test_a_hard_limit_that_may_not_be_reached_still_raises_that_of_open_files(monkeypatch, soft, allowed):
    """As on macOS, where shells begin with 256 and no hard limit."""
    limits = [soft]

    def set_limit(kind, wanted):
        if wanted[0] == resource.RLIM_INFINITY:
            raise ValueError("current limit exceeds maximum limit")
        limits.append(wanted[0])

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    allow_descriptors()
    assert limits[-1] == allowed


def test_replicas_of_an_actor_take_a_free_index_each_if_asked_and_one_that_is_taken_is_refused(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr("pipeline.cli.roles._run", lambda role, index, *_, **__: started.append(index))
    monkeypatch.setattr("pipeline.cli.roles._exit", lambda code: None)
    where = ("--set", f"run.directory={tmp_path}")
    for _ in range(2):
        assert invoke("actor", TINY, *where, "--free-index").exit_code == 0
    assert started == [0, 1]
    assert invoke("actor", TINY, *where, "--index", "1").exit_code != 0
    assert started == [0, 1]


def test_ctrl_c_while_a_command_is_still_importing_prints_no_traceback(tmp_path):
    (tmp_path / "typer.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.app", "run", "x.yaml"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a background job ignores it
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
