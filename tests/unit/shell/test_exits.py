"""An exit in user code is a failure under its name, wherever that code is called: the checks go on, and name it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.process.preflight import check_environments
from pipeline.config import RunConfig
from pipeline.config.lessons import LessonsConfig
from pipeline.config.rewards import ScorerConfig
from pipeline.errors import Findings, PlugInError, boundary, explained, is_failure
from pipeline.lessons.writer import LessonWriter
from pipeline.runtime.plugin_limits import TaskOwner, watch_tasks
from pipeline.scorer.scorer import Scorer
from pipeline.supervisor import preflight
from tests.unit.scorer.test_scorer import trajectory

EXITS = {
    "sys.exit(0)": "SystemExit: it called sys.exit(0)",
    "sys.exit('no licence')": "SystemExit: it called sys.exit('no licence')",
    "exit()": "SystemExit: it called sys.exit(None)",
    "raise KeyboardInterrupt": "KeyboardInterrupt",
    "raise GeneratorExit": "GeneratorExit",
    "raise asyncio.CancelledError": "CancelledError",
    "raise Panic('in Rust')": "Panic: in Rust",
    "raise BaseExceptionGroup('two', [SystemExit(3), ValueError()])": "SystemExit: it called sys.exit(3)",
}
"""Statements that leave, and what is said of them. Some libraries have exceptions that are no ``Exception``."""
AT = "    AT "
CODE = """
import asyncio, sys
from afterplay import Environment, Episode, Message, Step
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Opening
from actors.tools import Tool, ToolResult

class Panic(BaseException):
    pass

AT import
class Turn(Episode):
    def __init__(self):
        self.messages = (Message("user", "1 + 1"),)

    def step(self, reply):
        AT step
        return Step(done=True)

    def close(self):
        AT close

class Waits(Turn):
    async def step(self, reply):
        AT async step
        return Step(done=True)

class Game(Environment):
    turn = Turn

    def __init__(self):
        AT construction

    def start(self, task):
        AT start
        return self.turn()

    def tools(self):
        AT tools
        return ()

    @property
    def splits(self):
        AT splits
        return {}

    def close(self):
        AT end

class Later(Game):
    turn = Waits

class Slow(Game):
    blocking = True

class Look(Tool):
    name, description = "look", "Look."
    parameters = {"type": "object", "properties": {}}

    def __init__(self):
        AT tool construction

    async def create(self, key, task):
        AT tool create

    async def execute(self, key, arguments):
        return ToolResult("x")

    async def close(self):
        AT tool close

class Loop(AgentLoop):
    def __init__(self):
        AT loop construction

    def bind(self, host, renderer, metrics):
        AT loop bind

    def begin(self, game):
        AT loop begin
        return Agent(game)

    async def serve(self):
        AT loop serve

    async def close(self):
        AT loop close

class Agent(AgentEpisode):
    async def start(self):
        AT agent start
        return Opening(self.game.episode.messages)

    async def answer(self, reply):
        AT agent answer
        return Answer.of(await self.game.step(reply))

    async def close(self):
        AT agent close

class Source:
    def __init__(self):
        AT lessons construction
    async def search(self, order_id, query, top_k):
        return []
    async def summarise(self, trajectories):
        return 0
    async def close(self):
        AT lessons close

def pay(trajectory):
    AT reward
    return 1.0

async def pay_later(trajectory):
    AT async reward
    return 1.0

def pay_all(trajectories):
    AT group reward
    return [1.0 for _ in trajectories]

def loss(tokens, rules):
    AT loss
    return -tokens.advantages * tokens.logprobs

def shape(scored, trajectories):
    AT shaping
    return scored

def estimate(scored, config):
    AT estimator
    from learner.advantages.base import Estimates
    import numpy as np
    return Estimates(tuple(np.full(s.n_tokens, s.reward) for s in scored))
"""
PLAIN: dict[str, Any] = {"game": {"name": "FILE:Game"}}
TOOLS: dict[str, Any] = {"game": {**PLAIN["game"], "loop": {"name": "tool_agent", "options": {"tools": ["FILE:Look"]}}}}
LOOP: dict[str, Any] = {"game": {**PLAIN["game"], "loop": {"name": "FILE:Loop"}}}
PLACES: dict[str, dict[str, Any]] = {
    **{at: {"environments": PLAIN} for at in ("import", "construction", "start", "step", "tools", "splits", "end")},
    "async step": {"environments": {"game": {"name": "FILE:Later"}}},
    "step in a thread": {"environments": {"game": {"name": "FILE:Slow"}}},
    **{f"tool {at}": {"environments": TOOLS} for at in ("construction", "create")},
    **{f"loop {at}": {"environments": LOOP} for at in ("construction", "bind", "begin", "serve")},
    **{f"agent {at}": {"environments": LOOP} for at in ("start", "answer", "close")},
    "lessons construction": {"lessons": {"enabled": True, "source": "FILE:Source"}},
    "reward import": {"scorer": {"functions": [{"path": "FILE:pay"}]}},
    "reward": {"scorer": {"functions": [{"path": "FILE:pay"}]}},
    "async reward": {"scorer": {"functions": [{"path": "FILE:pay_later"}]}},
    "group reward": {"scorer": {"functions": [{"path": "FILE:pay_all", "per": "group"}]}},
    "loss import": {"loss": {"policy": "FILE:loss"}},
    "loss": {"loss": {"policy": "FILE:loss"}},
    "estimator": {"advantage": {"estimator": "FILE:estimate"}},
    "shaping": {"advantage": {"shaping": "FILE:shape"}},
}
LOGGED: dict[str, dict[str, Any]] = {
    "close": {"environments": PLAIN},
    "tool close": {"environments": TOOLS},
    "loop close": {"environments": LOOP},
    "lessons close": {"lessons": {"enabled": True, "source": "FILE:Source"}},
}
"""Places where nothing depends on it any more: it is only logged."""


def written(folder: Path, place: str, leaves: str) -> Path:
    """A file of plug-ins that leave at ``place``."""
    at = {"reward import": "import", "loss import": "import", "step in a thread": "step"}.get(place, place)
    lines = []
    for line in CODE.splitlines():
        indent, mark, where = line.partition("AT ")
        lines.append(f"{indent}{leaves if where == at else 'pass'}" if mark and not indent.strip() else line)
    file = folder / "leaving.py"
    file.write_text("\n".join(lines))
    return file


def findings(file: Path, sections: dict[str, Any]) -> Findings:
    """Of all checks that call plug-ins."""

    def filled(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: filled(one) for key, one in value.items()}
        if isinstance(value, list):
            return [filled(one) for one in value]
        return value.replace("FILE", str(file)) if isinstance(value, str) else value

    config = RunConfig.model_validate(
        {
            "run": {"directory": file.parent, "name": "run"},
            "model": {"source": "tiny", "max_length": 64},
            "sampling": {"max_tokens": 1},
            "environments": {"game": {"name": "number_guess"}},
            **filled(sections),
        }
    )
    found = Findings()
    preflight._check_functions(config, found)
    preflight._call_functions(config, {}, found)
    check_environments(config, {}, found)
    return found


@pytest.mark.parametrize("leaves", EXITS)
@pytest.mark.parametrize("place", PLACES)
def test_an_exit_is_a_problem_under_its_name_with_the_line(place: str, leaves: str, tmp_path: Path) -> None:
    found = findings(written(tmp_path, place, leaves), PLACES[place])
    assert found.problems, f"{place} is not told"
    for problem in found.problems:
        assert EXITS[leaves] in problem and "leaving.py, line" in problem


@pytest.mark.parametrize("leaves", EXITS)
@pytest.mark.parametrize("place", LOGGED)
def test_an_exit_at_the_end_is_logged(place: str, leaves: str, tmp_path: Path, caplog: Any) -> None:
    found = findings(written(tmp_path, place, leaves), LOGGED[place])
    said = "\n".join([*found.problems, caplog.text])
    assert EXITS[leaves] in said and "leaving.py, line" in said


@pytest.mark.parametrize("leaves", ["await asyncio.gather(leave())", "await asyncio.create_task(leave())"])
@pytest.mark.parametrize("how", ["sys.exit(4)", "raise KeyboardInterrupt"])
@pytest.mark.parametrize("place", ["async step", "agent start", "agent answer", "async reward"])
def test_an_exit_in_a_task_of_its_own_does_not_end_the_event_loop(
    place: str, leaves: str, how: str, tmp_path: Path
) -> None:
    file = written(tmp_path, place, leaves)
    file.write_text(file.read_text() + f"\n\nasync def leave():\n    {how}\n")
    found = findings(file, PLACES[place])
    (problem,) = found.problems
    assert how.removeprefix("raise ") in problem and "leaving.py, line" in problem


@pytest.mark.parametrize("worker", [False, True])
async def test_a_score_function_that_leaves_has_failed_and_the_next_is_called(worker: bool, tmp_path: Path) -> None:
    """All of them in one worker process, which none of them ends."""
    functions = []
    for number, leaves in enumerate(EXITS):
        (folder := tmp_path / str(number)).mkdir()
        functions.append({"path": f"{written(folder, 'reward', leaves)}:pay", "name": leaves, "worker": worker})
    verdict = await Scorer(ScorerConfig.model_validate({"functions": functions, "workers": 1})).score(trajectory())
    failures = {failure.name: failure for failure in verdict.failures}
    assert verdict.reward is None and failures.keys() == EXITS.keys()
    for leaves, failure in failures.items():
        assert failure.reason == "raised"
        assert EXITS[leaves] in failure.details and "leaving.py, line" in failure.details
        assert failure.cause.endswith(f"raised {EXITS[leaves].partition(':')[0]}")


@pytest.mark.parametrize("leaves", EXITS)
async def test_a_lesson_writer_that_leaves_has_failed(leaves: str, tmp_path: Path) -> None:
    (tmp_path / "writes.py").write_text(
        f"import asyncio, sys\nclass Panic(BaseException): pass\ndef write(task, trajectories):\n    {leaves}\n"
    )
    config = LessonsConfig.model_validate({"enabled": True, "writer": f"{tmp_path / 'writes.py'}:write"})
    with pytest.raises(PlugInError) as caught:
        await LessonWriter(config, 1.0)("task", [trajectory()])
    assert EXITS[leaves].partition(":")[0] == caught.value.kind and "writes.py, line 4" in str(caught.value)


def test_what_user_code_did_not_do_passes() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for guard in (boundary("step"), explained("step")):
            with pytest.raises(KeyboardInterrupt), guard:
                signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)

    async def waits(entered: asyncio.Event) -> None:
        with boundary("step"):
            entered.set()
            await asyncio.sleep(60)

    class Pause:
        def __await__(self) -> Generator[None, None, None]:
            yield

    async def pauses() -> None:
        with boundary("step"):
            await Pause()

    async def cancelled() -> None:
        entered = asyncio.Event()
        task = asyncio.create_task(waits(entered))
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    coroutine = pauses()
    coroutine.send(None)
    coroutine.close()
    assert is_failure(ValueError()) and not is_failure(KeyboardInterrupt())


async def test_tasks_of_plug_ins_end_as_other_tasks_do() -> None:
    watch_tasks()

    async def gives() -> int:
        await anyio.sleep(0)
        return 3

    async def waits() -> None:
        await anyio.sleep_forever()

    async def fails() -> None:
        raise KeyError("x")

    owner = TaskOwner()
    with owner.owning():
        given, failing, waiting = (asyncio.create_task(one()) for one in (gives, fails, waits))
        begun = asyncio.create_task(waits())
    assert await given == 3
    with pytest.raises(KeyError):
        await failing
    assert owner.cancel() == 2
    await asyncio.wait([waiting, begun])
    assert waiting.cancelled() and begun.cancelled()
