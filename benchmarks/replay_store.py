"""The stores, TorchRL's replay buffer as a peer, and a file for each trajectory as RLinf's buffer documents it.

    python -m benchmarks.replay_store [--folder .] [--grow 20000] [--reopen 50000] [--only buffer|stage]

Two shapes. *Steps*: trajectories [T=64, B=8] of 146 float32 a step (299 KB), 512 units each, in
:mod:`pipeline.buffer.trajectory_buffer` and in TorchRL (LazyTensorStorage, LazyMemmapStorage), same numbers of units,
same 256 drawn. *LLM*: 2,000 tokens in 8 turns, through the replay stage's own core and SQLite store.

Fresh memory can be slow to touch, so each in-memory store is filled once before it is timed (capacity 1,000, timed
while it overwrites). Times are the best of five rounds, so that other work on the machine counts as little as it can;
torch has one thread (with more, its small copies wait for each other). TorchRL needs `pip install torchrl` (extra
`benchmarks`); without it its column is empty.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.buffer.payloads import join_steps
from pipeline.buffer.trajectory_buffer import TrajectoryBuffer, load

T, B = 64, 8
FIELDS = {"observation": 72, "next_observation": 64, "action": 7, "reward": 1, "done": 1, "logprob": 1}
DRAW = 256
IN_MEMORY = 1000
ROUNDS = 5

Rows = list[tuple[str, str, str, str]]


def steps(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """One trajectory ``[T * B, ...]``, a view of ``[T, B, ...]``."""
    return {name: join_steps(rng.random((T, B, width), dtype=np.float32)) for name, width in FIELDS.items()}


def seconds(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def best_seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    return min(seconds(work) for _ in range(rounds))


def forget_pages(folder: Path) -> None:
    """Drop the page cache of the files in a folder, so that reading them is reading the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def peer() -> Any:
    """TorchRL's module, or None."""
    warnings.filterwarnings("ignore")
    try:
        import tensordict
        import torchrl.data
    except ImportError:
        return None
    return tensordict, torchrl.data


def per(value: float, unit: str = "s") -> str:
    scale = {"ms": 1e3, "us": 1e6, "s": 1.0}[unit]
    return f"{value * scale:,.3g} {unit}"


class Ours:
    """Timings of :mod:`pipeline.buffer.trajectory_buffer`."""

    def __init__(self, folder: Path, trajectories: list[dict[str, np.ndarray]]) -> None:
        self.folder, self.trajectories = folder, trajectories

    def in_memory(self) -> tuple[float, float]:
        buffer = TrajectoryBuffer(capacity=IN_MEMORY)
        self._fill(buffer, 2 * IN_MEMORY)
        add = best_seconds(lambda: self._fill(buffer, IN_MEMORY)) / IN_MEMORY
        draw = best_seconds(lambda: [buffer.sample(DRAW) for _ in range(100)]) / 100
        return add, draw

    def durable(self) -> tuple[float, float, float]:
        """Seconds a trajectory until durable, until ``add`` returns, and a draw without cache."""
        with TrajectoryBuffer(self.folder / "durable", cache_bytes=0, pending_bytes_max=512 * 2**20) as buffer:
            self._fill(buffer, 200)
            buffer.flush()

            def round_() -> None:
                self._fill(buffer, 500)
                buffer.flush()

            durable = best_seconds(round_) / 500
            buffer.flush()
            hot = []
            for trajectory in self.trajectories[:50]:
                hot.append(seconds(lambda t=trajectory: buffer.add(t)))
            buffer.flush()
            draw = best_seconds(lambda: [buffer.sample(DRAW) for _ in range(50)]) / 50
        return durable, statistics.median(hot), draw

    def cold(self) -> tuple[float, float]:
        """Seconds to load 1,000 that are not in the page cache, and for the first draw of such a buffer on disk."""
        place = self.folder / "cold"
        with TrajectoryBuffer(place, cache_bytes=0) as buffer:
            self._fill(buffer, IN_MEMORY)
            buffer.save()

        def once() -> float:
            forget_pages(place)
            started = time.perf_counter()
            load(place).close()
            return time.perf_counter() - started

        first = min(once() for _ in range(3))
        draws = []
        with TrajectoryBuffer(place, cache_bytes=0) as buffer:
            for _ in range(5):
                forget_pages(place)
                draws.append(seconds(lambda: buffer.sample(DRAW)))
        return first, min(draws)

    def grow(self, n: int, parts: int = 10) -> list[tuple[int, float, float, float]]:
        """(size, seconds an add until durable, the same of bare appends, median seconds of the call) for each tenth of
        the way to ``n``. The disk itself may become slower on the way, which the bare appends show."""
        found = []
        bare = os.open(self.folder / "bare", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        payload = np.random.default_rng(0).bytes(sum(a.nbytes for a in self.trajectories[0].values()))

        def append() -> None:
            for _ in range(10):
                os.writev(bare, [payload] * 16)
                os.fdatasync(bare)

        with TrajectoryBuffer(self.folder / "grow") as buffer:
            for part in range(1, parts + 1):
                calls = []
                started = time.perf_counter()
                for i in range(n // parts):
                    trajectory = self.trajectories[i % len(self.trajectories)]
                    calls.append(seconds(lambda t=trajectory: buffer.add(t)))
                buffer.flush()
                elapsed = time.perf_counter() - started
                found.append(
                    (part * (n // parts), elapsed / (n // parts), seconds(append) / 160, statistics.median(calls))
                )
            buffer.save()
        os.close(bare)
        shutil.rmtree(self.folder / "grow")
        return found

    def _fill(self, buffer: TrajectoryBuffer, n: int) -> None:
        for i in range(n):
            buffer.add(self.trajectories[i % len(self.trajectories)])


class Files:
    """A file for each trajectory (``torch.save``), each one drawn from loaded once."""

    def __init__(self, folder: Path, trajectories: list[dict[str, np.ndarray]]) -> None:
        import torch

        self.torch, self.folder = torch, folder / "files"
        self.trajectories = [{k: torch.from_numpy(v) for k, v in t.items()} for t in trajectories]
        self.folder.mkdir()

    def add_and_draw(self) -> tuple[float, float]:
        """Seconds to write one (no fsync), and to draw 256 units of 1,000 without cache."""

        def write() -> None:
            for i in range(IN_MEMORY):
                self.torch.save(self.trajectories[i % len(self.trajectories)], self.folder / f"{i}.pt")

        def draw() -> None:
            picks = np.random.default_rng(1).integers(0, IN_MEMORY * T * B, DRAW)
            parts = []
            for number in np.unique(picks // (T * B)).tolist():
                data = self.torch.load(self.folder / f"{number}.pt", weights_only=True)
                rows = self.torch.from_numpy(picks[picks // (T * B) == number] % (T * B))
                parts.append({name: tensor[rows] for name, tensor in data.items()})
            for name in FIELDS:
                self.torch.cat([part[name] for part in parts])

        return best_seconds(write, 2) / IN_MEMORY, best_seconds(draw, 3)


class TorchRL:
    """The same of TorchRL: one row of its storage is one unit."""

    def __init__(self, modules: Any, folder: Path, trajectories: list[dict[str, np.ndarray]]) -> None:
        import torch

        torch.set_num_threads(1)
        self.tensordict, self.data = modules
        self.folder = folder
        self.trajectories = [
            self.tensordict.TensorDict({k: torch.from_numpy(v) for k, v in t.items()}, batch_size=[T * B])
            for t in trajectories
        ]

    def in_memory(self) -> tuple[float, float]:
        return self._timed(self.data.LazyTensorStorage(IN_MEMORY * T * B))

    def memmap(self) -> tuple[float, float]:
        """Not durable: the pages are the kernel's to write."""
        return self._timed(self.data.LazyMemmapStorage(IN_MEMORY * T * B, scratch_dir=self.folder / "memmap"))

    def cold(self) -> float:
        """Seconds to load 1,000 that are not in the page cache."""
        buffer = self._buffer(self.data.LazyTensorStorage(IN_MEMORY * T * B))
        self._fill(buffer, IN_MEMORY)
        place = self.folder / "torchrl"
        buffer.dumps(place)

        def once() -> float:
            forget_pages(place)
            other = self._buffer(self.data.LazyTensorStorage(IN_MEMORY * T * B))
            started = time.perf_counter()
            other.loads(place)
            assert len(other) == IN_MEMORY * T * B
            return time.perf_counter() - started

        return min(once() for _ in range(3))

    def _timed(self, storage: Any) -> tuple[float, float]:
        buffer = self._buffer(storage)
        self._fill(buffer, 2 * IN_MEMORY)
        add = best_seconds(lambda: self._fill(buffer, IN_MEMORY)) / IN_MEMORY
        draw = best_seconds(lambda: [buffer.sample() for _ in range(100)]) / 100
        return add, draw

    def _buffer(self, storage: Any) -> Any:
        return self.data.TensorDictReplayBuffer(storage=storage, sampler=self.data.RandomSampler(), batch_size=DRAW)

    def _fill(self, buffer: Any, n: int) -> None:
        for i in range(n):
            buffer.extend(self.trajectories[i % len(self.trajectories)])


def buffer_rows(folder: Path, grow: int) -> Rows:
    rng = np.random.default_rng(0)
    trajectories = [steps(rng) for _ in range(64)]
    ours, modules = Ours(folder, trajectories), peer()
    theirs = TorchRL(modules, folder, trajectories) if modules else None
    rows: Rows = []

    def row(what: str, mine: float, other: float | None, unit: str, note: str = "") -> None:
        ratio = f"{other / mine:.2f}×" if other else ""
        rows.append((what, per(mine, unit), f"{per(other, unit)}{note}" if other else "", ratio))
        print("  " + " | ".join(rows[-1]), file=sys.stderr, flush=True)

    add, draw = ours.in_memory()
    gc.collect()
    peer_add, peer_draw = theirs.in_memory() if theirs else (None, None)
    row("add, in memory", add, peer_add, "us", " (LazyTensorStorage)")
    row("sample(256), in memory", draw, peer_draw, "us", " (LazyTensorStorage)")
    gc.collect()
    durable, hot, uncached = ours.durable()
    mapped_add, mapped_draw = theirs.memmap() if theirs else (None, None)
    row("add, until durable (fsync)", durable, mapped_add, "us", " (LazyMemmapStorage, no fsync)")
    row("add, until it returns", hot, mapped_add, "us", " (LazyMemmapStorage, no fsync)")
    row("sample(256), uncached", uncached, mapped_draw, "us", " (LazyMemmapStorage)")
    if theirs:
        written, drawn = Files(folder, trajectories).add_and_draw()
        row("add, until it returns", hot, written, "us", " (a file each, torch.save, no fsync)")
        row("sample(256), uncached", uncached, drawn, "us", " (a file each)")
    loaded, first = ours.cold()
    row("load 1,000, cold", loaded, theirs.cold() if theirs else None, "s", " (dumps, loads)")
    row("sample(256) from disk, cold", first, None, "ms")
    growth = ours.grow(grow)
    for size, until_durable, bare, call in growth:
        print(
            f"  {size:6d}: {until_durable * 1e6:8.0f} us until durable, {bare * 1e6:8.0f} us bare append, "
            f"{call * 1e6:6.0f} us a call",
            file=sys.stderr,
        )
    half = len(growth) // 2
    early, late = (statistics.median(g[1] for g in part) for part in (growth[:half], growth[half:]))
    rows.append((f"add until durable, second half of {grow:,} / first half", f"{late / early:.2f}", "", ""))
    early, late = (statistics.median(g[2] for g in part) for part in (growth[:half], growth[half:]))
    rows.append(("the same of bare appends with fsync", f"{late / early:.2f}", "", ""))
    early, late = (statistics.median(g[3] for g in part) for part in (growth[:half], growth[half:]))
    rows.append(("the same of the call of add", f"{late / early:.2f}", "", ""))
    return rows


def table(rows: Rows) -> str:
    lines = ["| what | here | peer | peer / here |", "|---|--:|--:|--:|"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("."), help="where the files go, on the disk to measure")
    parser.add_argument("--grow", type=int, default=20_000, help="trajectories of 299 KB to grow to (6 GB)")
    parser.add_argument("--reopen", type=int, default=50_000, help="LLM trajectories to reopen (1.1 GB)")
    parser.add_argument("--only", choices=["buffer", "stage"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        if options.only != "stage":
            print(table(buffer_rows(Path(folder), options.grow)), flush=True)
        if options.only != "buffer":
            from benchmarks.replay_stage import stage_rows

            print(table(stage_rows(Path(folder), options.reopen)), flush=True)


if __name__ == "__main__":
    run()
