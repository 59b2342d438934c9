"""Arguments against a tool's JSON schema, and the schema as chat templates take it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema
import referencing

from actors.tools.base import NAME_PATTERN, Tool
from pipeline.errors import ConfigurationError

Check = Callable[[Mapping[str, Any]], str | None]
"""None where the arguments satisfy the schema, else what the policy is told."""
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
    """What checks arguments against ``schema["function"]["parameters"]``. References to other documents are not
    followed. Raises :class:`ConfigurationError` for a schema that is none."""
    function = schema["function"]
    try:
        jsonschema.Draft202012Validator.check_schema(function["parameters"])
    except jsonschema.SchemaError as error:
        raise ConfigurationError(
            f"{where}: the parameters of {function['name']} are no JSON schema: {error.message}"
        ) from error
    validator = jsonschema.Draft202012Validator(function["parameters"], registry=referencing.Registry())

    def check(arguments: Mapping[str, Any]) -> str | None:
        try:
            errors = itertools.islice(validator.iter_errors(dict(arguments)), FAULTS_SHOWN_MAX)
            faults = [_words(error) for error in errors]
        except Exception as error:
            return f"its arguments could not be checked: {type(error).__name__}"
        return "; ".join(faults) or None

    return check


def _words(error: jsonschema.ValidationError) -> str:
    place = ".".join(str(part) for part in error.absolute_path)
    text = error.message if len(error.message) <= 200 else error.message[:200] + "..."
    return f"{place}: {text}" if place else text
