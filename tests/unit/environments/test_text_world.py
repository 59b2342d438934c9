"""Gold paths score 1.0 in every game and every split, many games share one Java process and none disturbs another."""

import threading
from pathlib import Path

import pytest
import yaml

from actors.adapters.text_world import ALONE, Game, TextWorldExpress, describe, fold_of
from actors.environments import Reply
from actors.environments.plugins import build
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError

GAMES = Game.__args__


@pytest.fixture
def express(kit):
    made = []

    def make(**options):
        made.append(kit.build("textworld_express", **options))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.fixture(scope="module", params=GAMES)
def world(kit, request):
    """One environment of each game."""
    environment = kit.build("textworld_express", game=request.param, steps=300, jvms=4 if request.param in ALONE else 1)
    yield environment
    environment.close()


@pytest.mark.slow
def test_gold_path_scores_one_in_each_split(kit, world):
    for split in ("train", "dev", "test"):
        seed = world.splits[split][7]
        gold = world.expert(kit.task(seed))
        total, last = kit.play(world, seed, [f"I should do this:\n{action.upper()}." for action in gold])
        assert total == pytest.approx(1.0)
        assert (last.done, last.signals) == (True, {"impossible_action": 0.0, "solved": 1.0})


@pytest.mark.slow
def test_plays_of_one_seed_at_once_do_not_disturb_each_other(kit, world):
    """Several episodes of the same task, at different points, as in a group."""
    task = kit.task(11)
    gold = world.expert(task)[:20]
    alone = world.start(task)
    expected = [alone.step(Reply(action)) for action in gold]
    alone.close()
    episodes, traces = [world.start(task) for _ in range(4)], [[], [], [], []]
    for turn in range(len(gold) + 9):
        for i, episode in enumerate(episodes):
            if 0 <= turn - 3 * i < len(gold):
                traces[i].append(episode.step(Reply(gold[turn - 3 * i])))
    for episode in episodes:
        episode.close()
    assert traces == [expected] * 4


@pytest.mark.slow
def test_one_process_serves_many_threads(kit, express):
    environment = express(game="coin", steps=100)
    totals = []

    def play(seed):
        totals.append(kit.play(environment, seed, environment.expert(kit.task(seed)))[0])

    threads = [threading.Thread(target=play, args=(seed,)) for seed in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert totals == [pytest.approx(1.0)] * 24
    assert len(environment._pool._processes) == 1


def test_a_game_that_cannot_share_waits_for_a_process(kit, express, monkeypatch):
    monkeypatch.setattr("actors.adapters.jvm_pool.WAIT_SECONDS_MAX", 0.05)
    environment = express(game="sorting")
    first = environment.start(kit.task(1))
    with pytest.raises(TimeoutError, match=r"options\.jvms"):
        environment.start(kit.task(2))
    first.close()
    environment.start(kit.task(2)).close()


def test_steps_run_out_and_nonsense_is_answered(kit, express):
    environment = express(game="coin", steps=3)
    total, last = kit.play(environment, 1, ["", "fly to the moon", "x" * 100_000])
    assert (total, last.done, last.signals) == (0.0, True, {"impossible_action": 1.0, "solved": 0.0})


RUN_FILE = Path(__file__).parents[3] / "configs" / "coin_tiny.yaml"
OPEN = "numLocations=8,includeDoors=0,numDistractorItems=0"


def test_compact_tells_the_room_its_exits_and_the_coin_and_nothing_more():
    look = (
        "You are in the laundry room. You also see a bench, that has nothing on it. There is also a coin. \n"
        "To the North you see the kitchen. To the West you see the living room."
    )
    assert describe(look) == "laundry room . north kitchen . west living room . coin"
    assert describe(look.replace("a coin", "a key")) == "laundry room . north kitchen . west living room"
    with pytest.raises(ValueError, match="You are in the ROOM"):
        describe("It is dark.")


@pytest.mark.slow
def test_compact_games_are_won_by_single_words_and_told_in_the_words_of_the_run_file(kit, express):
    environment = express(game="coin", params=OPEN, compact=True, steps=200)
    words = set(yaml.safe_load(RUN_FILE.read_text())["model"]["tiny"]["words"])
    for seed in (*environment.splits["train"][::200], *environment.splits["dev"][::200]):
        gold = [a.removeprefix("move ").removesuffix(" coin") for a in environment.expert(kit.task(seed))]
        episode = environment.start(kit.task(seed))
        told, total = [m.content for m in episode.messages], 0.0
        for word in gold:
            step = episode.step(Reply(word))
            assert word == "look around" or (word in words and not step.signals["impossible_action"])
            told, total = told + [m.content for m in step.messages], total + step.reward
        episode.close()
        assert total == 1.0
        assert {word for text in told for word in text.split()} <= words


def test_an_impossible_or_empty_action_costs_what_the_options_say_and_changes_nothing(kit, express):
    environment = express(game="coin", params=OPEN, compact=True, steps=4, impossible_pays=-0.25)
    episode = environment.start(kit.task(0))
    told = episode.messages[0].content
    assert told == "kitchen . south corridor . east living room . west pantry"
    for reply, reward, signal in (("take", -0.25, 1.0), ("north", -0.25, 1.0), ("", -0.25, 1.0), ("South.", 0.0, 0.0)):
        step = episode.step(Reply(reply))
        assert (step.reward, step.signals["impossible_action"]) == (reward, signal)
    episode.close()


def test_compact_is_refused_for_what_it_cannot_tell():
    for options in ({"game": "twc"}, {"game": "coin"}, {"game": "coin", "params": "includeDoors=1"}):
        with pytest.raises(ConfigurationError, match=r"includeDoors=0"):
            build("coin", EnvironmentConfig(name="textworld_express", options={"compact": True, **options}))


def test_java_ends_with_the_environment(kit, express):
    environment = express(game="coin")
    environment.start(kit.task(1)).close()
    java = environment._pool._processes[0].main._gateway.java_process
    assert java.poll() is None
    environment.close()
    assert java.wait(10) is not None


@pytest.mark.slow
def test_a_java_process_that_died_is_replaced(kit, express):
    environment = express(game="coin")
    episode = environment.start(kit.task(1))
    java = environment._pool._processes[0].main._gateway.java_process
    java.kill()
    java.wait(10)
    with pytest.raises(Exception, match=r"(?s)."):
        episode.step(Reply("look around"))
    episode.close()
    environment.start(kit.task(1)).close()
    assert environment._pool._processes[0].main._gateway.java_process.pid != java.pid


def test_splits_are_the_packages_own(kit, express):
    environment = express(game="coin")
    environment.start(kit.task(0)).close()
    main = environment._pool._processes[0].main
    theirs = {"train": main.getValidSeedsTrain(), "dev": main.getValidSeedsDev(), "test": main.getValidSeedsTest()}
    assert {name: list(seeds) for name, seeds in environment.splits.items()} == theirs


def test_seeds_beyond_the_splits_are_training_seeds():
    assert [fold_of(seed) for seed in (5, 10_005, 20_999, 999_999)] == [
        (5, "train"), (10_005, "dev"), (20_999, "test"), (999, "train")
    ]  # fmt: skip
    assert TextWorldExpress.blocking
