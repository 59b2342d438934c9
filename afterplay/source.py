"""Classes and functions of a notebook, a script or a module as plug-ins that the processes of a run can load.

What an installed module defines is named, ``module:Name``. What a notebook or script defines is copied as source: the
definition, and every import, definition and plain value that it uses, become a file of their own. Nothing is pickled:
the run directory keeps readable source, tracebacks name its lines, and another Python version can resume the run.
"""

from __future__ import annotations

import ast
import builtins
import importlib.machinery
import inspect
import os
import re
import symtable
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import OURS, file_in_working_folder

_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_IMPORTS = ast.Import | ast.ImportFrom
_ASSIGNMENTS = ast.Assign | ast.AnnAssign | ast.AugAssign
_MAIN = "__main__"


@dataclass(frozen=True, slots=True)
class PlugIn:
    """A class or function as the run file names it."""

    name: str
    module: str = ""
    """Importable module, or path of a file. Empty: ``source`` becomes a file."""
    source: str = ""

    def path(self, file: Path) -> str:
        """Value for the run file. ``file`` is the place of ``source``."""
        return f"{self.module or file}:{self.name}"


def plug_in(thing: Any, what: str) -> PlugIn:
    """``thing`` for other processes; ``what`` names the argument in messages. Raises :class:`ConfigurationError` with
    the reason if other processes cannot have it."""
    if not isinstance(thing, type) and not inspect.isfunction(thing):
        raise ConfigurationError(f"{what}: expected a class, a function or a name of the run file, got {thing!r}")
    name = thing.__qualname__
    if name == "<lambda>":
        raise ConfigurationError(f"{what}: a lambda has no name that other processes could load: write it with def")
    if "." in name:
        raise ConfigurationError(
            f"{what}: {name} is not at the top level, where other processes could load it: move it out of what "
            "encloses it, and pass what it needs as options"
        )
    module = sys.modules.get(thing.__module__)
    if module is None:
        raise ConfigurationError(f"{what}: expected {name} in a module, a script or a notebook, got one without source")
    if thing.__module__ != _MAIN:
        return PlugIn(name, _importable(module, what))
    return PlugIn(name, source=source_of(name, _texts(module, name, what), vars(module), what))


def require_defined(module: str, name: str, what: str) -> None:
    """Raise :class:`ConfigurationError` where a file that the working folder has does not define ``name``. Nothing is
    imported: the file may have changed since, and belongs to other processes. Of installed modules nothing is read."""
    if not (module and name):
        raise ConfigurationError(f"{what}: expected module:name or path/file.py:name, got '{module}:{name}'")
    file = Path(module).expanduser() if module.endswith(".py") else file_in_working_folder(module)
    if file is None:
        return
    if not file.is_file():
        raise ConfigurationError(f"{what}: there is no file {file.resolve()}; paths begin at the working folder")
    try:
        text = file.read_text(encoding="utf-8")
        table = symtable.symtable(text, str(file), "exec")
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigurationError(f"{what}: reading {file} failed with {type(error).__name__}: {error}") from error
    names = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    if name not in names and "__getattr__" not in names and "import *" not in text:
        classes = [child.get_name() for child in table.get_children()]
        raise ConfigurationError(f"{what}: {file} has no {name!r}; it has {', '.join(classes) or 'no definition'}")


def source_of(name: str, texts: Sequence[str], namespace: Mapping[str, Any], what: str) -> str:
    """Source of the definition ``name`` and of all that it uses.

    ``texts``: what was executed, in order (the cells of a notebook); of several definitions the last one counts.
    ``namespace``: the names now. Raises :class:`ConfigurationError` for an object that lives in this process alone.
    """
    statements = list(_statements(texts))
    last = {bound: index for index, statement in enumerate(statements) for bound in statement.binds}
    at = {bound: index for bound, index in last.items() if statements[index].text}
    if name in last and name not in at:
        raise ConfigurationError(
            f"{what}: {name} was assigned after its definition, and a copy of the definition would be another object: "
            "write what changes it as a decorator, or put it into a file and import it"
        )
    if name not in at:
        raise ConfigurationError(
            f"{what}: expected class {name} or def {name} in a cell, or at the top level of the script, found none (a "
            "cell with a %% magic does not count): put it into a file and import it"
        )
    kept: set[int] = set()
    values: dict[str, str] = {}
    pending = [(name, what)]
    while pending:
        used, by = pending.pop()
        index = at.get(used)
        if index is None:
            if used not in values and used in namespace and not _is_given(used, namespace):
                values[used] = _value(used, namespace[used], by, what)
        elif index not in kept:
            kept.add(index)
            pending += [(one, used) for one in sorted(statements[index].uses)]
    imports = [s.text for i, s in enumerate(statements) if s.always or (i in kept and s.imports)]
    definitions = [s.text for i, s in enumerate(statements) if i in kept and not s.imports]
    future = [text for text in imports if text.startswith("from __future__")]
    parts = [f'"""{name}, copied from the notebook or script that started the run."""']
    parts += ["\n".join(group) for group in (future, [i for i in imports if i not in future], values.values()) if group]
    return "\n\n".join(parts) + "".join(f"\n\n\n{text}" for text in definitions) + "\n"


@dataclass(frozen=True, slots=True)
class _Statement:
    """An import, a definition or an assignment at the top level."""

    text: str
    """Empty for an assignment: what it made is copied as a value."""
    binds: tuple[str, ...]
    uses: frozenset[str]
    imports: bool
    always: bool
    """True if nothing shows whether it is used: ``from __future__`` and ``import *``."""


def _statements(texts: Sequence[str]) -> Iterator[_Statement]:
    for text in texts:
        try:
            nodes = ast.parse(text).body
        except SyntaxError:  # a cell that failed
            continue
        lines = re.split(r"\r\n|\r|\n", text)  # as Python counts them
        for node in nodes:
            if isinstance(node, _IMPORTS):
                bound = tuple((alias.asname or alias.name).partition(".")[0] for alias in node.names)
                always = "*" in bound or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
                yield _Statement(ast.unparse(node), bound, frozenset(), True, always)
            elif isinstance(node, _DEFINITIONS):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                own = "\n".join(lines[first - 1 : node.end_lineno])
                uses = _names(symtable.symtable(own, node.name, "exec")) | set(_quoted(node))
                yield _Statement(own, (node.name,), frozenset(uses), False, False)
            elif isinstance(node, _ASSIGNMENTS) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name))
                bound = tuple(part.id for part in names if isinstance(part.ctx, ast.Store))
                yield _Statement("", bound, frozenset(), False, False)


def _names(table: symtable.SymbolTable) -> set[str]:
    """Global names that the code of a table and of those in it reads."""
    outer = table.get_type() == "module"
    found = {s.get_name() for s in table.get_symbols() if s.is_referenced() and (outer or s.is_global())}
    return found.union(*map(_names, table.get_children()))


def _quoted(node: ast.AST) -> Iterator[str]:
    """Names in annotations that are written as strings."""
    for part in ast.walk(node):
        for annotation in (getattr(part, "annotation", None), getattr(part, "returns", None)):
            for text in ast.walk(annotation) if isinstance(annotation, ast.expr) else ():
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    try:
                        parsed = ast.parse(text.value, mode="eval")
                    except SyntaxError:
                        continue
                    yield from (name.id for name in ast.walk(parsed) if isinstance(name, ast.Name))


def _is_given(name: str, namespace: Mapping[str, Any]) -> bool:
    """Every module has it."""
    return re.fullmatch("__.*__", name) is not None or (
        hasattr(builtins, name) and namespace[name] is getattr(builtins, name)
    )


def _value(name: str, value: Any, user: str, what: str) -> str:
    """A statement that binds ``name``: plain data as they are now, or a module."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    text = ""
    try:
        text = repr(value)
        plain = type(ast.literal_eval(text)) is type(value) and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        plain = False
    if not plain:
        raise ConfigurationError(
            f"{what}: {user} uses {name}, a {type(value).__name__} that lives in this process alone: make it inside "
            f"{user}, or put both into a module and import them"
        )
    return f"{name} = {text}"


def _texts(module: ModuleType, name: str, what: str) -> list[str]:
    """Source of ``__main__`` as it was executed: the cells of a notebook, or the file of a script."""
    cells = vars(module).get("In")
    if isinstance(cells, list) and "get_ipython" in vars(module):
        return [str(cell) for cell in cells]
    file = getattr(module, "__file__", None)
    if file and os.path.exists(file):
        return [Path(file).read_text(encoding="utf-8")]
    raise ConfigurationError(
        f"{what}: there is no source of {name}, because this is neither a notebook nor a script: put it into a file "
        "and import it"
    )


def _importable(module: ModuleType, what: str) -> str:
    """Name of a module that the processes of a run find too, or the path of its file where they do not: their path has
    no folder of the script, and ends with the working folder."""
    main = getattr(sys.modules.get(_MAIN), "__file__", None)
    script = os.path.dirname(os.path.abspath(main)) if main else ""
    inherited = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    theirs = [entry for entry in sys.path if entry and (entry != script or script in inherited)]
    top = module.__name__.partition(".")[0]
    ours, found = sys.modules.get(top), importlib.machinery.PathFinder.find_spec(top, [*theirs, os.getcwd()])
    file = getattr(module, "__file__", None)
    here = file_in_working_folder(module.__name__)
    if here is not None and (top in OURS or here.name == f"{module.__name__}.py"):  # what they load in any case
        named = file is not None and os.path.realpath(here) == os.path.realpath(file)
    else:
        named = (
            found is not None and ours is not None and (found.origin or "") == (getattr(ours, "__file__", None) or "")
        )
    if named:
        return module.__name__
    if file and "." not in module.__name__ and not hasattr(module, "__path__"):
        return os.path.abspath(str(file))
    raise ConfigurationError(
        f"{what}: other processes do not find the module {module.__name__}: install it, or start Python in its folder"
    )
