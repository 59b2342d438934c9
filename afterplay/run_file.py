"""The run file of a run that is started from Python: a configuration, the plug-ins of the caller, and overrides."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from actors.environments.base import Environment
from actors.environments.plugins import require_name
from afterplay.source import PlugIn, plug_in, require_defined
from pipeline.config import RunConfig
from pipeline.config.load import ENVIRONMENT_PREFIX, dump_yaml, example, flat, loads, parse_yaml, plain
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically

Config = str | os.PathLike[str] | Mapping[str, Any] | RunConfig
"""A run file, the name of one that ships with Afterplay (``"@tiny"``), or its sections."""
_CONFIGS = "the path of a YAML file, an example that ships with Afterplay ('@tiny'), or a mapping of sections"
EnvironmentName = type[Environment] | Environment | str
_ENVIRONMENT, _REWARD = "environment", "reward"


@dataclass(frozen=True, slots=True)
class RunFile:
    """Text of a run file, checked, with the source files that it names."""

    config: RunConfig
    sections: Mapping[str, Any]
    plug_ins: Mapping[str, PlugIn]
    """By the stem of the file."""
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables for the processes of the run."""

    @property
    def directory(self) -> RunDirectory:
        return RunDirectory(self.config.run.path.absolute())

    def write(self) -> Path:
        """Write the run file and its plug-ins into the run directory; returns the run file."""
        folder = self.directory.source
        for stem, found in self.plug_ins.items():
            if found.source:
                write_bytes_atomically(folder / f"{stem}.py", found.source.encode())
        file = folder / "run.yaml"
        write_bytes_atomically(file, dump_yaml(_named(self.sections, self.plug_ins, folder)).encode())
        return file


def read_run_file(
    config: Config,
    environment: EnvironmentName | None = None,
    reward: Callable[..., Any] | str | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> RunFile:
    """Read ``config`` and put the caller's environment, reward and overrides over it.

    Raises :class:`ConfigurationError`: all that is wrong with the result.
    """
    sections, name = _sections(config)
    plug_ins: dict[str, PlugIn] = {}
    if environment is not None:
        cls, options = _class_and_options(environment)
        if isinstance(cls, str) and ":" not in cls:
            require_name(cls, _ENVIRONMENT)
        found = _plug(cls, _ENVIRONMENT)
        plug_ins[_ENVIRONMENT] = found
        section = _snake(found.name)
        sections["environments"] = {section: _section(_section(sections, "environments"), section)}
        if options:
            keys = ["environments", section, "options"]
            _put(sections, keys, _copied(options, ".".join(keys)))
    if reward is not None:
        plug_ins[_REWARD] = _plug(reward, _REWARD)
        sections["scorer"] = {"environment_weight": 0.0, **_section(sections, "scorer")}
    for key, value in (overrides or {}).items():
        dotted = key.replace("__", ".")
        _put(sections, dotted.split("."), _copied(value, dotted))
    variables = _variables(overrides or {})
    try:
        checked = loads(dump_yaml(_named(sections, plug_ins, Path())), name, environment=variables)
    except ConfigurationError as error:  # the lines are those of a text that nobody has seen
        raise ConfigurationError(re.sub(rf"^{re.escape(name)}, line \d+", name, str(error), flags=re.M)) from None
    return RunFile(checked, sections, plug_ins, variables)


def assignments(overrides: Mapping[str, Any]) -> list[str]:
    """The same overrides as arguments of ``--set``, whose values are YAML, as JSON is."""
    return [f"{key}={json.dumps(plain(_copied(value, key)))}" for key, value in _flat(overrides).items()]


def _sections(config: Config) -> tuple[dict[str, Any], str]:
    """The sections, and the name that messages give them."""
    if isinstance(config, RunConfig):
        return config.model_dump(), "afterplay.train"
    if isinstance(config, Mapping):
        return _copied(config), "afterplay.train"
    if not isinstance(config, str | os.PathLike):
        raise ConfigurationError(f"expected {_CONFIGS}, got {config!r:.200}")
    name = os.fspath(config)
    if name.startswith("@"):
        text = example(name[1:])
    else:
        try:
            text = Path(name).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigurationError(f"expected a run file at {name}, got: {reason}. Give {_CONFIGS}") from error
    sections = parse_yaml(text, name) or {}
    if not isinstance(sections, dict):
        raise ConfigurationError(f"{name}: expected sections like 'run:' and 'engine:', got {type(sections).__name__}")
    return sections, name


def _class_and_options(environment: Any) -> tuple[Any, dict[str, Any]]:
    """The class of an instance, and the values of its fields as options. Raises :class:`ConfigurationError` for what is
    no environment, and where other processes could not make the same instance."""
    if isinstance(environment, str):
        return environment, {}
    if not isinstance(environment, Environment):
        if not isinstance(environment, type) or not callable(getattr(environment, "start", None)):
            raise ConfigurationError(
                "environment: expected a class with a method start(task), or a name of the run file such as "
                f"'bank.py:Bank', got {environment!r:.200}"
            )
        if missing := getattr(environment, "__abstractmethods__", None):
            raise ConfigurationError(
                f"environment: expected a class that defines {', '.join(sorted(missing))}, got "
                f"{environment.__name__}, which does not"
            )
        return environment, {}
    cls = type(environment)
    if is_dataclass(environment):
        return cls, {field.name: getattr(environment, field.name) for field in fields(environment) if field.init}
    if vars(environment):
        raise ConfigurationError(
            f"environment: expected a class, got an instance of {cls.__name__}, which other processes cannot make "
            f"again: pass {cls.__name__} itself, with what it takes as environments={{{_snake(cls.__name__)!r}: "
            "{'options': {...}}}, or make it a dataclass"
        )
    return cls, {}


def _plug(thing: Any, what: str) -> PlugIn:
    """A name of the run file as it is; a relative path stays relative to the working folder."""
    if not isinstance(thing, str):
        return plug_in(thing, what)
    module, colon, name = thing.rpartition(":")
    if not colon:
        return PlugIn(thing)
    require_defined(module, name, what)
    return PlugIn(name, module)


def _named(sections: Mapping[str, Any], plug_ins: Mapping[str, PlugIn], folder: Path) -> dict[str, Any]:
    """The sections with the plug-ins where they are named; their source is in ``folder``."""
    named: dict[str, Any] = _copied(sections)
    if found := plug_ins.get(_ENVIRONMENT):
        named["environments"] = _section(named, "environments")
        own = named["environments"][_snake(found.name)] = _section(named["environments"], _snake(found.name))
        own["name"] = _path(found, folder, _ENVIRONMENT)
    if found := plug_ins.get(_REWARD):
        entry = {"path": _path(found, folder, _REWARD), "name": found.name}
        named["scorer"] = _section(named, "scorer")
        functions = named["scorer"].get("functions") or []
        if not isinstance(functions, list):
            raise ConfigurationError(f"expected scorer.functions to be a list, got {functions!r}")
        named["scorer"]["functions"] = [*functions, entry]
    return named


def _path(found: PlugIn, folder: Path, stem: str) -> str:
    return found.path(folder / f"{stem}.py") if found.module or found.source else found.name


def _snake(name: str) -> str:
    """``BankAccount`` becomes ``bank_account``."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _put(at: dict[str, Any], keys: list[str], value: Any) -> None:
    """Set one value as YAML has it; a mapping is merged into the section that it names."""
    *sections, last = keys
    for key in sections:
        at[key] = dict(at[key]) if isinstance(at.get(key), dict) else {}  # others may be aliases of it
        at = at[key]
    if isinstance(value, Mapping) and isinstance(at.get(last), dict):
        at[last] = dict(at[last])
        for key, inner in value.items():
            _put(at[last], [key], inner)
    else:
        at[last] = value


def _flat(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Each value by its dotted key."""
    return flat({key.replace("__", "."): value for key, value in overrides.items()})


def _variables(overrides: Mapping[str, Any]) -> dict[str, str]:
    """Environment variables without those that set what ``overrides`` set: an argument goes before a variable."""
    given = [f"{key.lower()}." for key in _flat(overrides)]

    def is_free(variable: str) -> bool:
        key = variable.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".") + "."
        return not any(key.startswith(own) or own.startswith(key) for own in given)

    return {
        name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX) or is_free(name)
    }


def _section(sections: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of a section, empty where there is none."""
    value = sections.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigurationError(f"expected a section {key} with keys and values, got {value!r}")
    return dict(value)


def _copied(value: Any, key: str = "") -> Any:
    """A copy as YAML has it: numbers and arrays of NumPy and PyTorch as those of Python. ``key`` names it in the
    :class:`ConfigurationError` for a value that YAML does not have."""
    if isinstance(value, Mapping):
        if other := [name for name in value if not isinstance(name, str)]:
            raise ConfigurationError(f"{key or 'sections'}: expected keys that are text, got {other[0]!r:.200}")
        return {name: _copied(inner, f"{key}.{name}" if key else name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(inner, key) for inner in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        return value.value
    if isinstance(value, date):
        return str(value)  # text, as in a run file
    if value is None or isinstance(value, str | int | float | PurePath):
        return value
    raise ConfigurationError(
        f"{key}: expected a value that YAML has (a number, text, list or mapping, or the name of a function as "
        f"'file.py:name'), got {value!r:.200}"
    )
