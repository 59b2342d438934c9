"""One pass over the weights of a version, which feeds all groups of engines at once.

*consumes* weights, each made once (with several ranks by gathering its shards); *produces* the same weights for every
send; *waits for* the slowest send, so that it is at most ``AHEAD`` weights behind; *unblocked by* a broadcast that has
ended, or the end of a send.

So beside the trained ones there are at most three whole weights, however many engines: one that is made, one that is
sent, and the one sent before, which vLLM's loop holds until it gets another. A send that holds the others up for too
long (:func:`patience`) is given up, and the pass continues without it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import EngineUnavailable

AHEAD = 2
"""Whole weights that are made and not sent: one is sent, one is made."""
STALL_SECONDS = 30.0
"""Engines of which none takes a weight within this time have stopped. They may wait for the ranks."""
POLL_SECONDS = 0.0005

Description = Sequence[tuple[str, torch.dtype, Sequence[int]]]
"""Name, type and shape of each tensor."""
Read = Callable[[], Iterator[tuple[str, Tensor]]]
"""Begins a pass over weights in the order of their description."""


def patience(hold_seconds: float, elapsed: float, held: float) -> float:
    """Seconds for which a send may hold up the others further, ``elapsed`` after the pass began, if it has held them
    for ``held`` of that. It thus lengthens a pass of ``t`` by at most ``t + hold_seconds``."""
    return hold_seconds + elapsed - 2 * held


class Send:
    """One version on its way to one group: hand-over between the pass and the thread that broadcasts."""

    def __init__(self, description: Description, changed: threading.Condition) -> None:
        self.description = description
        self.error: Exception | None = None
        self.n_bytes = 0
        """Bytes of the weights that it was given."""
        self.held_seconds = 0.0
        """Time for which it has held up others."""
        self._changed = changed
        self.n_unsent = 0
        """Weights that it was given and has not sent."""
        self._given: deque[tuple[str, Tensor, Any]] = deque()
        self._complete = False

    @property
    def alive(self) -> bool:
        return self.error is None

    def give(self, name: str, tensor: Tensor, ready: Any) -> None:
        """The next weight, with the event after which it is whole."""
        with self._changed:
            if self.alive:
                self._given.append((name, tensor, ready))
                self.n_unsent += 1
                self.n_bytes += tensor.nbytes
                self._changed.notify_all()

    def complete(self) -> None:
        """All weights are given."""
        with self._changed:
            self._complete = True
            self._changed.notify_all()

    def stop(self, error: Exception) -> None:
        """End it in any thread; the first error stays."""
        with self._changed:
            self.error = self.error or error
            self._given.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended it."""
        if self.error is not None:
            raise self.error

    def pairs(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Weights on ``device``, each valid until the next is asked for. Raises what ended the send."""
        finished = False
        try:
            while (got := self._take()) is not None:
                if got[2] is not None:
                    got[2].wait()
                yield got[0], got[1]
                self._until_done(device)
                got = None
                with self._changed:
                    self.n_unsent -= 1
                    self._changed.notify_all()
            finished = True
        finally:
            got = None  # else the traceback of an error keeps a weight
            if not finished:
                self.stop(EngineUnavailable("the transfer was not finished"))

    def _take(self) -> tuple[str, Tensor, Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._given or self._complete or self.error)
            self.check()
            return self._given.popleft() if self._given else None

    def _until_done(self, device: torch.device) -> None:
        """Wait for the broadcast of the last weight, or for the end of the send."""
        work, idle = work_of(device), threading.Event()
        while work is not None and not work.query():
            self.check()
            idle.wait(POLL_SECONDS)
        self.check()


class WeightPass:
    """One pass and its sends. :meth:`run` blocks, each send is taken by a thread of its own."""

    def __init__(self, description: Description, read: Read, n_sends: int, hold_seconds: float) -> None:
        """``hold_seconds``: see :func:`patience`."""
        self._changed = threading.Condition()
        self._read = read
        self._hold_seconds = hold_seconds
        self._began = time.monotonic()
        self._stall_seconds = STALL_SECONDS
        self.sends = [Send(description, self._changed) for _ in range(n_sends)]

    def hurry(self) -> None:
        """Give those that take no weight no more than ``hold_seconds``: other engines wait for the end of the pass."""
        with self._changed:
            self._stall_seconds = min(self._stall_seconds, self._hold_seconds)
            self._changed.notify_all()

    def run(self, device: torch.device) -> None:
        """Give all weights to all sends, until they are sent. Returns early where no send is left; an error of the
        weights ends all sends."""
        self._began = time.monotonic()
        try:
            with contextlib.closing(self._read()) as weights:  # type: ignore[type-var]
                while self._until_fewer(AHEAD) and (found := next(weights, None)) is not None:
                    name, tensor = found[0], found[1].to(device, non_blocking=True)
                    del found
                    ready = work_of(device)
                    for send in self.sends:
                        send.give(name, tensor, ready)
                    del tensor
            for send in self.sends:
                send.complete()
            self._until_fewer(1)
        except Exception as error:
            for send in self.sends:
                send.stop(error)

    def _until_fewer(self, n: int) -> bool:
        """Wait until every send has fewer than ``n`` weights to send, but for those given up meanwhile; False where
        none is left."""
        began = time.monotonic()
        with self._changed:
            while full := [send for send in self.sends if send.alive and send.n_unsent >= n]:
                now, others = time.monotonic(), any(send.alive and send not in full for send in self.sends)
                left = {
                    send: self._patience(send, now) if others else began + self._stall_seconds - now for send in full
                }
                for send in full:
                    if left[send] <= 0:
                        held = f"it held up others for {send.held_seconds:.1f} s"
                        stopped = f"the engine has taken no weight for {self._stall_seconds:g} s"
                        send.stop(EngineUnavailable(held if others else stopped))
                if min(left.values()) > 0:
                    self._changed.wait(min(left.values()))
                    for send in full if others else ():
                        send.held_seconds += time.monotonic() - now
            return any(send.alive for send in self.sends)

    def _patience(self, send: Send, now: float) -> float:
        return patience(self._hold_seconds, now - self._began, send.held_seconds)


def work_of(device: torch.device) -> Any:
    """Event after all work of this thread's stream; None where work is done at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
