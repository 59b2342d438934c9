"""Clock of the learner's loop: the time between two updates, by phase.

Each second between the lines of two updates belongs to exactly one phase. Those of the trainer
(:class:`Stopwatch`) run in one thread, one after another; those of the loop lie around
them. What is in none is ``other``: counting, messages, the event loop.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import torch

Phase = Literal["prepare", "choose", "forward", "backward", "optimize"]
LoopPhase = Literal["wait", "publish", "save"]


class Stopwatch:
    """Seconds by phase, each second in one: a phase inside another interrupts it. On a GPU they are those of the
    device: an event marks each change of the phase, and only :attr:`seconds` waits for the device. For one thread.
    ``event``: makes an event, recorded now."""

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self.operations = 0.0
        """Operations of all passes of all ranks."""
        self._event = event or (_cuda_event if device.type == "cuda" else _HostEvent)
        self._open: list[Phase] = []
        self._marks: list[tuple[Phase | None, Any]] = []
        """Phase that began at each event; None: there is none until the next."""
        self._seconds: dict[str, float] = dict.fromkeys(get_args(Phase), 0.0)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far. Waits for the device."""
        if self._marks:
            self._marks[-1][1].synchronize()
        for (phase, start), (_, end) in pairwise(self._marks):
            if phase is not None:
                self._seconds[phase] += start.elapsed_time(end) / 1000
        del self._marks[:-1]
        return dict(self._seconds)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def _mark(self) -> None:
        self._marks.append((self._open[-1] if self._open else None, self._event()))


class _HostEvent:
    """The part of ``torch.cuda.Event`` that a stopwatch needs, of the host's clock."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end: _HostEvent) -> float:
        return 1000 * (end._at - self._at)

    def synchronize(self) -> None:
        """Nothing is awaited: the host has got here."""


def _cuda_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def utilisation(watch: Stopwatch, ranks: int, peak_flops: float | None) -> float | None:
    """See :attr:`StepReport.mfu`; ``peak_flops``: of one chip."""
    found = watch.seconds
    seconds = sum(found[phase] for phase in ("forward", "backward", "optimize"))
    return None if peak_flops is None or seconds <= 0 else watch.operations / (seconds * ranks * peak_flops)


def peak_memory_bytes(device: torch.device) -> int:
    """Largest memory of this process since its start: allocated on the GPU, or resident."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds around the trainer's own phases."""

    wait: float
    """Idle for lack of groups: the only phase that data can lengthen."""
    publish: float
    """Blocked by publication: copying the weights and waiting for the version before; with ``engine.colocate: sleep``
    also for the engines to give the device."""
    total: float
    """Since the line of the update before (of the first one: from the begin of the loop)."""
    save: float = 0.0
    """Blocked by the checkpoint after the update before: copying it and waiting for the one before."""

    def by_phase(self, trained: Mapping[str, float]) -> dict[str, float]:
        """All phases, the trainer's (``trained``) among them; they add up to ``total``."""
        phases = {"wait": self.wait, **trained, "publish": self.publish, "save": self.save}
        return {**phases, "other": max(0.0, self.total - sum(phases.values()))}


class LoopClock:
    """Measures the phases of the loop. ``now``: monotonic seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self._seconds: dict[LoopPhase, float] = {"wait": 0.0, "publish": 0.0, "save": 0.0}

    @contextmanager
    def phase(self, name: LoopPhase) -> Iterator[None]:
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] += self._now() - start

    def lap(self) -> StepTimes:
        """Seconds by phase since the last call; the next lap begins."""
        now, seconds = self._now(), self._seconds
        times = StepTimes(seconds["wait"], seconds["publish"], now - self._since, seconds["save"])
        self._since, self._seconds = now, dict.fromkeys(seconds, 0.0)
        return times
