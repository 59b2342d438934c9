"""What went wrong with tools: counted for ever, with the newest tracebacks kept."""

from __future__ import annotations

import logging
import traceback
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)

KEPT_MAX = 64
DETAILS_CHARACTERS_MAX = 8_000
LOGGED_MAX = 3
"""Tracebacks logged for each tool and kind of error; all are counted."""


@dataclass(frozen=True, slots=True)
class ToolFailure:
    """One failure of a tool's own code."""

    tool: str
    kind: str
    """Class name of what was raised."""
    where: str
    """``create``, ``execute`` or ``release``."""
    episode: str
    details: str
    """Traceback, bounded."""


class Failures:
    """Bounded in memory and in the log."""

    def __init__(self) -> None:
        self.newest: deque[ToolFailure] = deque(maxlen=KEPT_MAX)
        self._logged: dict[tuple[str, str], int] = {}

    def add(self, tool: str, where: str, episode: str, error: BaseException) -> ToolFailure:
        """Keep ``error`` with its traceback."""
        try:
            details = "".join(traceback.format_exception(error, limit=-20))
        except Exception as broken:  # an exception whose own __str__ fails
            details = f"{type(error).__name__} (no traceback: {type(broken).__name__})"
        if len(details) > DETAILS_CHARACTERS_MAX:
            half = DETAILS_CHARACTERS_MAX // 2
            details = f"{details[:half]}\n...\n{details[-half:]}"
        failure = ToolFailure(tool, type(error).__name__, where, episode, details)
        self.newest.append(failure)
        key = (tool, failure.kind)
        count = self._logged.get(key, 0) + 1
        if len(self._logged) < 1000 or key in self._logged:
            self._logged[key] = count
        if count <= LOGGED_MAX:
            more = "; more of these are only counted" if count == LOGGED_MAX else ""
            logger.warning("tool %s failed in %s (episode %s)%s\n%s", tool, where, episode, more, details)
        return failure
