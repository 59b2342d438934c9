"""``afterplay eval``: its options. The work is in :mod:`pipeline.supervisor.evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def evaluate(
    target: Annotated[Path, typer.Argument(metavar="RUN_OR_FILE", help="A run directory, or a run file.")],
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", "-c", metavar="N|best|latest", help="Which weights: after N updates, or by name."),
    ] = None,
    split: Annotated[str | None, typer.Option("--split", help="The split whose tasks are played.")] = None,
    tasks: Annotated[int | None, typer.Option("--tasks", min=1, help="Tasks of each environment.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", min=1, help="Rollouts of each task.")] = None,
    greedy: Annotated[
        bool | None, typer.Option("--greedy/--sampled", help="Likeliest tokens, or sampled (pass@k needs that).")
    ] = None,
    pass_at: Annotated[
        list[int] | None, typer.Option("--pass-at", metavar="K", min=1, help="A k of pass@k. May be repeated.")
    ] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change one value. May be repeated.")
    ] = None,
) -> None:
    """Play held-out tasks with the weights of a checkpoint, without training, and print a table.

    What is not said here is as the section `evaluation` of the run file has it. Without --checkpoint a run directory is
    evaluated at its newest checkpoint, and a run file (or a run without checkpoints) at its initial model. Starts
    engines, actors and a replay stage of its own, in a folder below the run; a run that is alive may go on meanwhile.
    Ends with 0 when every environment has a score, else with 1.

      afterplay eval runs/tiny --checkpoint best
      afterplay eval runs/tiny --tasks 200 --sampled --samples 8 --pass-at 1 --pass-at 8
      afterplay eval configs/tiny.yaml --split eval
    """
    from pipeline.supervisor.evaluate import Asked, evaluate_checkpoint

    asked = Asked(checkpoint, split, tasks, samples, greedy, tuple(pass_at or ()))
    raise typer.Exit(evaluate_checkpoint(target, asked, sets or []))
