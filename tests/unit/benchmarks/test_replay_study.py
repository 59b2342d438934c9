"""The study's protocol is valid, its rules choose what they say, and nothing is run twice."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.replay_efficiency.arms import Job
from benchmarks.replay_efficiency.measure import Bench
from benchmarks.replay_efficiency.records import Point, Result, Training, on_held_out, save
from benchmarks.replay_study import (
    RATES_BOUND,
    Runs,
    best,
    cost_until,
    generated,
    lines,
    main,
    read_plan,
    run_family,
)
from pipeline.config.load import load, loads
from pipeline.errors import AfterplayError
from pipeline.tasks.splits import evaluated_environments

TRAINING = Training(0.2, 0.9, 0.8, 0.5, 1, 2.0, 1.0)


def result(tokens: int, hit: bool = True, seed: int = 0, arm: str = "off") -> Result:
    points = (Point(0, 0.0, 0, 0.0), Point(5, 0.5, tokens, 1.0))
    return Result(arm, seed, "", (), 5, tokens, 1.0, hit, TRAINING, points)


def finish(runs: Runs, tokens: Callable[[Job], int], *, losers: bool = False) -> list[str]:
    """Results in place of all runs that can be made now; their names."""
    waiting = runs.missing(losers=losers)
    for job in waiting:
        done = replace(result(tokens(job), seed=job.seed), arm=job.arm, fingerprint=job.fingerprint)
        save(done, runs.bench.result_file(job))
    return [job.name for job in waiting]


@pytest.fixture
def small(tmp_path: Path) -> Runs:
    """Two rivals and one arm with replay on the locks, one tuning seed and two of the comparison."""
    plan = read_plan()
    arms = ("off", "half", "groups")
    family = replace(plan.families["locks"], arms=arms, rates=(1.0, 2.0, 4.0), tuning_seeds=(0,), seeds=(100, 101))
    return Runs(replace(plan, families={"locks": family}), "locks", tmp_path, threading.Event())


def costs(by_arm: Mapping[str, int]) -> Callable[[Job], int]:
    return lambda job: by_arm.get(job.arm, 90)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Job]]:
    """The first run of the comparison, by family and arm."""
    plan, folder = read_plan(), tmp_path_factory.mktemp("study")
    families = {name: replace(family, seeds=family.seeds[:1]) for name, family in plan.families.items()}
    runs = {name: Runs(replace(plan, families=families), name, folder, threading.Event()) for name in families}
    return {name: {arm: own.jobs(arm, 1.0, tuning=False)[0] for arm in own.arms} for name, own in runs.items()}


@pytest.mark.parametrize("name", read_plan().families)
def test_every_run_of_the_protocol_is_a_valid_run_of_its_own(name: str, first: dict[str, dict[str, Job]]) -> None:
    plan, jobs = read_plan(), first[name]
    assert not set(plan.families[name].seeds) & set(plan.families[name].tuning_seeds)
    assert len({job.fingerprint for job in jobs.values()}) == len(jobs) == len(plan.families[name].arms)
    configs = {arm: loads(job.run_file) for arm, job in jobs.items()}
    assert all(configs[arm].replay.enabled == arm.startswith("groups") for arm in jobs)
    assert configs["groups"].loss.off_clip_high == 1
    of_all = {arm: config.groups.trajectories_per_step for arm, config in configs.items()}
    assert of_all["off"] == 4 * of_all["quarter"]
    assert of_all["off"] == 2 * of_all.get("half", of_all["off"] // 2) == of_all.get("small_groups", of_all["off"])


@pytest.mark.parametrize("name", read_plan().families)
def test_all_arms_may_generate_the_same_rollouts_and_are_measured_equally_often_for_them(
    name: str, first: dict[str, dict[str, Job]]
) -> None:
    rollouts = [(generated(loads(job.run_file)), job.protocol) for job in first[name].values()]
    assert len({each * protocol.steps for each, protocol in rollouts}) == 1
    assert len({each * protocol.every for each, protocol in rollouts}) == 1
    assert all(protocol.steps % protocol.every == 0 for _, protocol in rollouts)


def test_runs_that_are_measured_by_their_evaluations_have_held_out_tasks(first: dict[str, dict[str, Job]]) -> None:
    ((name, family),) = ((name, family) for name, family in read_plan().families.items() if family.evaluated)
    config = load(family.file, family.set)
    having = [name for name, section in config.environments.items() if config.evaluation.split in section.held_out]
    assert evaluated_environments(config, having, {}) == tuple(config.environments)
    for job in first[name].values():
        config = loads(job.run_file)
        assert config.evaluation.every == job.protocol.every and config.evaluation.start and config.publish.keep < 10


def test_the_name_with_the_most_hits_is_the_best_then_the_cheapest() -> None:
    assert best({1.0: [result(100), result(900)], 2.0: [result(10), result(10, hit=False)]}) == 1.0
    assert best({1.0: [result(100), result(900)], 2.0: [result(400), result(200)]}) == 2.0


def test_tokens_to_the_goal_on_held_out_tasks_are_those_of_the_first_of_two_measurements() -> None:
    measured = [(0, 0.0, 0.0), (4, 0.9, 0.7), (8, 0.9, 0.8), (12, 0.9, 0.9)]
    points = [Point(v, s, 10 * v, 1.0 * v, h) for v, s, h in measured]
    found = cost_until(0.8, on_held_out(points))
    assert (found.tokens, found.updates, found.reached) == (80, 8, True)
    found = cost_until(0.95, on_held_out(points))
    assert (found.tokens, found.reached) == (120, False)
    assert cost_until(0.5, points).tokens == 40, "a lower goal, on the training tasks"


def test_a_rate_that_cannot_reach_the_hits_of_another_is_not_run_to_its_end(small: Runs) -> None:
    small.family = replace(small.family, tuning_seeds=(0, 1, 2))
    made = list[str]()
    while (job := small.missing(losers=False)[0]).arm not in small.arms:
        tokens = 80 if "tune2" in job.arm else 90
        done = replace(result(tokens, "tune4" not in job.arm, job.seed, job.arm), fingerprint=job.fingerprint)
        save(done, small.bench.result_file(job))
        made.append(job.name)
    # of the last seed, only those with all hits so far
    assert [name for name in made if name.endswith("-2")] == [f"{arm}.tune{r}-2" for arm in small.arms for r in (1, 2)]
    assert len(made) == 3 * 3 * 3 - 3 and small.base() is not None


def test_a_fixed_rate_counts_as_the_best_and_the_grid_grows_beyond_it(small: Runs) -> None:
    small.family = replace(small.family, fixed={"half": 0.5})
    made = [finish(small, lambda job: 50 if "tune2" in job.arm else 80) for _ in range(3)]
    assert made[1:] == [["half.tune0.5-0"], ["half.tune0.25-0"]]
    assert [small.chosen(arm) for arm in small.arms] == [2.0, 0.5, 2.0]
    assert small.base() == "off"


def test_a_grid_grows_until_its_best_rate_is_inside_or_at_the_bound(small: Runs) -> None:
    # off is best at 1/2, half inside the grid, and groups at the largest rate that there is
    def tokens(job: Job) -> int:
        arm, _, rate = job.arm.partition(".tune")
        cheapest = {"off": "0.5", "half": "2"}.get(arm)
        return int(1000 / float(rate)) if cheapest is None else 50 if rate == cheapest else 80

    assert finish(small, tokens) == [f"{arm}.tune{rate}-0" for arm in small.arms for rate in (1, 2, 4)]
    assert small.chosen("half") == 2.0 and small.base() is None and small.chosen("groups") is None
    *_, told = (line for line in lines("locks", small.report()) if "tuning" in line)
    assert told.endswith("tuning x1 1,000 (1 of 1)  x2 500 (1 of 1)  x4 250 (1 of 1)")
    assert finish(small, tokens) == ["off.tune0.5-0", "groups.tune8-0"]
    assert finish(small, tokens) == ["off.tune0.25-0", "groups.tune16-0"]
    assert (small.chosen("off"), small.chosen("groups")) == (0.5, RATES_BOUND[1])
    report = small.report()
    assert [known["at_edge"] for known in report["arms"].values()] == [False, False, True]
    assert "rate x16    (edge of the grid)" in [*lines("locks", report)][-1]


def test_the_best_tuned_rival_is_the_base_and_what_lost_runs_last(small: Runs) -> None:
    tokens = costs({"off.tune2": 60, "half.tune1": 50, "groups.tune2": 30, "half": 100, "groups": 50, "off": 110})
    assert all(".tune" in name for name in finish(small, tokens)) and small.base() is None
    assert finish(small, tokens) == ["half.tune0.5-0"] and small.base() == "half"
    assert finish(small, tokens) == ["half-100", "groups-100", "half-101", "groups-101"]
    assert small.missing(losers=False) == []
    assert finish(small, tokens, losers=True) == ["off-100", "off-101"] and small.missing(losers=True) == []
    report = small.report()
    assert report["arms"]["groups"]["ratios"]["tokens"]["ratio"] == pytest.approx(0.5)
    assert report["arms"]["off"]["ratios"]["tokens"]["ratio"] == pytest.approx(1.1)
    off, half, groups = (line for line in lines("locks", report) if "tuning" not in line)
    assert half.endswith("the base") and "tokens 0.50 (0.50–0.50)" in groups and "the base" not in off
    assert report["arms"]["half"]["runs"][0]["points"] == tuple(asdict(p) for p in result(100).points)


def test_what_is_known_is_reported_and_drawn_also_while_runs_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = read_plan()
    family = replace(plan.families["babyai"], tuning_seeds=(0,), seeds=(100, 101, 102))
    plan = replace(plan, families={"babyai": family})
    monkeypatch.setattr("benchmarks.replay_study.read_plan", lambda: plan)
    runs = Runs(plan, "babyai", tmp_path, threading.Event(), ["off", "groups"])
    while waiting := [job for job in runs.missing(losers=False) if job.seed != 102]:
        for job in waiting:
            tokens = 200 if "tune" in job.arm and "tune1" not in job.arm else 100 if "off" in job.arm else 50
            points = (Point(4, 0.9, tokens, 1.0, held_out=0.8), Point(8, 0.9, 2 * tokens, 2.0, held_out=0.8))
            done = replace(result(tokens, seed=job.seed), arm=job.arm, points=points)
            save(replace(done, fingerprint=job.fingerprint), runs.bench.result_file(job))
    assert main(["--directory", str(tmp_path), "--arms", "off", "groups", "--report"]) == 0
    said = capsys.readouterr().out
    assert "2 of  2 reach it" in said and "tokens 0.50 (0.50–0.50)" in said and "held-out 0.50 (0.50–0.50)" in said
    assert (tmp_path / "babyai.json").is_file() and (tmp_path / "babyai.png").read_bytes().startswith(b"\x89PNG")


def test_arms_can_be_chosen_and_keep_the_order_of_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(read_plan(), "locks", tmp_path, threading.Event(), ["groups", "off"])
    assert [*runs.arms] == ["off", "groups"]
    with pytest.raises(SystemExit):
        main(["--directory", str(tmp_path), "--families", "babyai", "--arms", "off", "groups_wide"])
    assert "--arms groups_wide: there are eighth, epochs, groups, groups_eighth" in capsys.readouterr().err


def test_a_run_that_fails_is_tried_again_and_does_not_stop_the_others(
    small: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def measure(bench: Bench, job: Job) -> None:
        tried.append(job.name)
        if job.name == "off.tune1-0" or tried.count(job.name) < 2:
            raise AfterplayError("broken\nlong tail")
        save(replace(result(100), arm=job.arm, fingerprint=job.fingerprint), bench.result_file(job))

    monkeypatch.setattr(Bench, "measure", measure)
    assert run_family(small, 1, math.inf, losers=False) == ["off.tune1-0: broken"]
    assert set(map(tried.count, tried)) == {2} and {"off.tune2-0", "half.tune4-0"} < {*tried}
