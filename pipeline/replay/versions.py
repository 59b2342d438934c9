"""Which policy version every update was trained from: a version is published for each update, so few numbers say it."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence


class TrainedVersions:
    """``version(update)`` is kept where it is not one more than that of the update before.

    >>> versions = TrainedVersions()
    >>> [versions.note(update, version) for update, version in ((0, 1), (1, 2), (2, 7), (3, 8))]
    [True, False, True, False]
    >>> versions.state(), versions.at(1), versions.at(3)
    ([[0, 1], [2, 7]], 2, 8)
    """

    def __init__(self, state: Iterable[Sequence[int]] | None = None) -> None:
        self._points = [(int(update), int(version)) for update, version in state or ()]

    def note(self, update: int, version: int) -> bool:
        """``update`` was trained from the weights of ``version``; what is known of later updates is forgotten, they
        will be made anew. Returns whether :meth:`state` changed."""
        before = list(self._points)
        del self._points[bisect.bisect_left(self._points, (update,)) :]
        if self.at(update) != version:
            self._points.append((update, version))
        return self._points != before

    def at(self, update: int) -> int | None:
        """The version that an update was trained from; None for one before the first that was noted. Of an update that
        was not noted it is the version it would have without a break."""
        i = bisect.bisect_right(self._points, update, key=lambda point: point[0])
        if i == 0:
            return None
        first, version = self._points[i - 1]
        return version + update - first

    def state(self) -> list[list[int]]:
        """JSON that :meth:`__init__` takes back."""
        return [list(point) for point in self._points]
