"""Fan-out of a version to all engines by NCCL: who shares a group, and who takes part in which pass over the weights.

*consumes* engines that are paused for a version; *produces* one pass for all that have come, and an end for each;
*waits for* engines that the publication waits for, and for groups that are made; *unblocked by* their arrival or
failure, or after ``hold_seconds``. Who comes later gets a pass with the others that do.

Up to ``GROUPS_MAX`` engines have a group each and fail alone. More of them share groups, in which one passes on to the
next: each group takes a copy of the weights through rank 0's link, and memory and multiprocessors of its device. An
engine that fails ends the send of its group. The others then load again at once in a group without it; where nobody
knows who failed, each alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import anyio
import torch

from learner.metrics import LearnerMetrics
from learner.weights.engine_keeper import Target
from learner.weights.nccl_transfer import Member, NcclGroup
from learner.weights.weight_pass import Description, Read, Send, WeightPass
from pipeline.errors import EngineUnavailable

log = logging.getLogger(__name__)
GROUPS_MAX = 4
"""Groups beyond which engines share them. Over a link of 50 GB/s, four copies of a 70B model in bfloat16 take 11 s."""


class Outcome(StrEnum):
    SENT = "sent"
    AGAIN = "again"
    """Another engine of its group failed: it has to load again."""
    ALONE = "alone"
    """Its group failed, and nobody knows because of whom: it has to load again, in a group of its own."""


def divide(
    engines: Iterable[str], groups: Iterable[frozenset[str]] = (), alone: Collection[str] = ()
) -> list[frozenset[str]]:
    """Groups of ``engines``: the ``groups`` that are whole among them, and new ones for the others; at most
    ``GROUPS_MAX`` besides those of engines that must be ``alone``. All are new where one would have more than twice its
    share."""
    shared = [engine for engine in engines if engine not in alone]
    parts = sorted((group for group in groups if group <= set(shared)), key=len)
    new = [engine for engine in shared if not any(engine in part for part in parts)]
    while len(parts) + bool(new) > GROUPS_MAX:
        new += sorted(parts.pop(0))
    parts += _dealt(new, GROUPS_MAX - len(parts))
    if any(len(part) > 2 * math.ceil(len(shared) / GROUPS_MAX) for part in parts):
        parts = _dealt(shared, GROUPS_MAX)
    return parts + [frozenset([engine]) for engine in alone]


def _dealt(engines: Sequence[str], n: int) -> list[frozenset[str]]:
    """At most ``n`` groups of equal size."""
    return [frozenset(engines[i::n]) for i in range(min(n, len(engines)))]


@dataclass(eq=False, slots=True)
class _Arrival:
    """One engine that is paused for a version."""

    member: Member
    target: Target
    alone: bool
    loop: asyncio.AbstractEventLoop
    ended: anyio.Event = field(default_factory=anyio.Event)
    error: Exception | None = None
    outcome: Outcome = Outcome.SENT
    given_up: bool = False
    send: Send | None = None

    def end(self, error: Exception | None = None, outcome: Outcome = Outcome.SENT) -> None:
        """In any thread."""
        self.error, self.outcome = error, outcome
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self.loop.call_soon_threadsafe(self.ended.set)


_Ready = tuple[NcclGroup, list[_Arrival]]


class FanOut:
    """Sends versions to engines. One thread forms groups and reads weights while there is something to do; each group
    has a thread that broadcasts."""

    def __init__(self, device: torch.device, hold_seconds: float, metrics: LearnerMetrics | None = None) -> None:
        """``hold_seconds``: time for which one engine may hold up the others, at each of three points: until it has
        come, until it has joined, and in the pass."""
        self._device = device
        self._hold_seconds = hold_seconds
        self._metrics = metrics
        self._changed = threading.Condition()
        self._arrived: list[_Arrival] = []
        self._ready: list[_Ready] = []
        """Groups of which all members wait for a pass."""
        self._idle: list[NcclGroup] = []
        self._pass: WeightPass | None = None
        self._serving = False

    async def send(self, member: Member, target: Target, *, alone: bool = False) -> Outcome:
        """Send ``target`` to an engine that is paused, ``alone`` in a group of its own. Raises what ended it if that
        was the engine's own failure."""
        arrival = _Arrival(member, target, alone, asyncio.get_running_loop())
        with self._changed:
            self._arrived.append(arrival)
            self._serve_soon()
        target.attendance.seen(member.url)
        try:
            await arrival.ended.wait()
        except anyio.get_cancelled_exc_class():
            with self._changed:
                arrival.given_up = True
                if arrival.send is not None:
                    arrival.send.stop(EngineUnavailable("the transfer was given up"))
            raise
        if arrival.error is not None:
            raise arrival.error
        return arrival.outcome

    def _serve_soon(self) -> None:
        self._changed.notify_all()
        if self._pass is not None and self._waiting():
            self._pass.hurry()
        if not self._serving:
            self._serving = True
            threading.Thread(target=self._serve, name="weights", daemon=True).start()

    def _serve(self) -> None:
        while (target := self._next()) is not None:
            try:
                target.attendance.wait(self._hold_seconds)
                self._until_open(self._form(target.version))
                self._send_ready(target.version)
            except Exception as error:  # no thread could be started, say
                log.exception("weights were not sent")
                with self._changed:
                    for arrival in self._waiting():
                        arrival.end(error)
                    self._arrived, self._ready = [], []

    def _waiting(self) -> list[_Arrival]:
        return [*self._arrived, *(arrival for _, arrivals in self._ready for arrival in arrivals)]

    def _next(self) -> Target | None:
        with self._changed:
            waiting = self._waiting()
            self._serving = bool(waiting)
            return waiting[0].target if waiting else None

    def _form(self, version: int) -> set[frozenset[str]]:
        """Put the engines that have come for ``version`` into groups; those that are being made."""
        with self._changed:
            arrivals = {a.member.url: a for a in self._arrived if a.target.version == version and not a.given_up}
            self._arrived = [a for a in self._arrived if a.target.version != version]
            touched = [group for group in self._idle if any(m.url in arrivals for m in group.members)]
            self._idle = [group for group in self._idle if group not in touched]
            members = {arrival.member for arrival in arrivals.values()}
            whole = {frozenset(m.url for m in g.members): g for g in touched if members.issuperset(g.members)}
            parts = divide(arrivals, whole, [url for url, arrival in arrivals.items() if arrival.alone])
            kept = [part for part in parts if part in whole]
            self._ready += [(whole[part], [arrivals[url] for url in part]) for part in kept]
            opening = {part for part in parts if part not in whole}
        for group in touched:
            if not any(group is whole[part] for part in kept):
                self._close(group)
        for part in tuple(opening):
            there = [arrivals[url] for url in sorted(part)]
            threading.Thread(target=self._open, args=(part, there, opening), name="join", daemon=True).start()
        return opening

    def _open(self, part: frozenset[str], arrivals: list[_Arrival], opening: set[frozenset[str]]) -> None:
        """Make a group. In one whose engine does not join, vLLM's constructor may return late, or never."""
        settled = False

        def end(group: NcclGroup | None, error: Exception | None) -> None:
            nonlocal settled
            with self._changed:
                if settled and group is not None:
                    self._close(group)
                if settled:
                    return
                settled = True
                opening.discard(part)
                if group is None:
                    self._end(arrivals, error, culprit)
                else:
                    self._ready.append((group, arrivals))
                self._serve_soon()

        culprit = ""

        def failed(url: str, error: Exception) -> None:
            nonlocal culprit
            culprit = url
            end(None, error)

        try:
            end(NcclGroup([arrival.member for arrival in arrivals], self._device, failed), None)
        except Exception as error:
            end(None, error)

    def _until_open(self, opening: set[frozenset[str]]) -> None:
        """Wait for groups that are made: once there is one to send to, for the others as long again, and
        ``hold_seconds``."""
        began = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: not opening or self._ready or self._arrived)
            if self._ready:
                self._changed.wait_for(lambda: not opening, time.monotonic() - began + self._hold_seconds)

    def _send_ready(self, version: int) -> None:
        with self._changed:
            open_groups = [entry for entry in self._ready if entry[1][0].target.version == version]
            self._ready = [entry for entry in self._ready if entry[1][0].target.version != version]
        ready: list[_Ready] = []
        for group, arrivals in open_groups:
            if given_up := _given_up(arrivals):
                self._close(group)
                self._end(arrivals, EngineUnavailable("the transfer was given up"), given_up)
            else:
                ready.append((group, arrivals))
        if not ready:
            return
        description, read = _source(ready[0][1][0].target)
        weights = WeightPass(description, read, len(ready), self._hold_seconds)
        for (group, arrivals), send in zip(ready, weights.sends, strict=True):
            with self._changed:
                for arrival in arrivals:
                    arrival.send = send
                    if arrival.given_up:
                        send.stop(EngineUnavailable("the transfer was given up"))
            threading.Thread(target=self._send, args=(group, arrivals, send), name="send", daemon=True).start()
        with self._changed:
            self._pass = weights
            if self._waiting():
                weights.hurry()
        weights.run(self._device)
        self._pass = None
        if self._metrics is not None:
            self._metrics.weight_sent_bytes_total.inc(sum(send.n_bytes for send in weights.sends))

    def _send(self, group: NcclGroup, arrivals: list[_Arrival], send: Send) -> None:
        try:
            group.send(send)
        except Exception as error:
            error.__traceback__ = error.__context__ = None  # their frames hold a weight
            self._end(arrivals, error, _given_up(arrivals) or group.culprit)
        else:
            with self._changed:
                self._idle.append(group)
            for arrival in arrivals:
                arrival.end()

    def _close(self, group: NcclGroup) -> None:
        with contextlib.suppress(Exception):  # its engines may be gone
            group.close()

    def _end(self, arrivals: list[_Arrival], error: Exception | None, culprit: str) -> None:
        """End of a group. ``culprit`` is empty where it is unknown who of several has failed."""
        for arrival in arrivals:
            if len(arrivals) == 1 or arrival.member.url == culprit:
                arrival.end(error)
            else:
                arrival.end(outcome=Outcome.AGAIN if culprit else Outcome.ALONE)


def _given_up(arrivals: Sequence[_Arrival]) -> str:
    return next((arrival.member.url for arrival in arrivals if arrival.given_up), "")


def _source(target: Target) -> tuple[Description, Read]:
    if target.weights is not None:
        return target.weights.description, target.weights.read
    tensors = target.tensors or {}
    return [(n, t.dtype, t.shape) for n, t in tensors.items()], lambda: (pair for pair in tensors.items())
