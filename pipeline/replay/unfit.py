"""Failed rollouts, kept for ``afterplay show``: the store keeps their facts only (``traces.failed``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.traces import TracesConfig
from pipeline.replay.journal import Unfit
from pipeline.traces import TraceWriter

log = logging.getLogger(__name__)
NAME = "failed"


class UnfitTraces:
    """Writes the traces of one stage; does nothing without a writer. A disk that refuses ends it, with a warning."""

    def __init__(self, writer: TraceWriter | None = None) -> None:
        self._writer = writer

    def keep(self, failed: Sequence[Unfit]) -> None:
        """Blocks for the disk's page cache. Called by one thread at a time."""
        if self._writer is None:
            return
        try:
            for one in failed:
                self._writer.append({"trajectory_id": one.trajectory_id, "time": one.received_at}, one.frames, None)
        except OSError as error:
            log.warning("traces of failed rollouts are kept no longer: %s", error)
            self.close()

    def close(self) -> None:
        """Harmless when done already."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


@contextmanager
def unfit_traces(config: TracesConfig, directory: Path, stage: int) -> Iterator[UnfitTraces]:
    """Of stage number ``stage``."""
    traces = UnfitTraces()
    if config.failed:
        try:
            traces = UnfitTraces(TraceWriter(directory, NAME if not stage else f"{NAME}-{stage}", config.bytes_max))
        except OSError as error:
            log.warning("traces of failed rollouts are not kept: %s", error)
    try:
        yield traces
    finally:
        traces.close()
