"""``afterplay show``: list and print the rollouts of a run."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from pipeline.cli.options import NUMBER_MAX, Run, finite
from pipeline.cli.replay import open_run
from pipeline.errors import ConfigurationError
from pipeline.views.tables import plain_console

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.runtime.run_directory import RunDirectory
    from pipeline.store.queries import Sort, Span
    from pipeline.views.terminal import Colour

LIST_LIMIT = 50
PAGE_LIMIT = 200

SortBy = StrEnum("SortBy", "newest oldest step reward tokens turns seconds entropy version age replays")
ColourBy = StrEnum("ColourBy", "sampled logprob ratio entropy advantage version")


def show(
    run: Run,
    trajectory: Annotated[
        str | None, typer.Argument(metavar="TRAJECTORY", help="Print this trajectory, for example g000012.3.0.")
    ] = None,
    step: Annotated[
        str | None, typer.Option(metavar="N|A-B", help="Trained in step N, or in steps A to B (also A- and -B).")
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option(metavar="N|A-B", help="From the evaluation after N updates, or after A to B (0-: all)."),
    ] = None,
    split: Annotated[str | None, typer.Option(help="From this split: train, or a held-out one such as eval.")] = None,
    reward_min: Annotated[float | None, typer.Option(callback=finite, help="With a reward of at least this.")] = None,
    reward_max: Annotated[float | None, typer.Option(callback=finite, help="With a reward of at most this.")] = None,
    task: Annotated[
        str | None, typer.Option(help="With this text in the task id, or matching a pattern: 'arithmetic/1*'.")
    ] = None,
    environment: Annotated[str | None, typer.Option(help="Name of the environment in the run file.")] = None,
    status: Annotated[
        str | None,
        typer.Option(
            help="complete, truncated, error, aborted; or trained, held, dropped, baseline, evaluated, imported."
        ),
    ] = None,
    failure: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Failed, with TEXT in the failure or traceback; '' for any.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(metavar="N|A-B", help="With a token sampled by policy version N, or A to B.")
    ] = None,
    replayed: Annotated[bool, typer.Option("--replayed", help="Trained again from the pool.")] = False,
    kept: Annotated[
        bool | None,
        typer.Option("--kept/--all", help="Only trajectories whose tokens are stored (default of --html), or all."),
    ] = None,
    sort: Annotated[SortBy, typer.Option(help="Sort by this, largest or newest first.")] = SortBy.newest,
    reverse: Annotated[bool, typer.Option("--reverse", help="Reverse the order.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=1, max=NUMBER_MAX, help=f"Most trajectories. Default: {LIST_LIMIT}, with --html {PAGE_LIMIT}."
        ),
    ] = None,
    whole: Annotated[bool, typer.Option("--print", "-p", help="Print transcripts instead of a list.")] = False,
    colour: Annotated[
        ColourBy, typer.Option("--colour", "--color", help="Value that colours the sampled tokens of a transcript.")
    ] = ColourBy.sampled,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per line; with tokens for TRAJECTORY and --print.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write one self-contained HTML page.")
    ] = None,
) -> None:
    """List the rollouts of a run, print them, or write them to an HTML page.

    Read-only; works on running, finished and killed runs. Metadata is kept for the newest 20,000 groups.
    Tokens are kept for those still in the replay stage's store, for a sample of each update (traces.trained; also with
    ratio, entropy and advantage), for failed ones and for a sample of each evaluation (traces.evaluated).

      afterplay show runs/tiny
      afterplay show runs/tiny g000012.3.0 --colour ratio
      afterplay show runs/tiny --step 10-20 --reward-max 0 --sort tokens
      afterplay show runs/tiny --failure timeout --print
      afterplay show runs/tiny --evaluation 20 --reward-max 0 --print
      afterplay show runs/tiny --html rollouts.html --limit 500
      afterplay show runs/tiny --json --limit 100000 | jq -r '[.step, .reward] | @tsv'
    """
    from pipeline.store.queries import Filters
    from pipeline.store.trained import describe_steps
    from pipeline.trackers.reporter import delivery_of
    from pipeline.trackers.tracker import trace_id
    from pipeline.views.page import write_page
    from pipeline.views.reader import RunReader
    from pipeline.views.terminal import json_line, print_found, print_list
    from pipeline.views.transcript import found_json, listed_json
    from pipeline.views.vocabulary import Vocabulary

    if html is not None and (as_json or whole):
        raise ConfigurationError("--html: expected neither --json nor --print beside it, which go to the terminal")
    if colour is not ColourBy.sampled and (html is not None or as_json or not (whole or trajectory)):
        raise ConfigurationError("--colour: expected TRAJECTORY or --print beside it, whose tokens it colours")
    config, directory = open_run(run)
    reader = RunReader(config, directory)
    only_kept = html is not None if kept is None else kept
    filters = Filters(
        kept=reader.traced if only_kept and trajectory is None else None,
        trajectory_id=trajectory,
        step=span("--step", step),
        evaluation=span("--evaluation", evaluation),
        split=split,
        version=span("--version", version),
        reward_min=reward_min,
        reward_max=reward_max,
        task=task,
        environment=environment,
        status=status,
        failure=failure,
        replayed=replayed,
    )
    order = cast("Sort", sort.value)
    listing = reader.listing(filters, order, reverse, limit or (PAGE_LIMIT if html else LIST_LIMIT))
    if trajectory is not None and not listing.rows:
        raise ConfigurationError(f"expected a trajectory of {run}, got {trajectory}: afterplay show {run} lists them")
    console = plain_console()
    if html is not None:
        page = write_page(html, reader, listing, filters.step, Vocabulary.read(reader.model))
        typer.echo(
            f"{html}: {page.shown} of {listing.count} trajectories, {page.transcripts} with tokens, "
            f"{page.n_bytes / 1e6:.1f} MB. Open it in a browser."
        )
    elif whole or trajectory is not None:
        vocabulary, traces = Vocabulary.read(reader.model), delivery_of(directory, "otel")
        for found in reader.find(listing.rows, filters.step):
            value = found_json(found, vocabulary)
            if traces.run is not None:
                name = found.listed.trajectory_id
                value["trace"] = {"id": trace_id(traces.run, name), "place": traces.place}
            if as_json:
                typer.echo(json_line(value))
            else:
                print_found(value, cast("Colour", colour.value), console)
    elif as_json:
        for row in listing.rows:
            typer.echo(json_line(listed_json(row)))
    else:
        again = repeatable_updates(config, directory)
        print_list(listing, reader, console, again)
        if again:
            console.print(f"↻ can be made again: {describe_steps(again)} (afterplay retrain {run})", style="dim")


def repeatable_updates(config: RunConfig, directory: RunDirectory) -> Collection[int]:
    """The updates of a run that ``afterplay retrain`` can make again."""
    from pipeline.store.store import store_path
    from pipeline.store.trained import TrainedUpdates, repeatable
    from pipeline.supervisor.history import exact_checkpoints

    path = store_path(config, directory)
    if not path.exists():
        return ()
    return repeatable(TrainedUpdates(path).updates, exact_checkpoints(directory))


def span(option: str, text: str | None) -> Span | None:
    """``7``, ``7-9``, ``7-`` or ``-9``. Raises :class:`ConfigurationError` for anything else.

    >>> span("--step", "7-9"), span("--step", "-9")
    (Span(low=7, high=9), Span(low=None, high=9))
    """
    from pipeline.store.queries import Span

    if text is None:
        return None
    low, dash, high = (part.strip() for part in text.partition("-"))
    numbers = [part for part in (low, high) if part]
    if not numbers or not all(part.isdecimal() and int(part) <= NUMBER_MAX for part in numbers):
        raise ConfigurationError(
            f"{option}: expected a whole number or a range such as 10-20, 10- or -20, up to {NUMBER_MAX:,}, "
            f"got {text!r}"
        )
    first = int(low) if low else None
    last = int(high) if high else None
    if not dash:
        return Span(first, first)
    if first is not None and last is not None and first > last:
        raise ConfigurationError(f"{option}: expected a range from the smaller to the larger number, got {text!r}")
    return Span(first, last)
