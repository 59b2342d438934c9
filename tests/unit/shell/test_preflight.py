"""The checks before and beside a run: lasting faults stop it, passing ones and those of the checks do not."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import actors.preflight
from actors.preflight import check_environments
from actors.rollout.rollout import classified
from learner.models.tiny import build_tokenizer
from pipeline.config import RunConfig
from pipeline.config.load import loads
from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError, PlugInError, boundary
from pipeline.runtime.findings import Findings
from pipeline.runtime.rundir import RunDirectory
from pipeline.schema import Task
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


WAIT = "actors.preflight.log.told.wait, 20"


@pytest.mark.parametrize("where", ["start", "step"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_long_is_named_while_it_does(
    where: str, is_async: bool, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    line = f"environments.game: environment {where} has not returned for 0.05 s; the check waits up to 60 s"
    monkeypatch.setattr(actors.preflight, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(actors.preflight.log, "told", told, raising=False)
    monkeypatch.setattr(actors.preflight.log, "warning", lambda said: told.set() if said == line else None)
    head = {"start": "def start(self, task):\n", "step": "def step(self, reply):\n"}[where]
    waits = f"await asyncio.to_thread({WAIT})" if is_async else f"functools.partial({WAIT})()"
    slow = f"{'async ' * is_async}{head}        assert {waits}\n"
    game.write_text("import asyncio, functools\nimport actors.preflight\n" + GAME.replace(head, slow))
    found = Findings()
    check_environments(configured(game), {}, found)
    assert found.problems == []


def test_a_call_that_never_returns_is_a_problem(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.preflight, "BLOCKED_SECONDS_MAX", 0.2)
    game.write_text(GAME.replace("return Step(done=True)", "\n        while True: pass"))
    found = Findings()
    check_environments(configured(game), {}, found)
    (problem,) = found.problems
    assert "environments.game: environment step failed with TimeoutError: it held the event loop for 0.2 s" in problem


SCORES = """
import asyncio

async def later(trajectory):
    await asyncio.sleep(0)
    return VALUE

def each(trajectories):
    return [VALUE for _ in trajectories]

async def every(trajectories):
    return [VALUE for _ in trajectories]
"""


@pytest.mark.parametrize(("name", "per"), [("later", "trajectory"), ("each", "batch"), ("every", "group")])
@pytest.mark.parametrize(
    ("value", "problem", "note"),
    [
        ("0.5", "", ""),
        ("None", "", ""),
        ("'good'", "expected a number or None, got str: good", ""),
        ("float('nan')", "it returned nan", ""),
        ("{}['x']", "", "failed on the scripted episode of game with KeyError: 'x' (scores.py, line"),
    ],
)
def test_functions_that_are_awaited_or_take_several_are_tried(
    name: str, per: str, value: str, problem: str, note: str, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(game.parent)
    (game.parent / "scores.py").write_text(SCORES.replace("VALUE", value))
    function = {"path": f"{game.parent / 'scores.py'}:{name}", "per": per}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    assert [problem in line for line in found.problems] == ([True] if problem else [])
    said = [line for line in found.notes if "scorer.functions" in line]
    assert [note in line for line in said] == ([True] if note else [])


def test_a_function_that_takes_too_long_is_not_checked_and_that_is_said(
    game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.preflight, "SCORE_SECONDS_MAX", 0.05)
    (game.parent / "scores.py").write_text(SCORES.replace("asyncio.sleep(0)", "asyncio.sleep(60)"))
    function = {"path": f"{game.parent / 'scores.py'}:later"}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    assert found.notes[-1].endswith("scores.py:later: not checked, it gave no value within 0.05 s")


@pytest.mark.parametrize(
    ("body", "note"),
    [
        ("return 0.5", ""),
        ("raise ValueError('no rate')", "failed on the scripted episode of game with ValueError: no rate"),
        ("__import__('os')._exit(3)", "failed on the scripted episode of game with BrokenWorkerProcess"),
    ],
)
def test_a_function_that_wants_a_worker_is_tried_in_one(body: str, note: str, game: Path) -> None:
    (game.parent / "apart.py").write_text(f"def pay(trajectory):\n    {body}\n")
    function = {"path": f"{game.parent / 'apart.py'}:pay", "worker": True}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    assert found.problems == []
    said = [line for line in found.notes if "scorer.functions" in line]
    assert [note in line for line in said] == ([True] if note else [])


@pytest.mark.parametrize(("payloads", "problems"), [(({}, {"answer": 1}), 0), (({}, {"question": 1}), 1)])
def test_a_grader_that_can_grade_no_task_is_a_problem(
    game: Path, payloads: tuple[dict[str, Any], ...], problems: int
) -> None:
    tasks = [Task(f"game/{i}", "game", i, payload) for i, payload in enumerate(payloads)]
    scorer = ScorerConfig.model_validate({"functions": [{"path": "exact"}]})
    found = Findings()
    check_environments(configured(game).model_copy(update={"scorer": scorer}), {"game": tasks}, found)
    assert len(found.problems) == problems
    assert all(line.startswith("scorer.functions: exact: expected 'answer' in") for line in found.problems)


def test_graders_of_an_agent_program_are_tried_too() -> None:
    text = (Path(__file__).resolve().parents[3] / "configs" / "program.yaml").read_text()
    found = Findings()
    check_environments(loads(f"{text}\nscorer: {{functions: [{{path: number}}]}}"), {}, found)
    (problem,) = found.problems
    assert problem.startswith("scorer.functions: number: expected 'answer' in the payload of task guess/0")


def test_an_error_of_user_code_has_its_line(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(game.parent)
    program = compile("import json\n\ndef read():\n    json.loads('{')\n", str(game.parent / "mine.py"), "exec")
    names: dict[str, Any] = {}
    exec(program, names)
    with pytest.raises(PlugInError) as caught, boundary("environment step"):
        names["read"]()
    assert caught.value.line == "mine.py, line 4, in read"
    assert str(caught.value).endswith("(mine.py, line 4, in read)")
    assert classified(caught.value).message.endswith("(mine.py, line 4, in read)")
    with pytest.raises(PlugInError) as caught, boundary("environment step"):
        raise SystemExit(3)
    assert "test_preflight.py" in caught.value.line
