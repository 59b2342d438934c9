"""Delivery of records to one tracker, each once. Pure, with the journal that makes it survive a kill.

A record is announced in the journal before it is sent, and confirmed when the tracker says that it is durable. After a
kill the announced and unconfirmed ones are in doubt: the tracker is asked which of them it has
(:meth:`pipeline.trackers.tracker.Tracker.held`), and the others are sent again.

::

    {"run": "6f0c…"}                                     id under which the tracker knows the run
    {"place": "https://…"}                               address or folder where a user finds it
    {"send": [["step/7", 7, "90ab…"], …]}                announced: key, step, fingerprint
    {"sent": true}                                       everything that was announced is durable
    {"held": ["step/7"]}                                 of what was in doubt, the tracker has these and no others
    {"rewind": 5}                                        it has dropped everything from step 5 on, which the learner
                                                         makes again; 0 also where it is another tracker than before
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.runtime.disk import whole_or_nothing
from pipeline.schema import record_file as frames

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | None, ...], ...]


@dataclass(frozen=True, slots=True)
class TrackerRecord:
    """One report to a tracker: the numbers of a step, a table of rollouts, a picture."""

    key: str
    """``step/7``, ``evaluation/2``, ``rollouts/step/10``, ``rollouts/evaluation/2`` or ``curves/50``."""
    step: int
    """Place on the axis of steps: updates made."""
    time: float
    """Unix time."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Names such as ``episode/reward_mean`` and ``eval/score``."""
    table: Table | None = None
    picture: bytes | None = None
    """PNG."""
    fingerprint: str = ""
    """Changes with the numbers. A step that was made again has another one."""

    @property
    def name(self) -> str:
        """Name of a table or picture, the same for all of its kind: ``rollouts/step``."""
        return self.key.rpartition("/")[0]

    @property
    def number(self) -> int:
        """Last part of the key."""
        return int(self.key.rpartition("/")[2])

    @property
    def is_empty(self) -> bool:
        return not self.numbers and self.table is None and self.picture is None


@dataclass(frozen=True, slots=True)
class SentEntry:
    """One record in the journal."""

    key: str
    step: int
    fingerprint: str
    position: int
    """Number of records announced before it, also of those that were lost."""


class Delivery:
    """State of the journal: what the tracker has, and what is in doubt."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.run: str | None = None
        self.place: str | None = None
        self._sent: dict[str, SentEntry] = {}
        self._doubtful: dict[str, SentEntry] = {}
        self.next_position = 0
        """Position of the first record that is announced next."""
        for line in lines:
            self.apply(line)

    @property
    def doubtful(self) -> tuple[SentEntry, ...]:
        """Announced and not confirmed, in order."""
        return tuple(self._doubtful.values())

    @property
    def last_step(self) -> int:
        """The newest step whose numbers the tracker has; 0: none."""
        return max((e.step for e in self._sent.values() if e.key.startswith("step/")), default=0)

    def knows(self, record: TrackerRecord) -> bool:
        """True if a record with its key was announced."""
        return record.key in self._sent or record.key in self._doubtful

    def has_other(self, record: TrackerRecord) -> bool:
        """True if the tracker has other numbers of this step: the learner resumed from an older checkpoint."""
        entry = self._sent.get(record.key) or self._doubtful.get(record.key)
        return entry is not None and entry.fingerprint != record.fingerprint

    def apply(self, line: Mapping[str, Any]) -> None:
        """Follow one line of the journal."""
        if "run" in line:
            self.run = str(line["run"])
        elif "place" in line:
            self.place = str(line["place"])
        elif "send" in line:
            for key, step, fingerprint in line["send"]:
                self._doubtful[key] = SentEntry(key, step, fingerprint, self.next_position)
                self.next_position += 1
        elif "sent" in line:
            self._sent |= self._doubtful
            self._doubtful = {}
        elif "held" in line:
            self._sent |= {key: self._doubtful[key] for key in line["held"] if key in self._doubtful}
            self._doubtful = {}
        elif "rewind" in line:
            for entries in (self._sent, self._doubtful):
                for key in [key for key, entry in entries.items() if entry.step >= line["rewind"]]:
                    del entries[key]


class DeliveryFile:
    """The journal on disk: a line is durable before :meth:`write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab+", buffering=0)
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):  # a kill cut the last line off
            os.ftruncate(self._file.fileno(), len(whole))
        try:
            self.delivery = Delivery(orjson.loads(line) for line in whole.splitlines())
        except (ValueError, TypeError, KeyError):  # nobody knows what was sent: a new run at the tracker gets all
            damaged = path.with_name(f"{path.name}.damaged")
            log.warning("%s is damaged and now %s: all is sent again, as a new run", path, damaged.name)
            path.replace(damaged)
            self._file.close()
            self._file = path.open("ab+", buffering=0)
            self.delivery = Delivery()

    def write(self, line: Mapping[str, Any]) -> None:
        with whole_or_nothing(self._file.fileno()):
            frames.write(self._file.fileno(), [orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)])
            os.fsync(self._file.fileno())
        self.delivery.apply(line)

    def close(self) -> None:
        self._file.close()
