"""``afterplay compare A B``: runs of several settings over seeds, and ratios of their costs to reach a target."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.viewer.metric import WINDOWS, Metric
from pipeline.errors import ConfigurationError

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,60}")


def compare(
    arms: Annotated[
        list[str],
        typer.Argument(metavar="[NAME=]A [NAME=]B …", help="Run files, or folders of runs. The first is the base."),
    ],
    reach: Annotated[float, typer.Option("--reach", metavar="VALUE", help="Target.")],
    seeds: Annotated[str, typer.Option("--seeds", metavar="1-12", help="Seeds of each run file.")] = "1-5",
    metric: Annotated[
        Metric, typer.Option("--metric", "-m", help="Value that has to reach the target.")
    ] = Metric.SUCCESS,
    window: Annotated[
        int | None,
        typer.Option("--window", min=1, help="Points whose mean is compared with the target. Default 5; 1 for eval."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Runs, table and picture.")] = Path("runs/compare"),
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Runs at once; they slow each other down.")] = 1,
    until_reached: Annotated[
        bool, typer.Option("--until-reached", help="Stop a run when it has reached the target.")
    ] = False,
    sets: Annotated[
        list[str] | None, typer.Option("--set", "-s", metavar="KEY=VALUE", help="Change one value in all run files.")
    ] = None,
    arm_sets: Annotated[
        list[str] | None, typer.Option("--set-arm", metavar="NAME:KEY=VALUE", help="Change one value of one arm.")
    ] = None,
) -> None:
    """Run settings over seeds, and tell how many generated tokens, updates and seconds each needs to reach a target.

    Each run is an ordinary run in OUT/NAME/seed-N. Run the command again to continue: finished runs are read,
    unfinished ones resume. A folder is one run, or holds several. The first call keeps each run file as OUT/NAME.yaml,
    and later calls must mean the same settings.

    A run has reached the target at the first update at which the mean of the last --window points is at least --reach.
    success: share of training rollouts that succeed, as replay.success_threshold says; settings that choose or retire
    tasks change it. reward: mean reward of fresh trajectories. eval: score on held-out tasks, the fair one for such
    settings; it needs evaluation.every. Choose the target, metric and window before the runs.

    Ratios are of geometric means, with 95 % t intervals of the logarithms, paired by seed if all seeds are the same. A
    run that never reaches the target is reported and counts with a cost that is restricted to a horizon; it is not
    left out. Written: compare.json and compare.png. The exit code is 1 if a run failed or the command was stopped.

      afterplay compare a.yaml b.yaml --seeds 1-12 --reach 0.8
      afterplay compare off=@replay_tiny on=@replay_tiny --set-arm off:replay.enabled=false --reach 0.8 --seeds 1-12
      afterplay compare runs/compare/off runs/compare/on --reach 0.7 --out seven
    """
    from pipeline.cli.study import Study

    if not math.isfinite(reach):
        raise ConfigurationError(f"--reach: expected a number, got {reach}")
    sources = read_arms(arms)
    own = read_arm_sets(arm_sets or [], sources)
    study = Study(sources, out, metric, reach, window or WINDOWS[metric], until_reached)
    raise typer.Exit(study.run(seeds_of(seeds), sets or [], own, jobs))


def read_arms(texts: Sequence[str]) -> dict[str, str]:
    """Sources by name, ``[NAME=]FILE``. Raises :class:`ConfigurationError`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, source = text.partition("=")
        if not equals:
            name, source = Path(text.removeprefix("@")).name.removesuffix(".yaml"), text
        if not _NAME.fullmatch(name) or name in found:
            raise ConfigurationError(
                f"{text}: expected a new name of letters, digits, '.', '_' and '-', got {name!r}: write NAME={source}"
            )
        found[name] = source
    if len(found) < 2:
        raise ConfigurationError(f"compare: expected two run files or folders at least, got {len(found)}")
    return found


def read_arm_sets(texts: Sequence[str], arms: Mapping[str, str]) -> dict[str, list[str]]:
    """Overrides by arm, ``NAME:KEY=VALUE``. Raises :class:`ConfigurationError`."""
    found: dict[str, list[str]] = {name: [] for name in arms}
    for text in texts:
        name, _, override = text.partition(":")
        if name not in arms or not override:
            raise ConfigurationError(
                f"--set-arm {text}: expected NAME:KEY=VALUE with a name of {', '.join(arms)}, got {name!r}"
            )
        found[name].append(override)
    return found


def seeds_of(text: str) -> list[int]:
    """Whole numbers and ranges, in order.

    >>> seeds_of("1-3,7")
    [1, 2, 3, 7]
    """
    found: list[int] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or (dash and int(high) < int(low)):
            raise ConfigurationError(f"--seeds: expected numbers and ranges such as 1-12 or 1,2,7-9, got {text!r}")
        found += range(int(low), int(high or low) + 1)
    return sorted(set(found))
