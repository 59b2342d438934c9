"""Commands that run one process of a run. ``afterplay run`` starts the same; on several machines, users do."""

from __future__ import annotations

import logging
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from pipeline.cli.options import File, Sets, load
from pipeline.runtime.children import end_with_parent
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import RunDirectory, take_index, write_json_atomically

if TYPE_CHECKING:
    from pipeline.config import RunConfig

REPORTER_NICENESS = 10
"""Added to the niceness of a reporter process: the processes that train come first."""


def _index(value: str | int) -> int:
    from pipeline.runtime.process import parse_index

    return parse_index(str(value))


def _index_option(about: str) -> Any:
    return typer.Option("--index", "-i", metavar="N|VARIABLE", parser=_index, help=about)


Index = Annotated[
    int,
    _index_option(
        "Index of this replica, starting at 0, or a variable that ends with it: SLURM_PROCID, or HOSTNAME in a "
        "StatefulSet."
    ),
]
FoundIndex = Annotated[int | None, _index_option("As for an actor. Without it 0; the next free one with --join.")]
Stay = Annotated[
    bool,
    typer.Option("--stay", help="Continue when the run has finished: for a role that would be started again at once."),
]


def engine(
    file: File,
    index: FoundIndex = None,
    sets: Sets = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Start one more engine for the run of FILE, which is alive; SIGTERM drains it."),
    ] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="With --join: its port. Else a free one, engine.port + index.")
    ] = None,
    await_model: Annotated[
        bool, typer.Option("--await-model", help="Start before the model folder is prepared, and wait for it.")
    ] = False,
    nnodes: Annotated[int, typer.Option(min=1, help="Nodes of this engine, if it is on several.")] = 1,
    node_rank: Annotated[int, typer.Option(min=0, help="Number of this node among them. 0 serves; others work.")] = 0,
    master_addr: Annotated[str, typer.Option(help="Address of node 0.")] = "127.0.0.1",
    master_port: Annotated[int, typer.Option(help="Port there at which the nodes meet.")] = 29501,
    stay: Stay = False,
) -> None:
    """Run one inference server, on engine.port + index.

    With --join it takes the next free index, announces itself in the run directory, gets the newest weights and then
    its share of the conversations. On SIGTERM it gets no new turns, ends when its requests have, and nothing is lost.

      afterplay engine @two_engines --index 1 --set engine.port=8100
      afterplay engine cluster.yaml --nnodes 2 --node-rank 1 --master-addr 10.0.0.1
      afterplay engine @tiny --join
    """
    from pipeline.supervisor.plan import Gang

    main = load_main("actors.servers.launch:main")
    config = _load_of_run(file, sets) if join else load(file, sets)
    ends = not stay and _alone(file, config)
    gang = Gang(node_rank, nnodes, master_addr, master_port) if nnodes > 1 else None
    raise typer.Exit(main(config, index, await_model=await_model, joins=join, port=port, ends_with_run=ends, gang=gang))


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
    from pipeline.runtime.process import ADDRESS

    config = _load_of_run(file, sets) if join else load(file, sets)
    directory = RunDirectory(config.run.path)
    own, first = None if free_index or join else index, config.actor.replicas if join else 0
    take = partial(take_index, directory, "actor", own, first, config.stage.curve, ADDRESS in os.environ)
    found, _lock = wait_for_room(take, directory.path, "the lock of the actor's index")
    port_index = 0 if free_index or own_address else found
    _exit(_run("actor", found, "actors.process.role:main", config, not stay and _alone(file, config), port_index))


def replay(file: File, sets: Sets = None, stay: Stay = False) -> None:
    """Run the replay stage, which plans rollouts and scores, stores and groups trajectories.

    Actors and learner connect to it.

    afterplay replay @tiny
    """
    config = load(file, sets)
    _exit(_run("replay", 0, "pipeline.stage.role:main", config, not stay and _alone(file, config)))


def learner(
    file: File,
    index: Index = 0,
    sets: Sets = None,
    job: Annotated[
        str,
        typer.Option(
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
    config = load(file, sets)
    if os.environ.get("RANK", "0") != "0":
        rank = load_main("learner.distributed.collectives:process_rank")(config.learner)
        _exit(load_main("learner.process.rank_processes:run")(config, rank))
    alone = _alone(file, config)
    if alone:
        _settle(config)
    code = _run("learner", index, "learner.process.role:main", config)
    if code == 0 and alone:
        finished = _record_end(config)
        if job and not finished:
            code = 128 + signal.SIGTERM
        elif job and job != "-":
            load_main("pipeline.launchers.kubernetes:end_pods")(job)
    _exit(code)


def evaluator(file: File, index: Index = 0, sets: Sets = None) -> None:
    """Run instead of the learner in `afterplay eval`: set the version of the engines and wait for the result."""
    _exit(_run("evaluator", index, "learner.process.evaluator:main", load(file, sets)))


def reporter(file: File, index: Index = 0, sets: Sets = None) -> None:
    """Report the run to the tracker at this position of report_to, until SIGTERM."""
    from pipeline.runtime.logs import configure_logging
    from pipeline.trackers.reporter import report

    config = load(file, sets)
    name = config.report_to[index]
    configure_logging(f"report-{name}", config.run.name)
    os.nice(REPORTER_NICENESS)
    report(name, config, RunDirectory(config.run.path))


def prepare(file: File, sets: Sets = None) -> None:
    """Prepare the model folder of the run (run.directory/run.name/model) for engines and learner.

    `afterplay run` does this itself. It is only needed if you start the roles one by one.

      afterplay prepare @quickstart
    """
    from pipeline.runtime.logs import configure_logging

    config = load(file, sets)
    configure_logging("prepare", config.run.name)
    _settle(config)
    info = load_main("learner.models.prepare:prepare_model")(config, RunDirectory(config.run.path).model)
    typer.echo(f"model ready in {info.path}")


def preflight(file: File) -> None:
    """Check the plug-ins of FILE beside a run that starts."""
    from pipeline.runtime.logs import configure_logging
    from pipeline.supervisor.preflight import check_beside_run

    config = load(file)
    configure_logging("preflight", config.run.name)
    check_beside_run(config)


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the keys; created if missing.")],
    actors: Annotated[int, typer.Option(min=0, help="Actors that have a key: actor-0, actor-1 …")] = 8,
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


def _load_of_run(file: Path, sets: list[str] | None) -> RunConfig:
    """As all processes of the run read it: its ports, keys and identity are fixed there."""
    config = load(file, sets)
    resolved = RunDirectory(config.run.path).config_file
    return load(resolved, sets) if resolved.exists() else config


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
    from pipeline.views.step_lines import last_step

    directory = RunDirectory(config.run.path)
    if last_step(directory.metrics_file) < config.run.total_steps:
        return False
    finished = {"steps": config.run.total_steps, "exit_code": 0}
    write = partial(write_json_atomically, directory.finished_file, finished)
    wait_for_room(write, directory.finished_file, "the end of the run")
    return True


def _run(
    role: str, index: int, main: str, config: RunConfig, ends_with_run: bool = False, port_index: int | None = None
) -> int:
    """Exit code of a role. ``port_index``: the index by which the metrics port is chosen; None: ``index``."""
    from pipeline.runtime.process import role_name, run_role

    port_index = index if port_index is None else port_index
    return run_role(role_name(role, index), port_index, config, load_main(main), ends_with_run)


def _exit(code: int) -> NoReturn:
    """End a role that has closed its resources. Finalizing the interpreter takes seconds (torch) or hangs on a
    thread."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
