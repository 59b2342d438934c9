"""``afterplay env``: list, show, play, evaluate and create environments."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.cli.options import NUMBER_MAX, finite
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import load_main
from pipeline.views.tables import plain_console, table

app = typer.Typer(no_args_is_help=True, help="List, show, play and evaluate environments, and create your own.")

_COMMANDS = "actors.env_commands"
_COLOURS = {"user": "cyan", "system": "magenta", "tool": "yellow", "assistant": "green"}

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name of `afterplay env list`, module:Class or path/file.py:Class.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="OPTION=VALUE", help="One option of the environment; the value is YAML."),
]
RunFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="Use section NAME of this run file, with its loop and data."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=NUMBER_MAX, help="Seed of the task.")]


@app.command("list")
def list_() -> None:
    """List the environments that a run file can name, and what each needs installed.

    A run file names any other environment as module:Class or path/file.py:Class.

      afterplay env list
    """
    entries = load_main(f"{_COMMANDS}.describe:entries")()
    rows = [(entry.name, entry.kind, entry.summary, entry.missing or entry.server or "yes") for entry in entries]
    plain_console().print(table(("name", "kind", "description", "ready"), rows))


@app.command()
def show(name: Name, sets: Sets = None, seed: Seed = 0) -> None:
    """Show the options of an environment, their meaning, and the start of a task.

    afterplay env show babyai
    afterplay env show babyai --set level=BabyAI-PickupLoc-v0 --seed 3
    """
    details = load_main(f"{_COMMANDS}.describe:details")(name, _options(sets), seed)
    say = typer.echo
    say(typer.style(details.entry.name, bold=True) + f" ({details.entry.kind})")
    if details.entry.missing is not None:
        say(typer.style(f"not ready: {details.entry.missing}", fg="red"))
    say(f"\n{details.doc.replace('``', '`')}\n" if details.doc else "")
    say(typer.style("options", bold=True))
    for option in details.options:
        say(f"  {typer.style(option.name, fg='cyan')}: {option.kind} = {option.default}")
        if option.doc:
            say("      " + " ".join(option.doc.replace("``", "`").split()))
    if not details.options:
        say("  none")
    say(typer.style("\nsplits", bold=True))
    for split, seeds in details.splits.items():
        say(f"  {split}: {seeds}")
    say(typer.style(f"\nfirst messages of the task with seed {seed}", bold=True))
    for role, text in details.example:
        _talk(role, text)
    if details.reason and sets:
        raise ConfigurationError(details.reason)
    if details.reason:
        say(typer.style(details.reason, fg="red"))


@app.command()
def play(
    name: Name,
    sets: Sets = None,
    seed: Seed = 0,
    turns: Annotated[int, typer.Option(min=1, help="Stop after this number of turns.")] = 1000,
    expert: Annotated[bool, typer.Option("--expert", help="Let the environment's expert play, if it has one.")] = False,
    config: RunFile = None,
) -> None:
    """Play one episode. The replies come from you (typed, or piped in with one per line), or from an expert.

    A line that ends with a backslash continues on the next line. End of input leaves the game. Tools are called as
    <tool_call>{"name": "...", "arguments": {...}}</tool_call>. With --config and tasks from a data set, the seed is the
    position of the task in the training split.

      afterplay env play number_guess --seed 3
      printf '8\\n12\\n' | afterplay env play number_guess
      afterplay env play questions --config @questions --seed 5
      afterplay env play babyai --expert
    """
    main = load_main(f"{_COMMANDS}.play:play")
    main(name, _options(sets), seed, turns, _talk, expert=expert, run_file=config)


ToolStyle = StrEnum("ToolStyle", "native text")


@app.command("eval")
def eval_(
    name: Name,
    url: Annotated[
        str, typer.Option("--url", "-u", metavar="URL", envvar="OPENAI_BASE_URL", help="Base URL of the endpoint.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="NAME", help="Name of the model. Default: the only one that it lists."),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="Place of the API key: env:NAME or file:PATH. Default: env:OPENAI_API_KEY if that is set.",
        ),
    ] = None,
    sets: Sets = None,
    config: RunFile = None,
    tasks: Annotated[int, typer.Option("--tasks", "-n", min=1, help="Number of tasks.")] = 32,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Rollouts of each task.")] = 8,
    first: Annotated[int, typer.Option(min=0, help="Place of the first task in the split.")] = 0,
    split: Annotated[str, typer.Option(help="Split that the tasks are taken from.")] = "train",
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, callback=finite, help="Sampling temperature. Default: the run file's, else 1."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of one reply. Default: the run file's, else 2048.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Most turns of an episode. Default: the run file's, else 8.")
    ] = None,
    success: Annotated[
        float | None,
        typer.Option(callback=finite, help="A reward of at least this is a success. Default: the run file's, else 1."),
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option(min=1, help="k of pass@k; repeat it. Default: 1, 2, 4, ... and --samples.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts at the same time.")] = 16,
    retries: Annotated[int, typer.Option(min=0, help="Further tries of a request that got 429, 5xx or no answer.")] = 6,
    request_seconds: Annotated[
        float, typer.Option(min=1.0, callback=finite, help="Time limit of one request.")
    ] = 600.0,
    tools: Annotated[
        ToolStyle, typer.Option(help="Send tools as the API has them, or as text in the system message.")
    ] = ToolStyle.native,
    body: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="Another field of each request; the value is YAML.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Folder of the results. Default: evaluations/NAME-MODEL."),
    ] = None,
) -> None:
    """Try an environment with any OpenAI-compatible model before you train on it.

    Runs --samples rollouts of each of --tasks tasks and reports the mean reward, pass@k, failures by reason, and how
    many tasks are always, never or sometimes solved. Only tasks whose rollouts get different rewards give advantages,
    so these tell whether training can learn anything. A rollout that failed is no reward of 0: it is counted apart.
    With --config the agent loop, the data and the scorer are those of the run; agent programs work as well.

    The folder gets rollouts.jsonl, summary.json and rollouts.html, the page of `afterplay show`. The same command
    continues an evaluation that was stopped, or adds to it with more --tasks or --samples. Rollouts that the endpoint
    failed are tried again. The exit code is 1 if it stopped early or nothing was scored.

      afterplay env eval number_guess --url http://127.0.0.1:8000/v1
      afterplay env eval reasoning_gym --set dataset=chain_sum --url http://127.0.0.1:8000/v1
      afterplay env eval questions --config @questions --url http://127.0.0.1:11434/v1 --model qwen3:0.6b
      afterplay env eval my_env.py:Bank --url https://api.openai.com/v1 --model gpt-4.1-mini --turns 16
      afterplay env eval big_sums --url http://127.0.0.1:8080/v1 --tools text
      afterplay env eval guess --config @program --url http://127.0.0.1:8000/v1 --body 'reasoning_effort=low'
    """
    from pipeline.errors import ConfigurationError

    if key is None and os.environ.get("OPENAI_API_KEY"):
        key = "env:OPENAI_API_KEY"
    if key is not None and not key.startswith(("env:", "file:")):
        raise ConfigurationError("--key: expected env:NAME or file:PATH, so that the key is in no list of commands")
    if wrong := [k for k in pass_at or () if k > samples]:
        raise ConfigurationError(f"--pass-at: expected at most --samples ({samples}), got {', '.join(map(str, wrong))}")
    request = load_main(f"{_COMMANDS}.evaluate:EvalRequest")(
        name, url, model, _options(sets), config, key, out, tasks, samples, first, split, temperature,
        max_tokens, turns, concurrency, success, tuple(pass_at or ()), _options(body, "--body"),
        tools is ToolStyle.text, retries, request_seconds,
    )  # fmt: skip
    result = load_main(f"{_COMMANDS}.evaluate:evaluate")(request, _progress())
    _print_evaluation(name, result)
    if result.stopped is not None or not result.summary.scored:
        raise typer.Exit(1)


def _progress() -> Callable[[int, int, int], None]:
    """Prints how far an evaluation is: one line that changes on a terminal, else a line for each tenth."""
    shown = [-1]

    def say(done: int, total: int, failed: int) -> None:
        tty, tenth = sys.stderr.isatty(), 10 * done // total
        if tty or tenth > shown[0]:
            words = f"{done} of {total} rollouts" + (f", {failed} failed" if failed else "")
            typer.echo(f"\r{words}" if tty else words, err=True, nl=not tty or done == total)
        shown[0] = tenth

    return say


def _print_evaluation(name: str, result: Any) -> None:
    found, say = result.summary, typer.echo
    say(typer.style(f"\n{name} with {result.model}", bold=True) + f": {found.tasks} tasks x {found.samples} rollouts")

    def line(what: str, value: str) -> None:
        say(f"  {what:<14} {value}")

    if found.score is not None:
        error = "" if found.se is None else f" ± {found.se:.3f} (standard error over tasks)"
        line("mean reward", f"{found.score:.3f}{error}")
        for k, estimate in found.pass_at.items():
            if estimate.value is not None:
                bounds = f"{estimate.low:.3f} to {estimate.high:.3f}"
                line(f"pass@{k}", f"{estimate.value:.3f}  (95 %: {bounds}, over {estimate.tasks} tasks)")
        line("turns", f"{found.turns:.1f} a rollout")
        line("tokens", f"{found.tokens:.0f} sampled a rollout" if found.tokens else "not reported by the endpoint")
    for reason, n in found.failures.items():
        message = " ".join(result.examples.get(reason, "").split())
        line("failed", f"{n} x {reason}: {message[:300]}")
    for words in (*result.words, *result.notes):
        say(f"\n{words}")
    if result.stopped is not None:
        say(typer.style(f"\nstopped: {result.stopped}. The same command continues.", fg="red"))
    say(f"\nwritten to {result.folder}: rollouts.html (open it in a browser), rollouts.jsonl, summary.json")


@app.command()
def demonstrate(
    name: Name,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", dir_okay=False, help="The JSONL file to write.")],
    sets: Sets = None,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first task.")] = 0,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Number of tasks.")] = 100,
    section: Annotated[str | None, typer.Option(help="Name of the environment in the run file. Default: NAME.")] = None,
) -> None:
    """Write episodes of an environment's expert as demonstrations, one per line.

    `afterplay replay import` and loss.supervised read the file. Seeds outside the split train are left out.

    afterplay env demonstrate babyai --count 200 --out babyai.jsonl
    """
    written, unsolved, held_out = load_main(f"{_COMMANDS}.demonstrate:demonstrate")(
        name, _options(sets), section or name, range(first, first + count), out
    )
    typer.echo(
        f"{written} episodes in {out}"
        + (f"; the expert did not solve {unsolved}" if unsolved else "")
        + (f"; seeds that are not of the split train: {held_out}" if held_out else "")
    )


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the new environment: lower-case letters, digits and _.")
    ],
    folder: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to create. Default: afterplay-NAME.")
    ] = None,
) -> None:
    """Create a working plug-in package with an example environment and a test, to edit into your own.

    afterplay env new colours && cd afterplay-colours && pip install -e '.[test]' && pytest
    """
    folder = folder or Path(f"afterplay-{name.replace('_', '-')}")
    for path in load_main(f"{_COMMANDS}.scaffold:write_package")(name, folder):
        typer.echo(str(path))
    typer.echo(f"\nNext: cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest")


def _talk(who: str, text: str) -> None:
    typer.echo(typer.style(f"{who}: ", fg=_COLOURS.get(who), bold=True) + text)


def _options(sets: list[str] | None, option: str = "--set") -> dict[str, Any]:
    """``["a=1", "b=[x]"]`` as a dictionary. Raises :class:`ConfigurationError`."""
    from pipeline.config.load import parse_yaml

    options: dict[str, Any] = {}
    for text in sets or ():
        key, equals, value = text.partition("=")
        if not (key and equals):
            raise ConfigurationError(f"{option} {text}: expected option=value")
        options[key] = parse_yaml(value, f"{option} {text}")
    return options
