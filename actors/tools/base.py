"""The interface between a tool and the agent loop.

A :class:`Tool` is built once per actor (a tool of the run file) or once per episode (a tool that an episode brings).
``create`` and ``release`` frame one episode; state of that episode belongs under its ``episode_key``. All three
have a time limit, and calls of one turn may run at the same time.

A complete tool, in one file::

    from actors.tools import Tool, ToolError, ToolResult

    class Capital(Tool):
        name = "capital"
        description = "The capital of a country."
        parameters = {
            "type": "object",
            "properties": {"country": {"type": "string"}},
            "required": ["country"],
        }

        async def execute(self, episode_key, arguments):
            try:
                return ToolResult(CAPITALS[arguments["country"]])
            except KeyError:
                raise ToolError("that country is not known") from None

A plain function with type hints and a docstring is a tool too: :class:`FunctionTool`. Arguments are checked against a
tool's JSON schema, which chat templates are given too. Tools of the run file are constructed from their names.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
import types
import typing
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jsonschema

from actors.environments.plugins import construct, find_plugin
from actors.tools.parsing.argument_types import validator_of
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugin_limits import BlockingCalls
from pipeline.schema import Task

NAME_PATTERN = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
"""Valid tool names: the letters that every chat format can carry."""


class ToolError(Exception):
    """A message to the policy: the call was wrong or cannot be done. It does not count as a failure of the tool."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """Result of one call."""

    text: str
    """The policy's view of the result. The agent loop cuts it to ``max_tool_response_length``."""
    reward: float = 0.0
    """Added to the reward of the turn that made the call."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Numbers for metrics, added up over the calls of a turn; they are not rewards."""


class Tool(ABC):
    """Something that the policy can call by name.

    Raise :class:`ToolError` for what the policy should know. Anything else that is raised is a failure of the tool: the
    policy reads that the tool failed, and it is counted under the tool's name."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: ``{"type": "object", "properties": {...}, "required": [...]}``."""

    async def create(self, episode_key: str, task: Task) -> None:  # noqa: B027 - optional
        """An episode begins. ``release`` is called exactly once for each ``create`` that was begun."""

    @abstractmethod
    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        """One call. ``arguments`` satisfy ``parameters``."""

    async def release(self, episode_key: str) -> None:  # noqa: B027 - optional
        """The episode ended, however it ended."""

    async def close(self) -> None:  # noqa: B027 - optional
        """The actor stops."""


class FunctionTool(Tool):
    """A function as a tool: name, docstring and type hints become its schema.

    >>> def add(a: int, b: int) -> int:
    ...     '''Add two integers.'''
    ...     return a + b
    >>> tool = FunctionTool(add)
    >>> tool.name, tool.description, tool.parameters["properties"]["a"]
    ('add', 'Add two integers.', {'type': 'integer'})

    The function may be ``async def`` and may return a :class:`ToolResult`; anything else is turned into text. A plain
    ``def`` runs on the event loop and must return within a millisecond, unless ``threads`` are given to run it in.
    Raises :class:`TypeError` for a signature with ``*args``, positional-only parameters, or hints that have no JSON
    schema.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        threads: BlockingCalls | None = None,
    ) -> None:
        self.name = name or function.__name__
        self.description = inspect.cleandoc(description or function.__doc__ or "")
        self.parameters = schema_of(function)
        self._function = function
        self._threads = threads if not inspect.iscoroutinefunction(function) else None

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        known = self.parameters["properties"]
        if unknown := sorted(arguments.keys() - known.keys()):
            raise ToolError(f"{self.name} has no argument {unknown[0][:64]!r}; it has {', '.join(known) or 'none'}")
        call = functools.partial(self._function, **{name: _whole(v, known[name]) for name, v in arguments.items()})
        value = call() if self._threads is None else await self._threads.run(call)
        if inspect.isawaitable(value):
            value = await value
        return value if isinstance(value, ToolResult) else ToolResult(str(value))


def _whole(value: Any, schema: Mapping[str, Any]) -> Any:
    """2.0 as 2 where the hint is ``int``: to JSON schema both are integers."""
    if isinstance(value, list):
        return [_whole(item, schema.get("items", {})) for item in value]
    kinds = {part.get("type") for part in schema.get("anyOf", [schema])}
    return int(value) if isinstance(value, float) and "integer" in kinds and "number" not in kinds else value


_PLAIN: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


class Toolset(ABC):
    """Several tools that come together and are listed only when it is connected, such as those of an MCP server."""

    @abstractmethod
    async def tools(self) -> Sequence[Tool]:
        """The tools, the same at every call. Waits until they are listed; the caller has a limit."""

    async def serve(self) -> None:  # noqa: B027 - optional
        """Runs for as long as the actor lives."""

    async def close(self) -> None:  # noqa: B027 - optional
        """The actor stops."""


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """JSON schema of a function's parameters, from its type hints and defaults. A method is read once for all its
    objects."""
    key = getattr(function, "__func__", None)
    if key is None:
        return _schema_of(function)
    if key not in _SCHEMAS:
        _SCHEMAS[key] = _schema_of(function)
    return _SCHEMAS[key]


_SCHEMAS: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def _schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"{function.__name__}: expected parameters that can be given by name, got {parameter} "
                f"({parameter.kind.description})"
            )
        properties[parameter.name] = _schema_of_hint(hints.get(parameter.name, Any), function.__name__)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return {"type": "object", "properties": properties, "required": required}


def _schema_of_hint(hint: Any, where: str) -> dict[str, Any]:
    if hint is Any:
        return {}
    if hint in _PLAIN:
        return {"type": _PLAIN[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema_of_hint(part, where) for part in inner]}
    if hint in (list, tuple) or origin in (list, tuple):
        parts = [part for part in inner if part is not Ellipsis]
        return {"type": "array", **({"items": _schema_of_hint(parts[0], where)} if len(parts) == 1 else {})}
    if hint is dict or origin is dict:
        return {"type": "object"}
    raise TypeError(f"{where}: no JSON schema is known for the type hint {hint!r}; write a Tool with its own schema")


Check = Callable[[Mapping[str, Any]], str | None]
"""Returns None where the arguments satisfy the schema, else a message to the policy."""
FAULTS_SHOWN_MAX = 3


def schema_of_tool(tool: Any, where: str) -> dict[str, Any]:
    """``{"type": "function", "function": {...}}``, a copy that the tool cannot change any more.

    Raises :class:`ConfigurationError` for something that is no tool."""
    name, description = getattr(tool, "name", None), getattr(tool, "description", "")
    if not isinstance(tool, Tool):
        raise ConfigurationError(f"{where}: expected a Tool, got {type(tool).__qualname__}")
    if not isinstance(name, str) or NAME_PATTERN.fullmatch(name) is None:
        raise ConfigurationError(f"{where}: expected a tool's name of letters, digits, _, . and -, got {name!r}")
    if not isinstance(description, str):
        raise ConfigurationError(f"{where}: expected the description of {name} to be text, got {description!r}")
    parameters = getattr(tool, "parameters", None)
    if not isinstance(parameters, Mapping):
        raise ConfigurationError(f"{where}: expected the parameters of {name} to be a JSON schema, got {parameters!r}")
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": copy.deepcopy(dict(parameters))},
    }


def check_of(schema: Mapping[str, Any], where: str) -> Check:
    """A check of arguments against ``schema["function"]["parameters"]``. References to other documents are not
    followed. Raises :class:`ConfigurationError` for a schema that is none."""
    function = schema["function"]
    try:
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
    except jsonschema.SchemaError as error:
        raise ConfigurationError(
            f"{where}: the parameters of {function['name']} are no JSON schema: {error.message}"
        ) from error
    validator = validator_of(function["parameters"])

    def check(arguments: Mapping[str, Any]) -> str | None:
        try:
            errors = itertools.islice(validator.iter_errors(dict(arguments)), FAULTS_SHOWN_MAX)
            faults = [_words(error) for error in errors]
        except Exception as error:
            return f"its arguments could not be checked: {type(error).__name__}"
        return "; ".join(faults) or None

    return check


def _words(error: jsonschema.ValidationError) -> str:
    path = ".".join(str(part) for part in error.absolute_path)
    text = error.message if len(error.message) <= 200 else error.message[:200] + "..."
    return f"{path}: {text}" if path else text


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
    found = find_plugin(name, where, GROUP, BUILT_IN, "tool")
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
