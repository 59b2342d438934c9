"""What models and environments wrote, made harmless for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.show.views import dumps

_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Characters that turn the direction of what stands behind them (Unicode, "Explicit Directional Formatting"): a line
would read as something else than what it says. Text in Arabic or Hebrew needs none of them."""
_LINES = (0x2028, 0x2029)
_CONTROL = {i: f"\\x{i:02x}" for i in (*range(0x20), *range(0x7F, 0xA0)) if i not in (0x09, 0x0A)} | {
    i: f"\\u{i:04x}" for i in (*_DIRECTIONS, *_LINES)
}
_CONTROL_JSON = {i: f"\\u{i:04x}" for i in (*range(0x7F, 0xA0), *_DIRECTIONS, *_LINES)}


def safe(text: str) -> str:
    """Without the control characters that would steer a terminal or turn its lines round; tabs and line ends stay."""
    return text.translate(_CONTROL)


def json_line(value: Mapping[str, Any]) -> str:
    """JSON text that does not steer a terminal either: JSON escapes only half of the control characters."""
    return dumps(value).translate(_CONTROL_JSON)
