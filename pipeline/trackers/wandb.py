"""Weights & Biases: one row of a run's history for each record, on an axis of its own called ``step``.

The client hands rows to a process that writes and uploads them later, so that what was sent last is lost in a kill.
The number of a row (``_step``) is the record's position in the journal: the server, or the files of an offline run,
tell which have arrived.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import wandb

from pipeline.errors import TrackerError
from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import TrackedRun, Tracker


class WeightsAndBiases(Tracker):
    """Numbers, tables and the curves as an image. Addresses and modes: ``WANDB_MODE``, ``WANDB_API_KEY`` …"""

    def __init__(self, run: TrackedRun) -> None:
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.directory),
            config=run.settings,
            settings=wandb.Settings(console="off", disable_git=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    @property
    def place(self) -> str:
        return str(self._run.url or self._run.dir)

    def is_empty(self) -> bool:
        return not self._run.offline and self._run.starting_step == 0

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        if not self._run.offline:
            return {entry.key for entry in entries if entry.position < self._run.starting_step}
        current = Path(self._run.settings.sync_file)
        files = current.parent.parent.glob(f"offline-run-*-{self._run.id}/{current.name}")
        rows = {row for file in files if file != current for row in _rows(file)}
        return {entry.key for entry in entries if entry.position in rows}

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        for record, position in records:
            row: dict[str, Any] = {"step": record.step, **record.numbers}
            if table := record.table:
                rows = [list(cells) for cells in table.rows]
                row[record.name] = wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)
            with tempfile.TemporaryDirectory() as folder:
                if record.picture is not None:
                    path = Path(folder) / "picture.png"
                    path.write_bytes(record.picture)
                    row[record.name] = wandb.Image(str(path))
                self._run.log(row, step=position, commit=True)

    def flush(self) -> bool:
        return False

    def close(self, finished: bool = True) -> None:
        self._run.finish(exit_code=0 if finished else 1)


def _rows(file: Path) -> Iterator[int]:
    """Numbers of the rows in the file of an offline run, as far as it was written."""
    command = [sys.executable, "-P", "-m", "wandb", "leet", "inspect", "--json", str(file)]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode and not found.stdout and b"EOF" not in found.stderr:
        raise TrackerError(f"wandb could not read {file}: {found.stderr.decode(errors='replace').strip()}")
    for line in found.stdout.splitlines():
        record = orjson.loads(line)
        if record.get("type") == "history":
            yield record["history"]["item"]["_step"]
