"""Time limits that stand still while the engines sleep (``engine.colocate: sleep``).

A sleeping engine is not slow and not dead: the learner has the device. Requests, episodes and waits that go on
meanwhile have the time that they had left when it fell asleep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Patience:
    """Shared by everything of an actor that waits for an engine. Use inside one event loop."""

    def __init__(self) -> None:
        self._asleep_since: float | None = None
        self._scopes: dict[anyio.CancelScope, float] = {}
        """Seconds left, kept while asleep."""

    @property
    def asleep(self) -> bool:
        return self._asleep_since is not None

    @contextmanager
    def limit(self, seconds: float) -> Iterator[anyio.CancelScope]:
        """Like ``anyio.move_on_after``, in seconds awake. ``cancelled_caught`` of the scope says whether it was too
        long."""
        deadline = float("inf") if self.asleep else anyio.current_time() + seconds
        with anyio.CancelScope(deadline=deadline) as scope:
            self._scopes[scope] = seconds
            try:
                yield scope
            finally:
                del self._scopes[scope]

    def fell_asleep(self) -> None:
        """All limits stand still. Harmless when they do."""
        if self.asleep:
            return
        now = self._asleep_since = anyio.current_time()
        for scope in self._scopes:
            self._scopes[scope] = max(0.0, scope.deadline - now)
            scope.deadline = float("inf")

    def woke(self) -> None:
        """All limits go on. Harmless when they do."""
        if not self.asleep:
            return
        self._asleep_since = None
        now = anyio.current_time()
        for scope, left in self._scopes.items():
            scope.deadline = now + left
