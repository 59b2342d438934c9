"""Every update of a run that can be made again, made again."""

from __future__ import annotations

from pathlib import Path

from learner.process.retrain import RunSource, retrain
from learner.process.update_record import Difference
from pipeline.store.trained import repeatable
from pipeline.supervisor.history import exact_checkpoints


def repeated(path: Path) -> dict[int, tuple[Difference, ...] | None]:
    """By step, where it differs from what the run recorded."""
    source = RunSource.open(path)
    starts = repeatable(source.updates, exact_checkpoints(source.directory))
    found: dict[int, tuple[Difference, ...] | None] = {}
    for update, start in starts.items():
        if update == start and update + 1 not in found:
            made = list(retrain(source, update + 1))
            assert all(one.compared and one.recorded is not None for one in made)
            found |= {one.step: one.differences for one in made}
    return found
