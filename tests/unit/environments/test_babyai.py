"""The expert's words solve levels through the adapter, so view, actions and rewards are those of the package."""

import pytest

from actors.adapters.babyai import action_of
from actors.environments import Reply


@pytest.mark.parametrize(
    "level", ["BabyAI-GoToRedBallNoDists-v0", "BabyAI-PickupLoc-v0", "BabyAI-UnlockPickup-v0", "BabyAI-GoToObjMaze-v0"]
)
def test_the_experts_words_solve_the_level(kit, level):
    babyai = kit.build("babyai", level=level)
    for seed in range(10):
        replies = babyai.expert(kit.task(seed))
        assert replies, f"no plan for seed {seed}"
        total, last = kit.play(babyai, seed, [f"I think {word} is best: {word}." for word in replies])
        assert (total, last.done, last.signals["solved"]) == (1.0, True, 1.0)


@pytest.mark.parametrize("compact", [False, True])
def test_same_task_starts_the_same_and_another_does_not(kit, compact):
    babyai = kit.build("babyai", level="BabyAI-GoToObj-v0", compact=compact)
    starts = [babyai.start(kit.task(seed)).messages for seed in (*range(12), *range(12))]
    assert starts[:12] == starts[12:]
    assert len({messages[0].content for messages in starts}) > 6


def test_view_names_what_is_where(kit):
    """Follow a ball through turns: what is ahead becomes what is to the right."""
    babyai = kit.build("babyai")
    episode = babyai.start(kit.task(1))
    assert "go to the red ball" in episode.messages[0].content
    seen = [episode.step(Reply(word)).messages[0].content for word in ("right", "right", "forward", "forward", "right")]
    assert "red ball 2 steps ahead and 2 to the right" in seen[1]
    assert "red ball 2 to the right" in seen[3]
    assert "a red ball 2 steps ahead." in seen[4]


def test_unknown_words_cost_a_step_and_are_told(kit):
    babyai = kit.build("babyai", steps=3)
    total, last = kit.play(babyai, 1, ["", "fly", "hm"])
    assert (total, last.done, last.signals) == (0.0, True, {"unknown_action": 1.0, "solved": 0.0})
    step = babyai.start(kit.task(1)).step(Reply("jump"))
    assert "Reply with one of" in step.messages[0].content


def test_unknown_words_move_nothing_and_end_no_level(kit):
    """Where ``done`` ends a level, and pays beside the goal, nonsense must do neither."""
    there = kit.build("babyai", level="MiniGrid-GoToObject-6x6-N2-v0", compact=True)
    for seed in range(20):
        episode = there.start(kit.task(seed))
        before = (episode.game.agent_pos, episode.game.agent_dir)
        steps = [episode.step(Reply("hm")) for _ in range(4)]
        assert [(s.done, s.reward) for s in steps] == [(False, 0.0)] * 4
        assert (episode.game.agent_pos, episode.game.agent_dir) == before and episode.game.step_count == 4
        assert episode.step(Reply("done")).done


def test_unknown_words_can_cost(kit):
    total, _ = kit.play(kit.build("babyai", steps=4, unknown_pays=-0.25), 1, ["fly", "left", "hm", "right"])
    assert total == -0.5


def test_quick_solutions_can_pay_more(kit):
    babyai = kit.build("babyai", quick_pays_more=True)
    total, _ = kit.play(babyai, 1, babyai.expert(kit.task(1)))
    assert 0.8 < total < 1.0


def test_last_action_word_counts():
    assert action_of("Not left, go FORWARD!") == "forward"
    assert action_of("leftover") is None and action_of("") is None
    assert action_of("x" * 10_000_000) is None


def test_unknown_level_is_refused(kit):
    with pytest.raises(Exception, match="BabyAI-NoSuch-v0"):
        kit.build("babyai", level="BabyAI-NoSuch-v0")


def test_redrawn_starts_print_nothing(kit, capfd):
    babyai = kit.build("babyai", level="BabyAI-PickupLoc-v0")
    for seed in range(20):
        babyai.start(kit.task(seed)).close()
    assert "Sampling" not in capfd.readouterr().out
