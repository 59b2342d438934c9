"""Asking a process how it is. Blocking; called in a thread."""

from __future__ import annotations

import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import Any

import orjson

from pipeline.rundir import RunDirectory, read_json

PROBE_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process said. Without an answer ``well`` is False and ``state`` empty."""

    well: bool
    state: str = ""
    waiting_for: str = ""
    details: dict[str, Any] = field(default_factory=dict)


def ask(url: str) -> Answer:
    """GET a health address. Never raises for what the other side does."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=PROBE_SECONDS_MAX) as reply:
            return _read(True, reply.read(65536))
    except urllib.error.HTTPError as error:
        with error:
            return _read(False, error.read(65536))
    except (OSError, ValueError):
        return Answer(False)


def health_url(directory: RunDirectory, name: str, pid: int) -> str | None:
    """Address of a role's ``/healthz``, once process ``pid`` itself has written it."""
    record = read_json(directory.process_file(name))
    if record is None or record.get("pid") != pid:
        return None
    host = record.get("metrics_host", "127.0.0.1")
    return f"http://{'127.0.0.1' if host in ('0.0.0.0', '::', '') else host}:{record['metrics_port']}/healthz"


def _read(well: bool, body: bytes) -> Answer:
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    if not isinstance(told, dict):
        return Answer(well, "serving" if well else "")
    return Answer(
        well,
        str(told.get("state", "serving" if well else "")),
        str(told.get("waiting_for", "")),
        told["details"] if isinstance(told.get("details"), dict) else {},
    )
