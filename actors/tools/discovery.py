"""From the names in the run file to constructed tools."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from actors.environments.threads import BlockingCalls
from actors.plugins import construct, find
from actors.tools.base import FunctionTool, Tool, Toolset
from pipeline.errors import ConfigurationError

GROUP = "afterplay.tools"
BUILT_IN = {
    "calculator": "actors.tools.calculator:Calculator",
    "python": "actors.tools.python:Python",
    "search": "actors.tools.search:Search",
    "mcp": "actors.tools.mcp:MCP",
}


def build_tool(
    name: str, options: Mapping[str, Any], where: str, threads: BlockingCalls | None = None
) -> Tool | Toolset:
    """A class that is constructed with ``options``, or a function as it is. Raises :class:`ConfigurationError`."""
    found = find(name, where, GROUP, BUILT_IN, "tool")
    if inspect.isclass(found):
        tool = construct(found, options, where)
        if not isinstance(tool, Tool | Toolset):
            raise ConfigurationError(f"{where}: expected {name} to be a Tool or a function, got {found!r}")
        return tool
    if options:
        raise ConfigurationError(f"{where}: {name} is a function and takes no options, got {dict(options)}")
    return as_tool(found, where, threads)


def as_tool(found: Any, where: str, threads: BlockingCalls | None = None) -> Tool:
    """A tool as it is, or a function as one. Raises :class:`ConfigurationError`."""
    if isinstance(found, Tool):
        return found
    if not callable(found) or not hasattr(found, "__name__"):
        raise ConfigurationError(f"{where}: expected a Tool or a function, got {repr(found)[:200]}")
    try:
        return FunctionTool(found, threads=threads)
    except (TypeError, NameError, ValueError) as error:
        raise ConfigurationError(f"{where}: {error}") from error
