"""``afterplay retrain`` and ``afterplay explain``: an update of a run made again, changed, bundled, or taken apart."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from pipeline.cli.options import Json, Sets
from pipeline.errors import ConfigurationError
from pipeline.runtime.children import wait_passively
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import RunDirectory
from pipeline.views.tables import plain_console, table

COMPARED = ("loss", "grad_norm", "ratio_mean", "ess_ratio", "kl_k3", "entropy", "clip_fraction")
"""Keys of ``metrics.jsonl`` that a changed update is shown by."""
PHASES = ("prepare", "choose", "forward", "backward", "optimize")
"""Phases of an update that a repetition has too."""
METRICS = "metrics.jsonl"
TOKENS_SHOWN, GROUPS_SHOWN = 10, 8
ABOUT_DATA = (
    "The rollouts are those of the recorded policies. This says what the changed update makes of them, and not what a "
    "run with this configuration would have sampled."
)

Target = Annotated[Path, typer.Argument(metavar="RUN|FILE", help="A run directory, or a bundle.")]
Step = Annotated[
    int | None,
    typer.Option(
        "--from",
        metavar="STEP",
        min=1,
        help="First step. Default: the first behind the newest checkpoint that has one.",
    ),
]


def retrain(
    run: Target,
    step: Step = None,
    updates: Annotated[
        int | None, typer.Option(min=1, help="Steps to make, counted from --from. Default: all that can be.")
    ] = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --set: metrics and picture. Default: retrain/ in the run directory, or retrain-2/ …",
        ),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the step of --from to one file instead.")
    ] = None,
    texts: Annotated[
        bool,
        typer.Option("--texts/--no-texts", help="With --bundle: with the texts of messages and tasks, or without."),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Without --set and --bundle: print a line of JSON for each step.")
    ] = False,
) -> None:
    """Make steps of a run again, from a checkpoint and the stored rollouts, without engines and environments.

    Unchanged, it proves that the run can be reproduced: rows, log-probabilities, advantages, losses, gradients and
    weights are compared bit for bit, and the first value that differs is named. The exit code is 0 if all are equal,
    else 1. With --set another loss, estimator or optimizer is tried on the same data, beside the recorded curves. Steps
    that can be made again are those of replay.keep_trained before the newest checkpoint, and all behind it. Works while
    the run is alive.

      afterplay retrain runs/tiny
      afterplay retrain runs/tiny --from 412 --updates 3
      afterplay retrain runs/tiny --from 412 --set loss.policy=sapo
      afterplay retrain runs/tiny --from 412 --bundle step412.afterplay --no-texts
      afterplay retrain step412.afterplay
    """
    if as_json and (sets or bundle is not None):
        raise ConfigurationError("--json: expected neither --set, whose numbers are in a file, nor --bundle beside it")
    if out is not None and not sets:
        raise ConfigurationError("--out: expected --set beside it, whose metrics and picture it takes")
    if out is not None and any(path.exists() for path in (RunDirectory(out).config_file, out / METRICS)):
        raise ConfigurationError(f"--out: expected a folder of its own, got {out}, which has metrics")
    if bundle is not None and updates is not None:
        raise ConfigurationError("--bundle: expected no --updates beside it: a bundle has one step")
    if bundle is None and not texts:
        raise ConfigurationError("--no-texts: expected --bundle beside it, whose texts it leaves out")
    wait_passively()
    with load_main("learner.process.bundle:open_source")(run) as source:
        if bundle is not None:
            if sets:
                raise ConfigurationError("--bundle: expected no --set beside it: a bundle has what the run made")
            n_bytes = load_main("learner.process.bundle:write_bundle")(source, step, bundle, texts=texts)
            typer.echo(f"{bundle}: {n_bytes / 1e6:.1f} MB. Repeat it with: afterplay retrain {bundle}")
            return
        made = load_main("learner.process.retrain:retrain")(source, step, updates, tuple(sets or ()))
        if sets:
            compare(made, out or free_folder(run / "retrain" if run.is_dir() else run.with_name(f"{run.name}-retrain")))
            return
        raise typer.Exit(0 if (verify_json if as_json else verify)(made) else 1)


def free_folder(folder: Path) -> Path:
    """``folder``, or with the first number behind it that has no results yet."""
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain((folder,), numbered) if not (path / METRICS).exists())


def verify_json(made: Any) -> bool:
    """Print a line of JSON for each update; True where none differs from what the run recorded."""
    equal = True
    for update in made:
        found = {
            "step": update.step,
            "compared": update.compared,
            "differences": [str(one) for one in update.differences],
            "seconds": update.seconds,
            "update_seconds": _seconds(update.line),
            "recorded_seconds": _seconds(update.recorded),
            "cpu_seconds": time.process_time(),
        }
        typer.echo(orjson.dumps(found).decode())
        equal &= not update.differences
    return equal


def verify(made: Any) -> bool:
    """Print where each update differs from what the run recorded; True where none does."""
    console = plain_console()
    here, equal, elsewhere = load_main("learner.process.update_record:describe_machine")(), 0, False
    different = 0
    for update in made:
        took = f"{update.seconds:.1f} s"
        if (recorded := _seconds(update.recorded)) is not None:
            took += f", trained in {recorded:.1f} s"
        there = update.recorded_machine or here
        if not elsewhere and any(there[key] != here[key] for key in ("device", "torch")):
            elsewhere = True
            console.print(f"recorded with {_machine(there)}, here {_machine(here)}", style="yellow")
        if update.recorded is None and not update.compared:
            console.print(f"step {update.step}: the run recorded nothing to compare it with ({took})", style="yellow")
        elif update.differences:
            different += 1
            console.print(f"step {update.step} differs ({took}), first in {update.differences[0]}", style="red")
            for one in update.differences[1:]:
                console.print(f"  {one}")
        else:
            equal += 1
            what = "" if update.compared else " in its line of metrics.jsonl; what it computed was not recorded"
            console.print(f"step {update.step}: the same bit for bit{what} ({took})")
    console.print(f"{equal} of {equal + different} steps are the same")
    return not different


def compare(made: Any, folder: Path) -> None:
    """Print changed updates beside the recorded ones; write their lines and a picture of both to ``folder``."""
    from pipeline.views.plots import draw_runs

    console, recorded, changed = plain_console(), [], []
    for update in made:
        if update.differences is not None:
            continue
        changed.append(dict(update.line))
        if update.recorded is not None:
            recorded.append(dict(update.recorded))
    before = {line["step"]: line for line in recorded}
    rows = [
        (
            line["step"],
            *(f"{_number(before.get(line['step'], {}).get(key))} → {_number(line.get(key))}" for key in COMPARED),
        )
        for line in changed
    ]
    console.print(table((">step", *(f">{key}" for key in COMPARED)), rows, "recorded → changed"))
    folder.mkdir(parents=True, exist_ok=True)
    files = {"recorded": folder / "recorded.jsonl", "changed": folder / METRICS}
    for file, lines in zip(files.values(), (recorded, changed), strict=True):
        file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    written = [files["changed"]]
    try:
        draw_runs(files, folder / "curves.png")
        written.append(folder / "curves.png")
    except ImportError as error:
        console.print(f"no picture is drawn: {error}. Install matplotlib", style="yellow")
    console.print(f"written: {', '.join(map(str, written))}")
    console.print(ABOUT_DATA)


def explain(
    run: Target,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=1, help="The step. Default as of retrain.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what carried the gradient of one step: shares of the loss by group, source, staleness and position, tokens
    that were clipped, masked or rejected, and the largest ratios with their text.

    The step is made again for it (see `afterplay retrain`), so nothing is stored.

      afterplay explain runs/tiny --step 412
      afterplay explain step412.afterplay --json | jq .shares.staleness
    """
    from pipeline.views.vocabulary import Vocabulary

    wait_passively()
    with load_main("learner.process.bundle:open_source")(run) as source:
        *_, update = load_main("learner.process.retrain:retrain")(source, step, 1, ())
        found = load_main("learner.process.contributions:contributions")(update)
        vocabulary = Vocabulary.read(source.directory.model)
    for token in found["largest"]:
        token["text"] = "".join(piece.text for piece in vocabulary.pieces(token["ids"]))
    if as_json:
        typer.echo(orjson.dumps(found, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found)


def _print(found: Mapping[str, Any]) -> None:
    console = plain_console()
    terms = ", ".join(f"{name} {value:.4g}" for name, value in found["terms"].items() if value)
    console.print(f"step {found['step']}: loss {terms or '0'}; gradient's norm {found['grad_norm']:.4g}", style="bold")
    for kind, shares in found["shares"].items():
        rows = [(one["label"], f"{100 * one['share']:.1f} %", one["tokens"]) for one in shares[:GROUPS_SHOWN]]
        more = f", {GROUPS_SHOWN} of {len(shares)}" if len(shares) > GROUPS_SHOWN else ""
        console.print(table((kind, ">of the loss", ">tokens"), rows, f"by {kind}{more}"))
    counts = [(name, n) for name, n in found["tokens"].items() if n]
    console.print(table(("tokens", ">count"), counts, "what became of the tokens"))
    tokens = [
        (
            t["trajectory"],
            t["token"],
            f"{t['ratio']:.3g}",
            f"{t['advantage']:.3g}",
            f"{100 * t['share']:.1f} %",
            repr(t["text"]),
        )
        for t in found["largest"][:TOKENS_SHOWN]
    ]
    headings = ("trajectory", ">token", ">π/μ", ">advantage", ">of the loss", "text up to it")
    console.print(table(headings, tokens, "ratios furthest from 1"))


def _seconds(line: Mapping[str, Any] | None) -> float | None:
    phases = (line or {}).get("seconds")
    return sum(phases.get(name, 0.0) for name in PHASES) if isinstance(phases, Mapping) else None


def _machine(machine: Mapping[str, Any]) -> str:
    return f"{machine['device']}, torch {machine['torch']}"


def _number(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, int | float) else str(value)
