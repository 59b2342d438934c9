"""What keeps and finds lessons in place of the stage's own memory: a class that ``lessons.source`` names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import anyio

from pipeline.errors import PlugInError, boundary
from pipeline.lessons.records import Lesson
from pipeline.schema import Trajectory

log = logging.getLogger("afterplay.lessons")

NAME = "lesson source"
"""In messages."""
CLOSE_SECONDS_MAX = 5.0


class LessonSource(Protocol):
    """Made with ``lessons.source_options``, once in every actor, which searches, and once in every replay stage, which
    hands over groups. Used inside an event loop; callers limit how long a call takes, and what it raises costs no more
    than that call."""

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]:
        """Lessons that fit the text of a task, best first."""
        ...

    async def summarise(self, trajectories: Sequence[Trajectory]) -> int:
        """Take the scored trajectories of a finished group; returns how many lessons came of it."""
        ...

    async def close(self) -> None:
        """Called once, at the end."""
        ...


async def close_source(source: LessonSource) -> None:
    """Close it; what it raises is logged, because the process stops anyway."""
    try:
        with anyio.move_on_after(CLOSE_SECONDS_MAX), boundary(f"{NAME} close"):
            await source.close()
    except PlugInError as error:
        log.error("%s\n%s", error, error.details)
