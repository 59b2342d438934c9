"""The run file of a run from Python: the configuration, the caller's plug-ins, and overrides over both."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.adapters.games import NumberGuess
from actors.environments.base import Environment, Episode
from afterplay.run_file import assignments, read_run_file
from pipeline.config.load import load, loads
from pipeline.errors import ConfigurationError
from pipeline.schema.trajectory import Task

SECTIONS: dict[str, Any] = {
    "run": {"name": "bank", "total_steps": 3},
    "environments": {"number_guess": {"name": "other", "max_turns": 3}, "another": {"name": "arithmetic"}},
}


def bonus(trajectory: Any) -> float:
    return float(len(trajectory.turns))


def test_an_environment_replaces_the_others_and_keeps_the_keys_of_its_section() -> None:
    found = read_run_file(SECTIONS, NumberGuess).config.environments
    assert list(found) == ["number_guess"]
    assert (found["number_guess"].name, found["number_guess"].max_turns) == ("actors.adapters.games:NumberGuess", 3)


@pytest.mark.parametrize(
    ("name", "section", "value"),
    [
        ("babyai", "babyai", "babyai"),
        ("games.py:BankAccount", "bank_account", "games.py:BankAccount"),
        ("games:HTTPBank2", "httpbank2", "games:HTTPBank2"),
        ("games.py:Late", "late", "games.py:Late"),
        ("installed:Bank", "bank", "installed:Bank"),
    ],
)
def test_an_environment_may_be_a_name_of_the_run_file(
    name: str, section: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "games.py").write_text(
        "from x import HTTPBank2\nif 1:\n    class BankAccount: ...\nLate = BankAccount\n"
    )
    monkeypatch.chdir(tmp_path)
    assert read_run_file({}, name).config.environments[section].name == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("games.py:Missing", "environment: games.py has no 'Missing'; it has Bank, f"),
        ("games:Missing", r"environment: .*games.py has no 'Missing'"),
        ("none.py:Bank", "environment: there is no file .*none.py; paths begin at the working folder"),
        ("broken.py:Bank", "environment: reading broken.py failed with SyntaxError"),
        ("games.py:", "environment: expected module:name or path/file.py:name, got 'games.py:'"),
        ("arithmetics", "environment: there is no environment 'arithmetics'; .*Did you mean arithmetic"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_without_an_import(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "games.py").write_text("raise AssertionError('imported')\nclass Bank: ...\ndef f(): ...\n")
    (tmp_path / "broken.py").write_text("class Bank(\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=message):
        read_run_file({}, name)
    with pytest.raises(ConfigurationError, match=r"reward: games.py has no 'Missing'"):
        read_run_file({}, reward="games.py:Missing")
    (tmp_path / "games.py").write_text("from x import *\n")
    assert read_run_file({}, "games.py:Missing").config.environments["missing"].name == "games.py:Missing"


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (Environment, "expected a class that defines start, got Environment"),
        (Episode, "expected a class with a method start"),
        (bonus, "expected a class with a method start"),
        ([NumberGuess], "expected a class with a method start.*or a name of the run file such as 'bank.py:Bank'"),
        (Path("bank.py"), "expected a class with a method start.*or a name of the run file such as 'bank.py:Bank'"),
    ],
)
def test_what_is_no_environment_is_refused(thing: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"environment: {message}"):
        read_run_file({}, thing)


class Level(Enum):
    EASY = "easy"


class Word(StrEnum):
    EASY = "easy"


@pytest.mark.parametrize("value", [Level.EASY, {1, 2}, bonus, range(3), 1j, [object()]])
def test_a_value_that_no_file_has_is_refused_by_its_key(value: Any) -> None:
    for config, overrides in (({"learner": {"betas": value}}, {}), ({}, {"learner__betas": value})):
        with pytest.raises(ConfigurationError, match=r"^learner.betas: expected a value that YAML has .*, got "):
            read_run_file(config, overrides=overrides)
    with pytest.raises(ConfigurationError, match=r"^environments.maze.options.walls: expected a value that YAML has"):
        read_run_file({}, Maze(walls=value))
    with pytest.raises(
        ConfigurationError, match=r"^environments.maze.options.walls: expected keys that are text, got 1"
    ):
        read_run_file({}, Maze(walls={1: "a"}))  # type: ignore[arg-type]
    assert read_run_file({}, Maze(walls=[Word.EASY])).config.environments["maze"].options["walls"] == ["easy"]


@dataclass
class Maze(Environment):
    size: int = 3
    walls: list[str] = field(default_factory=list)
    seen: int = field(default=0, init=False)

    def start(self, task: Task) -> Episode:
        raise NotImplementedError


class Made(Environment):
    def __init__(self, size: int = 3) -> None:
        self.size = size

    def start(self, task: Task) -> Episode:
        raise NotImplementedError


class Plain(Environment):
    def start(self, task: Task) -> Episode:
        raise NotImplementedError


def test_an_instance_is_its_class_with_its_fields_as_options_or_is_refused_with_the_remedy() -> None:
    found = read_run_file({}, Maze(5, ["a"])).config.environments["maze"]
    assert found.name.endswith(":Maze") and found.options == {"size": 5, "walls": ["a"]}
    assert read_run_file({}, Plain()).config.environments["plain"].options == {}
    with pytest.raises(ConfigurationError, match=r"an instance of Made.*environments=\{'made': \{'options'"):
        read_run_file({}, Made(4))


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)])
def test_numbers_of_other_libraries_are_numbers(number: Any) -> None:
    for overrides in ({"learner": {"learning_rate": number}}, {"learner__learning_rate": number}):
        assert read_run_file(SECTIONS, NumberGuess, overrides=overrides).config.learner.learning_rate == 0.5
        assert assignments(overrides) == ["learner.learning_rate=0.5"]
    steps = read_run_file(SECTIONS, NumberGuess, overrides={"run__total_steps": np.int64(7)}).config.run.total_steps
    assert steps == 7 and type(steps) is int
    betas = read_run_file(SECTIONS, NumberGuess, overrides={"learner__betas": np.array([0.5, 0.75])}).config.learner
    assert betas.betas == (0.5, 0.75)


def test_a_reward_replaces_the_score_of_the_environment_unless_its_weight_is_given() -> None:
    scorer = read_run_file({}, "babyai", bonus).config.scorer
    assert scorer.environment_weight == 0 and [part.known_as for part in scorer.functions] == ["bonus"]
    both = read_run_file({"scorer": {"environment_weight": 1, "functions": [{"path": "exact"}]}}, "babyai", bonus)
    assert both.config.scorer.names == ("environment", "exact", "bonus") and both.config.scorer.environment_weight == 1


def test_overrides_are_sections_or_paths_and_keep_what_they_do_not_name() -> None:
    given = {"run": {"seed": 7}, "learner__learning_rate": 1e-3, "environments": {"another": {"max_turns": 2}}}
    config = read_run_file(SECTIONS, overrides=given).config
    assert (config.run.name, config.run.seed, config.learner.learning_rate) == ("bank", 7, 1e-3)
    assert (config.environments["another"].name, config.environments["another"].max_turns) == ("arithmetic", 2)
    assert SECTIONS["run"] == {"name": "bank", "total_steps": 3}, "the caller's mapping is unchanged"


def test_an_override_changes_no_section_that_shares_an_anchor(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("environments:\n  a: &a {name: number_guess, options: {high: 9}}\n  b: *a\n")
    overrides = {"environments__a__weight": 0, "environments": {"b": {"options": {"high": 5}}}}
    found = read_run_file(file, overrides=overrides).config.environments
    assert [(section.weight, section.options["high"]) for section in found.values()] == [(0, 9), (1, 5)]


def test_overrides_are_also_arguments_of_a_command() -> None:
    given = {
        "run": {"name": "x"},
        "environments": {"a": {"name": "arithmetic"}},
        "learner__learning_rate": 1e-6,
        "engine__args": ["--seed=1"],
        "model": {"chat_template": None, "source": date(2026, 1, 2)},
        "sampling": {"stop": ["🛑"]},
        "run__directory": Path("there"),
    }
    config = loads("", overrides=assignments(given))
    assert config.model.source == "2026-01-02"
    assert (config.run.name, config.learner.learning_rate, config.engine.args) == ("x", 1e-6, ("--seed=1",))
    assert config.sampling.stop == ("🛑",) and config.run.directory == Path("there")


def test_the_written_file_is_the_configuration_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_run_file("@tiny", NumberGuess, overrides={"run__directory": str(tmp_path)})
    assert found.write() == tmp_path / "tiny" / "source" / "run.yaml"
    assert load(found.write(), environment={}) == found.config


def test_source_is_written_beside_the_run_file(tmp_path: Path) -> None:
    from afterplay.run_file import RunFile
    from afterplay.source import PlugIn

    found = read_run_file({}, "babyai", overrides={"run__directory": str(tmp_path)})
    sections = {**found.sections, "environments": {"bank": {}}}
    file = RunFile(found.config, sections, {"environment": PlugIn("Bank", source="class Bank: ...\n")}).write()
    environment = file.with_name("environment.py")
    assert environment.read_text() == "class Bank: ...\n"
    assert load(file, environment={}).environments["bank"].name == f"{environment}:Bank"


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ("@tiny", {"learner__rate": 1}, "^@tiny: .*learner.rate"),
        ("gone.yaml", {}, "expected a run file at gone.yaml, got: No such file"),
        ("@gone", {}, "there are .*@tiny"),
        (3, {}, "^expected the path of a YAML file, .*, got 3"),
        (NumberGuess, {}, "^expected the path of a YAML file, .*, got <class"),
        ("~/gone.yaml", {}, "expected a run file at ~/gone.yaml"),
        ("@tiny", {"run__name__first": 1}, "run.name: expected a valid string, got a section"),
        ({"run": 3}, {}, "run"),
        ("@tiny", {"run": {"name": b"x"}}, r"^run\.name: expected a value that YAML has .*, got b'x'"),
        ({"environments": []}, {"environments": [3]}, "environments"),
    ],
)
def test_what_is_wrong_is_said_at_once(config: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as error:
        read_run_file(config, overrides=overrides)
    assert ", line " not in str(error.value), "lines are of a text that the caller never saw"


def test_an_argument_goes_before_an_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERPLAY__LEARNER__LEARNING_RATE", "0.5")
    monkeypatch.setenv("AFTERPLAY__RUN__SEED", "9")
    found = read_run_file(SECTIONS, NumberGuess, overrides={"learner": {"learning_rate": 0.25}})
    assert (found.config.learner.learning_rate, found.config.run.seed) == (0.25, 9)
    assert {name for name in found.variables if name.startswith("AFTERPLAY__")} == {"AFTERPLAY__RUN__SEED"}
    assert found.variables.keys() > {"PATH"}


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        ({"environments": [3]}, {}, "expected a section environments with keys and values, got [3]"),
        ({"environments": {"number_guess": "x"}}, {}, "expected a section number_guess with keys and values, got 'x'"),
        ({}, {"environments": {"number_guess": 3}}, "expected a section number_guess with keys and values, got 3"),
        ({"scorer": ["exact"]}, {}, "expected a section scorer with keys and values, got ['exact']"),
        ({"scorer": {"functions": "exact"}}, {}, "expected scorer.functions to be a list, got 'exact'"),
    ],
)
def test_a_section_of_a_wrong_kind_is_named(config: Any, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read_run_file(config, NumberGuess, bonus, overrides)
    assert message in str(error.value)
