"""Event files as TensorBoard reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="NO TENSORBOARD: pip install '.[tensorboard]'")

from tensorboard.backend.event_processing import event_accumulator, plugin_event_accumulator

from pipeline.trackers.reporter import Reporter
from tests.unit.trackers.test_reporter import RunOnDisk

READERS = (event_accumulator, plugin_event_accumulator)
"""The public one, and that of TensorBoard's own server."""


def report(run: RunOnDisk) -> None:
    Reporter("tensorboard", run.config, run.directory).close()


def steps(run: RunOnDisk) -> list[list[int]]:
    """By reader: steps that it shows, in its order."""
    found = [reader.EventAccumulator(str(run.directory.path / "tensorboard")).Reload() for reader in READERS]
    return [
        [e.step for e in found[0].Scalars("episode/reward_mean")],
        [e.step for e in found[1].Tensors("episode/reward_mean")],
    ]


def test_steps_that_were_made_again_are_shown_once(tmp_path: Path) -> None:
    run = RunOnDisk(tmp_path)
    for kept in (5, 3, 1):  # two resumes
        run.resume_from(kept) if kept < 5 else None
        while len(run.lines if run.directory.metrics_file.exists() else []) < 5:
            run.step()
        report(run)
        assert steps(run) == [[1, 2, 3, 4, 5]] * 2


def test_a_new_event_file_takes_the_place_of_none_and_is_read_last(tmp_path: Path) -> None:
    run = RunOnDisk(tmp_path)
    for _ in range(3):
        run.step()
        report(run)
    folder = tmp_path / "tensorboard"
    first, *_, last = sorted(folder.iterdir())
    first.unlink()  # by a user who makes room
    before = last.read_bytes()
    run.step()
    report(run)
    assert last.read_bytes() == before and max(folder.iterdir()) > last
    assert steps(run)[0][-2:] == [3, 4]
    for file in folder.iterdir():
        file.unlink()
    report(run)
    assert steps(run) == [[1, 2, 3, 4]] * 2
