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
import io
import logging
import resource
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pipeline.cli.compare import compare
from pipeline.cli.env import app as env_app
from pipeline.cli.plan import show_plan
from pipeline.cli.push import push
from pipeline.cli.replay import START
from pipeline.cli.replay import app as replay_app
from pipeline.cli.show import show
from pipeline.errors import AfterplayError, ConfigurationError
from pipeline.runtime.children import append_working_folder, end_with_parent, end_with_supervisor, module_command
from pipeline.runtime.run_directory import RunDirectory, take_index, write_json_atomically

if TYPE_CHECKING:
    from pipeline.config import RunConfig

REPORTER_NICENESS = 10
"""Added to the niceness of a reporter process: the processes that train come first."""


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run directory, or a run file.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", metavar="N|best|latest", help="The checkpoint after N updates, or by name."),
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="Split to evaluate on.")] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Tasks per environment.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Rollouts per task.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--sampled", help="Greedy decoding, or sampling (needed for pass@k).")
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option("--pass-at", metavar="K", min=1, help="Report pass@K. May be repeated.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change one value. May be repeated.")
    ] = None,
) -> None:
    """Evaluate a checkpoint on held-out tasks and print a table.

    Options default to the section `evaluation` of the run file. Without --checkpoint, the newest checkpoint of a run
    directory is evaluated, or the initial model of a run file or of a run without checkpoints. The command starts its
    own engines, actors and replay stage in a folder below the run, so a live run is not affected. The exit code is 0 if
    every environment has a score, else 1.

      afterplay eval runs/tiny --checkpoint best
      afterplay eval runs/tiny --tasks 200 --sampled --samples 8 --pass-at 1 --pass-at 8
      afterplay eval @questions --split eval
    """
    from pipeline.supervisor.evaluate import EvaluationRequest, evaluate_checkpoint

    request = EvaluationRequest(checkpoint, split, tasks, samples, greedy, tuple(pass_at or ()))
    raise typer.Exit(evaluate_checkpoint(target, request, sets or []))


app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Reinforcement learning for language-model agents, asynchronous, from one YAML file.

[bold]Start here[/bold]

  afterplay init DIR                          write a run file, an environment and a test, to edit
  afterplay run @tiny                         train a tiny random model with all processes (one minute)
  afterplay run @quickstart                   train a pretrained model with a vLLM server
  afterplay plan @gpu --gpus 8                show the processes and their GPUs, before anything starts
  afterplay status runs/tiny                  processes, newest step, and the state of every order
  afterplay plot runs/tiny                    draw the curves
  afterplay show runs/tiny                    list and print rollouts, or write them as an HTML page
  afterplay eval runs/tiny --checkpoint best  evaluate a checkpoint on held-out tasks
  afterplay compare A.yaml B.yaml --reach 0.8 tokens, updates and time to a success rate, over seeds
  afterplay report runs/tiny --to wandb       send its numbers to an experiment tracker

[bold]Change the configuration[/bold]

  afterplay config show @tiny                 print every key with its meaning
  afterplay run @tiny --set learner.learning_rate=1e-3 --set run.name=faster
  AFTERPLAY__RUN__SEED=7 afterplay run @tiny

[bold]Exit codes[/bold]  0 finished or drained · 1 failed · 2 invalid run file or option · 3 forced (second
  signal, or drain time exceeded) · 4 a process failed too often · 5 the run is already alive · 6 every
  rollout of an environment failed · 7 a role made no progress and ended itself
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
) -> None:
    pass


config_app = typer.Typer(no_args_is_help=True, help="Check a run file, or show it with all defaults.")
app.add_typer(config_app, name="config")
app.add_typer(env_app, name="env")
app.add_typer(replay_app, name="replay")
PARTS = "One process at a time, on several machines"
"""Heading of these commands in the help."""

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="The run file, or an example that ships with Afterplay, such as @tiny.",
    ),
]


def _check_sets(sets: list[str] | None) -> list[str] | None:
    """Refuse ``--set a= 1``, of which a shell makes two arguments, before the second one is taken for another thing."""
    from pipeline.config.load import read_override

    for text in sets or ():
        read_override(text)
    return sets


Stay = Annotated[
    bool,
    typer.Option("--stay", help="Continue when the run has finished: for a role that would be started again at once."),
]


Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        help="Change one value, for example run.seed=3. May be repeated.",
        callback=_check_sets,
    ),
]


def _index(value: str | int) -> int:
    from pipeline.runtime.process import parse_index

    return parse_index(str(value))


Index = Annotated[
    int,
    typer.Option(
        "--index",
        "-i",
        metavar="N|VARIABLE",
        parser=_index,
        help="Index of this replica, starting at 0, or a variable that ends with it: SLURM_PROCID, or HOSTNAME in a "
        "StatefulSet.",
    ),
]
FoundIndex = Annotated[
    int | None,
    typer.Option(
        "--index",
        "-i",
        metavar="N|VARIABLE",
        parser=_index,
        help="As for an actor. Without it 0; the next free one with --join.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, for example runs/tiny.")]


@app.command()
def run(
    file: File,
    sets: Sets = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: empty the run directory first.")] = False,
    on: Annotated[
        str, typer.Option("--on", metavar="WHERE", help="local (this machine), ray, slurm or kubernetes.")
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started or submitted, and do nothing else.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="With --dry-run: write it to files in DIR instead.")
    ] = None,
    nodes: Annotated[str, typer.Option("--nodes", metavar="N|NAME:GPUS,…", help="Machines, not with --on local.")] = "",
    gpus: Annotated[
        int | None, typer.Option("--gpus", min=0, help="GPUs of each machine, not with --on local.")
    ] = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENT…]", help="Arguments for sbatch, or for helm.", show_default=False),
    ] = None,
) -> None:
    """Run FILE on this machine, with all processes, until training is done; or --on a cluster.

    Starts engines, actors, replay stage and learner, restarts processes that die, shows progress, and writes a run
    directory (run.directory/run.name). Rerun to resume; --fresh starts over. Ctrl-C stops the run cleanly within ten
    seconds.

      afterplay run @tiny
      afterplay run @tiny --fresh --set run.total_steps=20
      afterplay run @two_engines --set actor.replicas=2
      afterplay run @gpu --on slurm --nodes 2 --gpus 8 -- --partition=gpu --time=12:00:00
      afterplay run @gpu --on kubernetes --gpus 8 --dry-run
    """
    from pipeline.launchers.launcher import Launch, launch

    if out is not None and not dry_run:
        raise ConfigurationError("--out: expected --dry-run beside it, which writes files and starts nothing")
    request = Launch(_load(file, sets), fresh, dry_run, out, nodes, gpus, tuple(arguments or ()))
    raise typer.Exit(launch(on, request))


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]) -> None:
    """Write a run file, an environment and its test into DIR, to edit into your own.

    afterplay init colours && cd colours && afterplay run run.yaml
    """
    from pipeline.runtime.plugins import load_main

    for path in load_main("actors.env_commands.scaffold:write_project")(folder):
        typer.echo(str(path))
    typer.echo(f"\nNext: cd {shlex.quote(str(folder))} && afterplay run run.yaml")


@app.command()
def chaos(
    file: File,
    minutes: Annotated[float, typer.Option("--minutes", "-m", min=0.1, help="Time from the first update on.")] = 10.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the schedule of faults.")] = 0,
    every: Annotated[float, typer.Option("--every", min=0.5, help="Mean seconds between two faults.")] = 15.0,
    stall: Annotated[float, typer.Option("--stall", min=1, help="Longest time without anything new, seconds.")] = 60.0,
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
    overrides.append(f"run.name={_load(file, overrides).run.name}-chaos")
    config = _load(file, overrides)
    command = module_command("pipeline.cli.app", "run", str(file))
    for override in overrides:
        command += ["--set", override]
    seconds = 60 * minutes
    faults = schedule(seed, seconds, every, config.stage.silence_seconds_max)
    raise typer.Exit(run_chaos(config, command, faults, seconds, stall))


@app.command(rich_help_panel=PARTS)
def engine(
    file: File,
    index: FoundIndex = None,
    sets: Sets = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Start one more engine for the run of FILE, which is alive; SIGTERM drains it."),
    ] = False,
    await_model: Annotated[
        bool, typer.Option("--await-model", help="Start before the model folder is prepared, and wait for it.")
    ] = False,
    stay: Stay = False,
) -> None:
    """Run one inference server, on engine.port + index.

    With --join it takes the next free index, announces itself in the run directory, gets the newest weights and then
    its share of the conversations. On SIGTERM it gets no new turns, ends when its requests have, and nothing is lost.

      afterplay engine @two_engines --index 1 --set engine.port=8100
      afterplay engine @tiny --join
    """
    from pipeline.runtime.plugins import load_main

    main = load_main("actors.servers.launch:main")
    config = _load_of_run(file, sets) if join else _load(file, sets)
    ends = not stay and _alone(file, config)
    raise typer.Exit(main(config, index, await_model=await_model, joins=join, ends_with_run=ends))


@app.command(rich_help_panel=PARTS)
def actor(
    file: File,
    index: Index = 0,
    sets: Sets = None,
    free_index: Annotated[
        bool,
        typer.Option(
            "--free-index",
            help="Take the first index that no other actor of the run directory holds. Every replica listens on the "
            "metrics port of index 0.",
        ),
    ] = False,
    own_address: Annotated[
        bool,
        typer.Option(
            "--own-address",
            help="Listen on the metrics port of index 0, for replicas that have an address each, as pods.",
        ),
    ] = False,
    join: Annotated[
        bool, typer.Option("--join", help="Start one more actor for the run of FILE: take the next free index.")
    ] = False,
    stay: Stay = False,
) -> None:
    """Run one actor, which takes orders from the replay stage, runs episodes and sends trajectories back.

    afterplay actor @tiny --join
    afterplay actor cluster.yaml --index 3 --set actor.concurrency=64
    """
    from pipeline.runtime.disk import wait_for_room

    config = _load_of_run(file, sets) if join else _load(file, sets)
    directory = RunDirectory(config.run.path)
    own = None if free_index or join else index
    take = partial(take_index, directory, "actor", own, keys=config.stage.curve)
    if join:
        take = partial(take, first=config.actor.replicas)
    found, _lock = wait_for_room(take, directory.path, "the lock of the actor's index")
    port_index = 0 if free_index or own_address else None
    ends = not stay and _alone(file, config)
    _role("actor", found, "actors.process.role:main", config, port_index=port_index, ends_with_run=ends)


@replay_app.command(START)
def replay(file: File, sets: Sets = None, stay: Stay = False) -> None:
    """Run the replay stage, which plans rollouts and scores, stores and groups trajectories.

    Actors and learner connect to it.

    afterplay replay @tiny
    """
    config = _load(file, sets)
    _role("replay", 0, "pipeline.stage.role:main", config, ends_with_run=not stay and _alone(file, config))


@app.command(rich_help_panel=PARTS)
def learner(
    file: File,
    index: Index = 0,
    sets: Sets = None,
    job: Annotated[
        str,
        typer.Option(
            "--job",
            metavar="RUN|-",
            help="In a job of Kubernetes: end the pods of RUN when the run has finished (-: of none). If it is stopped "
            "before, the exit code is 143, so that the job does not count as done.",
        ),
    ] = "",
) -> None:
    """Train on groups from the replay stage and publish new weights to the engines.

    With learner.ranks=N it starts N-1 more processes, which share the model and each update. torchrun can start them
    instead, on one or several machines; then omit learner.ranks.

      afterplay learner @tiny
      torchrun --nproc-per-node 2 --no-python afterplay learner @tiny
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()  # torchrun gives each rank a session of its own
    if os.environ.get("RANK", "0") != "0":
        _follow(file, sets)
    config = _load(file, sets)
    alone = _alone(file, config)
    if alone:
        _settle(config)
    _role("learner", index, "learner.process.role:main", config, records_end=alone, job=job)


@app.command(hidden=True)
def evaluator(file: File, index: Index = 0, sets: Sets = None) -> None:
    """Run instead of the learner in `afterplay eval`: set the version of the engines and wait for the result."""
    _role("evaluator", index, "learner.process.evaluator:main", _load(file, sets))


@app.command(hidden=True)
def reporter(file: File, index: Index = 0, sets: Sets = None) -> None:
    """Report the run to the tracker at this position of report_to, until SIGTERM."""
    from pipeline.runtime.process import configure_logging
    from pipeline.trackers.reporter import report as report_all

    config = _load(file, sets)
    name = config.report_to[index]
    configure_logging(f"report-{name}")
    os.nice(REPORTER_NICENESS)
    report_all(name, config, RunDirectory(config.run.path), lambda: True)


@app.command(rich_help_panel=PARTS)
def prepare(file: File, sets: Sets = None) -> None:
    """Prepare the model folder of the run (run.directory/run.name/model) for engines and learner.

    `afterplay run` does this itself. It is only needed if you start the roles one by one.

      afterplay prepare @quickstart
    """
    from pipeline.runtime.plugins import load_main
    from pipeline.runtime.process import configure_logging

    configure_logging("prepare")
    config = _load(file, sets)
    _settle(config)
    info = load_main("learner.models.prepare:prepare_model")(config, RunDirectory(config.run.path).model)
    typer.echo(f"model ready in {info.path}")


@app.command(hidden=True)
def preflight(file: File) -> None:
    """Check the plug-ins of FILE beside a run that starts."""
    from pipeline.runtime.process import configure_logging
    from pipeline.supervisor.preflight import check_beside_run

    configure_logging("preflight")
    check_beside_run(_load(file, None))


@app.command(rich_help_panel=PARTS)
def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the keys; created if missing.")],
    actors: Annotated[int, typer.Option("--actors", min=0, help="Actors that have a key: actor-0, actor-1 …")] = 8,
) -> None:
    """Create the keys of a run on several machines: CURVE keys for TCP, one pair for the replay stage, the learner and
    each actor, and the keys of engines beyond loopback.

    Keep the folder on the replay stage's machine. Another machine gets server.key and the two files of each role that
    runs on it. Run the command again with a larger --actors to add keys; a stage that runs accepts them at once.

      afterplay keys keys --actors 16
      afterplay replay FILE --set stage.curve=keys --set stage.address=tcp://0.0.0.0:5555

    Engines on other machines need engine.actor_key: file:keys/engine_actor.secret (engines and actors) and
    engine.learner_key: file:keys/engine_learner.secret (engines and learner). Give a role only its own.
    """
    from pipeline.runtime.engine_keys import make_key_files
    from pipeline.transport.curve import make_keys

    made = make_keys(directory, actors)
    make_key_files(directory)
    typer.echo(
        f"{len(made)} new CURVE keys in {directory}. Use them with --set stage.curve={directory}; keep "
        "*.key_secret and *.secret to yourself"
    )


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
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The picture of several runs.")] = Path(
        "curves.png"
    ),
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
        output = directories[0].curves_file
        if problem := draw(directories[0].metrics_file, output):
            raise ConfigurationError(problem)
    else:
        named = [f"{number}: {directory.path.name[-20:]}" for number, directory in enumerate(directories, 1)]
        draw_runs(dict(zip(named, (d.metrics_file for d in directories), strict=True)), output)
    typer.echo(str(output))


@app.command()
def report(
    run_directory: Run,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="tensorboard, wandb, mlflow or trackio.")],
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
    from pipeline.cli.replay import open_run
    from pipeline.cli.status import is_alive
    from pipeline.trackers.reporter import describe_delivery
    from pipeline.trackers.reporter import report as report_all

    config, directory = open_run(run_directory, sets or ())
    report_all(to, config, directory, lambda: follow and is_alive(directory))
    typer.echo(describe_delivery(directory, to))


app.command()(show)
app.command("eval")(evaluate)
app.command()(compare)
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

    config = _load(file, sets)
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
    from pipeline.runtime.plugins import load_main

    typer.echo(show(load_main("learner.process.preflight:with_options")(_load(file, sets)), plain), nl=False)


def _load(file: Path, sets: list[str] | None) -> RunConfig:
    from pipeline.config.load import load

    return load(file, sets or [])


def _load_of_run(file: Path, sets: list[str] | None) -> RunConfig:
    """As all processes of the run read it: its ports, keys and identity are fixed there."""
    config = _load(file, sets)
    resolved = RunDirectory(config.run.path).config_file
    return _load(resolved, sets) if resolved.exists() else config


def _alone(file: Path, config: RunConfig) -> bool:
    """True where the role was not started by `afterplay run`, which gives its roles the file in the run directory."""
    return file.resolve() != RunDirectory(config.run.path).config_file.resolve()


def _settle(config: RunConfig) -> None:
    from pipeline.supervisor.history import settle

    for line in settle(RunDirectory(config.run.path), config).lines():
        print(line, file=sys.stderr)


def _record_end(config: RunConfig) -> bool:
    """Tell the other roles that the run has finished, if it has made all its steps."""
    from pipeline.runtime.disk import wait_for_room
    from pipeline.views.progress import MetricsTail

    directory = RunDirectory(config.run.path)
    tail = MetricsTail(directory.metrics_file)
    tail.skip()
    if tail.last is None or tail.last["step"] < config.run.total_steps:
        return False
    finished = {"steps": config.run.total_steps, "exit_code": 0}
    write = partial(write_json_atomically, directory.finished_file, finished)
    wait_for_room(write, directory.finished_file, "the end of the run")
    return True


def _role(
    role: str,
    index: int,
    main: str,
    config: RunConfig,
    port_index: int | None = None,
    ends_with_run: bool = False,
    records_end: bool = False,
    job: str = "",
) -> NoReturn:
    """``port_index``: the index by which the metrics port is chosen; None: ``index``. ``job``: see ``learner``."""
    from pipeline.runtime.plugins import load_main
    from pipeline.runtime.process import role_name, run_role

    port_index = index if port_index is None else port_index
    code = run_role(role_name(role, index), port_index, config, load_main(main), ends_with_run)
    if code == 0 and records_end:
        finished = _record_end(config)
        if job and not finished:
            code = 128 + signal.SIGTERM
        elif job and job != "-":
            load_main("pipeline.launchers.pods:end_pods")(job)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # The role has closed its resources. Finalizing the interpreter takes seconds (torch) or hangs on a thread.
    os._exit(code)


def _follow(file: Path, sets: list[str] | None) -> NoReturn:
    """A rank other than 0 under torchrun."""
    from pipeline.runtime.plugins import load_main

    config = _load(file, sets)
    code = load_main("learner.process.rank_processes:run")(
        config, load_main("learner.distributed.collectives:process_rank")(config.learner)
    )
    logging.shutdown()
    os._exit(code)


NO_WRITES = (
    *(errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS),
    *(errno.EEXIST, errno.EISDIR, errno.ENOTDIR),
)
"""Errors of a folder that may not be written, of a disk that is full, and of a path that is something else."""


USAGE_ERROR: type[Exception] = typer.BadParameter.mro()[1]
"""Class of typer's errors for wrong options and arguments, which has no public name."""


def _explain_usage(error: Any) -> int:
    """Print one sentence about wrong options or arguments; returns the exit code. A command without its arguments has
    printed its help already."""
    if type(error).__name__ != "NoArgsIsHelpError":
        message = " ".join(error.format_message().split()).rstrip(".")
        command = "afterplay" if error.ctx is None else error.ctx.command_path
        print(f"afterplay: {message[:1].lower()}{message[1:]}; see {command} --help", file=sys.stderr)
    return int(error.exit_code)


def allow_descriptors() -> None:
    """Raise the soft limit of open files, often 1024, to the hard one: whoever reaches a port can hold as many
    connections, and a process without a free descriptor can open no file either. Processes that we start inherit it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a smaller limit than it states
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


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

        print(f"afterplay: expected to write {error.filename}, got: {error.strerror}", file=sys.stderr)
        sys.exit(ExitCode.FAILED)


if __name__ == "__main__":
    entry()
