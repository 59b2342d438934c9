"""Generated tokens and training curve of a run, from its store and its lines, and the stored result."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.errors import AfterplayError, StoreError
from pipeline.runtime.run_directory import read_json, write_json_atomically
from pipeline.store.queries import reading, rollouts
from pipeline.views.step_lines import Line


def tokens_until(store: Path, moment: float) -> int:
    """Sampled tokens of all trajectories that the replay stage received up to ``moment``, Unix seconds."""
    return sum(r.n_sampled for r in rollouts(store) if r.received_at <= moment)


def first_order_at(store: Path) -> float:
    """Time of the first order, Unix seconds. Raises :class:`StoreError` when there is none."""
    with reading(store) as connection:
        moment = connection.execute("SELECT min(issued_at) FROM orders").fetchone()[0]
    if moment is None:
        raise StoreError("expected a run with rollouts, its store has no orders")
    return float(moment)


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    version: int
    success: float
    tokens: int
    """Generated until these weights were made."""
    seconds: float
    """From the first order until then."""
    held_out: float | None = None
    """Success on held-out tasks; None: not measured."""


@dataclass(frozen=True, slots=True)
class Training:
    """Means over the updates of a run up to the hit, or to its end."""

    replay_share: float
    """Replayed tokens among all trained ones."""
    ess: float | None
    """Effective sample size over number, of all trained tokens: median over updates."""
    ess_replay: float | None
    """The same of replayed tokens, over the updates that had some."""
    staleness_mean: float | None
    """Versions that fresh trajectories were behind when trained, mean over updates."""
    staleness_max: int
    replay_age_mean: float | None
    """The same of replayed trajectories, mean over all of them."""
    guard_factor: float
    """Factor of the guard on the learning rate, mean over updates; 1 without it."""


@dataclass(frozen=True, slots=True)
class Result:
    """One finished run."""

    arm: str
    seed: int
    fingerprint: str
    overrides: tuple[str, ...]
    updates: int
    """Updates until the hit, or all of them."""
    tokens: int
    """Generated until then."""
    seconds: float
    hit: bool
    """False: the goal was not reached within the run, and ``tokens`` is only a lower bound (censored)."""
    training: Training
    points: tuple[Point, ...]

    @property
    def cost(self) -> float:
        """Tokens until the goal; infinite where it was not reached."""
        return float(self.tokens) if self.hit else math.inf


def hit_version(points: Sequence[Point], goal: float) -> int | None:
    """The first of two measurements in a row that are both at least ``goal``; None: there are no two."""
    for point, following in pairwise(points):
        if point.success >= goal and following.success >= goal:
            return point.version
    return None


def on_held_out(points: Sequence[Point]) -> list[Point]:
    """The same points with the success on held-out tasks in place of that on the training tasks."""
    return [replace(p, success=p.held_out) for p in points if p.held_out is not None]


def training_of(lines: Sequence[Mapping[str, Any]]) -> Training:
    """Sums up the lines of the updates that count. Raises :class:`AfterplayError` when a run did not go straight on:
    then versions are not updates."""
    for line in lines:
        if line["policy_version"] != line["update"]:
            raise AfterplayError(
                f"expected version {line['update']} in update {line['update']}, got {line['policy_version']}: "
                "a process of the run was restarted; remove its folder and measure again"
            )

    def known(key: str) -> list[float]:
        return [float(line[key]) for line in lines if line.get(key) is not None]

    def median(key: str) -> float | None:
        return statistics.median(known(key)) if known(key) else None

    trained = sum(line["tokens_trained"] for line in lines)
    replayed = sum(line["replay_share"] * line["tokens_trained"] for line in lines)
    old = [(line["replay_age_mean"], line["n_replayed"]) for line in lines if line.get("replay_age_mean") is not None]
    count = sum(n for _, n in old)
    return Training(
        replay_share=replayed / trained if trained else 0.0,
        ess=median("ess_ratio"),
        ess_replay=median("ess_replay"),
        staleness_mean=statistics.fmean(known("staleness_mean")) if known("staleness_mean") else None,
        staleness_max=int(max(known("staleness_max"), default=0)),
        replay_age_mean=sum(age * n for age, n in old) / count if count else None,
        guard_factor=statistics.fmean(known("guard_lr_factor")) if known("guard_lr_factor") else 1.0,
    )


def finished_at(lines: Sequence[Line], version: int) -> float | None:
    """Time at which the update that made ``version`` ended, Unix seconds; None: its line is not there yet."""
    return next((float(line["finished"]) for line in lines if line["step"] == version), None)


def save(result: Result, path: Path) -> None:
    write_json_atomically(path, asdict(result))


def load_result(path: Path) -> Result | None:
    """The result in ``path``; None where there is none, or only a part of one."""
    found = read_json(path)
    if found is None:
        return None
    try:
        return Result(
            **{
                **found,
                "overrides": tuple(found["overrides"]),
                "training": Training(**found["training"]),
                "points": tuple(Point(**point) for point in found["points"]),
            }
        )
    except (KeyError, TypeError) as error:
        raise AfterplayError(f"{path} is not a result of this benchmark ({error}): remove it") from error
