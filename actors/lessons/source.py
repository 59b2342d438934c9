"""From ``lessons.source`` to a constructed lesson source."""

from __future__ import annotations

from typing import cast

from actors.plugins import attribute, construct
from pipeline.config.replay import LessonsConfig
from pipeline.errors import ConfigurationError
from pipeline.lessons.source import LessonSource

WHERE = "lessons.source"
METHODS = ("search", "summarise", "close")


def make_source(config: LessonsConfig) -> LessonSource:
    """The class at ``lessons.source`` with its options. Raises :class:`ConfigurationError`."""
    source = construct(attribute(config.source, WHERE), config.source_options, WHERE, "lessons.source_options")
    missing = [name for name in METHODS if not callable(getattr(source, name, None))]
    if missing:
        raise ConfigurationError(
            f"{WHERE}: expected a class with the methods {', '.join(METHODS)}, got {config.source} without "
            f"{', '.join(missing)}"
        )
    return cast("LessonSource", source)
