"""``afterplay env``: list, show, play and create environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="List, show and play environments, and create your own.")

_COMMANDS = "actors.env_commands"
_COLOURS = {"user": "cyan", "system": "magenta", "tool": "yellow", "assistant": "green"}

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name of `afterplay env list`, module:Class or path/file.py:Class.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="OPTION=VALUE", help="One option of the environment; the value is YAML."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the task.")]


@app.command("list")
def list_() -> None:
    """List the environments that a run file can name, and what each needs installed.

    A run file names any other environment as module:Class or path/file.py:Class.

      afterplay env list
    """
    from rich.console import Console
    from rich.table import Table

    from pipeline.runtime.process import load_main

    table = Table("name", "kind", "description", "ready", box=None, header_style="bold")
    for entry in load_main(f"{_COMMANDS}.describe:entries")():
        table.add_row(entry.name, entry.kind, entry.summary, entry.missing or entry.server or "yes")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def show(name: Name, sets: Sets = None, seed: Seed = 0) -> None:
    """Show the options of an environment, their meaning, and the start of a task.

    afterplay env show babyai
    afterplay env show babyai --set level=BabyAI-PickupLoc-v0 --seed 3
    """
    from pipeline.runtime.process import load_main

    details = load_main(f"{_COMMANDS}.describe:details")(name, _options(sets), seed)
    say = typer.echo
    say(typer.style(details.entry.name, bold=True) + f" ({details.entry.kind})")
    if details.entry.missing is not None:
        say(typer.style(f"not ready: {details.entry.missing}", fg="red"))
    say(f"\n{details.doc}\n")
    say(typer.style("options", bold=True))
    for option in details.options:
        say(f"  {typer.style(option.name, fg='cyan')}: {option.kind} = {option.default}")
        if option.doc:
            say("      " + " ".join(option.doc.split()))
    if not details.options:
        say("  none")
    say(typer.style("\nsplits", bold=True))
    for split, seeds in details.splits.items():
        say(f"  {split}: {seeds}")
    say(typer.style(f"\nfirst messages of the task with seed {seed}", bold=True))
    for role, text in details.example:
        _talk(role, text)
    if details.trouble:
        say(typer.style(details.trouble, fg="red"))
        if sets:
            raise typer.Exit(1)


@app.command()
def play(
    name: Name,
    sets: Sets = None,
    seed: Seed = 0,
    turns: Annotated[int, typer.Option("--turns", min=1, help="Stop after this number of turns.")] = 1000,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="URL", help="Let this engine play, for example http://127.0.0.1:8100."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="With --engine: folder of the model's tokenizer.")
    ] = None,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="With --engine: sampling temperature.")
    ] = 1.0,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="With --engine: most tokens of one reply.")
    ] = 256,
    expert: Annotated[bool, typer.Option("--expert", help="Let the environment's expert play, if it has one.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", metavar="FILE", help="Use section NAME of this run file, with its loop and data."
        ),
    ] = None,
) -> None:
    """Play one episode. The replies come from you (typed, or piped in with one per line), an engine or an expert.

    A line that ends with a backslash continues on the next line. End of input leaves the game. Tools are called as
    <tool_call>{"name": "...", "arguments": {...}}</tool_call>. With --config and tasks from a data set, the seed is the
    position of the task in the training split.

      afterplay env play number_guess --seed 3
      printf '8\\n12\\n' | afterplay env play number_guess
      afterplay env play questions --config configs/questions.yaml --seed 5
      afterplay env play babyai --expert
      afterplay env play arithmetic --engine http://127.0.0.1:8100 --model runs/quickstart/model
    """
    from pipeline.runtime.process import load_main

    load_main(f"{_COMMANDS}.play:play")(
        name,
        _options(sets),
        seed,
        turns,
        _talk,
        engine=engine,
        model=model,
        temperature=temperature,
        tokens_max=max_tokens,
        expert=expert,
        run_file=config,
    )


@app.command()
def demonstrate(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The JSONL file to write.")],
    sets: Sets = None,
    first: Annotated[int, typer.Option("--first", min=0, help="Seed of the first task.")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of tasks.")] = 100,
    section: Annotated[
        str | None, typer.Option("--section", help="Name of the environment in the run file. Default: NAME.")
    ] = None,
) -> None:
    """Write episodes of an environment's expert as demonstrations, one per line.

    `afterplay replay import` and loss.supervised read the file.

    afterplay env demonstrate babyai --count 200 --out babyai.jsonl
    """
    from pipeline.runtime.process import load_main

    written, skipped = load_main(f"{_COMMANDS}.demonstrate:demonstrate")(
        name, _options(sets), section or name, range(first, first + count), out
    )
    typer.echo(f"{written} episodes in {out}" + (f"; the expert did not solve {skipped}" if skipped else ""))


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the new environment: lower-case letters, digits and _.")
    ],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Folder to create. Default: afterplay-NAME.")
    ] = None,
) -> None:
    """Create a working plug-in package with an example environment and a test, to edit into your own.

    afterplay env new colours && cd afterplay-colours && pip install -e '.[test]' && pytest
    """
    from pipeline.runtime.process import load_main

    folder = folder or Path(f"afterplay-{name.replace('_', '-')}")
    for path in load_main(f"{_COMMANDS}.scaffold:write_package")(name, folder):
        typer.echo(str(path))
    typer.echo(f"\nNext: cd {folder} && pip install -e '.[test]' && pytest")


def _talk(who: str, text: str) -> None:
    colour = _COLOURS.get(who)
    typer.echo(typer.style(f"{who}: ", fg=colour, bold=True) + text)


def _options(sets: list[str] | None) -> dict[str, Any]:
    """``["a=1", "b=[x]"]`` as a dictionary. Raises :class:`ConfigurationError`."""
    import yaml

    from pipeline.errors import ConfigurationError

    options: dict[str, Any] = {}
    for text in sets or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigurationError(f"--set {text}: expected option=value")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigurationError(f"--set {text}: expected a YAML value, got an error: {error}") from error
    return options
