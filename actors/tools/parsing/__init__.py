"""Tool calls out of what the policy said: pure functions by name."""

from actors.tools.parsing.base import CallError, Parsed, ToolCall, ToolFormat
from actors.tools.parsing.registry import FORMATS, format_of_template, parser_of

__all__ = ["FORMATS", "CallError", "Parsed", "ToolCall", "ToolFormat", "format_of_template", "parser_of"]
