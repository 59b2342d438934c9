"""An export of stored trajectories in the archive's format and in the one of the trajectory buffer.

    python -m benchmarks.export_format [--trajectories 2000] [--json FILE]

Trajectories of 1, 2, 4 or 8 turns of 300 tokens, half of them sampled: words of this repository's pages as text, a
token for each five characters of it, log-probabilities in float32, one or two policy versions in a completion. The
buffer has a token as unit, with its id, log-probability, version and whether it was sampled; what the codec keeps
beside the arrays is zlib-compressed like the archive does it. An import is the read of every trajectory with all
checks, without the store that takes them afterwards. Each number is the median of three rounds. On 25 November 2026 the
buffer's format took 3.0 times the bytes (results/export-format-2026-11-25.json), so exports stay archives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson

from benchmarks.compare_revisions import revision
from pipeline.buffer.trajectory_buffer import TrajectoryBuffer
from pipeline.schema import Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn, VersionSpan, record_file
from pipeline.schema.codec import Limits, decode_trajectory, encode_trajectory
from pipeline.schema.record_file import Frames
from pipeline.schema.trajectory import FinishReason
from pipeline.store.archive import ArchivedTrajectory, Header, read_archive, write_archive

TURNS = 1, 2, 4, 8
CONTEXT, COMPLETION, VOCABULARY, ROUNDS = 150, 150, 50_000, 3
PIECE = 5
"""Characters of a token."""


def trajectories(n: int) -> list[Trajectory]:
    """``n`` trajectories; the same text always has the same ids."""
    draw, rng = random.Random(7), np.random.default_rng(7)
    text = " ".join(" ".join(path.read_text() for path in sorted(Path("docs").glob("*.md"))).split())

    def tokens(length: int) -> tuple[str, np.ndarray]:
        at = draw.randrange(len(text) - PIECE * length) // PIECE * PIECE
        words = text[at : at + PIECE * length]
        pieces = re.findall(f"(?s).{{{PIECE}}}", words)
        return words, np.asarray([zlib.crc32(piece.encode()) % VOCABULARY for piece in pieces], np.int32)

    def turn(number: int) -> Turn:
        (asked, context), (said, sampled) = tokens(CONTEXT), tokens(COMPLETION)
        logprobs = -rng.gamma(0.3, 1.5, COMPLETION).astype(np.float32)
        cuts = draw.choice([(0, COMPLETION), (0, COMPLETION // 3, COMPLETION)])
        versions = tuple(VersionSpan(*span, 7 + i) for i, span in enumerate(pairwise(cuts)))
        return Turn(
            TokenSpan.context(context), TokenSpan.sampled(sampled, logprobs, versions), (Message("user", asked),),
            Message("assistant", said), FinishReason.STOP, 1.0, {"valid": 1.0}, reward=float(number),
        )  # fmt: skip

    return [
        Trajectory(
            f"order-{i}", f"group-{i // 8}", Task(f"task/{i // 8}", "words", i // 8),
            tuple(turn(k) for k in range(TURNS[i % len(TURNS)])), TrajectoryStatus.COMPLETE,
            rewards={"environment": float(i % 2)}, reward=float(i % 2),
        )
        for i in range(n)
    ]  # fmt: skip


def marks_of(trajectory: Trajectory) -> dict[str, object]:
    return {"entropy": 0.5, "success_rate": 0.25, "uses": 1, "reward": trajectory.reward, "origin": "7c6e0b51"}


def export_archive(path: Path, stored: Sequence[tuple[Trajectory, Frames]]) -> None:
    records = (ArchivedTrajectory(marks_of(trajectory), frames) for trajectory, frames in stored)
    write_archive(path, Header("run", "model", "zlib", ("7c6e0b51",)), records)


def import_archive(path: Path) -> int:
    return sum(decode_trajectory(record.frames, Limits()).n_tokens for record in read_archive(path, Limits()))


def export_buffer(path: Path, stored: Sequence[tuple[Trajectory, Frames]]) -> None:
    """Codec's frames as arrays of one length, and a record for each header."""
    with TrajectoryBuffer(path) as buffer, (path / "headers").open("wb") as headers:
        for trajectory, frames in stored:
            ids = np.frombuffer(frames[1], "<i4")
            sampled = np.zeros(len(ids), bool)
            logprobs, versions = np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32)
            at = 0
            for turn in trajectory.turns:
                at, end = at + len(turn.context), at + len(turn.context) + len(turn.completion)
                sampled[at:end] = True
                versions[at:end] = turn.completion.versions()
                at = end
            logprobs[sampled] = np.frombuffer(frames[2], "<f4")
            buffer.add({"token_ids": ids, "logprobs": logprobs, "versions": versions, "sampled": sampled})
            headers.writelines(record_file.pack({"marks": marks_of(trajectory)}, [frames[0]], level=6))
        buffer.save()
        os.fsync(headers.fileno())


def import_buffer(path: Path) -> int:
    n_tokens = 0
    with TrajectoryBuffer(path, cache_bytes=0) as buffer, (path / "headers").open("rb") as headers:
        for identity, frame in zip(buffer.ids(), record_file.scan(headers.fileno(), 0), strict=True):
            (header,) = frame.load(headers.fileno(), 1 << 26)
            arrays = buffer.get(identity)
            sampled, spans, at = arrays["sampled"], [], 0
            for turn in orjson.loads(header)["turns"]:
                context, completion, _ = turn["n"]
                versions = arrays["versions"][at + context : at + context + completion]
                starts = np.flatnonzero(np.diff(versions, prepend=-2))
                spans += [*zip(starts, [*starts[1:], completion], versions[starts], strict=True)]
                at += context + completion
            frames = [
                header,
                record_file.array_bytes(np.ascontiguousarray(arrays["token_ids"])),
                record_file.array_bytes(arrays["logprobs"][sampled]),
                record_file.array_bytes(np.asarray(spans, "<i4")),
            ]
            n_tokens += decode_trajectory(frames).n_tokens
    return n_tokens


def timed(work: Callable[..., int | None], *arguments: object) -> tuple[float, int | None]:
    started = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=2000)
    parser.add_argument("--json", type=Path, help="write the raw numbers to this file")
    args = parser.parse_args()
    made = trajectories(args.trajectories)
    stored = [(trajectory, encode_trajectory(trajectory)) for trajectory in made]
    n_tokens = sum(trajectory.n_tokens for trajectory in made)
    ways = {"archive": (export_archive, import_archive), "buffer": (export_buffer, import_buffer)}
    rounds: dict[str, dict[str, list[float]]] = {name: {"bytes": [], "export": [], "import": []} for name in ways}
    for _ in range(ROUNDS):
        for name, (write, read) in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, name)
                took, _ = timed(write, path, stored)
                files = path.iterdir() if path.is_dir() else [path]
                rounds[name]["bytes"].append(sum(file.stat().st_size for file in files))
                rounds[name]["export"].append(took)
                took, found = timed(read, path)
                rounds[name]["import"].append(took)
                assert found == n_tokens
    print(f"{len(made)} trajectories, {n_tokens} tokens")
    for what in ("bytes", "export", "import"):
        archive, buffer = (statistics.median(rounds[name][what]) for name in ways)
        print(f"{what:7} archive {archive:14.2f}  buffer {buffer:14.2f}  ratio {buffer / archive:.2f}")
    if args.json:
        facts = {
            "date": datetime.date.today().isoformat(), "revision": revision(Path()), "cores": os.cpu_count(),
            "trajectories": len(made), "tokens": n_tokens, "rounds": rounds,
        }  # fmt: skip
        args.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
