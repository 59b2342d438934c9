"""Import of experience from files into the pool of a run, and export of a pool into one file.

An import needs a run that is not running. Everything in the file is read and checked first; only then is a store
opened for writing. Trajectories are committed a few hundred at a time, each transaction leaving a whole store; an
import that was killed is finished by repeating it, because existing trajectories are skipped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, StoreError
from pipeline.replay.demonstrations import Render, import_id, read_demonstrations
from pipeline.replay.replay import Replay
from pipeline.runtime.run_directory import RunDirectory, vocabulary_size
from pipeline.schema import TokenSpan, Trajectory, VersionSpan
from pipeline.schema.codec import Limits, decode_trajectory, encode_trajectory
from pipeline.schema.counters import Count
from pipeline.schema.record_file import Frames
from pipeline.store.archive import ArchivedTrajectory, Header, is_archive, read_archive, write_archive
from pipeline.store.journal import Journal, PayloadRefCounts
from pipeline.store.ledger import FAILURES
from pipeline.store.queries import meta, origin, pooled, reading
from pipeline.store.records import OrderKey, TrajectoryRecord, TrajectoryState, facts_of
from pipeline.store.replay_records import PoolEntry
from pipeline.store.store import ReplayStore, store_path

CHUNK, CHUNK_TOKENS = 256, 1 << 20
"""Trajectories of one transaction, and about how many tokens they have."""

Imported = tuple[Trajectory, ArchivedTrajectory | None]
"""A trajectory, and the record that it was read from, if it comes from an export."""


class Importer:
    """Brings trajectories into the store of one run.

    Raises :class:`ConfigurationError` for a run that cannot take any, :class:`StoreError` for a file or store that is
    not whole. Until :meth:`run` has read the whole file nothing is changed.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, render: Render, model: Path | None = None) -> None:
        if not config.replay.enabled:
            raise ConfigurationError(
                "expected a run with replay.enabled: true, got false: nothing would ever be replayed. Set it in the "
                "run file, from which a run that has started takes it at its next start"
            )
        if config.replay.mode == "groups":
            raise ConfigurationError(
                "expected a run with replay.mode: mix, which replays single trajectories, got groups: set "
                "replay.mode: mix in the run file, from which a run that has started takes it at its next start"
            )
        self._config, self._directory, self._render = config, directory, render
        self._path = store_path(config, directory)
        self._limits = Limits(tokens_max=config.stage.tokens_max)
        self._vocabulary = vocabulary_size(model or directory.model)
        self._origin, self._version = "", 0
        """History of the store (empty: it has none), and the newest policy version."""
        if self._path.exists():
            with reading(self._path) as connection:
                self._origin, self._version = origin(connection), max(0, meta(connection).get("policy_version", -1))

    def run(self, file: Path) -> Counter[str]:
        """Counts of the trajectories of ``file``: ``imported``, ``duplicate``, ``failure`` (a reward below
        ``replay.success_threshold``), ``retired`` (or too old), and ``left.<reason>`` of what had to make room."""
        for trajectory, portable in self._trajectories(file):
            self._check(file, trajectory, portable)
        counts: Counter[str] = Counter()
        with ReplayStore(self._path, self._config.stage.synchronous) as store:
            pool = PoolWriter(self._config, store, self._version)
            trajectories = self._trajectories(file)
            while chunk := list(_chunk(trajectories)):
                counts += pool.add(chunk)
        return counts

    def _trajectories(self, file: Path) -> Iterator[Imported]:
        if not is_archive(file):
            with file.open("rb") as stream:
                start = stream.read(64).lstrip()
                if start[:1] != b"{":
                    raise StoreError(
                        f"expected {file} to be an export of Afterplay or demonstrations (a JSON object on each line), "
                        f"got {'something else' if start else 'an empty file'}"
                    )
            for trajectory in read_demonstrations(file, self._render, self._version):
                yield trajectory, None
            return
        for portable in read_archive(file, self._limits):
            try:
                trajectory = decode_trajectory(portable.frames, self._limits)
            except AfterplayError as error:
                raise StoreError(f"{file} contains an invalid trajectory: {error}") from error
            reward = portable.marks.get("reward")
            if not isinstance(reward, int | float):
                raise StoreError(f"{file}: expected {trajectory.trajectory_id} with its reward, got {reward!r}")
            trajectory = trajectory.scored(float(reward), {})
            if not self._origin or portable.marks.get("origin") != self._origin:
                trajectory = _foreign(trajectory, portable.frames, self._version)
            yield trajectory, portable

    def _check(self, file: Path, trajectory: Trajectory, portable: ArchivedTrajectory | None) -> None:
        """Refuse what this run could not train. Raises :class:`StoreError`."""
        environment = trajectory.task.environment
        if environment not in self._config.trained_environments:
            names = ", ".join(self._config.trained_environments)
            raise StoreError(f"{file}: expected environments that this run trains ({names}), got {environment!r}")
        if trajectory.n_tokens > self._limits.tokens_max:
            raise StoreError(
                f"{file}: expected at most stage.tokens_max={self._limits.tokens_max} tokens, got "
                f"{trajectory.n_tokens} in one for {trajectory.task.task_id}"
            )
        if any(len(tokens) and tokens.loss_mask[0] for tokens in trajectory.branches()):
            raise StoreError(
                f"{file}: expected context before the first sampled token, got none in a trajectory for "
                f"{trajectory.task.task_id}: nothing predicts that token"
            )
        temperatures = {turn.temperature for turn in trajectory.turns if turn.trained and len(turn.completion)}
        if not all(temperature > 0 for temperature in temperatures):
            raise StoreError(
                f"{file}: expected a temperature > 0, got greedy tokens in a trajectory for "
                f"{trajectory.task.task_id}: they have no log-probability"
            )
        if self._config.learner.reference.url is not None and temperatures - {1.0}:
            raise StoreError(
                f"{file}: expected a temperature of 1, with which the server of learner.reference.url scores, got "
                f"{max(temperatures - {1.0}):g} in a trajectory for {trajectory.task.task_id}"
            )
        spans = (span.token_ids for turn in trajectory.turns for span in (turn.context, turn.completion))
        largest = max((int(ids.max()) for ids in spans if len(ids)), default=0)
        if self._vocabulary is not None and largest >= self._vocabulary:
            raise StoreError(
                f"{file}: expected token ids below the model's vocabulary of {self._vocabulary}, got {largest}: the "
                "file is of another tokenizer"
            )
        if portable is not None and not isinstance(portable.marks.get("success_rate"), int | float | None):
            raise StoreError(f"{file}: expected success_rate as a number, got {portable.marks.get('success_rate')!r}")


def _chunk(trajectories: Iterator[Imported]) -> Iterator[Imported]:
    """The trajectories of the next transaction: what is imported at once is held in memory."""
    n_tokens = 0
    for found in islice(trajectories, CHUNK):
        yield found
        n_tokens += found[0].n_tokens
        if n_tokens > CHUNK_TOKENS:
            return


class PoolWriter:
    """The pool of one store, and the rows that adding to it makes."""

    def __init__(self, config: RunConfig, store: ReplayStore, version: int) -> None:
        self._store = store
        self._version = version
        self._threshold = config.replay.success_threshold
        snapshot = store.load()
        self._journal = Journal(snapshot.counters, snapshot.meta.get(FAILURES))
        self._replay = Replay(config, entries=snapshot.entries, tasks=snapshot.tasks, state=snapshot.meta.get("replay"))
        self._holds = PayloadRefCounts(self._journal)
        self._holds.restore(snapshot.groups.values(), snapshot.entries, snapshot.stored_groups)
        self._stored_ids = {entry.trajectory_id for entry in snapshot.entries}
        self._next_row_id = snapshot.next_row_id

    def add(self, trajectories: Sequence[Imported]) -> Counter[str]:
        """One transaction."""
        counts: Counter[str] = Counter()
        new: dict[int, tuple[TrajectoryRecord, Trajectory, Frames]] = {}
        entries = []
        for trajectory, portable in trajectories:
            assert trajectory.reward is not None
            if trajectory.trajectory_id in self._stored_ids:
                counts["duplicate"] += 1
            elif trajectory.reward < self._threshold or not trajectory.usable:
                counts["failure"] += 1
            else:
                self._stored_ids.add(trajectory.trajectory_id)
                frames = encode_trajectory(trajectory)
                record = self._record(trajectory, frames)
                new[record.row_id] = (record, trajectory, frames)
                entries.append(_entry(record, trajectory, portable))
        saved = self._replay.import_entries(entries, version=self._version)
        for entry in saved:
            record, trajectory, frames = new[entry.row_id]
            record.saved = entry.saved
            self._journal.imported(record, trajectory.trajectory_id, frames)
            self._holds.arrived(entry.row_id, entry.n_bytes)
            self._journal.count(Count.POOL_IMPORTED)
        changed = self._replay.take_changes()
        for entry, reason in changed.removed:
            self._holds.release(entry.row_id, entry.n_bytes)
            self._stored_ids.discard(entry.trajectory_id)
            self._journal.count(Count(f"pool.evicted.{reason}"))
            counts[f"left.{reason.value}"] += 1
        counts["imported"] = len(saved)
        counts["retired"] = len(entries) - len(saved)
        self._journal.replay_changes(changed)
        changes, _ = self._journal.collect()
        if saved or changed.removed:
            self._store.commit(changes)
        return counts

    def _record(self, trajectory: Trajectory, frames: Frames) -> TrajectoryRecord:
        row_id = self._next_row_id
        self._next_row_id += 1
        facts = facts_of(trajectory, frames)
        return TrajectoryRecord(
            row_id=row_id,
            key=OrderKey(-1, row_id, 0),
            facts=facts,
            received_at=time.time(),
            state=TrajectoryState.IMPORTED,
            reward=trajectory.reward,
            rewards=trajectory.rewards,
            age_insert=max(0, self._version - facts.version_min) if trajectory.recorded else 0,
        )


def _entry(record: TrajectoryRecord, trajectory: Trajectory, portable: ArchivedTrajectory | None) -> PoolEntry:
    entry, marks = record.pool_entry(trajectory.task, trajectory.trajectory_id), portable.marks if portable else {}
    if isinstance(entropy := marks.get("entropy"), int | float):
        entry.entropy = float(entropy)
    entry.success_rate, entry.recorded = marks.get("success_rate"), trajectory.recorded
    return entry


def _foreign(trajectory: Trajectory, frames: Frames, version: int) -> Trajectory:
    """A trajectory of another run: its id, versions and experts mean nothing here, and its age counts from now on."""
    identity = trajectory.trajectory_id
    if not identity.startswith("import-"):
        identity = import_id(b"".join(bytes(frame) for frame in frames))
    at = version if trajectory.recorded else 0
    turns = tuple(replace(t, completion=_at_version(t.completion, at), experts=None) for t in trajectory.turns)
    return replace(trajectory, trajectory_id=identity, group_id="imported", turns=turns)


def _at_version(span: TokenSpan, version: int) -> TokenSpan:
    spans = (VersionSpan(0, len(span), version),) if len(span) else ()
    return replace(span, version_spans=spans)


def export_run(config: RunConfig, directory: RunDirectory, file: Path, *, replace: bool = False) -> int:
    """Write every trajectory of the pool as of one moment; returns how many. The run may be active.

    Raises :class:`ConfigurationError` for a run that keeps groups, and if ``file`` already exists (unless ``replace``),
    :class:`StoreError` for a store that is missing or not ours.
    """
    if config.replay.mode == "groups":
        raise ConfigurationError(
            "expected a run with replay.mode: mix, whose pool has single trajectories, got groups: stored groups are "
            "not exported"
        )
    with reading(store_path(config, directory)) as store:
        header = Header(config.run.name, config.model.source, tuple(filter(None, [origin(store)])))
        return write_archive(file, header, pooled(store), replace=replace)
