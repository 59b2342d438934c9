"""The trajectories of a run, live, stopped or killed: facts from its store, transcripts from traces and store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, SchemaError, StoreError, WireError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Trajectory, TrajectoryStatus
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.schema.record_file import Frames
from pipeline.store.queries import Filters, Listed, Sort, Span, list_store, stored_frames
from pipeline.store.records import TrajectoryState
from pipeline.store.store import store_path
from pipeline.store.traces import SeenTokens, TraceEntry, scan_traces, trace_files
from pipeline.views.step_lines import read_lines

FREED = (
    "its tokens are not kept: the stage frees them once a checkpoint covers the update, and it is not among the "
    "trajectories of each update that traces.trained keeps"
)
NOT_STORED = "its tokens are not kept: the oldest failed rollouts are deleted (traces.bytes_max)"
NOT_EVALUATED = (
    "its tokens are not kept: an evaluated rollout is freed at once, and it is not among those of each evaluation that "
    "traces.evaluated keeps"
)
TRACE_GONE = "its tokens were kept, but made room for newer ones (traces.bytes_max)"


@dataclass(frozen=True, slots=True)
class Transcript:
    """One trajectory with its tokens."""

    trajectory: Trajectory
    seen: SeenTokens | None = None
    """Values of the learner for its sampled tokens; None: no trace is kept."""
    step: int | None = None
    """Step of ``seen``."""
    policy_version: int | None = None
    """Version of the weights that ``seen`` was computed with."""
    replayed: bool = False
    """``seen`` is of an update that took it from the pool."""


@dataclass(frozen=True, slots=True)
class Found:
    """A listed trajectory, with its tokens or why there are none."""

    listed: Listed
    transcript: Transcript | None = None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The first of all matching trajectories."""

    rows: list[Listed]
    count: int
    """All that match."""


class RunReader:
    """Reads one run. It writes nothing, so the run may be alive. Raises :class:`StoreError` when there is no store."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self.name = directory.path.resolve().name
        self.model = directory.model
        self._limits = Limits(tokens_max=config.stage.tokens_max)
        self._path = store_path(config, directory)
        if not self._path.exists():
            raise StoreError(f"there is no replay store at {self._path}: has the run been started?")
        self._traces: dict[str, list[TraceEntry]] = {}
        for entry in scan_traces(trace_files(directory.traces)):
            self._traces.setdefault(entry.trajectory_id, []).append(entry)
        self.keeps_trained = config.traces.trained
        self._metrics = directory.metrics_file
        self._replay = config.replay
        self._environments = tuple(config.environments)

    @property
    def replay(self) -> str:
        """Account of what replay added to the run; empty where it added nothing."""
        return replay_account(read_lines(self._metrics), self._replay.ess_guard.level) if self._replay.enabled else ""

    def listing(self, filters: Filters, sort: Sort = "newest", reverse: bool = False, limit: int = 50) -> Listing:
        """No payload is read. Raises :class:`StoreError`, and :class:`ConfigurationError` for a status or environment
        that no rollout can have."""
        _require_known("status", filters.status, [*TrajectoryStatus, *TrajectoryState])
        listing = Listing(*list_store(self._path, filters, sort, reverse, limit))
        if not listing.count:  # the store may have rollouts of an environment that the run file no longer has
            _require_known("environment", filters.environment, self._environments)
        return listing

    @property
    def traced(self) -> frozenset[str]:
        """Ids of the trajectories whose tokens are in a trace."""
        return frozenset(self._traces)

    def has_trace(self, listed: Listed) -> bool:
        """True when a trace has its tokens."""
        return listed.trajectory_id in self._traces

    def find(self, rows: Sequence[Listed], step: Span | None = None) -> Iterator[Found]:
        """Their tokens, in order. ``step``: of several traces, take that of such an update; else the newest."""
        frames = dict(stored_frames(self._path, [row.row_id for row in rows if not self.has_trace(row)]))
        for row in rows:
            yield self._found(row, frames.pop(row.row_id, None), step)

    def _found(self, row: Listed, stored: Frames | None, step: Span | None) -> Found:
        try:
            entries = self._traces.get(row.trajectory_id)
            if entries:
                fit = [e for e in entries if step is not None and e.step is not None and e.step in step]
                return self._from_trace(row, max(fit or entries, key=lambda e: e.update))
            if stored is None:
                lost = row.status in ("error", "aborted")
                return Found(row, None, NOT_STORED if lost else FREED if row.evaluation is None else NOT_EVALUATED)
            return Found(row, Transcript(self._scored(row, decode_trajectory(stored, self._limits))))
        except (StoreError, WireError, SchemaError) as error:
            return Found(row, None, f"its tokens cannot be read: {error}")

    def _from_trace(self, row: Listed, entry: TraceEntry) -> Found:
        trace = entry.load()
        if trace is None:
            return Found(row, None, TRACE_GONE)
        trajectory = self._scored(row, decode_trajectory(trace.frames, self._limits))
        seen, version = trace.seen, entry.index.get("policy_version")
        if seen is not None and len(seen) != trajectory.n_sampled:
            seen = None
        version = version if isinstance(version, int) else None
        return Found(row, Transcript(trajectory, seen, entry.step, version, bool(entry.index.get("replayed"))))

    def _scored(self, row: Listed, trajectory: Trajectory) -> Trajectory:
        """Bytes are stored as they came, before the scorer's verdict."""
        return replace(trajectory, reward=row.reward, rewards={**trajectory.rewards, **row.rewards})


def replay_account(lines: Sequence[Mapping[str, Any]], level: Literal["token", "sequence"] = "token") -> str:
    """Share of replays, and how much of it is on-policy enough to count; empty where nothing was replayed.

    ``level``: of the effective sample size, as ``replay.ess_guard.level`` has it. What one run cannot say is said too.

    >>> line = {"n_replayed": 8, "n_trajectories": 64, "tokens_trained": 100, "replay_share": 0.1}
    >>> print(replay_account([line | {"ess_carried": 0.5, "clip_fraction_replay": 0.2}]).split(". Whether")[0])
    Replay: 8 of 64 trained trajectories, 10.0% of the trained tokens. By their effective sample size they count as \
5.0%; 20.0% of them were clipped
    """
    carried = "ess_carried" if level == "token" else "sequence_ess_carried"
    replayed = sum(line.get("n_replayed") or 0 for line in lines)
    if not replayed:
        return ""
    trained = sum(line.get("n_trajectories") or 0 for line in lines)
    tokens = [(line.get("tokens_trained") or 0) * (line.get("replay_share") or 0.0) for line in lines]
    total = max(1, sum(line.get("tokens_trained") or 0 for line in lines))

    def weighted(key: str) -> float:
        return sum(n * (line.get(key) or 0.0) for n, line in zip(tokens, lines, strict=True))

    return (
        f"Replay: {replayed:,} of {trained:,} trained trajectories, {sum(tokens) / total:.1%} of the trained tokens. "
        f"By their effective sample size they count as {weighted(carried) / total:.1%}; "
        f"{weighted('clip_fraction_replay') / max(1.0, sum(tokens)):.1%} of them were clipped. "
        "Whether replay saves tokens is not visible in one run, because replayed and fresh groups train the same "
        "weights: compare it with a run without replay (afterplay compare)."
    )


def _require_known(filtered: str, value: str | None, known: Iterable[str]) -> None:
    names = [str(name) for name in known]
    if value is not None and value not in names:
        raise ConfigurationError(f"{filtered}: expected one of {', '.join(names)}, got {value!r}")
