"""Paths of plug-ins: what stands in the working folder comes first, and our own imports stay ours."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import OURS, attribute, load_main, resolve

REWARD = "def reward(trajectory): return {0!r}"


@pytest.fixture(params=["working folder is searched", "working folder is not searched"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    if request.param == "working folder is searched":
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    before = set(sys.modules)
    resolve.cache_clear()
    yield tmp_path
    loaded = {name: sys.modules[name] for name in set(sys.modules) - before}
    for name in [name for name, module in loaded.items() if str(tmp_path) in repr(module.__spec__ or module.__path__)]:
        del sys.modules[name]
    resolve.cache_clear()


def write(folder: Path, *files: str) -> None:
    """Each file has a function ``reward`` that returns the file's name."""
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(REWARD.format(file))


PATHS = {
    "file": ("mine.py:reward", "mine.py"),
    "file with a dot": ("./mine.py:reward", "mine.py"),
    "file in a folder": ("some/mine.py:reward", "some/mine.py"),
    "module": ("mine:reward", "mine.py"),
    "module of a package": ("pack.own:reward", "pack/own.py"),
    "package": ("pack:reward", "pack/__init__.py"),
    "name of the standard library": ("random:reward", "random.py"),
    "name of a library": ("yaml:reward", "yaml.py"),
}


@pytest.mark.parametrize(("path", "file"), PATHS.values(), ids=PATHS)
def test_every_path_leads_to_the_file_of_the_working_folder(path: str, file: str, folder: Path) -> None:
    if path.startswith("pack") and str(folder) not in sys.path:
        pytest.skip("a package with a name of its own is imported, from where Python searches")
    write(folder, "pack/__init__.py", file)
    assert resolve(path)(None) == file
    assert attribute(f"{folder / file}:reward", "here")(None) == file


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize(
    ("file", "path"),
    [
        ("{0}.py", "{0}:reward"),
        ("{0}/__init__.py", "{0}:reward"),
        ("{0}/own.py", "{0}.own:reward"),
        ("{0}/deep/own.py", "{0}.deep.own:reward"),
    ],
)
def test_the_names_of_our_packages_lead_to_the_file_of_the_working_folder(
    name: str, file: str, path: str, folder: Path
) -> None:
    ours = importlib.import_module(name)
    write(folder, file := file.format(name))
    assert resolve(path.format(name))(None) == file
    assert importlib.import_module(name) is ours is sys.modules[name]


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("whole", [True, False], ids=["with __init__", "without __init__"])
def test_modules_of_a_package_with_a_name_of_ours_import_each_other(name: str, whole: bool, folder: Path) -> None:
    write(folder, f"{name}/helper.py", *([f"{name}/__init__.py"] if whole else []))
    (folder / name / "own.py").write_text("from .helper import reward")
    assert resolve(f"{name}.own:reward")(None) == f"{name}/helper.py"


def test_a_module_is_imported_once(folder: Path) -> None:
    write(folder, "mine.py", "learner.py")
    for name in ("mine", "learner"):
        assert attribute(f"{name}:reward", "a") is attribute(f"{name}:reward", "b")
    if str(folder) in sys.path:
        assert attribute("mine:reward", "a") is importlib.import_module("mine").reward


def test_what_is_ours_can_be_named_where_the_user_has_a_module_of_that_name(folder: Path) -> None:
    write(folder, "pipeline.py", "actors/own.py")
    from actors.adapters.games import NumberGuess
    from pipeline.scorer.graders import exact

    assert resolve("pipeline.scorer.graders:exact") is exact
    assert attribute("actors.adapters.games:NumberGuess", "environments.guess") is NumberGuess


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (
            {},
            "learner:reward",
            r"it has \[\]. learner is a package of Afterplay, and .* has no learner.py: give the path of yours, "
            r"./learner.py:reward",
        ),
        ({}, "actors.mine:reward", r"has no actors/mine.py: give the path of yours, ./actors/mine.py:reward"),
        (
            {"mine.py": "from actors import help", "actors.py": "help = 1"},
            "mine:reward",
            r"actors is a package of Afterplay, which an import in a plug-in finds in place of ./actors.py: rename",
        ),
        (
            {"learner.py": "import learner\nlearner.mine()"},
            "learner:reward",
            r"learner is a package of Afterplay, which an import in a plug-in finds in place of ./learner.py: rename",
        ),
        (
            {"pipeline/own.py": "from pipeline.helper import help", "pipeline/helper.py": "help = 1"},
            "pipeline.own:reward",
            r"pipeline is a package of Afterplay, which an import in a plug-in finds in place of ./pipeline/: rename",
        ),
        (
            {"mine.py": "import nothing"},
            "mine:reward",
            r"importing 'mine' failed with .*No module named 'nothing' \(mine.py, line 1, in <module>\)$",
        ),
        ({"mine.py": ""}, "mine:reward", r"mine has no 'reward'; it has \[\]$"),
        ({}, "mine.py:reward", r"there is no file .*mine.py; paths begin at the working folder$"),
        ({}, ":reward", r"expected module:name or path/file.py:name, got ':reward'"),
    ],
)
def test_what_cannot_be_loaded_is_one_sentence_that_names_a_collision(
    files: dict[str, str], path: str, message: str, folder: Path
) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    with pytest.raises(ConfigurationError, match=message) as error:
        attribute(path, "scorer.functions")
    assert str(error.value).startswith("scorer.functions: ") and "\n" not in str(error.value)


def test_a_module_that_hides_a_package_of_ours_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, "learner.py")
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    for name in [name for name in sys.modules if name.partition(".")[0] == "learner"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigurationError, match=r"learner.py hides a package of Afterplay: rename it, or take its"):
        load_main("learner.process.role:main")
    del sys.modules["learner"]
