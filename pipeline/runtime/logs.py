"""Logs of a process on stderr: lines of text, or JSON objects for a collector of logs (``afterplay --log-format``)."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import datetime
from enum import StrEnum

LEVEL, FORMAT = "AFTERPLAY_LOG_LEVEL", "AFTERPLAY_LOG_FORMAT"
"""Environment variables, which the processes of a run inherit."""
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


def configure_logging(role: str, run: str | None = None) -> None:
    """Log on stderr from now on, as the environment says."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(role, run) if os.environ.get(FORMAT) == LogFormat.JSON else text)
    level = getattr(logging, os.environ.get(LEVEL, "INFO").upper(), logging.INFO)
    logging.basicConfig(level=level, handlers=[handler], force=True)
