"""From the name in the run file to a constructed environment.

``arithmetic`` (built in), ``babyai`` (an adapter to a package), an entry point of the group
``afterplay.environments``, ``module:Class``, or ``path/file.py:Class``. Whatever cannot be found or built is a
:class:`ConfigurationError` that names the section and what would have worked."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from actors.environments.base import Environment
from actors.environments.packages.catalogue import ADAPTERS
from pipeline.config.play import EnvironmentConfig
from pipeline.errors import ConfigurationError

GROUP = "afterplay.environments"
BUILT_IN = {
    "arithmetic": "actors.environments.arithmetic:Arithmetic",
    "big_sums": "actors.environments.big_sums:BigSums",
    "number_guess": "actors.environments.number_guess:NumberGuess",
    "passcode": "actors.environments.passcode:Passcode",
    "program": "actors.environments.program:Program",
    "question": "actors.environments.question:Question",
}


def build(section: str, config: EnvironmentConfig) -> Environment:
    """The environment of the section ``environments.<section>``. Raises :class:`ConfigurationError`."""
    where = f"environments.{section}"
    cls = find(config.name, where)
    _check_option_names(cls, config.options, where)
    try:
        environment = cls(**config.options)
    except ValidationError as error:
        raise ConfigurationError(f"{where}.options: {'; '.join(map(_fault, error.errors()))}") from error
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    except Exception as error:
        raise ConfigurationError(
            f"{where}: {cls.__qualname__}({_shown(config.options)}) raised {type(error).__name__}: {error}"
        ) from error
    if not callable(getattr(environment, "start", None)):
        raise ConfigurationError(
            f"{where}: expected {config.name} to have a method start(task), {cls.__qualname__} has none"
        )
    return environment


def names() -> list[str]:
    """Every name that can be given without a colon."""
    return sorted({*BUILT_IN, *ADAPTERS, *(point.name for point in entry_points(group=GROUP))})


def find(name: str, where: str = "environments") -> type[Environment]:
    """The class behind ``name``. Raises :class:`ConfigurationError`."""
    path = BUILT_IN.get(name) or (ADAPTERS[name].path if name in ADAPTERS else name)
    if ":" in path:
        return _checked(attribute(path, where), path, where)
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                return _checked(point.load(), name, where)
            except ConfigurationError:
                raise
            except Exception as error:
                raise ConfigurationError(
                    f"{where}: entry point {name} ({point.value}) failed to load: {error!r}"
                ) from error
    raise ConfigurationError(
        f"{where}: no environment is called {name!r}; there are {', '.join(names())}; "
        "or give module:Class or path/file.py:Class"
    )


def attribute(path: str, where: str) -> Any:
    """What ``module:name`` or ``path/file.py:name`` stands for. Raises :class:`ConfigurationError` that begins with
    ``where``."""
    module_name, _, name = path.rpartition(":")
    try:
        module = (
            _file_module(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
        )
    except Exception as error:
        raise ConfigurationError(
            f"{where}: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        there = sorted(n for n, v in vars(module).items() if callable(v) and v.__module__ == module.__name__)
        raise ConfigurationError(f"{where}: {module_name} has no {name!r}; its classes are {there}") from error


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name of its own, once."""
    path = path.expanduser().resolve()
    name = f"afterplay_environment_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _checked(found: Any, name: str, where: str) -> type[Environment]:
    if not (inspect.isclass(found) and callable(getattr(found, "start", None))):
        raise ConfigurationError(f"{where}: expected {name} to be a class with a method start(task), got {found!r}")
    return cast("type[Environment]", found)


def _check_option_names(cls: type[Environment], options: Mapping[str, Any], where: str) -> None:
    try:
        parameters = inspect.signature(cls).parameters
    except (ValueError, TypeError):
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(options) - set(parameters))
    if unknown:
        raise ConfigurationError(
            f"{where}.options: unknown {', '.join(unknown)}; {cls.__qualname__} takes {', '.join(parameters) or 'none'}"
        )


def _fault(error: ErrorDetails) -> str:
    """One fault of the options. What an environment's own check says stands for itself."""
    if not error["loc"] and error["type"] in ("value_error", "assertion_error"):
        return str(error["msg"]).partition(", ")[2]
    return f"{'.'.join(map(str, error['loc'])) or 'options'}: {error['msg']} (got {error['input']!r})"


def _shown(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}={v!r}" for k, v in options.items())
