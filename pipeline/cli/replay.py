"""``afterplay replay``: the replay stage of a run, and what it has stored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.rundir import RunDirectory

START = "start"


class StartByDefault(TyperGroup):
    """``afterplay replay FILE`` is ``afterplay replay start FILE``: what is no command is a run file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=StartByDefault,
    no_args_is_help=True,
    help="""The replay stage of a run, and the experience it has stored.

[bold]Be the stage[/bold] (`afterplay run` starts it by itself)

  afterplay replay configs/tiny.yaml            the same as: afterplay replay start configs/tiny.yaml

[bold]Look at what is stored[/bold], while the run goes on or later

  afterplay replay inspect runs/tiny
  afterplay replay inspect runs/tiny --json | jq .audit

[bold]Carry experience from run to run[/bold]

  afterplay replay export runs/tiny pool.afterplay
  afterplay replay import runs/other pool.afterplay
  afterplay replay import configs/tiny.yaml demonstrations.jsonl    before the run has started
""",
)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory, for example runs/tiny.")]
Target = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or the run file of a run that has not started.")
]


@app.command("inspect")
def inspect_command(
    run: Run,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")] = False,
    rescore: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Score N pooled trajectories again and compare.")
    ] = None,
) -> None:
    """Show difficulty buckets, the pool with its ages, terminal states, the guard and the bias audit.

    Only reads, and works while the run goes on. The audit compares what was sampled with what was stored, trained and
    replayed: where their means of length, duration, reward or age differ, selection has shifted the data.

    --rescore runs the score functions of the run on N stored trajectories and tells which rewards they give otherwise
    today. It changes nothing: the stored reward is the one that counts.

      afterplay replay inspect runs/tiny
      afterplay replay inspect runs/tiny --json
      afterplay replay inspect runs/tiny --rescore 100
    """
    from pipeline.cli.experience import show, show_rescored
    from pipeline.replay import rescoring
    from pipeline.replay.examine import dumps, examine_run
    from pipeline.replay.store import store_path

    config, directory = open_run(run)
    path = store_path(config, directory)
    found = examine_run(path)
    rescored = None if rescore is None else rescoring.rescore(config, path, rescore)
    if as_json:
        typer.echo(dumps(found, config, **({} if rescored is None else {"rescored": rescored.json()})))
    else:
        show(found, config, run)
        if rescored is not None:
            show_rescored(rescored)


@app.command("export")
def export_command(
    run: Run,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write, for example pool.afterplay.")],
    compress: Annotated[bool, typer.Option("--compress/--plain", help="Compress every trajectory with zlib.")] = True,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it is there.")] = False,
) -> None:
    """Write the stored trajectories of a run into one portable, checksummed file. Works while the run goes on.

    afterplay replay export runs/tiny pool.afterplay
    afterplay replay export runs/tiny pool.afterplay --plain --force
    """
    from pipeline.replay.exporting import export_run

    config, directory = open_run(run)
    count = export_run(config, directory, file, compress=compress, replace=force)
    typer.echo(f"{count} trajectories in {file}")


@app.command("import")
def import_command(
    run: Target,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An export, or demonstrations: one JSON object a line (.jsonl).")
    ],
) -> None:
    """Put trajectories into the pool of a run that is not running, or has not started yet.

    FILE is read and checked to its end before anything is changed. What is stored already, failed
    (replay.success_threshold) or belongs to a retired task is passed over; the capacity of the pool holds. The
    trajectories are replayed like the run's own. A line of demonstrations has token ids, with log-probabilities where
    somebody recorded them,

      {"environment": "arithmetic", "seed": 17, "reward": 1, "turns": [{"context_ids": [1, 2],
       "completion_ids": [3, 4], "logprobs": [-0.1, -0.2]}]}

    or text, for the chat template of the run's model:

      {"environment": "arithmetic", "seed": 17, "reward": 1, "messages": [{"role": "user", "content": "2+3?"},
       {"role": "assistant", "content": "5"}]}

    Without log-probabilities a demonstration is trained as if today's policy had sampled it.

      afterplay replay import runs/other pool.afterplay
      afterplay replay import configs/tiny.yaml demonstrations.jsonl
    """
    from pipeline.cli.status import is_alive
    from pipeline.errors import ConfigurationError
    from pipeline.replay.importing import Importer
    from pipeline.role import load_main

    config, directory = open_run(run, or_file=True)
    if is_alive(directory):
        raise ConfigurationError(f"expected a run that is not running, but {directory.path} is: stop it first")
    model = config.model
    demonstrator = load_main("actors.rendering.demonstrations:Demonstrator")
    render = demonstrator(directory.model, model.chat_template, model.trust_remote_code)
    counts = Importer(config, directory, render).run(file)
    words = {
        "imported": "imported",
        "duplicate": "stored already",
        "failure": "below replay.success_threshold",
        "retired": "of retired tasks, too old (replay.max_age) or without a sampled token",
    }
    typer.echo(", ".join(f"{counts[key]} {text}" for key, text in words.items() if counts[key] or key == "imported"))
    left = {key.removeprefix("left."): n for key, n in counts.items() if key.startswith("left.")}
    if left:
        typer.echo("left the pool to make room: " + ", ".join(f"{n} ({reason})" for reason, n in left.items()))


def open_run(path: Path, *, or_file: bool = False) -> tuple[RunConfig, RunDirectory]:
    """Configuration and directory of a run that is there; ``or_file``: ``path`` may be the run file of one that is not.

    Raises :class:`ConfigurationError`.
    """
    from pipeline.config.load import load
    from pipeline.errors import ConfigurationError
    from pipeline.rundir import RunDirectory

    if path.is_file() and or_file:
        config = load(path, [])
        directory = RunDirectory(config.run.path)
        if directory.config_file.exists():
            raise ConfigurationError(
                f"the run of {path} has started: name its directory, {directory.path}, because settings may have been "
                "given on its command line"
            )
        return config, directory
    directory = RunDirectory(path)
    if not directory.config_file.exists():
        raise ConfigurationError(f"expected a run directory, got {path}, which has no config.yaml")
    config = load(directory.config_file, environment={})
    return config, directory
