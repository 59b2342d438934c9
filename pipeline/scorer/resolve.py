"""From an import path in the run file to a function."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigurationError

UserFunction = Callable[..., Any]


@lru_cache(maxsize=256)
def resolve(path: str, what: str = "score function") -> UserFunction:
    """The function at ``module:function`` or ``folder/file.py:function`` (files are relative to the working directory).

    Raises :class:`ConfigurationError` that says which part of the path is wrong.
    """
    where, _, name = path.rpartition(":")
    if not where or not name:
        raise ConfigurationError(f"expected a {what} as module:function or file.py:function, got {path!r}")
    try:
        module = _load_file(Path(where), what) if where.endswith(".py") else importlib.import_module(where)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{what} {path!r}: importing {where} failed with {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = "nothing of that name" if function is None else f"a {type(function).__name__}"
        raise ConfigurationError(f"{what} {path!r}: expected a function {name!r} in {where}, got {found}")
    return function  # type: ignore[no-any-return]


def _load_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ConfigurationError(f"{what} file {path} does not exist (looked in {Path.cwd()})")
    name = f"afterplay_plugin_{path.stem}_{abs(hash(str(path.resolve()))):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
