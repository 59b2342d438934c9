"""Records of a run directory in the order in which they appear: steps, evaluations, tables of rollouts, curves."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import orjson

from pipeline.config import RunConfig
from pipeline.errors import StoreError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.ledger import read_ledger
from pipeline.store.queries import Filters, Span
from pipeline.store.store import store_path
from pipeline.trackers.delivery import Table, TrackerRecord
from pipeline.views.plots import figure, png_of
from pipeline.views.reader import RunReader, Transcript
from pipeline.views.step_lines import MetricsTail, step_of
from pipeline.views.terminal import truncate

BATCH = 100
"""Most records that are announced and sent at once."""
TABLES = 16
"""Most tables of rollouts that are made at once."""
READ_BYTES_MAX = 4 * 1024 * 1024
"""Bytes of a file that are read at once: a run that is reported afterwards may have gigabytes."""
CHARACTERS_MAX = 20_000
"""Length at which the text of a rollout is cut."""
COLUMNS = ("step", "trajectory", "environment", "task", "reward", "status", "turns", "sampled tokens", "text")


class RunRecords:
    """Reads one run directory; it writes nothing, so the run may be alive. ``counted``: steps, too, wait until the
    replay stage has counted them."""

    def __init__(self, config: RunConfig, directory: RunDirectory, counted: bool = False) -> None:
        self._config = config
        self._directory = directory
        self._counted = counted
        self.restart()

    def restart(self) -> None:
        """Begin again with the first record."""
        self._steps = MetricsTail(self._directory.metrics_file, READ_BYTES_MAX)
        self._evaluations = MetricsTail(self._directory.evaluations_file, READ_BYTES_MAX)
        self._tables: dict[str, tuple[TrackerRecord, Filters]] = {}
        """By key: tables to make at the next call at which the replay stage has counted their updates."""
        self._early: dict[str, TrackerRecord] = {}
        """By key: steps that wait to be counted."""

    def new(self, is_known: Callable[[TrackerRecord], bool]) -> Iterator[list[TrackerRecord]]:
        """New records since the last call. A step that was made again comes again; tables of rollouts that
        are known do not."""
        updates = self._updates() if self._tables or self._counted else 0
        due = self._due_tables(updates)
        for at in range(0, len(due), TABLES):
            try:
                reader = RunReader(self._config, self._directory)
                yield [self._filled(table, reader, filters) for table, filters in due[at : at + TABLES]]
            except StoreError:
                yield [table for table, _ in due[at : at + TABLES]]
        waiting, self._early = [*self._early.values()], {}
        for at in range(0, len(waiting), BATCH):
            yield self._ready(waiting[at : at + BATCH], updates)
        for tail, record in ((self._steps, step_record), (self._evaluations, evaluation_record)):
            while lines := tail.read():
                for at in range(0, len(lines), BATCH):
                    found = [made for line in lines[at : at + BATCH] if (made := record(line)) is not None]
                    tables = [self._table_of(made) for made in found]
                    self._tables |= {t[0].key: t for t in tables if t is not None and not is_known(t[0])}
                    yield self._ready(found, updates)

    @property
    def finished(self) -> bool:
        """True if the newest step that was read is the run's last one."""
        return step_of(self._steps.last) >= self._config.run.total_steps

    def _updates(self) -> int | None:
        """Updates that the replay stage has counted; None without a store, where only tables are missing then."""
        try:
            return read_ledger(store_path(self._config, self._directory)).updates
        except StoreError:
            if self._counted:
                raise
            return None

    def _ready(self, records: list[TrackerRecord], updates: int | None) -> list[TrackerRecord]:
        """Without the steps that the replay stage has not counted, which come with a later call."""
        if not self._counted:
            return records
        early = {made.key: made for made in records if made.name == "step" and made.step > (updates or 0)}
        self._early |= early
        return [made for made in records if made.key not in early]

    def _due_tables(self, updates: int | None) -> list[tuple[TrackerRecord, Filters]]:
        """Tables whose rollouts the store has; the others wait, for this reporter or the next one."""
        if updates is None:
            return []
        due = {k: t for k, t in self._tables.items() if t[1].step is None or t[0].step <= updates}
        self._tables = {key: table for key, table in self._tables.items() if key not in due}
        return list(due.values())

    def curves(self) -> TrackerRecord | None:
        """The picture of all curves up to now; None without a step."""
        last = step_record(self._steps.last or {})
        if last is None:
            return None
        with suppress(ImportError):  # without matplotlib
            picture = png_of(figure(self._directory.metrics_file, self._directory.path.resolve().name))
            return TrackerRecord(f"curves/{last.step}", last.step, last.time, picture=picture)
        return None

    def _table_of(self, record: TrackerRecord) -> tuple[TrackerRecord, Filters] | None:
        """An empty record of the table that belongs to a step or an evaluation, and the rollouts in it."""
        section, traces = self._config.trackers, self._config.traces
        table = TrackerRecord(f"rollouts/{record.key}", record.step, record.time)
        if not section.rollouts:
            return None
        if record.name == "evaluation":
            return (table, Filters(evaluation=Span(record.step, record.step))) if traces.evaluated else None
        due = record.step % section.rollouts_every == 0 or record.step == 1
        return (table, Filters(step=Span(record.step, record.step))) if traces.trained and due else None

    def _filled(self, record: TrackerRecord, reader: RunReader, filters: Filters) -> TrackerRecord:
        """With its table; empty where the rollouts are not kept."""
        kept = replace(filters, kept=reader.traced)
        listed = reader.listing(kept, "oldest", limit=self._config.trackers.rollouts).rows
        rows = tuple(
            (
                record.step, row.trajectory_id, row.environment, row.task_id, row.reward, row.status, row.n_turns,
                row.n_sampled, transcript_text(found.transcript),
            )
            for found in reader.find(listed, filters.step)
            if found.transcript is not None and (row := found.listed)
        )  # fmt: skip
        return replace(record, table=Table(COLUMNS, rows)) if rows else record


SECTIONS = (
    ("episode", re.compile(r"reward|signals|truncated|turns|sampled_tokens_mean|n_groups|groups|overlong")),
    ("replay", re.compile(r".*replay|.*retest|candidates|choice|pool|n_replayed")),
    ("off_policy", re.compile(r"ratio|ess|sequence|kl_k|staleness|logprob|off_|loss_o|rejected|masked_f|guard|policy")),
    ("loss", re.compile(r".*loss|value|grad|learning|entropy|kl|clip|nonfinite|supervised|optimizer|hinted")),
    ("time", re.compile("")),
)
"""Groups of charts, with the keys of ``metrics.jsonl`` that begin so; the first one that fits. Trackers sort groups by
name, so rewards come first, then ``eval``."""


def step_numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of ``metrics.jsonl`` in their groups.

    >>> step_numbers({"reward_mean": 0.5, "seconds": {"wait": 2}})
    {'episode/reward_mean': 0.5, 'time/seconds/wait': 2}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        section = next(name for name, keys in SECTIONS if keys.match(key))
        found |= numbers_of(value, f"{section}/{key}")
    return found


def step_record(line: Mapping[str, Any]) -> TrackerRecord | None:
    """The record of a line of ``metrics.jsonl``."""
    step, time = line.get("step"), _time(line.get("time"))
    if not isinstance(step, int):
        return None
    return TrackerRecord(f"step/{step}", step, time, step_numbers(line), fingerprint=_fingerprint(line))


def evaluation_record(line: Mapping[str, Any]) -> TrackerRecord | None:
    """The record of a line of ``evaluations.jsonl``."""
    number, updates = line.get("evaluation"), line.get("updates")
    if not isinstance(number, int) or not isinstance(updates, int):
        return None
    time, numbers = _time(line.get("started_at")) + _time(line.get("seconds")), numbers_of(line, "eval")
    return TrackerRecord(f"evaluation/{number}", updates, time, numbers, fingerprint=_fingerprint(line))


def numbers_of(value: object, path: str) -> dict[str, float]:
    """Every finite number in nested objects by its path. Lists, texts and booleans are left out.

    >>> numbers_of({"score": 0.5, "pass_at": {"8": 1}, "versions": [1, 2]}, "eval")
    {'eval/score': 0.5, 'eval/pass_at/8': 1}
    """
    if isinstance(value, Mapping):
        return {
            name: number for key, inner in value.items() for name, number in numbers_of(inner, f"{path}/{key}").items()
        }
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return {path: value}
    return {}


def transcript_text(transcript: Transcript) -> str:
    """The messages of a rollout as one text, cut in the middle if it is long."""
    parts = []
    for turn in transcript.trajectory.turns:
        parts += [f"[{message.role}]\n{message.content}" for message in turn.context_messages]
        parts.append(f"[{turn.completion_message.role}]\n{turn.completion_message.content}")
    return truncate("\n\n".join(parts), CHARACTERS_MAX)


def _time(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _fingerprint(line: Mapping[str, Any]) -> str:
    return hashlib.blake2b(orjson.dumps(line), digest_size=8).hexdigest()
