"""The ``afterplay`` commands and their help. Commands import their code when they run, so that ``--help`` is fast."""

from __future__ import annotations

import os
import signal
import sys

if (__name__ == "__main__" or os.path.basename(sys.argv[0]) == "afterplay") and (
    signal.getsignal(signal.SIGINT) == signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # during the imports, Ctrl-C would print a traceback

import contextlib
import errno
import inspect
import io
import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli import roles
from pipeline.cli.compare import compare
from pipeline.cli.env import app as env_app
from pipeline.cli.options import File, Run, Sets, finite, load
from pipeline.cli.plan import show_plan
from pipeline.cli.push import push
from pipeline.cli.replay import START, open_run
from pipeline.cli.replay import app as replay_app
from pipeline.cli.retrain import explain, retrain
from pipeline.cli.show import show
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.runtime.children import append_working_folder, end_with_supervisor, module_command
from pipeline.runtime.logs import FORMAT, LogFormat
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import NO_LOCKS, RunDirectory

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Reinforcement learning for language-model agents, asynchronous, from one YAML file.

[bold]Start here[/bold]

  afterplay init DIR                     write files to edit into your own
  afterplay run @tiny                    train a tiny model (one minute)
  afterplay run @quickstart              train a pretrained model with vLLM
  afterplay plan @gpu --gpus 8           show the processes and their GPUs
  afterplay status runs/tiny             processes, newest step, all orders
  afterplay plot runs/tiny               draw the curves
  afterplay show runs/tiny               list rollouts, or make a page of them
  afterplay retrain runs/tiny            make steps again, and compare
  afterplay eval runs/NAME -c best       score a checkpoint on held-out tasks
  afterplay compare A B --reach 0.8      costs to reach a success rate
  afterplay report runs/tiny --to wandb  send its numbers to a tracker

[bold]Change the configuration[/bold]

  afterplay config show @tiny            print every key with its meaning
  afterplay run @tiny --set learner.learning_rate=1e-3 --set run.name=faster
  AFTERPLAY__RUN__SEED=7 afterplay run @tiny

[bold]Exit codes[/bold]  0 finished or drained · 1 failed · 2 invalid run file or option · 3 forced (second signal,
or drain time exceeded) · 4 a process failed too often · 5 the run is already alive · 6 every rollout of an
environment failed · 7 a role made no progress and ended itself · 8 too many calls of an actor's environments hang,
it starts again
""",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"afterplay {metadata.version('afterplay')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    log_format: Annotated[
        LogFormat | None,
        typer.Option("--log-format", help="Form of all processes' logs. json: an object a line, with run, role, ids."),
    ] = None,
) -> None:
    if log_format is not None:
        os.environ[FORMAT] = log_format


config_app = typer.Typer(no_args_is_help=True, help="Check a run file, or show it with all defaults.")
app.add_typer(config_app, name="config")
app.add_typer(env_app, name="env")
app.add_typer(replay_app, name="replay")


@app.command()
def run(
    file: File,
    sets: Sets = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: empty the run directory first.")] = False,
    on: Annotated[str, typer.Option(metavar="WHERE", help="local (this machine), ray, slurm or kubernetes.")] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started or submitted, and do nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="With --dry-run on slurm or kubernetes: write files into DIR instead."),
    ] = None,
    nodes: Annotated[str, typer.Option(metavar="N|NAME:GPUS,…", help="Machines, for --on slurm or kubernetes.")] = "",
    gpus: Annotated[
        int | None, typer.Option(min=0, max=10_000, help="GPUs of each machine, for --on slurm or kubernetes.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT…]", help="Arguments for sbatch, or for helm.", show_default=False),
    ] = None,
) -> None:
    """Run FILE on this machine, with all processes, until training is done; or --on a cluster.

    Starts engines, actors, replay stage and learner, restarts processes that die, shows progress, and writes a run
    directory (run.directory/run.name). Rerun to resume; --fresh starts over. Ctrl-C stops the run cleanly, within
    checkpoint.drain_seconds_max.

      afterplay run @tiny
      afterplay run @tiny --fresh --set run.total_steps=20
      afterplay run @two_engines --set actor.replicas=2
      afterplay run @gpu --on slurm --nodes 2 --gpus 8 -- --partition=gpu --time=12:00:00
      afterplay run @gpu --on kubernetes --gpus 8 --dry-run
    """
    from pipeline.launchers.launcher import Launch, launch

    if out is not None and not dry_run:
        raise ConfigurationError("--out: expected --dry-run beside it, which writes files and starts nothing")
    request = Launch(load(file, sets), fresh, dry_run, out, nodes, gpus, tuple(arguments or ()))
    raise typer.Exit(launch(on, request))


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]) -> None:
    """Write a run file, an environment and its test into DIR, to edit into your own.

    afterplay init colours && cd colours && afterplay run run.yaml
    """
    for path in load_main("actors.env_commands.scaffold:write_project")(folder):
        typer.echo(str(path))
    typer.echo(f"\nNext: cd {shlex.quote(str(folder))} && afterplay run run.yaml")


@app.command()
def chaos(
    file: File,
    minutes: Annotated[
        float, typer.Option("--minutes", "-m", min=0.1, max=10_000, help="Time from the first update on.")
    ] = 10.0,
    seed: Annotated[int, typer.Option(help="Seed of the schedule of faults.")] = 0,
    every: Annotated[float, typer.Option(min=0.5, callback=finite, help="Mean seconds between two faults.")] = 15.0,
    stall: Annotated[
        float, typer.Option(min=1, callback=finite, help="Longest time without anything new, seconds.")
    ] = 60.0,
    sets: Sets = None,
) -> None:
    """Run FILE while its processes are killed, stopped and starved, then audit it from outside.

    Faults come at random times drawn from the seed: SIGKILL to a process or to the whole run, SIGSTOP for some seconds,
    no free cores, a damaged copy of the store. Afterwards the run must make two more updates and end. The exit code is
    0 if every sum adds up, the store agrees with what actors and learner recorded themselves, and the run never stood
    still. The run directory is that of FILE with -chaos behind it; it is emptied first.

      afterplay chaos @replay_tiny --minutes 60 --seed 1
    """
    from pipeline.supervisor.chaos import OVERRIDES, run_chaos, schedule

    overrides = [*(sets or []), *OVERRIDES]
    overrides.append(f"run.name={load(file, overrides).run.name}-chaos")
    config = load(file, overrides)
    command = module_command("pipeline.cli.app", "run", str(file))
    for override in overrides:
        command += ["--set", override]
    seconds = 60 * minutes
    faults = schedule(seed, seconds, every, config.stage.silence_seconds_max)
    raise typer.Exit(run_chaos(config, command, faults, seconds, stall))


PARTS = "One process at a time, on several machines"
"""Heading of these commands in the help."""
replay_app.command(START)(roles.replay)
_SHOWN: tuple[Callable[..., None], ...] = (roles.engine, roles.actor, roles.learner, roles.prepare, roles.keys)
_HIDDEN: tuple[Callable[..., None], ...] = (roles.evaluator, roles.reporter, roles.preflight)
for command in (*_SHOWN, *_HIDDEN):
    app.command(rich_help_panel=PARTS, hidden=command in _HIDDEN)(command)


@app.command()
def status(run_directory: Run) -> None:
    """Show processes, the newest step, the learner's time by stage, and the state of orders, trajectories and groups.

    afterplay status runs/tiny
    """
    from pipeline.cli.status import show_status

    raise typer.Exit(show_status(RunDirectory(run_directory)))


@app.command()
def plot(
    run_directories: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The picture, such as a .png, .pdf or .svg. Default: curves.png, of one run in its directory.",
        ),
    ] = None,
) -> None:
    """Draw curves.png from the metrics.jsonl of a run, or the curves of several runs over each other. Works while a run
    is alive.

      afterplay plot runs/tiny
      afterplay plot runs/first runs/second -o both.png
    """
    from pipeline.views.plots import draw, draw_runs

    directories = [RunDirectory(path) for path in run_directories]
    for directory in directories:
        if not directory.config_file.exists() and not directory.metrics_file.exists():
            raise ConfigurationError(f"expected a run directory, got {directory.path}, which has no config.yaml")
        if len(directories) > 1 and not directory.metrics_file.exists():
            raise ConfigurationError(f"not drawn: {directory.path} has no steps yet")
    if len(directories) == 1:
        output = output or directories[0].curves_file
        if problem := draw(directories[0].metrics_file, output):
            raise ConfigurationError(problem)
    else:
        output = output or Path("curves.png")
        named = [f"{number}: {directory.path.name[-20:]}" for number, directory in enumerate(directories, 1)]
        draw_runs(dict(zip(named, (d.metrics_file for d in directories), strict=True)), output)
    typer.echo(str(output))


@app.command()
def report(
    run_directory: Run,
    to: Annotated[str, typer.Option(metavar="NAME", help="tensorboard, wandb, mlflow, trackio or otel.")],
    follow: Annotated[bool, typer.Option("--follow", help="Continue while the run is alive.")] = False,
    sets: Sets = None,
) -> None:
    """Send the steps, evaluations, sampled rollouts and curves of a run to an experiment tracker.

    What the tracker has already is not sent again, so the command can be repeated, and a run with `report_to` that was
    killed can be completed. Names are in the section `trackers`; addresses, keys and offline modes are those of the
    tracker's own environment variables.

      afterplay report runs/tiny --to tensorboard
      WANDB_MODE=offline afterplay report runs/tiny --to wandb --follow --set trackers.project=games
    """
    from pipeline.cli.status import is_alive
    from pipeline.trackers import reporter

    config, directory = open_run(run_directory, sets or ())
    reporter.report(to, config, directory, lambda: is_alive(directory), follow)
    typer.echo(reporter.describe_delivery(directory, to))


app.command()(show)


@app.command("eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run directory, or a run file.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--checkpoint",
            "-c",
            metavar="N|best|latest|initial",
            help="The checkpoint after N updates, or by name. Default: the newest.",
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split to evaluate on.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks per environment.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts per task.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--sampled", help="Greedy decoding, or sampling (needed for pass@k).")
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option(metavar="K", min=1, help="Report pass@K. May be repeated.")
    ] = None,
    sets: Sets = None,
) -> None:
    """Evaluate a checkpoint on held-out tasks and print a table.

    Options default to the section `evaluation` of the run file. Without --checkpoint, the newest checkpoint of the run
    is evaluated, also where its run file is given, or the initial model where there is none. The command starts its
    own engines, actors and replay stage in a folder below the run, so a live run is not affected. The exit code is 0 if
    every environment has a score, else 1.

      afterplay eval runs/NAME --checkpoint best
      afterplay eval runs/NAME --tasks 200 --sampled --samples 8 --pass-at 1 --pass-at 8
      afterplay eval @questions --split eval
    """
    from pipeline.supervisor.evaluate import EvaluationRequest, evaluate_checkpoint

    request = EvaluationRequest(checkpoint, split, tasks, samples, greedy, tuple(pass_at or ()))
    raise typer.Exit(evaluate_checkpoint(target, request, sets or []))


app.command()(compare)
app.command()(retrain)
app.command()(explain)
app.command()(push)
app.command("plan")(show_plan)


@config_app.command("check")
def config_check(
    file: File,
    sets: Sets = None,
    data: Annotated[bool, typer.Option("--data", help="Also read the data of tasks_from and print a task.")] = False,
) -> None:
    """Check FILE on this machine and report all that is wrong, each with what was expected, what came and what to do.

    Environments are built, and one scripted episode of each is played; prompts and tool schemas are measured with the
    model's tokenizer if that is here. Model, functions, devices, disk, ports, keys and external engines are looked at.
    Nothing is downloaded or started. The exit code is 0 if a run could start, else 2.

      afterplay config check @tiny --set groups.n_rollout=16
      afterplay config check @questions --data
    """
    from pipeline.supervisor.preflight import check_all

    config = load(file, sets)
    found = check_all(config)
    found.require_none()
    for note in found.notes:
        typer.echo(note)
    if data:
        from pipeline.tasks.open import describe_tasks

        for line in describe_tasks(config):
            typer.echo(line)
    typer.echo(
        f"{file} is valid: {config.run.total_steps} steps of {config.groups.groups_per_step} groups of "
        f"{config.groups.n_rollout} rollouts, staleness up to {config.staleness.max}, "
        f"{config.engine.kind} engine, model {config.model.source}"
    )


@config_app.command("show")
def config_show(
    file: File,
    sets: Sets = None,
    plain: Annotated[bool, typer.Option("--plain", help="Omit the explanations.")] = False,
) -> None:
    """Print FILE with every key, its value and its meaning. The output is a valid run file.

    afterplay config show @tiny > mine.yaml
    """
    from pipeline.config.explain import show

    typer.echo(show(load_main("learner.process.preflight:with_options")(load(file, sets)), plain), nl=False)


NO_WRITES = (
    *(errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *NO_LOCKS,
)
"""Errors of a folder that may not be written or has no locks, of a disk that is full, and of a path that is something
else, or none."""


USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[1]
"""Class of typer's errors for wrong options and arguments, which has no public name."""


def _explain_usage(error: Any) -> int:
    """Print one sentence about wrong options or arguments; returns the exit code. A command without its arguments has
    printed its help already."""
    if type(error).__name__ != "NoArgsIsHelpError":
        message = " ".join(error.format_message().split()).rstrip(".").replace(": Value error, ", ": ")
        command = "afterplay" if error.ctx is None else error.ctx.command_path
        print(f"afterplay: {message[:1].lower()}{message[1:]}; see {command} --help", file=sys.stderr)
    return int(error.exit_code)


OPEN_MAX = 10_240
"""Open files that macOS allows a process, whose hard limit says more (setrlimit(2) there)."""


def allow_descriptors() -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: whoever reaches a port can hold as many
    connections, and a process without a free descriptor can open no file either. Processes that we start inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (hard, max(soft, OPEN_MAX)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            return


def flow(text: str) -> str:
    """``text`` with each paragraph in one line, for a terminal of any width; indented lines and commands keep theirs.

    >>> flow("One.\\n\\nTwo\\nlines.\\n\\n  afterplay a\\n  afterplay b")
    'One.\\n\\nTwo lines.\\n\\n  afterplay a\\n  afterplay b'
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(p if p.startswith((" ", "afterplay ")) else p.replace("\n", " ") for p in paragraphs)


app.info.help = flow(app.info.help or "")
for group in (app, config_app, env_app, replay_app):
    for info in group.registered_commands:
        assert info.callback is not None
        info.help = flow(info.callback.__doc__ or "")


def entry() -> None:
    """Console script. Expected errors are printed as one message on stderr, without a traceback."""
    end_with_supervisor()
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    append_working_folder()
    allow_descriptors()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without our characters ends nothing
    try:
        sys.exit(app(prog_name="afterplay", standalone_mode=False))
    except USAGE_ERROR as error:
        sys.exit(_explain_usage(error))
    except typer.Abort:
        sys.exit(1)
    except AfterplayError as error:
        from pipeline.runtime.process import ExitCode

        print(f"afterplay: {error}", file=sys.stderr)
        sys.exit(ExitCode.CONFIGURATION if isinstance(error, ConfigurationError) else ExitCode.FAILED)
    except OSError as error:
        if error.errno not in NO_WRITES or error.filename is None:
            raise
        from pipeline.runtime.process import ExitCode

        print(f"afterplay: expected to use {error.filename}, got: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    entry()
