"""The study's protocol is valid, its rules choose what they say, and nothing is run twice."""

from __future__ import annotations

import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.replay_efficiency.records import Point, Result, Training, save
from benchmarks.replay_study import Runs, best_rate, gains_at_equal_tokens, lines, main, read_plan, success_at
from pipeline.config.load import load
from pipeline.errors import AfterplayError
from pipeline.tasks.splits import evaluated_environments

TRAINING = Training(0.2, 0.9, 0.8, 0.5, 1, 2.0, 1.0)


def result(tokens: int, hit: bool = True, seed: int = 0, arm: str = "off") -> Result:
    points = (Point(0, 0.0, 0, 0.0), Point(5, 0.5, tokens, 1.0))
    return Result(arm, seed, "", (), 5, tokens, 1.0, hit, TRAINING, points)


@pytest.mark.parametrize("name", ["locks", "locks_of_8_turns", "babyai", "staleness"])
def test_every_run_of_the_protocol_is_a_valid_run_of_its_own(name: str, tmp_path: Path) -> None:
    plan = read_plan()
    family = plan.families[name]
    runs = Runs(plan, name, tmp_path, threading.Event())
    assert not set(family.seeds) & set(family.tuning_seeds)
    jobs = [job for arm in runs.arms for job in runs.jobs(arm, 1.0, family.seeds[:1], "")]
    same = {"off", "off_as_is", "off_doubled"} & set(runs.arms)  # they differ in the rate only
    assert len({job.fingerprint for job in jobs}) == len(runs.arms) - max(0, len(same) - 1)
    assert runs.protocol.plays == (family.plays or plan.plays)


def test_runs_that_are_compared_by_evaluations_have_held_out_tasks() -> None:
    (family,) = (family for family in read_plan().families.values() if family.compare)
    config = load(family.file, family.set)
    having = [name for name, section in config.environments.items() if config.evaluation.split in section.held_out]
    assert config.evaluation.every and evaluated_environments(config, having, {}) == tuple(config.environments)


def test_the_rate_with_which_most_seeds_reach_the_goal_is_chosen_then_the_cheapest() -> None:
    assert best_rate({1.0: [result(100), result(900)], 2.0: [result(10), result(10, hit=False)]}) == 1.0
    assert best_rate({1.0: [result(100), result(900)], 2.0: [result(400), result(200)]}) == 2.0


def test_success_at_equal_tokens_is_interpolated_and_never_guessed_beyond_the_run() -> None:
    points = [Point(0, 0.0, 0, 0.0), Point(5, 0.4, 100, 1.0), Point(10, 0.8, 300, 2.0)]
    assert success_at(points, 200) == pytest.approx(0.6)
    with pytest.raises(AfterplayError, match="at least 400 generated tokens, got 300"):
        success_at(points, 400)


def test_an_arm_is_compared_once_it_is_tuned_and_no_run_is_made_twice(tmp_path: Path) -> None:
    plan = read_plan()
    arms = {"off": plan.arms["off"], "groups": plan.arms["groups"]}
    family = replace(plan.families["locks"], arms=arms, rates=(1.0, 2.0), tuning_seeds=(0,), seeds=(100, 101, 102))
    runs = Runs(replace(plan, families={"locks": family}), "locks", tmp_path, threading.Event())
    assert [job.name for job in runs.missing()] == ["off.tune1-0", "off.tune2-0", "groups.tune1-0", "groups.tune2-0"]
    for job in runs.missing():
        tokens = {"off.tune1": 100, "off.tune2": 50}.get(job.arm, 80)
        save(replace(result(tokens), arm=job.arm, fingerprint=job.fingerprint), runs.bench.result_file(job))
    assert (runs.chosen("off"), runs.chosen("groups")) == (2.0, 1.0)
    assert len(runs.missing()) == 6 and {job.seed for job in runs.missing()} == {100, 101, 102}
    for job in runs.missing():
        tokens = 100 if job.arm == "off" else 50
        done = replace(result(tokens, seed=job.seed), arm=job.arm, fingerprint=job.fingerprint)
        save(done, runs.bench.result_file(job))
    assert runs.missing() == []
    report = runs.report()
    assert report["arms"]["groups"]["ratios"]["tokens"]["ratio"] == pytest.approx(0.5)
    assert "tokens 0.50 (0.50–0.50)" in "\n".join(lines("locks", report))
    assert report["arms"]["off"]["runs"][0]["points"] == tuple(asdict(p) for p in result(100).points)


def test_what_is_known_is_reported_and_drawn_also_while_runs_are_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = Runs(read_plan(), "babyai", tmp_path, threading.Event(), ["off", "groups"])
    while waiting := [job for job in runs.missing() if job.seed != runs.family.seeds[-1]]:
        for job in waiting:
            done = replace(result(100 if "off" in job.arm else 50, seed=job.seed), arm=job.arm)
            save(replace(done, fingerprint=job.fingerprint), runs.bench.result_file(job))
    assert main(["--directory", str(tmp_path), "--families", "babyai", "--arms", "off", "groups", "--report"]) == 0
    assert "5 of  5 reach it" in (said := capsys.readouterr().out) and "tokens 0.50 (0.50–0.50)" in said
    assert (tmp_path / "babyai.json").is_file() and (tmp_path / "babyai.png").read_bytes().startswith(b"\x89PNG")


def test_arms_can_be_chosen_and_keep_the_order_of_the_protocol(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = read_plan()
    assert [*plan.arms_of(plan.families["locks"], ["retire", "off"])] == ["off", "retire"]
    with pytest.raises(SystemExit):
        main(["--directory", str(tmp_path), "--families", "babyai", "--arms", "off", "retire"])
    assert "--arms retire: there are groups, mix, off" in capsys.readouterr().err


def test_runs_with_replay_are_paired_by_seed_and_staleness() -> None:
    arms = {
        name: {"success": {"by_seed": by_seed}}
        for name, by_seed in {
            "off_0": {"1": 0.5, "2": 0.6},
            "off_4": {"1": 0.7},
            "groups_0": {"1": 0.75, "2": 0.5},
            "groups_4": {"1": 0.75, "3": 1.0},
            "groups_16": {"1": 1.0},
        }.items()
    }
    assert gains_at_equal_tokens(arms) == pytest.approx([0.25, -0.1, 0.05])
    assert gains_at_equal_tokens({"off": {}, "groups": {}}) == []
