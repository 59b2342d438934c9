"""The checks before and beside a run: lasting faults stop it, passing ones and those of the checks do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.preflight import check_environments
from learner.models.tiny import build_tokenizer
from pipeline.config import RunConfig
from pipeline.config.load import loads
from pipeline.errors import ConfigurationError, PlugInError, boundary
from pipeline.runtime.findings import Findings
from pipeline.runtime.rundir import RunDirectory
from pipeline.supervisor import preflight

GAME = """
from actors.environments import Environment, Episode, Step
from pipeline.schema import Message

class Turn(Episode):
    messages = (Message("user", "guess"),)

    def step(self, reply):
        return Step(done=True)

class Game(Environment):
    def __init__(self, fails=0):
        self.fails = fails

    def start(self, task):
        if task.seed < self.fails:
            raise RuntimeError("the server is away")
        return Turn()
"""


@pytest.fixture
def game(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.nice", lambda by: by)
    file = tmp_path / "game.py"
    file.write_text(GAME)
    return file


def configured(game: Path, **more: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"directory": game.parent, "name": "run"},
            "model": {"source": "tiny", "max_length": 64},
            "sampling": {"max_tokens": 1},
            "environments": {"game": {"name": f"{game}:Game", **more}},
        }
    )


def prepared(config: RunConfig) -> RunDirectory:
    directory = RunDirectory(config.run.path).create()
    build_tokenizer(8).save_pretrained(directory.model)
    (directory.model / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize(("fails", "problems"), [(0, 0), (2, 0), (3, 1)])
def test_an_environment_that_fails_now_and_then_is_right(game: Path, fails: int, problems: int) -> None:
    found = Findings()
    check_environments(configured(game, options={"fails": fails}), {}, found)
    assert len(found.problems) == problems
    assert [line for line in found.problems if "RuntimeError: the server is away" not in line] == []


def test_a_run_that_resumes_is_not_stopped_by_what_an_environment_raises(game: Path) -> None:
    config = configured(game, options={"fails": 9})
    directory = prepared(config)
    with pytest.raises(ConfigurationError, match="the server is away"):
        preflight.check_beside_run(config)
    directory.metrics_file.write_text("")
    preflight.check_beside_run(config)


def test_a_prompt_is_measured_as_soon_as_the_model_is_there(game: Path) -> None:
    game.write_text(GAME.replace('"guess"', '"guess " * 90'))
    config = configured(game)
    prepared(config)
    with pytest.raises(ConfigurationError, match=r"shorter than model\.max_length \(64 tokens\), got 93 tokens"):
        preflight.check_beside_run(config)


def test_an_error_of_a_check_stops_no_run(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: str) -> Any:
        raise RuntimeError(f"{path} is broken")

    monkeypatch.setattr(preflight, "load_main", broken)
    preflight.check_beside_run(configured(game))


def test_a_program_that_asks_for_completions_is_not_played() -> None:
    found = Findings()
    text = (Path(__file__).resolve().parents[3] / "configs" / "program.yaml").read_text()
    check_environments(loads(text), {}, found)
    assert found.notes == ["environments.guess: not played, its agent requests completions itself"]
    assert found.problems == []


def test_an_error_of_user_code_has_its_line(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(game.parent)
    program = compile("import json\n\ndef read():\n    json.loads('{')\n", str(game.parent / "mine.py"), "exec")
    names: dict[str, Any] = {}
    exec(program, names)
    with pytest.raises(PlugInError) as caught, boundary("environment step"):
        names["read"]()
    assert caught.value.line == "mine.py, line 4, in read"
    assert caught.value.sentence.endswith("(mine.py, line 4, in read)")
    with pytest.raises(PlugInError) as caught, boundary("environment step"):
        raise SystemExit(3)
    assert "test_preflight.py" in caught.value.line
