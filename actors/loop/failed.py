"""What is kept of an error that ended a play. Pure."""

from __future__ import annotations

import traceback

from actors.loop.checked import AGENT_LOOP
from pipeline.errors import ConfigurationError, EngineError, EpisodeLimit, PlugInError
from pipeline.schema import Failure

MESSAGE_MAX = 4_000
DETAILS_MAX = 20_000
"""Characters of what a plug-in raised, and of its traceback, that a trajectory keeps."""


def classified(error: Exception) -> Failure:
    """Which boundary an error belongs to, with a bounded message and traceback."""
    if isinstance(error, PlugInError):
        return Failure(error.boundary, error.kind, _bounded(error.message, MESSAGE_MAX), _bounded(error.details))
    kind, message = type(error).__name__, _bounded(str(error), MESSAGE_MAX)
    if isinstance(error, EngineError):
        return Failure("engine", kind, message)
    if isinstance(error, ConfigurationError):
        return Failure("actor", kind, message)
    details = "" if isinstance(error, EpisodeLimit) else "".join(traceback.format_exception(error))
    return Failure(AGENT_LOOP, kind, message, _bounded(details))


def _bounded(text: str, characters_max: int = DETAILS_MAX) -> str:
    """Its beginning and its end, where it is longer."""
    if len(text) <= characters_max:
        return text
    half = characters_max // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
