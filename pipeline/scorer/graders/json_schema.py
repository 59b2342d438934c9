"""``json_schema``: the reply is JSON that satisfies a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.graders.answers import given, payload_value

_FENCE = "```"


def json_schema(trajectory: Trajectory, schema: Mapping[str, Any] | None = None, after: str | None = None) -> float:
    """The reply, or the last fenced block in it, is JSON that satisfies the schema (of the options, else ``schema`` of
    the payload). References to other documents are not followed."""
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    rule = schema if schema is not None else payload_value(trajectory, "schema")
    if isinstance(rule, str):
        rule = orjson.loads(rule)
    validator = validator_for(rule, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(rule)
    except jsonschema.SchemaError as error:
        raise SchemaError(f"expected a JSON schema, got one that is not: {error.message}") from error
    try:
        value = orjson.loads(_json_text(given(trajectory, after)))
    except orjson.JSONDecodeError:
        return 0.0
    return float(validator(rule, registry=Registry()).is_valid(value))


def _json_text(text: str) -> str:
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip().isalpha() else block
