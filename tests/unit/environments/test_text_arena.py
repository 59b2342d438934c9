"""The games of the list start, go on and end, and leave the global random state alone."""

import random

import pytest

from actors.adapters.text_arena import GAMES
from actors.environments import Reply
from pipeline.errors import ConfigurationError

SLOW = {"Sokoban-v0", "RushHour-v0"}
MOVES = ["[up]", "[1]", "[0 0]", "[left]", "[A B]", "[5]", "hello", "[10]", "[hit]", "[1 2 3 4]"]


@pytest.mark.parametrize("game", sorted(set(GAMES) - SLOW))
def test_game_plays_the_same_for_the_same_task_beside_others(kit, game):
    arena = kit.build("textarena", game=game)
    random.seed(4)
    before = random.getstate()
    first, second = arena.start(kit.task(7)), arena.start(kit.task(7))
    assert first.messages == second.messages and first.messages[0].content
    for move in MOVES * 6:
        steps = [episode.step(Reply(move)) for episode in (first, second)]
        assert steps[0] == steps[1]
        assert steps[0].done or steps[0].messages[0].content
        if steps[0].done:
            break
    else:
        pytest.fail("the game did not end")
    assert random.getstate() == before


def test_a_binary_search_wins_guess_the_number(kit):
    arena = kit.build("textarena", game="GuessTheNumber-v0")
    for seed in range(20):
        episode, low, high = arena.start(kit.task(seed)), 1, 20
        while True:
            guess = (low + high) // 2
            step = episode.step(Reply(f"[{guess}]"))
            if step.done:
                break
            low, high = (guess + 1, high) if "higher" in step.messages[0].content else (low, guess - 1)
        assert (step.reward, step.signals["solved"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("game", "move"), [("GuessTheNumber-v0", "[{}]"), ("LightsOut-v0", "[{} {}]"), ("Minesweeper-v0", "[{} {}]")]
)
def test_a_number_that_python_does_not_read_is_a_move_like_other_wrong_ones(kit, game, move):
    episode = kit.build("textarena", game=game).start(kit.task(1))
    step = episode.step(Reply(move.format("9" * 5000, "9" * 5000)))
    assert step.done or step.messages[0].content


def test_tower_of_hanoi_is_solved_by_its_moves(kit):
    arena = kit.build("textarena", game="TowerOfHanoi-v0")

    def moves(n, a, b, c):
        return [*moves(n - 1, a, c, b), f"[{a} {c}]", *moves(n - 1, b, a, c)] if n else []

    total, last = kit.play(arena, 1, moves(3, "A", "B", "C"))
    assert (total, last.done) == (1.0, True)


def test_what_a_loss_pays_is_an_option(kit):
    for pays, reward in ((None, -1.0), (0.0, 0.0)):
        arena = kit.build("textarena", game="Bandit-v0", loss_pays=pays)
        total, last = kit.play(arena, 1, ["nonsense"] * 10)
        assert (total, last.signals["invalid_move"]) == (reward, 1.0)


@pytest.mark.parametrize(("game", "says"), [("Nope-v0", "not found"), ("Poker-v0", "cannot be played")])
def test_what_cannot_be_played_says_why(kit, game, says):
    with pytest.raises(ConfigurationError, match=says):
        kit.build("textarena", game=game)
