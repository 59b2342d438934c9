"""The code blocks of the pages: run files are valid, Python runs, and every command is understood by its program."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

from learner.process.preflight import check_own_functions, with_options
from pipeline.cli.app import app
from pipeline.cli.replay import START
from pipeline.config import RunConfig
from pipeline.config.load import dump_yaml, loads, model_at, parse_yaml
from pipeline.errors import Findings
from pipeline.tasks.source import TaskSource
from tests.unit.test_pages import PAGES, has

ROOT = Path(__file__).parents[2]
CLI = typer.main.get_command(app)
USAGE = typer.BadParameter.__mro__[1]
"""Base of the errors of wrong arguments."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page, or the command of an inline code span."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            code = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
            found.append(Block(page, text[: match.start()].count("\n") + 1, match[2], code))
    return [block for block in found if block.language in languages]


def each(*languages: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks(*languages), ids=str)


def test_every_language_is_checked() -> None:
    checked = {"yaml", "python", "bash", "json", ""}
    fenced = {block.language for block in blocks(*checked, "console", "sh", "text")}
    marks = sum(len(re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)) for page in PAGES)
    assert fenced <= checked
    assert len(blocks(*checked)) * 2 == marks, "a fence is not closed, or has a language that no test reads"


# Run files

DATA = {"kind": "jsonl", "path": "questions.jsonl"}
PLACES: dict[tuple[str, ...], dict[str, Any]] = {
    (): {},
    ("environments", "example", "tasks_from"): DATA,
    ("environments", "example"): {},
}
"""Sections that a fragment may belong to, with the keys that it needs beside it."""


def placed(fragment: dict[str, Any]) -> dict[str, Any]:
    """The fragment as a run file. Environments that parts of the scorer name are added."""
    for path, beside in PLACES.items():
        section = model_at(RunConfig, path)
        if section is not None and set(fragment) <= set(section.model_fields):
            whole: dict[str, Any] = {**beside, **fragment}
            for key in reversed(path):
                whole = {key: whole}
            parts = [part for kind in ("functions", "judges") for part in whole.get("scorer", {}).get(kind, ())]
            named = {name: {} for part in parts for name in part.get("environments", ())}
            environments = {**named, **whole.get("environments", {})}
            environments = environments or {"example": {}}
            return {**whole, "environments": {n: {"name": n, **(e or {})} for n, e in environments.items()}}
    raise AssertionError(f"expected keys of the run file or of {list(PLACES)}, got {list(fragment)}")


@each("yaml")
def test_run_files_are_valid(block: Block) -> None:
    fragment = parse_yaml(block.text, str(block))
    assert isinstance(fragment, dict)
    if "apiVersion" in fragment:
        return  # an object of Kubernetes: tests/integration/test_chart.py
    with_options(loads(dump_yaml(placed(fragment)), str(block), environment={}))


@each("json")
def test_json_is_valid(block: Block) -> None:
    for line in block.text.splitlines() if block.text.count("\n{") else [block.text]:
        json.loads(line)


# Python

COMPILED = {
    "afterplay.train": "starts a run; tests/integration/test_python_api.py proves it",
    "afterplay.retrain": "makes steps of a run again; tests/unit/models_trained/test_retrain.py proves it",
    "openai": "talks to the gateway of a run; tests/integration and tests/unit/actors prove it",
    "trl": "trains another library's model",
    "verifiers.v1": "an environment of another library",
    "self.": "the body of a method of the user's class",
}
"""Texts of blocks that are compiled and not run, and the reason."""


@each("python")
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = compile(block.text, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if any(re.search(rf"\b{re.escape(text)}", block.text) for text in COMPILED):
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    names: dict[str, Any] = {"__name__": "page"}
    monkeypatch.setitem(sys.modules, "page", type(sys)("page"))
    exec(code, names)
    for value in names.values():
        if isinstance(value, TaskSource):
            value.close()


OWN = ("my_estimator.py", "my_shaping.py", "my_loss.py")
"""Files with functions of the user's own that docs/ALGORITHMS.md shows, each before the run file that names it."""


@pytest.mark.parametrize("file", OWN)
def test_own_functions_of_the_pages_are_accepted(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = [block for block in blocks("python", "yaml") if block.page == "docs/ALGORITHMS.md"]
    at = next(i for i, block in enumerate(page) if block.text.startswith(f"# {file}\n"))
    (tmp_path / file).write_text(page[at].text)
    monkeypatch.chdir(tmp_path)
    config = loads(f"environments: {{guess: {{name: number_guess}}}}\n{page[at + 1].text}", environment={})
    assert file in f"{config.advantage} {config.loss}"
    found = Findings()
    check_own_functions(config, {}, found)
    assert found.problems == []


# Commands

UNCHECKED = {
    "cd": "changes the folder",
    "curl": "asks a running server",
    "docker": "needs a container engine; tests/unit/grafana reads the compose files",
    "done": "ends a loop of the shell",
    "for": "begins a loop of the shell",
    "git": "needs the address of the repository",
    "grep": "reads the output of a command",
    "jq": "reads the output of a command",
    "kubectl": "needs a cluster",
    "mkdir": "makes a folder",
    "pip": "installs; tests/unit/test_extras.py checks the extras",
    "pre-commit": "installs hooks",
    "source": "activates an environment",
    "uv": "installs; scripts/check_wheel.py proves it",
    "time": "measures the command after it",
}
"""Programs whose arguments are not checked, and the reason."""
PROGRAMS = {"afterplay", "make", "python", "python3", "pytest", "torchrun"}


def commands(text: str) -> Iterator[list[str]]:
    """The words of each command, without comments and without what a shell may put before it."""
    for line in re.sub(r"\$\(\(.*?\)\)|\$\w+", "0", re.sub(r"\\\n\s*", " ", text)).splitlines():
        reader = shlex.shlex(line.strip().removeprefix("$ "), posix=True, punctuation_chars="|&;")
        reader.whitespace_split = True
        for operator, part in itertools.groupby(reader, key=lambda word: set(word) <= set("|&;")):
            words = list(itertools.dropwhile(re.compile(r"[A-Z_]+=|do$").match, () if operator else part))
            if words:
                yield [words[0].rpartition("/")[2], *words[1:]]


def listed(text: str) -> Iterator[list[str]]:
    """The commands of a block that also has output or explanations: lines that begin with a program. Two spaces end
    a command."""
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = line.strip().removeprefix("$ ")
        if line.split(" ")[0] in PROGRAMS and not line.endswith(":"):
            yield from commands(re.split(r"\s{2,}", line)[0])


def check(words: list[str], *, whole: bool) -> None:
    """Raises :class:`AssertionError` for a command that its program does not understand. ``whole``: arguments that it
    requires must be there."""
    program, arguments = words[0], words[1:]
    if program == "afterplay":
        check_afterplay(CLI, arguments, whole=whole)
    elif program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
    elif "--no-python" in arguments:
        check(arguments[arguments.index("--no-python") + 1 :], whole=whole)
    elif program in ("python", "python3", "torchrun", "pytest"):
        check_python(arguments if program != "pytest" else ["-m", "pytest", *arguments], whole=whole)
    else:
        assert program in UNCHECKED, f"{program}: expected one of {sorted(PROGRAMS | set(UNCHECKED))}"


def check_afterplay(command: Any, words: list[str], *, whole: bool) -> None:
    while hasattr(command, "commands"):
        if not words or words[0] in ("-h", "--help", *(name for p in command.params for name in p.opts)):
            return
        if words[0] not in command.commands and START in command.commands:
            words = [START, *words]
        assert words[0] in command.commands, f"expected one of {sorted(command.commands)}, got {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    options = {name: p for p in command.params for name in (*p.opts, *p.secondary_opts) if name.startswith("-")}
    own = words[: words.index("--")] if "--" in words else words  # what follows is for another program
    for word, following in itertools.pairwise([*own, ""]):
        if not re.fullmatch(r"-[a-z]|--[a-z-]+", word) or word == "--help":
            continue
        assert word in options, f"expected one of {sorted(options)}, got {word!r}"
        if options[word].metavar == "KEY=VALUE" and "=" in following:
            key = following.partition("=")[0]
            assert has(RunConfig, key.split(".")), f"the run file has no key {key}"
    for word in words:
        assert not word.startswith("configs/") or "…" in word or (ROOT / word).exists(), word
    if whole and "…" not in words and "..." not in words:
        try:
            command.make_context(command.name, list(words))
        except USAGE as error:
            raise AssertionError(str(error)) from error


def check_python(words: list[str], *, whole: bool) -> None:
    """A module or a script exists, and its options occur in its source."""
    if "-m" in words:
        module, arguments = words[words.index("-m") + 1], words[words.index("-m") + 2 :]
        if module == "pipeline.cli.app":
            return check_afterplay(CLI, arguments, whole=whole)
        own = ROOT / module.replace(".", "/")
        if not own.with_suffix(".py").exists() and not own.is_dir():
            package = module.partition(".")[0]
            assert not (ROOT / package).exists() and importlib.util.find_spec(package) is not None, module
            assert all((ROOT / word).exists() for word in arguments if word.startswith("tests/")), arguments
            return None
        sources = list(own.glob("*.py")) if own.is_dir() else [own.with_suffix(".py")]
    elif words and words[0].endswith(".py"):
        sources, arguments = [ROOT / words[0]], words[1:]
        assert sources[0].exists(), words[0]
    else:
        return None
    text = "\n".join(source.read_text() for source in sources)
    named = text.replace("_", "-")
    for option in (word for word in arguments if re.fullmatch(r"--[a-z-]+", word)):
        assert option in text or option.removeprefix("--") in named, f"{words}: no option {option}"
    return None


@each("bash")
def test_commands_are_understood(block: Block) -> None:
    found = list(commands(block.text))
    assert found
    for words in found:
        check(words, whole=True)


@each("")
def test_commands_among_text_are_understood(block: Block) -> None:
    for words in listed(block.text):
        check(words, whole=True)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_exist(page: str) -> None:
    """``afterplay``, ``make`` and ``python -m`` in code spans. Arguments may be omitted; ``a|b`` is a choice."""
    text = re.sub(r"^ *```.*?^ *```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"(?<!`)`((?:afterplay|make|python -m|python3 -m) [^`]*)`(?!`)", text):
        choice = re.search(r"\w+(\|\w+)+", span)
        for option in choice[0].split("|") if choice else [""]:
            line = span.replace(choice[0], option) if choice else span
            for words in commands(" ".join(line.split())):
                check([word for word in words if word not in ("…", "...")], whole=False)


def test_a_command_that_no_program_understands_is_refused() -> None:
    """The checks of this file refuse what they are for."""
    for line in (
        "afterplay rum configs/tiny.yaml",
        "afterplay run configs/tiny.yaml --frsh",
        "afterplay run configs/tiny.yaml --set learner.rate=1",
        "afterplay run configs/gone.yaml",
        "afterplay run",
        "make quickstat",
        "python -m benchmarks.gone",
        "python -m benchmarks.stale_pool --sedes 1",
        "rm -r runs",
    ):
        with pytest.raises(AssertionError):
            check(next(commands(line)), whole=True)
    with pytest.raises(AssertionError):
        placed({"replai": {}})
