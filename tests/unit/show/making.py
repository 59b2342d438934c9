"""Run directories with rollouts in them, written like those of a real run, but in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import yaml

from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Failure, FinishReason, Message, Task, Timings, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.codec import encode_trajectory
from pipeline.schema.trajectory import VersionSpan
from pipeline.store import tables
from pipeline.store.store import checksum
from pipeline.store.traces import Flag, SeenTokens, TraceWriter

BASE = 100
"""First id of the byte tokens of :func:`write_tokenizer`."""


@dataclass(frozen=True)
class Rollout:
    """One trajectory and what became of it."""

    group: int = 0
    slot: int = 0
    reward: float | None = 1.0
    task: str = "game/0"
    environment: str = "game"
    state: str = "trained"
    reason: str = ""
    step: int | None = 1
    evaluation: int | None = None
    """Updates in the weights that it was played to evaluate."""
    replays: Sequence[int] = ()
    stored: bool = True
    """Its payload is still in the store."""
    traced: bool = False
    """The learner kept a trace of it."""
    failure: Failure | None = None
    said: Sequence[tuple[str, str]] = (("question", "answer"),)
    """By turn: what the user said, what the policy answered (bytes as tokens)."""
    versions: Sequence[tuple[int, int]] = ((0, 10**6),)
    """Policy version and up to which sampled token of a turn."""
    branches: Sequence[int] = field(default=())
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"g{self.group:06d}.{self.slot}.0"


def ids_of(text: str) -> list[int]:
    return [BASE + byte for byte in text.encode()]


def trajectory_of(r: Rollout) -> Trajectory:
    turns = []
    for i, (user, answer) in enumerate(r.said):
        ids = [*ids_of(answer), 2]
        spans, at = [], 0
        for version, stop in r.versions:
            stop = min(stop, len(ids))
            if stop > at:
                spans.append(VersionSpan(at, stop, version))
                at = stop
        logprobs = -np.linspace(0.01, 4.0, len(ids))
        turns.append(
            Turn(
                context=TokenSpan.context([4, *ids_of(user), 5]),
                completion=TokenSpan.sampled(ids, logprobs, tuple(spans)),
                context_messages=(Message("user", user, dict(r.extra)),),
                completion_message=Message("assistant", answer),
                finish_reason=FinishReason.STOP,
                temperature=1.0,
                signals={"solved": 1.0} if i == len(r.said) - 1 else {},
                branch=r.branches[i] if r.branches else 0,
                reward=0.5,
            )
        )
    failed = r.failure is not None
    return Trajectory(
        r.name,
        f"g{r.group:06d}",
        Task(r.task, r.environment, 7, {"text": "payload"}),
        tuple(turns),
        TrajectoryStatus.ERROR if failed else TrajectoryStatus.COMPLETE,
        r.failure,
        {} if failed else {"environment": r.reward},
        None,
        timings=Timings(1e9, 1e9 + 2.0, 1.5, 0.25, ((0.25, 1.5),)),
    )


def seen_of(trajectory: Trajectory) -> SeenTokens:
    n = trajectory.n_sampled
    flags = np.full(n, int(Flag.SEEN | Flag.TRAINED), np.uint8)
    flags[-1] = int(Flag.SEEN | Flag.MASKED)
    return SeenTokens(np.linspace(-0.5, 0.5, n), np.linspace(0, 2, n), np.full(n, 0.75), flags)


def write_tokenizer(folder: Path) -> None:
    """Byte-level: ids from :data:`BASE` on are the 256 bytes."""
    from pipeline.views.vocabulary import _byte_level

    table = _byte_level()
    special = ["<|pad|>", "<|unknown|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    raw = {
        "model": {"type": "BPE", "vocab": {char: BASE + byte for char, byte in table.items()}, "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": i, "content": text, "special": True} for i, text in enumerate(special)],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(orjson.dumps(raw))


def make_run(path: Path, rollouts: Sequence[Rollout], **sections: Any) -> Path:
    """A run directory."""
    directory = RunDirectory(path).create()
    named = {"environments": {"guess": {"name": "number_guess"}}}
    config = {"run": {"name": path.name, "directory": str(path.parent)}, **named, **sections}
    directory.config_file.write_text(yaml.safe_dump(config))
    write_tokenizer(directory.model)
    _write_store(directory.store_file, rollouts)
    trained, failed = (
        TraceWriter(directory.traces, "trained", 1 << 24),
        TraceWriter(directory.traces, "failed", 1 << 24),
    )
    for r in rollouts:
        trajectory = trajectory_of(r)
        frames = encode_trajectory(trajectory)
        index = {"trajectory_id": r.name, "policy_version": 3, "replayed": False}
        if r.traced and r.failure is None and r.evaluation is None:
            for step in [s for s in (r.step, *r.replays) if s is not None]:
                trained.append({**index, "replayed": step != r.step}, frames, seen_of(trajectory), step - 1)
        elif r.traced:
            failed.append(index, frames, None)
    trained.close()
    failed.close()
    return path


def _write_store(path: Path, rollouts: Sequence[Rollout]) -> None:
    tables.STORE.create(path)
    connection = tables.STORE.connect(path, synchronous="OFF")
    run = connection.execute
    try:
        run("BEGIN")
        replay_group = 10_000
        for row, r in enumerate(rollouts):
            t = trajectory_of(r)
            task = orjson.dumps({"task_id": r.task, "environment": r.environment, "seed": 7, "payload": {}})
            state = "trained" if r.state == "trained" else "collecting"
            update = None if r.step is None else r.step - 1
            if r.evaluation is not None:
                state, update = "evaluated", r.evaluation
            index = None if r.evaluation is None else 0
            row_of_group = (r.group, task, 8, 8, 0, 0, index, state, update, 0, 0, "", 1e9, None, 0)
            _insert(run, "INSERT OR IGNORE INTO groups", *row_of_group)
            order = (r.group, r.slot, 0, "actor-0", 0, 0, "delivered", "", 0, 1e9 - 1, 1e9 + row)
            _insert(run, "INSERT INTO orders", *order)
            low, high = t.version_range() or (-1, -1)
            failure = r.failure and orjson.dumps({name: getattr(r.failure, name) for name in
                                                  ("boundary", "kind", "message", "details")})  # fmt: skip
            frames = encode_trajectory(t)
            _insert(
                run, "INSERT INTO trajectories", row, r.name, r.group, r.slot, 0, r.state, r.reason, r.reward,
                orjson.dumps(t.rewards), 1, 1e9 + row, t.status.value, len(t.turns), t.n_tokens, t.n_sampled, low, high,
                2.0, "actor-0", sum(map(len, map(bytes, frames))), failure, 0.5, 1, 0, None,
            )  # fmt: skip
            if r.stored:
                _insert(run, "INSERT INTO payloads", row, *map(bytes, frames), checksum(frames, row))
            for step in r.replays:
                replay_group += 1
                row_of_group = (replay_group, task, 8, 7, 1, 0, None, "trained", step - 1, 0, 0, "", 1e9, None, 0)
                _insert(run, "INSERT INTO groups", *row_of_group)
                _insert(run, "INSERT INTO group_replays", replay_group, 0, row, 1.0, 1, 2, 0, None, None, None, 1)
        run("COMMIT")
    finally:
        connection.close()


def _insert(run: Any, into: str, *values: Any) -> None:
    table = into.split()[-1]
    if table in tables.ROW_TABLES:
        values = (*values, tables.row_digest(values, tables.ROW_TABLES[table]))
    run(f"{into} VALUES ({','.join('?' * len(values))})", values)
