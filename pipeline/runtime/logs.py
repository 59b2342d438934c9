"""Logs of a process on stderr: lines of text, or JSON objects for a collector of logs (``afterplay --log-format``).
A statement that warns again and again is limited (:class:`LimitedHandler`)."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import datetime
from enum import StrEnum
from typing import TextIO

LEVEL, FORMAT = "AFTERPLAY_LOG_LEVEL", "AFTERPLAY_LOG_FORMAT"
"""Environment variables, which the processes of a run inherit."""
REPEATS_MAX, REPEATS_SECONDS = 20, 60.0
_IDS = re.compile(r"\bg\d{6,18}(?:\.\d{1,9}\.\d{1,9})?\b")
"""Ids of groups and trajectories."""


class LogFormat(StrEnum):
    """Form of a line."""

    TEXT = "text"
    """Time, role, level, logger and message."""
    JSON = "json"
    """The same as an object, with the run, the time zone, and the ids of groups and trajectories in the message."""


class JsonFormatter(logging.Formatter):
    """One line for each record, whatever is in it: ``{"time": "2026-11-27T10:51:22.123+00:00", "level": "INFO", "run":
    "tiny", "role": "actor-0", "logger": "…", "message": "order g000012.3.0 failed", "ids": ["g000012.3.0"]}``."""

    def __init__(self, role: str, run: str | None) -> None:
        super().__init__()
        self._names = {"run": run, "role": role} if run else {"role": role}

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
        message = record.getMessage()
        level, logger = record.levelname, record.name
        line: dict[str, object] = {"time": time, "level": level, **self._names, "logger": logger, "message": message}
        if ids := list(dict.fromkeys(_IDS.findall(message))):
            line["ids"] = ids
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most ``REPEATS_MAX`` warnings and errors of one statement within ``REPEATS_SECONDS``, and how many were
    left out before the next one: when an environment is down, thousands of rollouts fail for the same reason."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._windows: dict[tuple[str, int], tuple[float, int]] = {}
        """Start of the present window of each statement, in seconds, and how many records it has had."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            statement = record.pathname, record.lineno
            began, seen = self._windows.get(statement, (record.created, 0))
            if abs(record.created - began) >= REPEATS_SECONDS:  # the clock may be set back
                if seen > REPEATS_MAX:
                    super().emit(_left_out(record, seen - REPEATS_MAX))
                began, seen = record.created, 0
            self._windows[statement] = began, seen + 1
            if seen >= REPEATS_MAX:
                return
        super().emit(record)


def _left_out(record: logging.LogRecord, n: int) -> logging.LogRecord:
    words = "%d more like the next line were left out"
    return logging.LogRecord(record.name, record.levelno, record.pathname, record.lineno, words, (n,), None)


def configure_logging(role: str, run: str | None = None) -> None:
    """Log on stderr from now on, as the environment says."""
    handler = LimitedHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(role, run) if os.environ.get(FORMAT) == LogFormat.JSON else text)
    level = getattr(logging, os.environ.get(LEVEL, "INFO").upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
