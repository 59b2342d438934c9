"""From a run file, the environment and ``--set`` to a :class:`RunConfig`; errors that a person can act on.

Later wins: the file, then ``AFTERPLAY__SECTION__KEY=value``, then ``--set section.key=value``. Values are read as YAML.
"""

from __future__ import annotations

import difflib
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.config import yamls
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigurationError

ENVIRONMENT_PREFIX = "AFTERPLAY__"
Path_ = tuple[str | int, ...]


@dataclass(slots=True)
class _Sources:
    """Which file, variable or option each value came from."""

    file: str
    lines: yamls.Lines = field(default_factory=dict)
    overrides: dict[Path_, str] = field(default_factory=dict)

    def name(self, path: Path_) -> str:
        """Where to look for the value at ``path``."""
        for length in range(len(path), 0, -1):
            part = path[:length]
            if part in self.overrides:
                return self.overrides[part]
            if part in self.lines:
                return f"{self.file}, line {self.lines[part]}"
        return self.file


def load(file: Path | str, overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> RunConfig:
    """The configuration of a run.

    ``overrides`` are the arguments of ``--set``; ``environment`` is ``os.environ`` where it is None.
    Raises :class:`ConfigurationError` that lists every problem with its place, what was expected and what came.
    """
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigurationError(
            f"expected a run file at {path}, got: {reason}. Give the path of a YAML file, for example configs/tiny.yaml"
        ) from error
    return loads(text, str(path), overrides, os.environ if environment is None else environment)


def loads(
    text: str, name: str = "run file", overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> RunConfig:
    """:func:`load` for a text in memory; ``name`` stands for the file in messages."""
    data = yamls.parse(text, name)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigurationError(f"{name}: expected sections like 'run:' and 'engine:', got a {type(data).__name__}")
    sources = _Sources(name, yamls.lines(text))
    for key, value in sorted((environment or {}).items()):
        if key.startswith(ENVIRONMENT_PREFIX):
            parts = key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            place = f"environment variable {key}"
            _assign(data, parts, yamls.parse(value, place), place, sources)
    for override in overrides:
        dotted, equals, value = override.partition("=")
        place = f"--set {override}"
        if not equals or not dotted.strip():
            raise ConfigurationError(
                f"{place}: expected section.key=value, for example --set learner.learning_rate=1e-5"
            )
        _assign(data, dotted.strip().split("."), yamls.parse(value, place), place, sources)
    return _validate(data, sources)


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML that :func:`loads` reads as an equal one."""
    return yamls.dump(config.model_dump(mode="python"))


def _assign(data: dict[str, Any], parts: list[str], value: Any, place: str, sources: _Sources) -> None:
    """Set one value, making the sections on the way."""
    if not all(parts):
        raise ConfigurationError(f"{place}: expected names between the separators, got {'.'.join(parts)!r}")
    at: Any = data
    path: Path_ = ()
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        key: str | int = part
        if isinstance(at, list):
            key = _position(at, part, place, path)
        elif isinstance(at, dict):
            key = _existing(at, part)
        else:
            raise ConfigurationError(f"{place}: expected {_dotted(path)} to be a section, got the value {at!r}")
        path = (*path, key)
        if following is None:
            at[key] = value
        elif (at.get(key) if isinstance(at, dict) else at[typing.cast(int, key)]) is None:
            at[key] = {}
        if following is not None:
            at = at[key]
    sources.overrides[path] = place


def _existing(at: dict[str, Any], part: str) -> str:
    """The key as the file spells it: environment variables have lost their case."""
    return next((key for key in at if key == part), None) or next((k for k in at if k.lower() == part), part)


def _position(at: list[Any], part: str, place: str, path: Path_) -> int:
    if part.isdigit() and int(part) < len(at):
        return int(part)
    raise ConfigurationError(f"{place}: expected a position from 0 to {len(at) - 1} in {_dotted(path)}, got {part!r}")


def _validate(data: dict[str, Any], sources: _Sources) -> RunConfig:
    data = {key: {} if value is None else value for key, value in data.items()}
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = [_describe(problem, sources) for problem in error.errors(include_url=False)]
    raise ConfigurationError("\n".join(dict.fromkeys(problems)))


def _describe(problem: Any, sources: _Sources) -> str:
    """One line: place, key, what was expected, what came, what to do."""
    path: Path_ = tuple(problem["loc"])
    key, place, kind = _dotted(path), sources.name(path), problem["type"]
    if kind == "extra_forbidden":
        model = model_at(RunConfig, path[:-1])
        known = list(model.model_fields) if model else []
        return f"{place}: unknown key {key}{_suggestion(str(path[-1]), known, path[:-1])}"
    came = "" if isinstance(problem["input"], dict | BaseModel) else f", got {_short(problem['input'])}"
    if kind == "value_error":
        return f"{place}: {key + ': ' if key else ''}{problem['ctx']['error']}"
    if kind == "literal_error":
        return f"{place}: {key}: expected one of {problem['ctx']['expected']}{came}"
    if kind == "model_type":
        return f"{place}: {key}: expected a section (keys and values){came}"
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return f"{place}: {key}: expected {message[0].lower() + message[1:]}{came}"


def _suggestion(wrong: str, known: Sequence[str], section: Path_) -> str:
    close = difflib.get_close_matches(wrong.lower(), known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {_dotted((*section, close[0]))}?"
    elsewhere = next((found for found in _places(wrong) if found), None)
    if elsewhere:
        return f"; did you mean {elsewhere}?"
    return f"; {_dotted(section) or 'the file'} has {', '.join(known)}" if known else ""


def _places(name: str) -> list[str]:
    """Sections that do have a key of this name."""
    sections = ((n, model_at(RunConfig, (n,))) for n in RunConfig.model_fields)
    return [f"{n}.{name}" for n, model in sections if model is not None and name in model.model_fields]


def model_at(model: type[BaseModel], path: Path_) -> type[BaseModel] | None:
    """The section that the keys of ``path`` lead to, or None where they lead to a value."""
    at: Any = model
    for key in path:
        if isinstance(at, type) and issubclass(at, BaseModel):
            found = at.model_fields.get(str(key))
            at = found.annotation if found else None
        else:
            arguments = typing.get_args(at)
            at = arguments[-1] if typing.get_origin(at) is dict else arguments[0] if arguments else None
        if typing.get_origin(at) in (UnionType, typing.Union):
            at = next((a for a in typing.get_args(at) if a is not type(None)), None)
    return at if isinstance(at, type) and issubclass(at, BaseModel) else None


def _dotted(path: Path_) -> str:
    return ".".join(map(str, path))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


load_config = load
"""The same under the name that reads well where ``load`` alone would not."""
