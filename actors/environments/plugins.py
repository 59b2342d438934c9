"""Finds plug-ins by their name in the run file, built in or from other packages, and builds the lesson source of
``lessons.source``.

A name is a built-in one, an entry point, ``module:name`` or ``path/file.py:name``. One that cannot be found or built is
a :class:`ConfigurationError` that names the key of the run file and the valid choices.

Environments are built here too: ``arithmetic`` is built in, ``babyai`` an adapter to a package, and other packages add
theirs as entry points of the group ``afterplay.environments``.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, cast

from pydantic import ValidationError

from actors.environments.base import Environment
from pipeline.config.lessons import LessonsConfig
from pipeline.config.load import sentence
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError, explained
from pipeline.lessons.store import LessonSource
from pipeline.runtime.plugins import attribute


def names_of(group: str, built_in: Mapping[str, str]) -> list[str]:
    """Every name that can be given without a colon."""
    return sorted({*built_in, *(point.name for point in entry_points(group=group))})


def find_plugin(name: str, where: str, group: str, built_in: Mapping[str, str], what: str) -> Any:
    """The class or function that ``name`` refers to. ``where`` is the key of the run file, ``what`` the kind of thing,
    both for messages.

    Raises :class:`ConfigurationError`.
    """
    if name in built_in:
        module, _, own = built_in[name].partition(":")
        with explained(f"{where}: importing {module} failed with"):
            return getattr(importlib.import_module(module), own)
    if ":" in name:
        return attribute(name, where)
    for point in entry_points(group=group):
        if point.name == name:
            with explained(f"{where}: entry point {name} ({point.value}) failed to load with"):
                return point.load()
    raise _unknown(name, where, group, built_in, what)


def _unknown(name: str, where: str, group: str, built_in: Mapping[str, str], what: str) -> ConfigurationError:
    known = names_of(group, built_in)
    close = difflib.get_close_matches(name, known, n=1)
    near = f". Did you mean {close[0]}?" if close else ""
    return ConfigurationError(
        f"{where}: there is no {what} {name!r}; there are {', '.join(known)}; or give module:Name or "
        f"path/file.py:Name{near}"
    )


def construct(cls: Callable[..., Any], options: Mapping[str, Any], where: str, options_key: str | None = None) -> Any:
    """``cls(**options)``. ``options_key`` is the key of the options, ``where.options`` unless it is given.

    Raises :class:`ConfigurationError` that names the option that is wrong."""
    options_key = options_key or f"{where}.options"
    label = getattr(cls, "__qualname__", repr(cls))
    if not callable(cls):
        raise ConfigurationError(f"{where}: expected a class, got {cls!r}")
    _check_names(cls, options, options_key, label)
    shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
    with explained(f"{where}: {label}({shown}) raised"):
        try:
            return cls(**options)
        except ValidationError as error:
            path = tuple(options_key.split("."))
            faults = [sentence(fault, (*path, *fault["loc"])) for fault in error.errors()]
            raise ConfigurationError("\n".join(faults)) from error
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from error


def _check_names(cls: Callable[..., Any], options: Mapping[str, Any], options_key: str, label: str) -> None:
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise ConfigurationError(
            f"{options_key}: unknown {', '.join(unknown)}; {label} takes {', '.join(parameters) or 'none'}"
        )


def make_source(config: LessonsConfig) -> LessonSource:
    """The class at ``lessons.source`` with its options. Raises :class:`ConfigurationError`."""
    where, methods = "lessons.source", ("search", "summarise", "close")
    source = construct(attribute(config.source, where), config.source_options, where, "lessons.source_options")
    missing = [name for name in methods if not callable(getattr(source, name, None))]
    if missing:
        raise ConfigurationError(
            f"{where}: expected a class with the methods {', '.join(methods)}, got {config.source} without "
            f"{', '.join(missing)}"
        )
    return cast("LessonSource", source)


GROUP = "afterplay.environments"

BUILT_IN = {
    "arithmetic": "actors.adapters.games:Arithmetic",
    "big_sums": "actors.adapters.big_sums:BigSums",
    "repair": "actors.adapters.repair:Repair",
    "number_guess": "actors.adapters.games:NumberGuess",
    "passcode": "actors.adapters.games:Passcode",
    "program": "actors.adapters.games:Program",
    "question": "actors.adapters.question:Question",
    "alfworld": "actors.adapters.alfworld:AlfWorld",
    "appworld": "actors.adapters.appworld:AppWorldTasks",
    "babyai": "actors.adapters.babyai:BabyAI",
    "bfcl": "actors.adapters.bfcl:BFCL",
    "gymnasium": "actors.adapters.gymnasium_text:Gymnasium",
    "openenv": "actors.adapters.openenv:OpenEnv",
    "reasoning_gym": "actors.adapters.reasoning:ReasoningGym",
    "textarena": "actors.adapters.text_arena:TextArena",
    "textworld_express": "actors.adapters.text_world:TextWorldExpress",
}


def build(section: str, config: EnvironmentConfig) -> Environment:
    """The environment of the section ``environments.<section>``. Raises :class:`ConfigurationError`."""
    where = f"environments.{section}"
    cls = find(config.name, where)
    return cast("Environment", construct(cls, config.options, where))


def require_name(name: str, where: str) -> None:
    """Raise :class:`ConfigurationError` unless an environment has this name. Nothing is imported."""
    if name not in names_of(GROUP, BUILT_IN):
        raise _unknown(name, where, GROUP, BUILT_IN, "environment")


def find(name: str, where: str = "environments") -> type[Environment]:
    """The class behind ``name``. Raises :class:`ConfigurationError`."""
    found = find_plugin(name, where, GROUP, BUILT_IN, "environment")
    if not (inspect.isclass(found) and callable(getattr(found, "start", None))):
        raise ConfigurationError(f"{where}: expected {name} to be a class with a method start(task), got {found!r}")
    return cast("type[Environment]", found)
