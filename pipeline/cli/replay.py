"""``afterplay replay``: start the replay stage; inspect, export and import stored experience."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pipeline.cli.options import Json, Run
from pipeline.errors import ConfigurationError
from pipeline.runtime.disk import size
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import RunDirectory
from pipeline.views.tables import counts_table, describe_version, plain_console, table

if TYPE_CHECKING:
    from rich.console import Console

    from pipeline.config import RunConfig
    from pipeline.replay.report import ReplayReport

TASKS_SHOWN = 10
_TOKENIZER = "learner.models.prepare:tokenizer_folder"


def show(found: ReplayReport, config: RunConfig, run: Path) -> None:
    """Print the report of ``afterplay replay inspect``."""
    console, value = plain_console(), found.json(config)
    state = "on" if config.replay.enabled else "off"
    console.print(
        f"{run}: {describe_version(found.policy_version)}, {found.updates} updates, replay {state}", style="bold"
    )
    pooled = [task.bucket for task in found.pooled_tasks]
    buckets = [(bucket, tasks, pooled.count(bucket)) for bucket, tasks in sorted(found.buckets.items())]
    title = f"tasks by successes of {config.groups.n_rollout} at their success rate"
    retired = sorted(found.retired)
    console.print(table(("successes", ">tasks", ">in the pool"), [*buckets, ("retired", len(retired), 0)], title))
    for task_id in retired[:TASKS_SHOWN]:
        console.print(f"  {task_id}", style="dim")
    if len(retired) > TASKS_SHOWN:
        console.print(f"  and {len(retired) - TASKS_SHOWN} more (--json lists all)", style="dim")
    if config.replay.mode == "groups":
        console.print(
            f"\nstored: {found.stored_groups} of {config.replay.groups.capacity} groups, "
            f"replayed {found.stored_uses} times"
        )
    else:
        _print_pool(found, config, console)
    counts = {**value["states"], "stored and replayed": found.counters}
    console.print(counts_table({what: dict(sorted(states.items())) for what, states in counts.items()}))
    if config.replay.enabled:
        guard = value["guard"]
        console.print(
            f"mixing {'has begun' if guard['mixing'] else 'has not begun'}; ESS guard "
            f"{'on' if guard['enabled'] else 'off'}, factor {guard['factor']:.2f}; replay share now "
            f"{guard['share']:.2f} of task_ratio {config.replay.task_ratio:.2f}"
        )
    kinds = ("tokens", "seconds", "reward", "age", "tasks", "tasks_effective")
    means = [
        (name, own["count"], *("" if own[kind] is None else f"{own[kind]:.3g}" for kind in kinds))
        for name, own in value["audit"].items()
    ]
    console.print(
        table(("population", ">count", *(f">{kind}" for kind in kinds)), means, "bias audit: means, and tasks")
    )


def _print_pool(found: ReplayReport, config: RunConfig, console: Console) -> None:
    console.print(
        f"\npool: {found.entries} of {config.replay.capacity} trajectories of {len(found.pooled_tasks)} tasks, "
        f"{size(found.n_bytes)}, {found.unrecorded} without recorded log-probs, replayed {found.uses} times"
    )
    ages = [(describe_ages(bound), count) for bound, count in sorted(found.ages.items())]
    console.print(table(("age", ">trajectories"), ages, "age of the pool in versions"))
    largest = [(s.task_id, s.trajectories, f"{s.n_bytes / 1024:.1f}", s.bucket, s.visits) for s in found.pooled_tasks]
    headings = ("task", ">trajectories", ">KiB", ">bucket", ">visits")
    console.print(table(headings, largest[:TASKS_SHOWN], f"largest of {len(found.pooled_tasks)} pooled tasks"))


def describe_ages(bound: int) -> str:
    """The ages that are counted at ``bound``.

    >>> [describe_ages(bound) for bound in (1, 4, 128)]
    ['1', '4 to 7', '128 and more']
    """
    from pipeline.replay.report import AGES

    last = next((later - 1 for later in AGES if later > bound), None)
    if last is None:
        return f"{bound} and more"
    return str(bound) if last == bound else f"{bound} to {last}"


START = "start"


class StartByDefault(TyperGroup):
    """``afterplay replay FILE`` is ``afterplay replay start FILE``: an argument that is not a command is a run file."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            if (close := difflib.get_close_matches(args[0], self.commands, 1)) and not Path(args[0]).exists():
                raise ConfigurationError(
                    f"replay: expected a command or a run file, got {args[0]!r}; did you mean {close[0]}?"
                )
            args = [START, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=StartByDefault,
    no_args_is_help=True,
    help="""Run the replay stage; inspect, export and import stored trajectories.

[bold]Run the stage[/bold] (`afterplay run` does this itself)

  afterplay replay @tiny            the same as: afterplay replay start @tiny

[bold]Inspect the store[/bold] of a live or finished run

  afterplay replay inspect runs/tiny
  afterplay replay inspect runs/tiny --json | jq .audit

[bold]Move trajectories between runs[/bold]

  afterplay replay export runs/tiny pool.afterplay
  afterplay replay import runs/other pool.afterplay
  afterplay replay import run.yaml demonstrations.jsonl    before the run has started
""",
)

Target = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run directory, or the run file of a run that has not started.")
]


@app.command("inspect")
def inspect_command(run: Run, as_json: Json = False) -> None:
    """Show difficulty buckets, the stored groups or the pool and its ages, final states, the ESS guard and the audit.

    Read-only; works while the run is alive. The audit compares the mean length, duration, reward and age of sampled,
    stored, trained and replayed trajectories, and how many tasks they are of. Differences show how selection has
    shifted the data.

      afterplay replay inspect runs/tiny
      afterplay replay inspect runs/tiny --json
    """
    from pipeline.replay.report import dumps, examine_run
    from pipeline.store.store import store_path

    config, directory = open_run(run)
    found = examine_run(store_path(config, directory))
    if as_json:
        typer.echo(dumps(found, config))
    else:
        show(found, config, run)


@app.command("export")
def export_command(
    run: Run,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", dir_okay=False, help="The file to write, for example pool.afterplay.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
) -> None:
    """Write the pool of a run with replay.mode: mix to one portable, checksummed file. Works while the run is alive.

    afterplay replay export runs/tiny pool.afterplay
    afterplay replay export runs/tiny pool.afterplay --force
    """
    from pipeline.replay.transfer import export_run

    config, directory = open_run(run)
    count = export_run(config, directory, file, replace=force)
    typer.echo(f"{count} trajectories in {file}")


@app.command("import")
def import_command(
    run: Target,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An export, or demonstrations: one JSON object per line (.jsonl).")
    ],
) -> None:
    """Add trajectories to the pool of a run that is stopped or has not started yet.

    FILE is checked completely before anything is changed. Trajectories that are already stored, failed
    (replay.success_threshold) or belong to a retired task are skipped. The capacity of the pool applies. The
    trajectories are replayed like the run's own.

    A line of demonstrations has token ids, optionally with recorded log-probabilities,

      {"environment": "arithmetic", "seed": 17, "reward": 1, "turns": [
       {"context_ids": [1, 2], "completion_ids": [3, 4],
        "logprobs": [-0.1, -0.2]}]}

    or text, for the chat template of the run's model:

      {"environment": "arithmetic", "seed": 17, "reward": 1, "messages": [
       {"role": "user", "content": "2+3?"},
       {"role": "assistant", "content": "5"}]}

    Without log-probabilities a demonstration is trained as if the current policy had sampled it.

      afterplay replay import runs/other pool.afterplay
      afterplay replay import run.yaml demonstrations.jsonl
    """
    from pipeline.cli.status import is_alive
    from pipeline.replay.transfer import Importer

    config, directory = open_run(run, or_file=True)
    if is_alive(directory):
        raise ConfigurationError(f"expected a stopped run, but {directory.path} is running: stop it first")
    model = config.model
    demonstrator = load_main("actors.env_commands.demonstrate:Demonstrator")
    there = directory.model.exists()  # else the run has not prepared it yet
    with nullcontext(directory.model) if there else load_main(_TOKENIZER)(config) as tokenizer:
        render = demonstrator(tokenizer or directory.model, model.chat_template, model.trust_remote_code)
        counts = Importer(config, directory, render, tokenizer).run(file)
    words = {
        "imported": "imported",
        "duplicate": "already stored",
        "failure": "below replay.success_threshold",
        "retired": "of retired tasks, too old (replay.max_age) or without a sampled token",
    }
    typer.echo(", ".join(f"{counts[key]} {text}" for key, text in words.items() if counts[key] or key == "imported"))
    left = {key.removeprefix("left."): n for key, n in counts.items() if key.startswith("left.")}
    if left:
        typer.echo("evicted from the pool: " + ", ".join(f"{n} ({reason})" for reason, n in left.items()))


def open_run(path: Path, overrides: Sequence[str] = (), *, or_file: bool = False) -> tuple[RunConfig, RunDirectory]:
    """Configuration and directory of an existing run. ``overrides``: as of ``--set``.

    ``or_file``: ``path`` may also be the run file of a run that has not started. Raises :class:`ConfigurationError`.
    """
    from pipeline.config.load import load

    if or_file and (path.is_file() or str(path).startswith("@")):
        config = load(path, [])
        directory = RunDirectory(config.run.path)
        if directory.config_file.exists():
            raise ConfigurationError(
                f"the run of {path} has already started: give its directory {directory.path} instead, because the run "
                "may have been started with --set"
            )
        return config, directory
    directory = RunDirectory(path)
    if not directory.config_file.exists():
        raise ConfigurationError(f"expected a run directory, got {path}, which has no config.yaml")
    return load(directory.config_file, overrides, environment={}), directory
