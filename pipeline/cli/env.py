"""``afterplay env``: list, show, play and create environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Environments: list, show, play by hand, and make your own.")

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
    """List every environment that a run file can name, with what has to be installed for it.

    Others are named in the run file as module:Class or path/file.py:Class.

      afterplay env list
    """
    from rich.console import Console
    from rich.table import Table

    from pipeline.runtime.process import load_main

    table = Table("name", "kind", "what it is", "ready", box=None, header_style="bold")
    for entry in load_main(f"{_COMMANDS}.describe:entries")():
        table.add_row(entry.name, entry.kind, entry.summary, entry.missing or entry.server or "yes")
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)


@app.command()
def show(name: Name, sets: Sets = None, seed: Seed = 0) -> None:
    """Show the options of an environment, what they mean, and how a task begins.

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
    say(typer.style(f"\nthe task with seed {seed} begins", bold=True))
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
    turns: Annotated[int, typer.Option("--turns", min=1, help="Turns at most.")] = 1000,
    engine: Annotated[
        str | None,
        typer.Option("--engine", metavar="URL", help="Let this engine play, for example http://127.0.0.1:8100."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="With --engine: folder of the model's tokenizer.")
    ] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="With --engine.")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="With --engine: of one reply.")] = 256,
    expert: Annotated[
        bool, typer.Option("--expert", help="Watch the environment's own expert, where it has one.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", metavar="FILE", help="NAME is a section of this run file: its loop, its data."),
    ] = None,
) -> None:
    """Play an episode: you type the replies (or pipe them in, one a line), or an engine or an expert does.

    A line that ends with a backslash goes on in the next; the end of the input leaves the game. Tools are called as
    <tool_call>{"name": "...", "arguments": {...}}</tool_call>. With --config and tasks from data the seed is the place
    of the task among those that are trained on.

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
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="JSON lines, one episode each.")],
    sets: Sets = None,
    first: Annotated[int, typer.Option("--first", min=0, help="Seed of the first task.")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many tasks.")] = 100,
    section: Annotated[
        str | None, typer.Option("--section", help="The environment's section in the run file. Default: NAME.")
    ] = None,
) -> None:
    """Write episodes of an environment's expert, for `afterplay replay import` and for loss.supervised.

    afterplay env demonstrate babyai --count 200 --out babyai.jsonl
    """
    from pipeline.runtime.process import load_main

    written, skipped = load_main(f"{_COMMANDS}.demonstrate:demonstrate")(
        name, _options(sets), section or name, range(first, first + count), out
    )
    typer.echo(f"{written} episodes in {out}" + (f"; the expert gave up {skipped}" if skipped else ""))


@app.command()
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the new environment: small letters, digits and _.")],
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Destination. Default: afterplay-NAME.")
    ] = None,
) -> None:
    """Write a plug-in package that works, with a test: an environment to change into your own.

    afterplay env new colours && cd afterplay-colours && pip install -e '.[test]' && pytest
    """
    from pipeline.runtime.process import load_main

    folder = folder or Path(f"afterplay-{name.replace('_', '-')}")
    for path in load_main(f"{_COMMANDS}.scaffold:write")(name, folder):
        typer.echo(str(path))
    typer.echo(f"\nNow: cd {folder} && pip install -e '.[test]' && pytest")


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
            raise ConfigurationError(f"--set {text}: the value is no YAML: {error}") from error
    return options
