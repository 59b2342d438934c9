"""``afterplay compare``: arms, seeds, kept settings, curves of runs, and the report on finished runs."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.cli.compare import Study, plan_jobs, read_arm, read_arm_sets, read_arms, run_jobs, seeds_of
from pipeline.config.load import load
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime.run_directory import RunDirectory, write_json_atomically
from pipeline.store import tables
from pipeline.views.comparison import Point, read_curve
from pipeline.views.step_lines import Metric

TINY = str(Path(__file__).parents[3] / "configs" / "tiny.yaml")


@pytest.fixture
def made_run(tmp_path):
    """Makes a run of one rollout a second, with two of 5 tokens in each update and rewards that are given."""

    def made(folder, seed, *rewards, finished=True, version=0):
        directory = RunDirectory(tmp_path / folder).create()
        steps = len(rewards) // 2
        text = f"run: {{seed: {seed}, total_steps: {steps}}}\nmodel: {{source: tiny}}\nengine: {{kind: embedded}}\n"
        directory.config_file.write_text(text + "environments: {guess: {name: number_guess}}\n")
        tables.STORE.create(directory.store_file)
        connection = tables.STORE.connect(directory.store_file)
        kinds = [(i, "trained", i + 1.0, reward) for i, reward in enumerate(rewards)]
        for group, state, at, reward in (*kinds, (-1, "held", 0.5, 1.0), (90, "evaluated", 1.2, 1.0)):
            connection.execute(
                f"INSERT INTO trajectories VALUES ({', '.join('?' * 26)})",
                (group + 5, f"t{group}", group, 0, 0, state, "", reward, b"{}", 0, at, "complete", 1, 9, 5, 0, 0, 0.1,
                 "actor-0", 9, None, 0.5, 1, 0, None, 0),
            )  # fmt: skip
        connection.close()
        same = {"seconds": {"step": 3.0}, "reward_mean": 0.25, "n_trajectories": 2, "n_replayed": 0}
        lines = [
            {"step": i + 1, "update": i, "policy_version": i + version, "finished": 2.0 * i + 2, **same}
            for i in range(steps)
        ]  # fmt: skip
        directory.metrics_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        if finished:
            write_json_atomically(directory.finished_file, {"steps": steps, "exit_code": 0})
        return load(directory.config_file, environment={}), directory

    return made


def test_curve_counts_generated_tokens_of_training_and_successes_of_each_update(made_run):
    config, directory = made_run("a", 3, 1.0, 0.0, 1.0, None)
    found = read_curve(config, directory, 3, Metric.SUCCESS)
    assert found.points == (Point(1, 10, 3.0, 0.5, 2.0), Point(2, 20, 6.0, 1.0, 1.0))
    assert (found.seed, found.finished, found.redone) == (3, True, False)
    assert [p.value for p in read_curve(config, directory, 3, Metric.REWARD).points] == [0.25, 0.25]
    assert read_curve(config, directory, 3, Metric.EVAL).points == ()
    with pytest.raises(ConfigurationError, match=r"seeds 3.*evaluation\.every"):
        read_arm("a", str(directory.path), [], Metric.EVAL)


def test_seeds_that_are_asked_for_are_taken_of_folders_too(made_run, tmp_path):
    for seed in (1, 2, 3):
        made_run(f"a/seed-{seed}", seed, 1.0, 0.0)
    folder = str(tmp_path / "a")
    assert [curve.seed for curve in read_arm("a", folder, [], Metric.REWARD)] == [1, 2, 3]
    assert [curve.seed for curve in read_arm("a", folder, [], Metric.REWARD, [1, 3])] == [1, 3]
    with pytest.raises(ConfigurationError, match=r"a run for each of --seeds, .* has none of 4, 5"):
        read_arm("a", folder, [], Metric.REWARD, range(1, 6))


def test_a_folder_that_cannot_be_compared_is_refused_before_any_run_of_the_other_arms(made_run, tmp_path, monkeypatch):
    made_run("a/seed-1", 1, 1.0, 0.0)
    monkeypatch.setattr("pipeline.cli.compare.run_jobs", lambda *_: pytest.fail("hours of runs have begun"))
    call = ["compare", str(tmp_path / "a"), f"b={TINY}", "--reach", "0.8", "--seeds", "1-2", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, call)
    assert isinstance(result.exception, ConfigurationError) and "has none of 2" in str(result.exception)


def test_a_run_that_was_trained_again_is_one_run(made_run):
    _, directory = made_run("a", 3, 1.0, 0.0)
    (again := directory.path / "retrain").mkdir()
    (again / "metrics.jsonl").write_text("{}\n")
    assert [curve.seed for curve in read_arm("a", str(directory.path), [], Metric.REWARD)] == [3]


def test_curve_of_evaluations_has_the_tokens_of_their_weights(made_run):
    config, directory = made_run("a", 0, 1.0, 0.0, 1.0, None)
    lines = [
        {"evaluation": i, "updates": updates, "status": status, "score": 0.1 * i}
        for i, (updates, status) in enumerate([(0, "complete"), (1, "abandoned"), (2, "complete")])
    ]
    directory.evaluations_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    assert read_curve(config, directory, 3, Metric.EVAL).points == (Point(0, 0, 0.0, 0.0), Point(2, 20, 6.0, 0.2))


def test_a_run_whose_oldest_rollouts_are_gone_is_refused_because_its_tokens_are_not_known(made_run):
    config, directory = made_run("a", 3, 1.0, 0.0)
    connection = tables.STORE.connect(directory.store_file)
    connection.execute("INSERT INTO meta VALUES ('rolled_below', '1500')")
    connection.close()
    with pytest.raises(StoreError, match=r"none of the first 1,500"):
        read_curve(config, directory, 3, Metric.REWARD)


@pytest.mark.slow
def test_finished_runs_are_compared_by_seed_and_written(made_run, tmp_path):
    for seed in (1, 2):
        made_run(f"off/seed-{seed}", seed, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
        made_run(f"on/seed-{seed}", seed, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)
    made_run("late/seed-1", 1, 0.0, 0.0, 0.0, 0.0, finished=False, version=2)
    out = tmp_path / "out"
    arms = [str(tmp_path / name) for name in ("off", "on", "late")]
    result = CliRunner().invoke(app, ["compare", *arms, "--reach", "0.8", "--window", "1", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "on needs 0.67 (0.67 to 0.67) of off's generated tokens" in result.output
    assert "1 and 2 runs, not paired" in result.output and "1 of 1 runs of late never reached it" in result.output
    assert "late: runs of seeds 1 are unfinished" in result.output and "older checkpoint" in result.output
    found = orjson.loads((out / "compare.json").read_bytes())
    assert [run["tokens"] for run in found["arms"]["on"]] == [20, 20]
    assert found["ratios"]["on"][0]["ratio"] == pytest.approx(2 / 3)
    assert found["ratios"]["late"][0]["high"] is None, "one run gives no interval"
    assert (out / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_run_that_has_reached_the_target_is_not_continued_with_until_reached(made_run, tmp_path):
    made_run("a/seed-1", 1, 0.0, 0.0, 1.0, 1.0, finished=False)
    job = plan_jobs({"a": TINY}, [1], [], {"a": []}, tmp_path)[0]
    assert Study({}, tmp_path, Metric.SUCCESS, 0.8, 1, until_reached=True).is_enough(job)
    assert not Study({}, tmp_path, Metric.SUCCESS, 0.8, 2, until_reached=True).is_enough(job), "a mean of 0.5"
    assert not Study({}, tmp_path, Metric.SUCCESS, 0.8, 1, until_reached=False).is_enough(job)
    assert run_jobs([job], 1, lambda job: True, threading.Event()) == [], "nothing was started that could fail"


def test_runs_are_not_ended_because_nobody_reads_what_is_said_of_them(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-I", "-S", "-c", "raise SystemExit(7)"]
    directory = RunDirectory(tmp_path / "a")
    job = SimpleNamespace(name="a", finished=False, directory=directory, log_file=tmp_path / "a.log", command=command)
    with open(writer, "w") as output, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", output)
        faults = run_jobs([job, job], 1, lambda job: False, threading.Event())
    assert [("exit code 7" in fault) for fault in faults] == [True, True]


def test_where_no_run_of_an_arm_makes_an_update_their_logs_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "pipeline.cli.compare.run_jobs", lambda jobs, *_: [f"{job.arm} ended; see its log" for job in jobs]
    )
    with pytest.raises(ConfigurationError, match="found none"):
        Study({"a": TINY}, tmp_path, Metric.REWARD, 0.8, 1, False).run([1], [], {"a": []}, 1)
    assert capsys.readouterr().err == "a ended; see its log\n"


def test_the_table_fits_a_terminal_of_80_columns(made_run, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for arm in ("off", "on"):
        for seed in range(3):
            made_run(f"{arm}/{seed}", seed, *[0.0] * (2 * seed), 1.0, 1.0)
    arms = str(tmp_path / "off"), str(tmp_path / "on")
    result = CliRunner().invoke(app, ["compare", *arms, "--reach", "0.8", "--out", str(tmp_path), "--window", "1"])
    heading, *rows = (line.split("  ") for line in result.output.splitlines()[:7])
    assert heading[0] == "arm" and [row[0] for row in rows] == ["off", "", "", "on", "", ""]
    for words in ("20 (10–30)", "generated tokens", "1.00 (1.00–1.00)"):
        assert words in result.output, "no cell is broken"


def test_each_run_has_a_store_and_a_folder_of_its_own(tmp_path):
    out = tmp_path / "run #2: new"
    sets = [f"stage.store={tmp_path / 'all.sqlite'}"]
    first, second = plan_jobs({"a": TINY}, [1, 2], sets, {"a": []}, out)
    for job in (first, second):
        config = load(job.file, [word.removeprefix("--set=") for word in job.command if word.startswith("--set=")])
        assert config.run.path == job.directory.path == out / "a" / f"seed-{job.seed}"
        assert config.stage.store is None


def test_two_runs_of_one_seed_in_an_arm_are_refused(made_run, tmp_path):
    for name in ("a/x", "a/y", "b/x"):
        made_run(name, 1, 1.0, 1.0)
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--reach", "0.8"])
    assert isinstance(result.exception, ConfigurationError) and "a run for each seed" in str(result.exception)


def test_arms_of_a_seed_run_together_and_differ_in_what_was_set(tmp_path):
    arms = read_arms([f"slow={TINY}", f"fast={TINY}"])
    own = read_arm_sets(["fast:learner.learning_rate=0.01"], arms)
    jobs = plan_jobs(arms, [4, 5], ["run.total_steps=3"], own, tmp_path)
    assert [(job.arm, job.seed) for job in jobs] == [("slow", 4), ("fast", 4), ("slow", 5), ("fast", 5)]
    assert jobs[3].directory.path == tmp_path / "fast" / "seed-5"
    assert jobs[3].command[-3:] == ["--set=run.name=seed-5", "--set=run.seed=5", "--set=model.tiny.seed=5"]
    assert [job.config.learner.learning_rate for job in jobs[:2]] == [0.003, 0.01]
    assert load(jobs[1].file, environment={}).run.total_steps == 3


def test_a_run_has_what_was_set_for_its_arm_whatever_the_variables_say(tmp_path, monkeypatch):
    monkeypatch.setenv("AFTERPLAY__LEARNER__LEARNING_RATE", "0.5")
    monkeypatch.setenv("AFTERPLAY__LEARNER__GRAD_CLIP", "0.25")
    jobs = plan_jobs({"a": TINY}, [1], [], {"a": ["learner.learning_rate=0.01"]}, tmp_path)
    started = []

    class Child:
        pid = 7

        def __init__(self, command, reaper, environment=None, output=None):
            started.append(load(jobs[0].file, environment=environment).learner)
            self.end = Future()
            self.end.set_result(1)

    monkeypatch.setattr("pipeline.cli.compare.ChildGroup", Child)
    assert "ended before its last update" in run_jobs(jobs, 1, lambda job: False, threading.Event())[0]
    assert (started[0].learning_rate, started[0].grad_clip) == (0.01, 0.25)


def test_settings_of_an_earlier_call_are_not_mixed_with_others(tmp_path):
    arms = read_arms([f"a={TINY}", f"b={TINY}"])
    plan_jobs(arms, [1], [], {"a": [], "b": []}, tmp_path)
    assert plan_jobs(arms, [1, 2], [], {"a": [], "b": []}, tmp_path)[-1].seed == 2
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    continued = plan_jobs(arms, [1], [], {"a": [], "b": []}, moved)[0]
    assert f'--set=run.directory="{moved / "a"}"' in continued.command, "not in the folder where they were"
    moved.rename(tmp_path)
    with pytest.raises(ConfigurationError, match=r"b\.yaml.*groups\.n_rollout.*another --out"):
        plan_jobs(arms, [1], [], {"a": [], "b": ["groups.n_rollout=4"]}, tmp_path)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: read_arms(["a.yaml"]), "two run files or folders"),
        (lambda: read_arms(["x/a.yaml", "y/a.yaml"]), "a new name"),
        (lambda: read_arm_sets(["c:x=1"], {"a": "", "b": ""}), "a name of a, b"),
        (lambda: seeds_of("3-1"), "such as 1-12"),
        (lambda: seeds_of("all"), "such as 1-12"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_expected(call, problem):
    with pytest.raises(ConfigurationError, match=problem):
        call()


def test_names_come_from_files_and_examples():
    assert read_arms(["configs/a.yaml", "@tiny", "b=c.yaml"]) == {"a": "configs/a.yaml", "tiny": "@tiny", "b": "c.yaml"}
