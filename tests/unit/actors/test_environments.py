"""Environments are found by name, built from checked options, and start the same for the same task."""

from __future__ import annotations

import math
import threading
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.adapters.games import Arithmetic, NumberGuess, Passcode
from actors.environments import Environment, Episode, Reply, Step, plugins
from actors.environments import plugins as discovery
from actors.environments.host import EnvironmentHost
from actors.rollout.agent_loop import Answer, checked_answer
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError, PlugInError, PlugInTimeout
from pipeline.schema import Message, Task

PLUG_IN = """
from dataclasses import dataclass
from actors.environments import Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

@dataclass
class Echo(Environment):
    word: str = "hello"

    def start(self, task: Task) -> Episode:
        return EchoEpisode(self.word)

class EchoEpisode(Episode):
    def __init__(self, word: str) -> None:
        self.messages = (Message("user", f"Say {word}."),)
        self.word = word

    def step(self, reply: Reply) -> Step:
        return Step(reward=float(self.word in reply), done=True)
"""


def build(name: str, **options: Any) -> Environment:
    return discovery.build("game", EnvironmentConfig(name=name, options=options))


def start(environment: Environment, seed: int) -> Episode:
    episode = environment.start(Task(f"t/{seed}", "game", seed))
    assert isinstance(episode, Episode)
    return episode


@given(seed=st.integers(0, 2**63 - 1))
def test_same_task_starts_the_same(seed: int) -> None:
    for environment in (Arithmetic(), NumberGuess(), Passcode()):
        first, second = start(environment, seed), start(environment, seed)
        assert first.messages == second.messages
        assert first.step(Reply("7")) == second.step(Reply("7"))


@given(seed=st.integers(0, 1000), wrong=st.integers(0, 3))
def test_arithmetic_pays_less_for_each_later_attempt(seed: int, wrong: int) -> None:
    episode = start(build("arithmetic", attempts=4), seed)
    words = episode.messages[0].content.split()
    answer = int(words[2]) + int(words[4].rstrip("?"))
    steps = [episode.step(Reply(f"Is {answer}? No, it is {answer + 1}.")) for _ in range(wrong)]
    last = episode.step(Reply(f"1 + 1 = {answer}."))
    assert all(step.reward == 0 and not step.done and step.messages for step in steps)
    assert last.reward == 0.5**wrong and last.done
    signals = [step.signals for step in [*steps, last]]
    assert signals[0] == {"first_right": float(wrong == 0)} and not any(signals[1:])


def test_arithmetic_ends_after_the_last_attempt_without_reward() -> None:
    episode = start(build("arithmetic"), 3)
    first, second = episode.step(Reply("")), episode.step(Reply("9" * 5000))
    assert (first.done, second.done, first.reward + second.reward) == (False, True, 0.0)


@given(seed=st.integers(0, 1000))
def test_number_guess_is_solved_by_bisection_on_what_it_says(seed: int) -> None:
    episode = start(build("number_guess", compact=True, turns=5), seed)
    assert [m.content for m in episode.messages] == ["guess"]
    low, high = 0, 15
    for _ in range(5):
        middle = (low + high) // 2
        step = episode.step(Reply(str(middle)))
        if step.done:
            break
        low, high = (middle + 1, high) if step.messages[0].content == "higher" else (low, middle - 1)
    assert step.done and step.reward == 1.0 and step.signals == {"solved": 1.0}


def test_number_guess_pays_closeness_only_when_it_is_over() -> None:
    for closeness, expected in ((0.0, 0.0), (0.5, 0.5 * (1 - 1 / 16))):
        episode = start(build("number_guess", turns=2, closeness=closeness), 0)
        hidden = episode._hidden
        near = hidden + 1 if hidden < 15 else hidden - 1
        assert episode.step(Reply("no idea")).reward == 0.0
        last = episode.step(Reply(str(near)))
        assert last.done and last.reward == pytest.approx(expected) and last.signals == {"solved": 0.0}


@given(lock=st.integers(0, 1000), wrong_at=st.none() | st.integers(0, 2))
def test_passcode_pays_only_for_the_whole_code_and_ends_at_the_first_wrong_number(
    lock: int, wrong_at: int | None
) -> None:
    environment = build("passcode", lengths=(1, 2, 3), answers=(1, 2), numbers=5, compact=True)
    assert isinstance(environment, Passcode)
    code = environment.code(lock)
    assert len(code) == lock % 3 + 1 and all(len(place) == lock % 2 + 1 and place <= set(range(5)) for place in code)
    episode = start(environment, lock)
    assert [m.content for m in episode.messages] == [f"open {lock}"]
    for turn, place in enumerate(code):
        right = turn != wrong_at
        step = episode.step(Reply(str(min(place if right else set(range(5)) - place))))
        opened = right and turn == len(code) - 1
        assert (step.reward, step.done) == (float(opened), opened or not right)
        assert [m.content for m in step.messages] == ([] if step.done else ["yes"])
        assert step.signals == ({"solved": step.reward} if step.done else {})
        if step.done:
            break


def test_passcode_refuses_a_code_without_numbers() -> None:
    with pytest.raises(ConfigurationError, match="lengths"):
        build("passcode", lengths=(0, 2))
    with pytest.raises(ConfigurationError, match="answers"):
        build("passcode", numbers=4, answers=(5,))


def test_environment_in_a_file_needs_no_edit_elsewhere(tmp_path: Path) -> None:
    assert len(PLUG_IN.strip().splitlines()) < 30
    file = tmp_path / "echo.py"
    file.write_text(PLUG_IN)
    environment = build(f"{file}:Echo", word="yes")
    assert start(environment, 0).messages[0].content == "Say yes."
    assert type(environment) is type(build(f"{file}:Echo"))


def test_environment_is_found_in_a_module_and_as_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "actors.adapters.games:Arithmetic"
    assert isinstance(build(path), Arithmetic)
    points = [EntryPoint("sums", path, discovery.GROUP), EntryPoint("broken", "no_such_module:X", discovery.GROUP)]
    monkeypatch.setattr(plugins, "entry_points", lambda group: points)
    assert isinstance(build("sums"), Arithmetic)
    with pytest.raises(ConfigurationError, match="no_such_module"):
        build("broken")
    with pytest.raises(ConfigurationError, match=r"arithmetic, .*broken, .*number_guess, .*passcode, .*sums"):
        build("chess")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("chess", {}, "environments.game: there is no environment 'chess'"),
        ("no.such.module:X", {}, "no.such"),
        ("no/such/file.py:X", {}, "no file"),
        ("actors.adapters.games:Nothing", {}, r"\['Arithmetic', 'ArithmeticEpisode', "),
        ("actors.environments.base:Step", {}, "method start"),
        ("pathlib:Path.home", {}, "pathlib"),
        ("arithmetic", {"hgih": 3}, "unknown hgih; Arithmetic takes low, high"),
        ("arithmetic", {"high": 0}, "high"),
        ("arithmetic", {"attempts": "many"}, "attempts"),
        ("number_guess", {"low": 5, "high": 5}, "must be above low"),
    ],
)
def test_what_cannot_be_built_says_what_was_expected(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        build(name, **options)


class _Computed(Environment):
    """An environment whose steps have NumPy values."""

    def start(self, task: Task) -> Episode:
        return _ComputedEpisode()


class _ComputedEpisode(Episode):
    messages = (Message("user", "x"),)

    def step(self, reply: Reply) -> Step:
        return Step((), np.float32(0.5), np.bool_(True), {"n": np.int64(2)})


async def test_numpys_numbers_and_truth_values_are_those_of_a_step() -> None:
    host = EnvironmentHost("c", EnvironmentConfig(name="c"), environment=_Computed())
    step = await host.step(await host.start(Task("c/0", "c", 0)), Reply("a"))
    assert step == Step((), 0.5, True, {"n": 2.0}) and step.done is True


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0), (np.float32(0.5), 0.5), (np.array(0.5), 0.5), (torch.tensor(0.5), 0.5),
        ("1.0", None), (b"1", None), (math.nan, None), (10**400, None), (torch.ones(2), None), (None, None),
    ],
)  # fmt: skip
async def test_environments_and_agent_loops_may_give_the_same_numbers(value: Any, number: float | None) -> None:
    class Game(_Computed):
        def start(self, task: Task) -> Episode:
            return type("Only", (_ComputedEpisode,), {"step": lambda self, reply: Step((), value, True)})()

    host = EnvironmentHost("c", EnvironmentConfig(name="c"), environment=Game())
    episode = await host.start(Task("c/0", "c", 0))
    if number is None:
        with pytest.raises(PlugInError, match="to be a finite number, got"):
            await host.step(episode, Reply("a"))
        with pytest.raises(PlugInError, match="to be a finite number, got"):
            checked_answer(Answer(reward=value, done=True))
    else:
        assert (await host.step(episode, Reply("a"))).reward == number
        assert checked_answer(Answer(reward=value, done=True)).reward == number


class _Slow(Environment):
    """Its start and the steps of its episode take until they may end."""

    blocking = True

    def __init__(self, episode: _Closing) -> None:
        self._episode = episode

    def start(self, task: Task) -> Episode:
        self._episode.may_start.wait()
        return self._episode


class _Closing(Episode):
    messages = (Message("user", "x"),)

    def __init__(self) -> None:
        self.may_start, self.may_step, self.closed = threading.Event(), threading.Event(), threading.Event()

    def step(self, reply: Reply) -> Step:
        self.may_step.wait()
        return Step(done=True)

    def close(self) -> None:
        self.closed.set()


class _ClosingAsync(_Closing):
    async def close(self) -> None:  # type: ignore[override]
        await anyio.sleep(0)
        self.closed.set()


@pytest.mark.parametrize("kind", [_Closing, _ClosingAsync])
async def test_an_episode_that_began_too_late_is_closed(kind: type[_Closing]) -> None:
    episode = kind()
    config = EnvironmentConfig(name="slow", step_seconds_max=0.05)
    with pytest.raises(PlugInTimeout):
        await EnvironmentHost("slow", config, environment=_Slow(episode)).start(Task("slow/0", "slow", 0))
    assert not episode.closed.is_set()
    episode.may_start.set()
    assert await anyio.to_thread.run_sync(episode.closed.wait, 60)


async def test_an_episode_that_finds_no_thread_in_time_is_closed_when_there_is_one() -> None:
    """Its rollout was given up in the middle of a step, which goes on in its thread."""
    episode = _Closing()
    host = EnvironmentHost("slow", EnvironmentConfig(name="slow"), threads_max=1, environment=_Slow(episode))
    episode.may_start.set()
    assert await host.start(Task("slow/0", "slow", 0)) is episode
    for call in (host.step(episode, Reply("x")), host.close(episode)):
        with anyio.move_on_after(0.05) as scope:
            await call
        assert scope.cancelled_caught
    assert not episode.closed.is_set()
    episode.may_step.set()
    assert await anyio.to_thread.run_sync(episode.closed.wait, 60)
