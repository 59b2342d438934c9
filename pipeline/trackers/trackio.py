"""trackio: one row for each record. A thread of trackio writes rows a moment after they were given to it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trackio
from huggingface_hub import get_token
from trackio.remote_client import RemoteClient
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import TRACKIO_DIR

from pipeline.errors import TrackerError
from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import MARKS, TrackedRun, Tracker


class Trackio(Tracker):
    """Numbers, tables and the curves as an image. Folder: ``TRACKIO_DIR``; ``TRACKIO_SPACE_ID`` for a Space."""

    def __init__(self, run: TrackedRun) -> None:
        self._project = run.project
        # trackio resumes a run by its name, which another run may have too
        self._run = trackio.init(
            project=run.project,
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=run.settings,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._sent: list[SentEntry] = []

    @property
    def place(self) -> str:
        return f"{self._run.url or TRACKIO_DIR}: project {self._project}, run {self._run.name}"

    def is_empty(self) -> bool:
        return not self._rows()

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        found: set[str] = set()
        for row in self._rows():
            found |= {f"{kind}/{row[mark]}" for kind, mark in MARKS.items() if mark in row}
            found |= {f"{name}@{row['step']}" for name in row if name.startswith(("rollouts/", "curves"))}
        return {e.key for e in entries if e.key in found or f"{e.key.rpartition('/')[0]}@{e.step}" in found}

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        for record, position in records:
            row: dict[str, Any] = dict(record.numbers)
            if table := record.table:
                row[record.name] = trackio.Table(columns=list(table.columns), data=[*map(list, table.rows)])
            with tempfile.TemporaryDirectory() as folder:
                if record.picture is not None:
                    path = Path(folder) / "picture.png"
                    path.write_bytes(record.picture)
                    row[record.name] = trackio.Image(str(path))
                self._run.log(row, step=record.step)
            self._sent.append(SentEntry(record.key, record.step, record.fingerprint, position))

    def flush(self) -> bool:
        return False

    def close(self, finished: bool = True) -> None:
        """Raises :class:`TrackerError` if rows are missing: trackio only warns where it could not write."""
        self._run.finish()
        if self._sent and (missing := {entry.key for entry in self._sent} - self.held(self._sent)):
            raise TrackerError(f"trackio has not stored {len(missing)} of {len(self._sent)} records that it was sent")

    def _rows(self) -> list[dict[str, Any]]:
        if self._run.url is None:
            logs: list[dict[str, Any]] = SQLiteStorage.get_logs(self._project, self._run.name, run_id=self._run.id)
            return logs
        if self._run.url.startswith(("http://", "https://")):
            token, write_token = None, os.environ.get("TRACKIO_WRITE_TOKEN")
        else:
            token, write_token = get_token(), None
        client = RemoteClient(self._run.url, hf_token=token, write_token=write_token, verbose=False)
        return list(client.predict(api_name="/get_logs", project=self._project, run=self._run.name))
