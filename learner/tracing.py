"""Keeps some trajectories of every update with what the learner saw at each of their tokens (``traces.trained``).

It uses what the pass of the update has computed already, and never stops the learner: a disk that refuses ends the
keeping, with a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.batching import token_numbers
from learner.report import StepReport
from learner.rows import Batch
from learner.statistics import TokenValues
from pipeline.codec import encode_trajectory
from pipeline.config.traces import TracesConfig
from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.traces import Flag, SeenTokens, TraceWriter

log = logging.getLogger(__name__)
NAME = "trained"
_DRAW = 0x7472
"""Keeps this draw apart from others of the same seed."""


class Tracer:
    """Writes the traces of one learner; does nothing without a writer."""

    def __init__(self, writer: TraceWriter | None = None, trained: int = 0, seed: int = 0) -> None:
        self._writer = writer
        self._trained = trained
        self._seed = seed

    def record(self, batch: Batch, report: StepReport) -> None:
        """Keep ``traces.trained`` trajectories of an update. Takes a millisecond or two for each thousand tokens."""
        values = report.statistics.values
        if self._writer is None or values is None or not len(values):
            return
        try:
            for sequence in drawn(len(batch.trajectories), self._trained, self._seed, report.update):
                self._keep(self._writer, batch, sequence, values, report)
        except (OSError, SchemaError) as error:
            log.warning("traces of trained trajectories are kept no longer: %s", error)
            self.close()

    def close(self) -> None:
        """Harmless when done already."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _keep(
        self, writer: TraceWriter, batch: Batch, sequence: int, values: TokenValues, report: StepReport
    ) -> None:
        trajectory = batch.trajectories[sequence]
        rows = [row for row in batch.rows if row.sequence == sequence]
        if not rows:
            return
        index = trace_index(trajectory, report, replayed=rows[0].replayed, whole=rows[0].whole)
        writer.append(index, encode_trajectory(trajectory), seen_tokens(batch, sequence, values), report.update)


@contextmanager
def tracing(config: TracesConfig, directory: Path, seed: int, updates: int) -> Iterator[Tracer]:
    """The tracer of a learner that has made ``updates`` updates: traces of later ones are dropped."""
    tracer = Tracer()
    if config.trained:
        try:
            tracer = Tracer(TraceWriter(directory, NAME, config.bytes_max, updates), config.trained, seed)
        except OSError as error:
            log.warning("traces of trained trajectories are not kept: %s", error)
    try:
        yield tracer
    finally:
        tracer.close()


def drawn(n: int, count: int, seed: int, update: int) -> list[int]:
    """Which of ``n`` trajectories are kept: ``count`` of them, each as likely as any other."""
    rng = np.random.default_rng([seed, _DRAW, update])
    return sorted(int(i) for i in rng.choice(n, min(n, count), replace=False))


def seen_tokens(batch: Batch, sequence: int, values: TokenValues) -> SeenTokens:
    """Of the sampled tokens of trajectory number ``sequence``, in order of its turns. Tokens of turns that were not
    trained stay unknown."""
    trajectory = batch.trajectories[sequence]
    lengths = [len(turn.completion) for turn in trajectory.turns]
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]).astype(np.int64)
    out = SeenTokens.unknown(int(begins[-1]))
    at = np.full(batch.n_sampled, -1)
    at[values.numbers] = np.arange(len(values))
    for row, first in zip(batch.rows, token_numbers(batch.rows), strict=True):
        if row.sequence != sequence:
            continue
        found = at[int(first) : int(first) + row.n_sampled]
        places = _places(row.turns[row.loss_mask], begins)[found >= 0]
        found = found[found >= 0]
        _fill(out, places, values, found)
    return out


def _places(turns: npt.NDArray[np.int32], begins: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Place among the sampled tokens of the trajectory, given the turn of each: a turn is trained whole or not."""
    return np.concatenate([np.arange(begins[turn], begins[turn + 1]) for turn in np.unique(turns)])


def _fill(out: SeenTokens, places: npt.NDArray[np.int64], values: TokenValues, found: npt.NDArray[np.int64]) -> None:
    known = values.recorded[found]
    behaviour = np.where(known, values.behaviour[found], 0.0)
    out.log_ratios[places] = values.logprobs[found] - behaviour
    out.entropies[places] = values.entropy[found]
    out.advantages[places] = values.advantages[found]
    masked = values.masked[found] | (values.reasons[found] > 0)
    flags = np.full(len(found), int(Flag.SEEN), np.uint8)
    for flag, on in (
        (Flag.TRAINED, values.trained[found]),
        (Flag.CLIPPED_LOW, values.clipped_low[found]),
        (Flag.CLIPPED_HIGH, values.clipped_high[found]),
        (Flag.MASKED, masked),
        (Flag.TRUNCATED, values.truncated[found]),
    ):
        flags |= np.where(on, np.uint8(flag), np.uint8(0))
    out.flags[places] = flags


def trace_index(trajectory: Trajectory, report: StepReport, *, replayed: bool, whole: bool) -> Mapping[str, Any]:
    """What the index of a trace says."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "policy_version": report.policy_version,
        "replayed": replayed,
        "whole": whole,
        "time": time.time(),
    }

