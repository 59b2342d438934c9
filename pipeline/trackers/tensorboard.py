"""TensorBoard: event files in ``tensorboard/`` of the run directory.

One record is one event. Each reporter process writes a file of its own. A file may begin with a mark that makes
TensorBoard forget everything from a step on, which is how steps that are made again replace the first ones.
"""

from __future__ import annotations

import html
import io
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from pipeline.runtime.run_directory import write_bytes_atomically
from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import TrackedRun, Tracker

FOLDER = "tensorboard"
_KEY = "afterplay/key"
"""Tag of a text that no plug-in shows: the key of the record."""


class TensorBoard(Tracker):
    """Scalars, tables as texts, and the curves as an image."""

    rewinds = True

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._folder = run.directory / FOLDER
        self._file: IO[bytes] | None = None
        """None until something is to be written: until then the newest file is that of the reporter before."""

    @property
    def place(self) -> str:
        return str(self._folder)

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        written = RawEventFileLoader(str(files[-1])).Load() if (files := self._files()) else ()
        values = (value for data in written for value in Event.FromString(data).summary.value)
        found = {str(value.tensor.string_val[0].decode()) for value in values if value.tag == _KEY}
        return found & {entry.key for entry in entries}

    def is_empty(self) -> bool:
        return not self._files()

    def rewind(self, step: int) -> None:
        self.close()
        self._open(Event(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START)))

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        file = self._file or self._open()
        for record, _ in records:
            file.write(_framed(_event(record)))

    def flush(self) -> bool:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        return True

    def close(self, finished: bool = True) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self, *first: Event) -> IO[bytes]:
        """A new file, which appears whole with its first events."""
        files = self._files()
        number = int(files[-1].suffixes[-2][1:]) + 1 if files else 0  # TensorBoard reads them by name
        path = self._folder / f"events.out.tfevents.{number:010d}.afterplay"
        begin = [Event(wall_time=time.time(), file_version="brain.Event:2"), *first]
        if not files:
            settings = _text("configuration", [[f"<pre>{html.escape(self._run.run_file)}</pre>"]])
            begin.append(Event(wall_time=time.time(), summary=Summary(value=[settings])))
        write_bytes_atomically(path, b"".join(map(_framed, begin)), durable=True)
        self._file = path.open("ab")
        return self._file

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("events.out.tfevents.*.afterplay"))


def _event(record: TrackerRecord) -> Event:
    values = [Summary.Value(tag=_KEY, tensor=_strings([[record.key]]), metadata=_plugin("afterplay"))]
    values += [Summary.Value(tag=name, simple_value=number) for name, number in record.numbers.items()]
    if record.table is not None:  # text of a model is no Markdown
        rows = [["" if cell is None else html.escape(str(cell)) for cell in row] for row in record.table.rows]
        cells = [record.table.columns, *([f"<pre>{cell}</pre>" for cell in row] for row in rows)]
        values.append(_text(record.name, cells))
    if (png := record.picture) is not None:
        width, height = struct.unpack(">II", png[16:24])
        image = Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=png)
        values.append(Summary.Value(tag=record.name, image=image))
    return Event(wall_time=record.time, step=record.step, summary=Summary(value=values))


def _framed(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _text(tag: str, cells: Sequence[Sequence[str]]) -> Summary.Value:
    return Summary.Value(tag=tag, tensor=_strings(cells), metadata=_plugin("text"))


def _plugin(name: str) -> SummaryMetadata:
    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=name))


def _strings(cells: Sequence[Sequence[str]]) -> TensorProto:
    """Texts as a matrix, which TensorBoard shows as a table of Markdown."""
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=n) for n in (len(cells), len(cells[0]))])
    return TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[c.encode() for row in cells for c in row])
