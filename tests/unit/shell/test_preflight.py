"""The checks before and beside a run: lasting faults stop it, passing ones and those of the checks do not."""

from __future__ import annotations

import re
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import actors.process.preflight
from actors.process.preflight import check_environments, check_prompts
from actors.rollout.rollout import classified
from learner.models.tiny import build_tokenizer
from pipeline.config import RunConfig
from pipeline.config.learner import LearnerConfig
from pipeline.config.load import loads
from pipeline.config.rewards import ScorerConfig
from pipeline.errors import ConfigurationError, Findings, PlugInError, boundary
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Task
from pipeline.supervisor import preflight
from tests.support.chat_server import chat_server

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


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"command": ["python", "agent.py"]}, ""),
        ({"command": ["python", "tests.py"]}, ""),  # of the episode
        ({"command": ["python", "none.py"]}, r"command: expected a program at .*none.py, got none"),
        ({"command": ["python", "agent.py"], "folder": "f"}, r"command: expected a program at .*f.agent.py, got none"),
        ({"command": ["python", "agent.py"], "folder": "none"}, r"folder: expected a folder at .*none, got none"),
        ({"command": ["./agent.py"]}, "command: expected a program at .*agent.py, got a file that may not be executed"),
        ({"command": ["~/agent"]}, "command: expected a program at .*agent, got none"),
        ({"command": "python agent.py"}, "command: expected a list, got 'python agent.py'"),
        ({"function": "given.py:GIVEN"}, "function: expected a function, got 3"),
    ],
)
def test_a_program_that_cannot_start_is_a_problem(
    game: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], problem: str
) -> None:
    game.write_text(GAME.replace("messages =", "files = {'tests.py': ''}\n    messages ="))
    game.with_name("agent.py").write_text("")
    game.with_name("given.py").write_text("GIVEN = 3")
    game.with_name("f").mkdir()
    monkeypatch.chdir(game.parent)
    found = Findings()
    loop = {"name": "program", "options": {**options, "sandbox": "none"}}
    check_environments(configured(game, loop=loop), {}, found)
    expected = [f"environments.game.loop.options.{problem}"] if problem else []
    assert len(found.problems) == len(expected)
    assert all(re.match(*pair) for pair in zip(expected, found.problems, strict=True)), found.problems


@pytest.mark.parametrize(
    ("name", "reward", "functions", "problem"),
    [
        ("game.py:Game", "scorer", [], "reward is scorer and no part of the scorer applies to game"),
        ("game.py:Game", "scorer", [{"path": "length"}], ""),
        ("game.py:Game", "environment", [], ""),
        ("program", "environment", [], "reward is environment, the environment program judges nothing, and no part of"),
        ("program", "environment", [{"path": "length"}], ""),
        ("program", "program", [], ""),
    ],
)
def test_a_program_that_nobody_judges_is_a_problem(
    game: Path, monkeypatch: pytest.MonkeyPatch, name: str, reward: str, functions: list[Any], problem: str
) -> None:
    """Every reward would be 0."""
    monkeypatch.chdir(game.parent)
    options = {"command": ["true"], "sandbox": "none", "reward": reward}
    config = configured(game, name=name, loop={"name": "program", "options": options})
    scorer, found = ScorerConfig.model_validate({"functions": functions}), Findings()
    check_environments(config.model_copy(update={"scorer": scorer}), {}, found)
    judged = [line for line in found.problems if "every reward would be 0" in line]
    assert [problem in line for line in judged] == ([True] if problem else [])


def prepared(config: RunConfig) -> RunDirectory:
    directory = RunDirectory(config.run.path).create()
    build_tokenizer(8).save_pretrained(directory.model)
    (directory.model / "config.json").write_text("{}")
    return directory


@pytest.mark.parametrize("at_once", [True, False])
def test_a_missing_split_is_said_before_anything_is_played_where_a_run_waits(game: Path, at_once: bool) -> None:
    config, found = configured(game), Findings()
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 1})})
    with pytest.raises(ConfigurationError) if at_once else nullcontext():
        check_environments(config, {}, found, at_once)
    assert "evaluation.split is eval, which is not there" in found.problems[0]
    assert any("episode of" in note for note in found.notes) is not at_once


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


@pytest.mark.parametrize("url", [None, "http://127.0.0.1:1"])
def test_the_proposed_length_is_the_least_with_room_for_the_first_reply(url: str | None, game: Path) -> None:
    game.write_text(GAME.replace('"guess"', '"guess " * 90'))
    config = configured(game).model_copy(update={"learner": LearnerConfig(reference={"url": url})})
    folder = prepared(config).model
    openings = check_environments(config, {}, Findings())

    def said(length: int) -> list[str]:
        found = Findings()
        check_prompts(config.updated(model={"max_length": length}), openings, folder, found)
        return found.problems + [note for note in found.notes if "first reply has room" in note]

    proposed = re.search(r"set model\.max_length to at least (\d+)", said(64)[0])
    assert proposed is not None
    assert said(int(proposed[1])) == []
    assert said(int(proposed[1]) - 1) != []


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


WAIT = "actors.process.preflight.log.told.wait, 20"


@pytest.mark.parametrize("where", ["start", "step"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_call_that_takes_long_is_named_while_it_does(
    where: str, is_async: bool, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = threading.Event()
    line = f"environments.game: environment {where} has not returned for 0.05 s; the check waits up to 60 s"
    monkeypatch.setattr(actors.process.preflight, "TELL_SECONDS", 0.05)
    monkeypatch.setattr(actors.process.preflight.log, "told", told, raising=False)
    monkeypatch.setattr(actors.process.preflight.log, "warning", lambda said: told.set() if said == line else None)
    head = {"start": "def start(self, task):\n", "step": "def step(self, reply):\n"}[where]
    waits = f"await asyncio.to_thread({WAIT})" if is_async else f"functools.partial({WAIT})()"
    slow = f"{'async ' * is_async}{head}        assert {waits}\n"
    game.write_text("import asyncio, functools\nimport actors.process.preflight\n" + GAME.replace(head, slow))
    found = Findings()
    check_environments(configured(game), {}, found)
    assert found.problems == []


def test_a_call_that_never_returns_is_a_problem(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.process.preflight, "BLOCKED_SECONDS_MAX", 0.2)
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
    ("value", "problem"),
    [
        ("0.5", ""),
        ("None", "it returned None"),
        ("'good'", "expected a number or None, got str: good"),
        ("float('nan')", "it returned nan"),
        ("{}['x']", "KeyError: 'x' (scores.py, line"),
    ],
)
@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_functions_that_are_awaited_or_take_several_are_tried(
    name: str, per: str, value: str, problem: str, weight: float, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(game.parent)
    (game.parent / "scores.py").write_text(SCORES.replace("VALUE", value))
    function = {"path": f"{game.parent / 'scores.py'}:{name}", "per": per, "weight": weight}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    said = found.problems if weight else [line for line in found.notes if "scorer.functions" in line]
    assert [problem in line for line in said] == ([True] if problem else [])
    assert weight or not found.problems, "a part without weight may fail"


@pytest.mark.parametrize(
    "code",
    [
        "def pay(completions, **kwargs):\n    return [float(len(c)) for c in completions]",
        "def pay(prompts, completions, **kwargs):\n    return [0.0 for _ in completions]",
        "def pay(prompts, completions, answer, **kwargs):\n    return [0.0 for _ in completions]",
        "def pay(completions):\n    return [0.0]",
        "async def pay(completions, **kwargs):\n    return [float(len(c)) for c in completions]",
        "def pay(solution_str, ground_truth):\n    return 0.0",
    ],
)
@pytest.mark.parametrize("per", ["trajectory", "group"])
def test_a_reward_function_of_another_library_is_a_problem(code: str, per: str, game: Path) -> None:
    (game.parent / "other.py").write_text(code)
    function = {"path": f"{game.parent / 'other.py'}:pay", "per": per}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    (problem,) = found.problems
    assert "other.py:pay" in problem
    assert any(words in problem for words in ("rajectory", "a list of 2 numbers", "got list"))


def test_a_function_that_takes_too_long_is_not_checked_and_that_is_said(
    game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.process.preflight, "SCORE_SECONDS_MAX", 0.05)
    (game.parent / "scores.py").write_text(SCORES.replace("asyncio.sleep(0)", "asyncio.sleep(60)"))
    function = {"path": f"{game.parent / 'scores.py'}:later"}
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": [function]})})
    found = Findings()
    check_environments(config, {}, found)
    assert found.notes[-1].endswith("scores.py:later: not checked, it gave no value within 0.05 s")


def test_functions_that_want_a_worker_are_tried_in_one(game: Path) -> None:
    bodies = {
        "pay": ("return 0.5", ""),
        "raises": ("raise ValueError('no rate')", "(every reply is '1'): ValueError: no rate"),
        "leaves": ("__import__('sys').exit(3)", "(every reply is '1'): SystemExit: it called sys.exit(3)"),
        "dies": ("__import__('os')._exit(3)", "(every reply is '1'): BrokenWorkerProcess"),
    }
    file = game.parent / "apart.py"
    file.write_text("".join(f"def {name}(trajectory):\n    {body}\n" for name, (body, _) in bodies.items()))
    functions = [{"path": f"{file}:{name}", "worker": True} for name in bodies]
    config = configured(game).model_copy(update={"scorer": ScorerConfig.model_validate({"functions": functions})})
    found = Findings()
    check_environments(config, {}, found)
    expected = [(name, problem) for name, (_, problem) in bodies.items() if problem]
    for line, (name, problem) in zip(found.problems, expected, strict=True):
        assert f"apart.py:{name}" in line and problem in line


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


OWN = {
    "loss": (
        "loss.policy",
        "def good(tokens, rules):\n    return -tokens.advantages * tokens.log_ratio.exp()\n"
        "def scalar(tokens, rules):\n    return (tokens.advantages * tokens.logprobs).mean()\n"
        "def detached(tokens, rules):\n    return tokens.advantages * tokens.logprobs.detach()\n"
        "def constant(tokens, rules):\n    return tokens.logprobs * 0\n"
        "def typo(tokens, rules):\n    return tokens.advantage * tokens.logprobs\n"
        "def one(tokens):\n    return tokens.logprobs\n"
        "def infinite(tokens, rules):\n    return tokens.logprobs / 0\n"
        "def nothing(tokens, rules):\n    return None\n"
        "def leaves(tokens, rules):\n    exit(3)\n"
        "def in_place(tokens, rules):\n"
        "    y = tokens.log_ratio.exp()\n    z = y * y\n    y += 1\n    return z\n",
        {
            "good": "",
            "scalar": "expected one loss for each of",
            "detached": "expected losses with a gradient",
            "constant": "a gradient other than 0",
            "typo": "no attribute 'advantage' (mine.py, line 10, in typo)",
            "one": "takes 1 positional argument",
            "infinite": "expected a finite loss and gradient",
            "nothing": "expected one loss for each of",
            "leaves": "SystemExit: it called sys.exit(3) (mine.py, line",
            "in_place": "loss.policy PATH:in_place, backward, failed with RuntimeError",
        },
    ),
    "estimator": (
        "advantage.estimator",
        "import numpy as np\nfrom learner.advantages.base import Estimates\n"
        "def good(scored, config):\n    return Estimates(tuple(np.full(s.n_tokens, s.reward) for s in scored))\n"
        "def one(scored):\n    return Estimates(())\n"
        "def plain(scored, config):\n    return [s.reward for s in scored]\n"
        "def lists(scored, config):\n    return Estimates(tuple([s.reward] * s.n_tokens for s in scored))\n"
        "def scalars(scored, config):\n    return Estimates(tuple(s.reward for s in scored))\n"
        "def few(scored, config):\n    return Estimates(())\n"
        "def typo(scored, config):\n    return scored[0].rewards\n"
        "def leaves(scored, config):\n    exit('enough')\n"
        "def values(scored, config):\n    return Estimates(tuple(s.values for s in scored))\n"
        "values.needs = {'values'}\n",
        {
            "good": "",
            "one": "takes 1 positional argument",
            "plain": "expected Estimates (from learner.advantages.base import Estimates), got list",
            "lists": "one for each trained token, got list",
            "scalars": "one for each trained token, got float",
            "few": "expected advantages as a tuple of 8 arrays",
            "typo": "no attribute 'rewards' (mine.py, line 16, in typo)",
            "leaves": "SystemExit: it called sys.exit('enough') (mine.py, line",
            "values": "",
        },
    ),
    "shaping": (
        "advantage.shaping",
        "from dataclasses import replace\n"
        "def good(scored, trajectories):\n    return [replace(p, reward=p.reward - 0.1 * len(t.turns)) "
        "for p, t in zip(scored, trajectories)]\n"
        "def one(scored):\n    return scored\n"
        "def fewer(scored, trajectories):\n    return scored[1:]\n"
        "def numbers(scored, trajectories):\n    return [p.reward for p in scored]\n"
        "def nothing(scored, trajectories):\n    pass\n"
        "def gold(scored, trajectories):\n    return [t.task.payload['gold'] for t in trajectories]\n"
        "def leaves(scored, trajectories):\n    raise KeyboardInterrupt\n",
        {
            "good": "",
            "one": "takes 1 positional argument",
            "fewer": "expected 8 ScoredTrajectory from the reward shaping",
            "numbers": "expected 8 ScoredTrajectory from the reward shaping",
            "nothing": "'NoneType' object is not iterable",
            "gold": "KeyError: 'gold' (mine.py, line 13, in ",
            "leaves": "KeyboardInterrupt (mine.py, line",
        },
    ),
}


@pytest.mark.parametrize(
    ("section", "key", "name", "problem"),
    [
        ("lessons", "writer", "contrast", ""),
        ("lessons", "writer", "PATH:write", ""),
        ("lessons", "writer", "PATH:wirte", r"has no 'wirte'; it has \['write'\]"),
        ("lessons", "writer", "mine", "expected module:name or path/file.py:name, got 'mine'"),
        ("advantage", "shaping", "mine", "expected module:name or path/file.py:name, got 'mine'"),
    ],
)
def test_a_path_that_leads_to_no_function_is_found_before_a_run(
    game: Path, section: str, key: str, name: str, problem: str
) -> None:
    (file := game.parent / "mine.py").write_text("def write(task, trajectories):\n    return []\n")
    enabled: dict[str, Any] = {"enabled": True} if section == "lessons" else {}
    sections = {section: {**enabled, key: name.replace("PATH", str(file))}}
    config = RunConfig.model_validate({**configured(game).model_dump(exclude_unset=True), **sections})
    found = Findings()
    preflight._check_functions(config, found)
    assert len(found.problems) == bool(problem)
    assert all(re.search(f"^{section}.{key}: .*{problem}", line) for line in found.problems), found.problems


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, (_, _, names) in OWN.items() for name in names])
def test_own_losses_estimators_and_shapings_are_called_before_a_run(
    kind: str, name: str, game: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(game.parent)
    key, code, names = OWN[kind]
    (game.parent / "mine.py").write_text(code)
    section, field = key.split(".")
    path = f"{game.parent / 'mine.py'}:{name}"
    config = RunConfig.model_validate({**configured(game).model_dump(exclude_unset=True), section: {field: path}})
    found = Findings()
    preflight._check_functions(config, found)
    preflight._call_functions(config, {}, found)
    said = [names[name].replace("PATH", path.rpartition(":")[0]) in line for line in found.problems]
    assert said == ([True] if names[name] else []), found.problems
    if name == "typo":
        directory = prepared(config)
        with pytest.raises(ConfigurationError, match="no attribute"):
            preflight.check_beside_run(config)
        directory.metrics_file.write_text("")
        preflight.check_beside_run(config)  # one that resumes is not stopped


STARTS = {
    "seeded": ("return Turn(str(random.Random(task.seed).random()))", ""),
    "drawn": ("return Turn(str(random.random()))", "draw everything random from task.seed"),
    "a coin": ("return Turn(random.choice('ab'))", "draw everything random from task.seed"),
    "a counter": ("self.n = getattr(self, 'n', 0) + 1; return Turn(f'task {self.n}')", "got 'user: task"),
    "the clock": ("import time; return Turn(str(time.monotonic_ns()))", "draw everything random from task.seed"),
    "a system message": ("return Turn('1', f'you are {random.random()}')", "got 'system: you are 0."),
    "async": ("return Turn(str(random.random()))", "draw everything random from task.seed"),
}


@pytest.mark.parametrize("name", STARTS)
def test_prompts_that_do_not_follow_from_the_seed_are_a_problem(name: str, game: Path) -> None:
    body, problem = STARTS[name]
    head = "    async def start" if name == "async" else "    def start"
    game.write_text(f"""
import random
from afterplay import Environment, Episode, Message, Step

class Turn(Episode):
    def __init__(self, text, system=None):
        self.messages = (*((Message("system", system),) if system else ()), Message("user", text))
    def step(self, reply):
        return Step(done=True)

class Game(Environment):
{head}(self, task):
        {body}
""")
    wrong = 0
    for _ in range(8 if name == "a coin" else 1):
        found = Findings()
        check_environments(configured(game), {}, found)
        assert [problem in line for line in found.problems] == ([True] if found.problems else [])
        wrong += bool(found.problems)
    assert wrong > 0 if problem else wrong == 0


TOOLS = """
from afterplay import Environment, Episode, Message, Step, tool

class Turn(Episode):
    messages = (Message("user", "dig"),)
    def step(self, reply):
        return Step(done=True)

class Digging(Turn):
    @tool
    def dig(self, place: int) -> str:
        "Dig."
        return "nothing"

class Given(Turn):
    def __init__(self):
        def dig(place: int) -> str:
            "Dig."
            return "nothing"
        self.tools = [dig]

class Marked(Environment):
    def start(self, task):
        return Digging()

class Set(Environment):
    def start(self, task):
        return Given()

class Shared(Environment):
    @tool
    def dig(self, place: int) -> str:
        "Dig."
        return "nothing"
    def start(self, task):
        return Turn()

class Agent(Marked):
    loop = "tool_agent"

class Plain(Environment):
    def start(self, task):
        return Turn()
"""


@pytest.mark.parametrize(
    ("name", "loop", "problem"),
    [
        *((name, loop, True) for name in ("Marked", "Set", "Shared") for loop in ("multi_turn", "single_turn", None)),
        *((name, "tool_agent", False) for name in ("Marked", "Set", "Shared", "Plain")),
        ("Agent", None, False),
        ("Agent", "multi_turn", True),
        ("Plain", None, False),
    ],
)
def test_tools_that_no_policy_gets_are_a_problem(name: str, loop: str | None, problem: bool, game: Path) -> None:
    game.write_text(TOOLS)
    found = Findings()
    more = {"loop": {"name": loop}} if loop else {}
    check_environments(configured(game, **more).model_copy(update={"environments": {
        "game": configured(game, **more).environments["game"].model_copy(update={"name": f"{game}:{name}"})
    }}), {}, found)  # fmt: skip
    assert [f"{name} has tools (dig), and expected the loop tool_agent" in line for line in found.problems] == (
        [True] if problem else []
    )


JUDGED = {
    "right": ("Good. Score: 7", {}, "", ""),
    "no score": ("I like it.", {}, "", "expected a score from 0 to 10"),
    "no key": ((401, {"error": "no key"}, {}), {}, "refused: ", ""),
    "another model": ((404, {"error": "no model"}, {}), {}, "refused: ", ""),
    "busy": ((503, {"error": "loading"}, {}), {}, "unavailable: ", ""),
    "without weight": ((404, {"error": "no model"}, {}), {"weight": 0}, "", "refused: "),
    "another name in its prompt": ("Score: 7", {"prompt": "{rubric} {reply}"}, "expected {rubric} of the template", ""),
    "nobody": (None, {}, "unavailable: ", ""),
}


@pytest.mark.parametrize("name", JUDGED)
def test_a_judge_is_asked_once_before_a_run(name: str, game: Path) -> None:
    said, options, problem, note = JUDGED[name]
    with chat_server(lambda body: said) as server:
        url = server.url if said is not None else "http://127.0.0.1:9"
        judges = [{"name": "clear", "url": url, "retries": 20, **options}]
        scorer = ScorerConfig.model_validate({"judges": judges})
        found = Findings()
        check_environments(configured(game).model_copy(update={"scorer": scorer}), {}, found)
        assert len(server.requests) == (said is not None and "prompt" not in options)
    assert [problem in line for line in found.problems] == ([True] if problem else [])
    notes = [line for line in found.notes if "clear at" in line]
    assert [note in line for line in notes] == ([True] if note else [])


def test_a_judge_that_is_slow_is_a_note(game: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.process.preflight, "ASK_SECONDS_MAX", 0.05)
    late = threading.Event()
    with chat_server(lambda body: late.wait(20) and "Score: 7") as server:
        scorer = ScorerConfig.model_validate({"judges": [{"name": "clear", "url": server.url}]})
        found = Findings()
        check_environments(configured(game).model_copy(update={"scorer": scorer}), {}, found)
        late.set()
    assert found.problems == [] and "clear at" in found.notes[-1] and "within 0.05 s" in found.notes[-1]


def test_a_reward_model_that_answers_in_another_format_is_a_problem(game: Path) -> None:
    with chat_server(lambda body: (200, {"values": [1]}, {})) as server:
        models = [{"name": "liked", "url": f"{server.url}/chat/completions"}]
        scorer = ScorerConfig.model_validate({"reward_models": models})
        found = Findings()
        check_environments(configured(game).model_copy(update={"scorer": scorer}), {}, found)
    (problem,) = found.problems
    assert "liked at" in problem and "expected scores as a list of 1 values" in problem


def test_a_reference_model_with_another_tokenizer_is_found(game: Path) -> None:
    folder = game.parent / "teacher"
    build_tokenizer(9).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    reference = {"folder": folder}
    config = RunConfig.model_validate({**configured(game).model_dump(), "learner": {"reference": reference}})
    (problem,) = preflight.check_all(config).problems
    assert "expected a model with the policy's tokenizer" in problem
