"""Any Gymnasium environment runs with a describe function by import path."""

import importlib
import sys

import pytest

from actors.environments import Reply
from pipeline.errors import ConfigurationError

HELPERS = """
def describe(observation, env):
    return f"You stand on square {observation} of {env.observation_space.n}."

def cards(observation, env):
    return "Your sum is {}, the dealer shows {}.".format(*observation)

def parse(reply, env):
    try:
        return float(reply)
    except ValueError:
        return None

def steer(reply, env):
    import numpy as np
    value = parse(reply, env)
    return None if value is None else np.array([value], dtype=np.float32)
"""
WORDS = ["left", "down", "right", "up"]

GAMES = """
import time
import gymnasium

class Count(gymnasium.Env):
    closed, seconds = [], 0.0

    def __init__(self, space="discrete"):
        spaces = {"discrete": gymnasium.spaces.Discrete(3, start=5), "bits": gymnasium.spaces.MultiBinary(3)}
        self.action_space, self.observation_space = spaces[space], gymnasium.spaces.Discrete(9)

    def reset(self, *, seed=None, options=None):
        time.sleep(self.seconds)
        return 0, {}

    def step(self, action):
        return action, 0.0, False, False, {}

    def close(self):
        self.closed.append(self)

gymnasium.register("Count-v0", entry_point=Count)
"""


@pytest.fixture
def helpers(tmp_path):
    (tmp_path / "helpers.py").write_text(HELPERS)
    return str(tmp_path / "helpers.py")


@pytest.fixture
def games(tmp_path, monkeypatch):
    """A module that registers ``Count-v0``: actions 5 to 7, or three bits."""
    gymnasium = pytest.importorskip("gymnasium", reason="pip install '.[gymnasium]'")
    (tmp_path / "counting_games.py").write_text(GAMES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "counting_games", raising=False)
    yield importlib.import_module("counting_games")
    gymnasium.registry.pop("Count-v0", None)


def lake(kit, helpers, **more):
    return kit.build(
        "gymnasium",
        id="FrozenLake-v1",
        options={"is_slippery": False},
        describe=f"{helpers}:describe",
        actions=WORDS,
        **more,
    )


def test_words_reach_the_goal(kit, helpers):
    total, last = kit.play(lake(kit, helpers), 1, ["I go down.", "down", "right", "right", "down", "Right!"])
    assert (total, last.done, last.messages) == (1.0, True, ())


def test_observations_are_described_and_unknown_words_told(kit, helpers):
    episode = lake(kit, helpers).start(kit.task(1))
    assert episode.messages[0].content.endswith("You stand on square 0 of 16.")
    assert episode.step(Reply("down")).messages[0].content == "You stand on square 4 of 16."
    step = episode.step(Reply("downwards"))
    assert (step.done, step.signals) == (False, {"unknown_action": 1.0}) and "one of: left" in step.messages[0].content
    assert lake(kit, helpers, unknown_ends=True).start(kit.task(1)).step(Reply("?")).done


def test_same_task_starts_the_same(kit, helpers):
    cards = kit.build("gymnasium", id="Blackjack-v1", describe=f"{helpers}:cards", actions=["stick", "hit"])
    starts = [cards.start(kit.task(seed)).messages for seed in (*range(9), *range(9))]
    assert starts[:9] == starts[9:] and len(set(m[0].content for m in starts)) > 3


def test_other_action_spaces_have_a_parse_function(kit, helpers):
    pendulum = kit.build("gymnasium", id="Pendulum-v1", parse=f"{helpers}:steer", options={"max_episode_steps": 4})
    total, last = kit.play(pendulum, 1, ["0.5", "left", "-1", "2", "1"])
    assert total < 0 and last.done


def test_actions_that_begin_elsewhere_are_meant(kit, games):
    episode = kit.build("gymnasium", id="counting_games:Count-v0", actions=["a", "b", "c"]).start(kit.task(1))
    assert [episode.step(Reply(word)).messages[0].content for word in "abc"] == ["5", "6", "7"]


def test_an_action_that_ends_with_the_word_of_another_is_meant(kit, games):
    actions = ["up", "pick up", "up and down"]
    episode = kit.build("gymnasium", id="counting_games:Count-v0", actions=actions).start(kit.task(1))
    replies = ["Pick up", "up", "I pick up, then go up and down."]
    assert [episode.step(Reply(reply)).messages[0].content for reply in replies] == ["6", "5", "7"]


def test_words_cannot_name_what_is_no_single_action(kit, games):
    options = {"id": "counting_games:Count-v0", "options": {"space": "bits"}, "actions": ["a", "b", "c"]}
    with pytest.raises(ConfigurationError, match="or a parse function"):
        kit.build("gymnasium", **options)


def test_an_environment_that_starts_slowly_runs_in_threads(kit, games, monkeypatch):
    options = {"id": "counting_games:Count-v0", "actions": ["a", "b", "c"]}
    monkeypatch.setattr(games.Count, "seconds", 0.02)
    assert kit.build("gymnasium", **options).blocking


def test_an_episode_that_cannot_start_leaves_nothing_open(kit, games, helpers, monkeypatch):
    count = kit.build("gymnasium", id="counting_games:Count-v0", actions=["a", "b", "c"])
    games.Count.closed.clear()
    count._describe = lambda seen, env: 1 / 0
    with pytest.raises(ZeroDivisionError):
        count.start(kit.task(1))
    assert len(games.Count.closed) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "NoSuch-v0"}, "NoSuch"),
        ({"actions": ["left"]}, "a different word for each action"),
        ({"actions": ["left", "down", "right", "Left"]}, "a different word for each action"),
        ({"actions": WORDS, "describe": "no_such_module:x"}, "no_such_module"),
        ({"actions": WORDS, "describe": "math:pi"}, "to be a function"),
    ],
)
def test_wrong_options_say_what_would_be_right(kit, options, says):
    with pytest.raises(ConfigurationError, match=says):
        kit.build("gymnasium", **options)
