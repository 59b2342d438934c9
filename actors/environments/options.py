"""How the built-in environments declare their options: typed, bounded, unknown ones refused."""

from __future__ import annotations

from pydantic import ConfigDict

STRICT_OPTIONS = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)
