"""Gold paths score 1.0 in every game and every split, many games share one Java process and none disturbs another."""

import shutil
import threading

import pytest

from actors.environments import Reply
from actors.environments.packages.text_world import ALONE, Game, TextWorldExpress, fold_of

GAMES = Game.__args__


@pytest.fixture
def express(kit):
    made = []

    def make(**options):
        if shutil.which("java") is None:
            pytest.skip("textworld_express: install java and put it on the PATH")
        made.append(kit.build("textworld_express", **options))
        return made[-1]

    yield make
    for environment in made:
        environment.close()


@pytest.mark.parametrize("game", GAMES)
def test_gold_path_scores_one_in_each_split(kit, express, game):
    environment = express(game=game, steps=300)
    for split in ("train", "dev", "test"):
        seed = environment.splits[split][7]
        gold = environment.expert(kit.task(seed))
        total, last = kit.play(environment, seed, [f"I should do this:\n{action.upper()}." for action in gold])
        assert total == pytest.approx(1.0)
        assert (last.done, last.signals) == (True, {"solved": 1.0})


@pytest.mark.parametrize("game", GAMES)
def test_plays_of_one_seed_at_once_do_not_disturb_each_other(kit, express, game):
    """What a group is: several plays of the same task, at different points."""
    environment = express(game=game, steps=300, jvms=4 if game in ALONE else 1)
    task = kit.task(11)
    gold = environment.expert(task)[:20]
    alone = environment.start(task)
    expected = [alone.step(Reply(action)) for action in gold]
    alone.close()
    episodes, traces = [environment.start(task) for _ in range(4)], [[], [], [], []]
    for turn in range(len(gold) + 9):
        for i, episode in enumerate(episodes):
            if 0 <= turn - 3 * i < len(gold):
                traces[i].append(episode.step(Reply(gold[turn - 3 * i])))
    for episode in episodes:
        episode.close()
    assert traces == [expected] * 4


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
    monkeypatch.setattr("actors.environments.packages.jvm_pool.WAIT_SECONDS_MAX", 0.05)
    environment = express(game="sorting")
    first = environment.start(kit.task(1))
    with pytest.raises(TimeoutError, match=r"options\.jvms"):
        environment.start(kit.task(2))
    first.close()
    environment.start(kit.task(2)).close()


def test_steps_run_out_and_nonsense_is_answered(kit, express):
    environment = express(game="coin", steps=3)
    total, last = kit.play(environment, 1, ["", "fly to the moon", "x" * 100_000])
    assert (total, last.done, last.signals) == (0.0, True, {"solved": 0.0})


def test_java_ends_with_the_environment(kit, express):
    environment = express(game="coin")
    environment.start(kit.task(1)).close()
    java = environment._pool._processes[0].main._gateway.java_process
    assert java.poll() is None
    environment.close()
    assert java.wait(10) is not None


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
