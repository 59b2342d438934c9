"""Broadcasts that an engine's worker waits for: aborted where one does not end.

A kernel of NCCL waits without end for a peer that is gone: the learner, or an engine of the same group. vLLM (0.32) has
no limit for it and no request that reaches a worker meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

STALL_SECONDS = 60.0
"""A broadcast that takes longer after the one before has lost a peer. The learner gives one up after 30 s."""
LOOK_SECONDS = 0.5


class WatchedBroadcasts:
    """In place of a communicator while weights come, and a context around that. Raises :class:`RuntimeError` at its end
    where it had to abort."""

    def __init__(
        self,
        group: Any,
        use_device: Callable[[], None],
        stall_seconds: float = STALL_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        """``group``: vLLM's, with ``broadcast`` and ``destroy``. ``use_device`` is called in the thread that watches,
        which would otherwise take memory of GPU 0."""
        self._group = group
        self._use_device = use_device
        self._stall_seconds, self._look_seconds = stall_seconds, look_seconds
        self._pending: deque[Any] = deque()
        """Events after the broadcasts that had not ended when last seen."""
        self._last: Any = None
        self._since = time.monotonic()
        self._ended = threading.Event()
        self._aborted = False
        self._thread = threading.Thread(target=self._watch, name="broadcasts", daemon=True)

    def __enter__(self) -> WatchedBroadcasts:
        self._thread.start()
        return self

    def broadcast(self, tensor: Any, src: int, stream: Any) -> None:
        """Begin one. After an abort it does nothing."""
        self._group.broadcast(tensor, src=src, stream=stream)
        self._last = stream.record_event()
        self._pending.append(self._last)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None and self._last is not None:
            self._last.synchronize()
        self._ended.set()
        self._thread.join()
        if self._aborted:
            raise RuntimeError(
                f"no weight came for {self._stall_seconds:g} s: the learner or an engine of the same group is gone"
            )

    def _watch(self) -> None:
        self._use_device()
        while not self._ended.wait(self._look_seconds):
            while self._pending and self._pending[0].query():
                self._pending.popleft()
                self._since = time.monotonic()
            if not self._pending:
                self._since = time.monotonic()
            elif time.monotonic() - self._since > self._stall_seconds:
                self._aborted = True
                self._group.destroy()
                return
