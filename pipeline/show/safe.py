"""What models and environments wrote, made harmless for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.show.views import dumps

_CONTROL = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if i not in (0x09, 0x0A)}
_CONTROL_JSON = {i: f"\\u{i:04x}" for i in range(0x7F, 0xA0)}


def safe(text: str) -> str:
    """Without the control characters that would steer a terminal; tabs and line ends stay."""
    return text.translate(_CONTROL)


def json_line(value: Mapping[str, Any]) -> str:
    """JSON text that does not steer a terminal either: JSON escapes only half of the control characters."""
    return dumps(value).translate(_CONTROL_JSON)
