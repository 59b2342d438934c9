"""Definitions of a notebook or script reach other processes as source, or are refused with the reason."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from afterplay.source import PlugIn, plug_in, source_of
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import attribute

CELLS = (
    "import math\nfrom collections import Counter as Tally, deque\nclient = object()\nLIMIT = 3\n",
    "%this is no Python",
    "class Bank:\n    def old(self): return client\n",
    "def rounded(x: 'Amount') -> float:\n    '''Half up.'''\n    return math.floor(x + 0.5)\n\nAmount = float\n",
    "class Base:\n    limit = LIMIT\n\n    def total(self, client):\n"
    "        return Tally(client)[rounded(self.limit)]\n",
    "import functools\n\n@functools.total_ordering\nclass Bank(Base):\n    # a comment stays\n"
    "    def __lt__(self, other): return self.cap < other.cap\n    def peer(self): return Peer(LIMIT + len(WORDS))\n",
    "class Peer:\n    def bank(self): return Bank()\nrun = print('a run starts')\nx = 1; y = 2\n",
)


def namespace(cells: tuple[str, ...] = CELLS) -> dict[str, Any]:
    names: dict[str, Any] = {"WORDS": ["a", "b"], "__name__": "__main__"}
    for cell in cells:
        if not cell.startswith("%"):
            exec(cell, names)
    return names


def source(name: str, cells: tuple[str, ...] = CELLS, **more: Any) -> str:
    names = namespace(() if "get_ipython" in more else cells)
    return source_of(name, cells, {**names, **more}, "environment")


def test_a_definition_brings_all_that_it_uses_and_nothing_else() -> None:
    found = source("Peer", (*CELLS[:-1], CELLS[-1], "Amount = 4\n"))
    assert "a run starts" not in found and "deque" in found and "client = " not in found and "old" not in found
    assert "# a comment stays" in found and "import math" in found and "WORDS = ['a', 'b']" in found
    names: dict[str, Any] = {}
    exec(compile(found, "environment.py", "exec"), names)
    assert names["Bank"]().peer and names["Bank"].limit == 3


def test_definitions_keep_their_order() -> None:
    found = source("Peer", (*CELLS, "Amount = 4\n"))
    assert found.index("class Base") < found.index("class Bank") < found.index("class Peer")
    assert found.index("LIMIT = 3") < found.index("class Base")


def test_local_names_hide_global_ones() -> None:
    cell = "run = object()\ndef f(run):\n    client = run\n    return [client for client in run if client]\n"
    assert "object" not in source("f", (cell,))


def test_plain_data_travel_with_their_value_of_now() -> None:
    assert "LIMIT = {'a': (1, None, 2.5)}" in source("f", ("def f(): return LIMIT\n",), LIMIT={"a": (1, None, 2.5)})


@pytest.mark.parametrize("value", [object(), open, iter([1]), float("nan"), [object()], type("T", (), {})()])
def test_an_object_that_lives_in_this_process_alone_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigurationError, match=r"environment: f uses client, a \w+ that lives in this process alone"):
        source("f", ("def f(): return client\n",), client=value)


def test_the_user_of_a_refused_object_is_named_however_deep_it_is() -> None:
    cells = ("class A:\n    def b(self): return g()\n", "def g(): return client\n")
    with pytest.raises(ConfigurationError, match="g uses client"):
        source("A", cells, client=object())


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("def helper(x): return 1\nhelper = 7\ndef score(x): return helper", "helper = 7"),
        ("from math import floor\nfloor = 3\ndef score(x): return floor", "floor = 3"),
        ("def helper(x): return 1\nhelper: int = 7\ndef score(x): return helper", "helper = 7"),
        ("__table = 4\ndef score(x): return __table", "__table = 4"),
    ],
)
def test_the_last_thing_that_a_name_was_given_counts(cell: str, line: str) -> None:
    namespace: dict[str, object] = {}
    exec(cell, namespace)
    source = source_of("score", [cell], namespace, "reward")
    copied: dict[str, Any] = {}
    exec(source, copied)
    assert line in source and copied["score"](0) == namespace["score"](0)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["score", "helper"])
def test_a_definition_that_was_wrapped_afterwards_is_refused(name: str) -> None:
    cell = f"def score(x): return helper(x)\ndef helper(x): return 1\n{name} = (lambda f: lambda x: 5)({name})"
    namespace: dict[str, object] = {}
    exec(cell, namespace)
    with pytest.raises(ConfigurationError, match=r"assigned after its definition|lives in this process alone"):
        source_of("score", [cell], namespace, "reward")


@pytest.mark.parametrize("odd", ["\u2028", "\x0b", "\x85", "\x1c"])
def test_characters_that_end_no_line_of_python_shift_nothing(odd: str) -> None:
    cell = f'MARKS = "a{odd}b"\n\n\ndef score(x):\n    return len(MARKS)\n'
    copied: dict[str, Any] = {}
    exec(source_of("score", [cell], {"MARKS": f"a{odd}b"}, "reward"), copied)
    assert copied["score"](0) == 3


def test_a_number_that_is_too_long_to_write_is_refused_with_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match="lives in this process alone"):
        source_of("score", ["N = 10**5000\ndef score(x): return N"], {"N": 10**5000}, "reward")


def test_a_future_import_comes_first() -> None:
    cells = ("from __future__ import annotations\n", "import math\nclass A:\n    def b(self) -> B: return math.pi\n")
    assert source("A", cells).splitlines()[2] == "from __future__ import annotations"
    compile(source("A", cells), "a.py", "exec")


def test_a_module_bound_without_an_import_statement_is_imported() -> None:
    assert "import math as m" in source("f", ("def f(): return m.pi\n",), m=sys.modules["math"])


def test_a_definition_inside_a_magic_is_not_found() -> None:
    with pytest.raises(ConfigurationError, match="environment: expected class Bank or def Bank in a cell"):
        source("Bank", ("get_ipython().run_cell_magic('time', '', 'class Bank: ...')\n",), get_ipython=print)


# Where it comes from


def outer() -> Any:
    class Inner:
        pass

    return Inner


class Here:
    class Nested:
        pass


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (lambda t: 0.0, "reward: a lambda has no name"),
        (outer(), r"reward: outer.<locals>.Inner is not at the top level"),
        (Here.Nested, "reward: Here.Nested is not at the top level"),
        (3, "reward: expected a class, a function or a name of the run file, got 3"),
    ],
)
def test_what_has_no_name_at_the_top_level_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        plug_in(thing, "reward")


def test_what_an_installed_module_defines_is_named() -> None:
    from actors.adapters.games import NumberGuess

    assert plug_in(NumberGuess, "environment") == PlugIn("NumberGuess", "actors.adapters.games")


def test_a_module_that_only_the_script_finds_is_named_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_bank.py").write_text("class Bank:\n    pass\n")
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "script.py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    import my_bank

    path = plug_in(my_bank.Bank, "environment").path(Path("unused.py"))
    del sys.modules["my_bank"]
    assert path == f"{tmp_path / 'my_bank.py'}:Bank"
    assert attribute(path, "environments.bank").__name__ == "Bank"


@pytest.mark.parametrize("file", ["learner.py", "learner/own.py"])
def test_a_module_of_a_notebook_that_is_called_as_a_package_of_ours_is_found_by_the_run(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).parent.joinpath("__init__.py").touch()
    (tmp_path / file).write_text("def reward(trajectory): return 'theirs'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "learner"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])  # as in a notebook
    name = file.removesuffix(".py").replace("/", ".")
    found = plug_in(importlib.import_module(name).reward, "reward")
    for each in [each for each in sys.modules if each.partition(".")[0] == "learner"]:
        del sys.modules[each]
    monkeypatch.setattr(sys, "path", [*sys.path[1:], str(tmp_path)])  # as in the processes of the run
    assert attribute(found.path(Path("unused.py")), "reward")(None) == "theirs"
    assert "advantages" in os.listdir(os.path.dirname(importlib.import_module("learner").__file__ or ""))


def main_module(monkeypatch: pytest.MonkeyPatch, **names: Any) -> ModuleType:
    module = ModuleType("__main__")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


CLASS = "class Bank:\n    def limit(self): return 3\n"


def test_a_notebook_has_its_source_in_its_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    module = main_module(monkeypatch, In=["", CLASS, "get_ipython().run_line_magic('time', '')"], get_ipython=print)
    exec(CLASS, vars(module))
    found = plug_in(module.Bank, "environment")
    assert found.name == "Bank" and CLASS.strip() in found.source and not found.module


def test_a_script_has_its_source_in_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(CLASS + "if __name__ == '__main__':\n    print(Bank())\n")
    module = main_module(monkeypatch, __file__=str(file))
    exec(CLASS, vars(module))
    assert "print" not in plug_in(module.Bank, "environment").source


def test_a_command_line_has_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    module = main_module(monkeypatch)
    exec(CLASS, vars(module))
    with pytest.raises(ConfigurationError, match="neither a notebook nor a script: put it into a file and import it"):
        plug_in(module.Bank, "environment")
