"""Plug-ins by their path in the run file, ``module:name`` or ``folder/file.py:name``, and our own modules that are
imported late.

A module in the working folder comes first: it is imported under its own name if Python finds it there, and else, as a
``learner.py`` beside our package ``learner``, loaded by its file under another name. Our own imports stay ours.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigurationError, explained

UserFunction = Callable[..., Any]
OURS = ("actors", "afterplay", "learner", "pipeline")
"""Our packages, which a module of the user cannot replace, only stand beside."""


@lru_cache(maxsize=256)
def resolve(path: str, what: str = "score function") -> UserFunction:
    """The function at ``path``. Raises :class:`ConfigurationError` that says which part of the path is wrong."""
    function = attribute(path, f"{what} {path!r}")
    if not callable(function):
        raise ConfigurationError(f"{what} {path!r}: expected a function, got a {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def attribute(path: str, where: str) -> Any:
    """The object at ``module:name`` or ``folder/file.py:name``, both relative to the working folder. ``where`` begins
    the message of the :class:`ConfigurationError` that is raised if there is nothing."""
    module_name, _, name = path.rpartition(":")
    if not module_name or not name:
        raise ConfigurationError(f"{where}: expected module:name or path/file.py:name, got {path!r}")
    file = Path(module_name).expanduser().resolve()
    if module_name.endswith(".py") and not file.is_file():
        raise ConfigurationError(f"{where}: there is no file {file}; paths begin at the working folder")
    try:
        with explained(f"{where}: importing {module_name!r} failed with"):
            module = _load_file(file) if module_name.endswith(".py") else _load_module(module_name)
    except ConfigurationError as error:
        if collision := _collision(error.__cause__, module_name, name):
            raise ConfigurationError(f"{error}. {collision}") from error.__cause__
        raise
    if not hasattr(module, name):
        there = sorted(n for n, v in vars(module).items() if getattr(v, "__module__", None) == module.__name__)
        more = _collision(None, module_name, name) if module.__name__ == module_name else ""
        raise ConfigurationError(f"{where}: {module_name} has no {name!r}; it has {there}{more and '. '}{more}")
    return getattr(module, name)


def load_main(path: str) -> Any:
    """The object at ``module:attribute`` of our own, imported only now. Raises :class:`ConfigurationError` that names
    the path."""
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        remedy = "Is Afterplay installed completely?"
        found = getattr(sys.modules.get(module_name.partition(".")[0]), "__file__", None)
        if found is not None and Path(found).parents[1] != Path(__file__).parents[2]:
            remedy = f"{found} hides a package of Afterplay: rename it, or take its folder out of PYTHONPATH"
        raise ConfigurationError(
            f"expected {path} to be importable, got {type(error).__name__}: {error}. {remedy}"
        ) from error


def _load_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, once."""
    name = _private_name(path)
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_in_working_folder(module_name: str) -> Path | None:
    """The file that a module of this name has there."""
    base = os.path.join(os.getcwd(), *module_name.split("."))
    files = (Path(base, "__init__.py"), Path(f"{base}.py"))
    return next((file for file in files if file.is_file()), None)


def _load_module(name: str) -> ModuleType:
    file = file_in_working_folder(name)
    top, _, rest = name.partition(".")
    if file is None or _is_imported_from(Path.cwd(), top):
        return importlib.import_module(name)
    if file.name == f"{name}.py" or (not rest and top in OURS):
        return _load_file(file)
    if top not in OURS:  # also installed: its own modules import it by its name
        return importlib.import_module(name)
    package = _load_package(Path.cwd() / top)
    return importlib.import_module(f"{package.__name__}.{rest}")


def _load_package(folder: Path) -> ModuleType:
    if (file := folder / "__init__.py").is_file():
        return _load_file(file)
    package = sys.modules.setdefault(name := _private_name(folder), ModuleType(name))
    package.__path__ = [str(folder)]
    return package


def _private_name(path: Path) -> str:
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    return f"afterplay_plugin_{stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def _is_imported_from(folder: Path, top: str) -> bool:
    """True if ``import top`` finds what is in ``folder``."""
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # __main__
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.has_location else spec.submodule_search_locations or ()
    expected = {folder / top / "__init__.py", folder / f"{top}.py", folder / top}
    return any(Path(place).resolve() in {one.resolve() for one in expected} for place in places if place)


def _collision(error: BaseException | None, module_name: str, name: str) -> str:
    """A sentence, if the user's plug-in or a module that it imports has the name of a package of ours."""
    missing = module_name
    if isinstance(error, ImportError):
        missing = error.name or ""
    elif isinstance(error, AttributeError):
        missing = str(getattr(error.obj, "__name__", ""))
    top = missing.partition(".")[0]
    if top not in OURS or _is_imported_from(Path.cwd(), top):
        return ""
    there = next((one for one in (f"{top}.py", f"{top}/") if Path(one).exists()), "")
    if missing == module_name and not there:
        file = f"{module_name.replace('.', '/')}.py"
        return (
            f"{top} is a package of Afterplay, and {Path.cwd()} has no {file}: give the path of yours, ./{file}:{name}"
        )
    return there and (
        f"{top} is a package of Afterplay, which an import in a plug-in finds in place of ./{there}: rename yours, or "
        "load it by its path"
    )
