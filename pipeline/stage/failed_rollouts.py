"""Traces of rollouts that are not trained: failed ones, and a sample of the evaluated.

A failed rollout is ordered again up to ``groups.attempts_max`` times (:mod:`pipeline.stage.groups`); it never becomes a
reward of 0. Its bytes are written here, for ``afterplay show``, by a worker thread of the stage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.evaluation import TracesConfig
from pipeline.runtime.disk_wait import disk_fault
from pipeline.store.journal import UntrainedRollout
from pipeline.store.traces import TraceWriter

log = logging.getLogger("afterplay.replay")

FAILED, EVALUATED = "failed", "evaluated"
"""Kinds of traces that the stage writes."""


class UntrainedTraces:
    """Writes the traces of each kind that has a writer. What the file system does not take is left out, any other error
    ends it, both with a warning."""

    def __init__(self, failed: TraceWriter | None = None, evaluated: TraceWriter | None = None) -> None:
        self._writers = {FAILED: failed, EVALUATED: evaluated}
        self._left_out = False
        """The newest trace was."""

    def keep(self, rollouts: Sequence[UntrainedRollout]) -> None:
        """Blocks for the disk's page cache. Called by one thread at a time."""
        for one in rollouts:
            kind = EVALUATED if one.evaluated else FAILED
            writer = self._writers[kind]
            if writer is None:
                continue
            try:
                writer.append({"trajectory_id": one.trajectory_id, "time": one.received_at}, one.frames, None)
                self._left_out = False
            except OSError as error:
                if disk_fault(error, Path()):
                    if not self._left_out:
                        log.warning("traces of rollouts are left out until they can be written: %s", error)
                    self._left_out = True
                    continue
                log.warning("stopped writing traces of %s rollouts: %s", kind, error)
                self._close(kind)

    def close(self) -> None:
        """Harmless when done already."""
        for kind in self._writers:
            self._close(kind)

    def _close(self, kind: str) -> None:
        writer, self._writers[kind] = self._writers[kind], None
        if writer is not None:
            writer.close()


@contextmanager
def untrained_traces(config: TracesConfig, directory: Path, *, evaluates: bool = False) -> Iterator[UntrainedTraces]:
    """Traces of failed rollouts, and those of evaluations where the run file asks for them. ``evaluates``: the stage
    has evaluations."""

    def writer(kind: str) -> TraceWriter | None:
        try:
            return TraceWriter(directory, kind, config.bytes_max)
        except OSError as error:
            log.warning("no traces of %s rollouts are written: %s", kind, error)
            return None

    traces = UntrainedTraces(writer(FAILED), writer(EVALUATED) if evaluates and config.evaluated else None)
    try:
        yield traces
    finally:
        traces.close()
