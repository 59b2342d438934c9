"""Runs of the replay benchmark: made once, kept, refused, and not repeated."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.replay_efficiency import measure
from benchmarks.replay_efficiency.arms import Job, Protocol, fingerprint, jobs_of
from benchmarks.replay_efficiency.examine import load_score
from benchmarks.replay_efficiency.measure import Bench, Stopped
from benchmarks.replay_efficiency.records import load_result, save
from learner.models.tiny import TinyOptions, write_tiny_model
from pipeline.config.load import load, loads
from pipeline.errors import AfterplayError

BASE = Path(__file__).parents[3] / "configs" / "replay_tiny.yaml"
OFF, ON = ("replay.enabled=false",), ("replay.mode=mix",)


def test_every_arm_and_seed_is_a_valid_run_that_differs_from_the_others():
    jobs = jobs_of({"off": OFF, "on": ON}, [0, 1], [], Protocol(), BASE)
    assert [job.name for job in jobs] == ["off-0", "on-0", "off-1", "on-1"]
    assert len({job.fingerprint for job in jobs}) == 4
    configs = {job.name: load(BASE, job.overrides, environment={}) for job in jobs}
    assert (configs["on-1"].run.seed, configs["on-1"].model.tiny["seed"]) == (1, 1)
    assert not configs["off-0"].replay.enabled and configs["on-0"].replay.enabled
    assert configs["off-1"].run.total_steps == 240 < configs["off-1"].publish.keep


def test_run_file_that_is_edited_meanwhile_changes_no_run(tmp_path):
    base = tmp_path / "base.yaml"
    base.write_text(BASE.read_text())
    (job,) = jobs_of({"on": ()}, [3], [], Protocol(), base)
    before = load(base, job.overrides, environment={})
    base.write_text("learner: {learning_rate: 0.5}")
    assert loads(job.run_file) == before


def test_seed_of_a_run_changes_its_random_weights(tmp_path):
    scores = []
    for job in jobs_of({"on": ()}, [0, 1], [], Protocol(), BASE):
        config = load(BASE, job.overrides, environment={})
        write_tiny_model(TinyOptions.parse(config.model.tiny, config.model.max_length), tmp_path / job.name)
        scores.append(load_score(tmp_path / job.name)([(5, 8)]))
    assert np.abs(scores[0] - scores[1]).max() > 0.01


def test_settings_for_all_arms_lose_against_an_arm_s_own():
    common = ["replay.enabled=true", "learner.learning_rate=0.5"]
    (job,) = jobs_of({"off": OFF}, [0], common, Protocol(), BASE)
    config = load(BASE, job.overrides, environment={})
    assert (config.replay.enabled, config.learner.learning_rate) == (False, 0.5)


def test_fingerprint_ignores_where_a_run_lives_and_notices_how_it_is_measured():
    def of(*overrides, **protocol):
        return fingerprint(load(BASE, overrides, environment={}), Protocol(**protocol))

    assert of() == of("run.directory=/elsewhere", "run.name=other", "groups.zero_variance=keep")
    assert len({of(), of("learner.learning_rate=0.5"), of(plays=65)}) == 3


def test_result_comes_back_from_its_file_as_it_was_written(tmp_path, run_of):
    result = run_of(training=replace(run_of().training, ess_replay=None))
    save(result, tmp_path / "r.json")
    assert load_result(tmp_path / "r.json") == result
    assert load_result(tmp_path / "none.json") is None
    (tmp_path / "bad.json").write_text('{"arm": "on"}')
    with pytest.raises(AfterplayError, match="remove it"):
        load_result(tmp_path / "bad.json")


def bench(tmp_path):
    return Bench(tmp_path, 10.0, stop=threading.Event())


def test_finished_run_is_not_made_again(tmp_path, monkeypatch, run_of):
    made = []

    def watch(bench, job, run):
        made.append(job.name)
        return run_of(job.arm, job.seed, fingerprint=job.fingerprint)

    monkeypatch.setattr(measure, "_watch", watch)
    monkeypatch.setattr(measure, "start_run", lambda *_, **__: threading.Lock())
    jobs = [Job("on", seed, (), "f") for seed in (0, 1)]
    first = bench(tmp_path).measure(jobs[0])
    both = [bench(tmp_path).measure(job) for job in jobs]
    assert made == ["on-0", "on-1"]
    assert both[0] == first


def test_result_of_other_settings_is_refused_and_stays(tmp_path, run_of):
    job = Job("on", 0, (), "other")
    path = bench(tmp_path).result_file(job)
    save(run_of(), path)
    with pytest.raises(AfterplayError, match="other settings"):
        bench(tmp_path).kept(job)
    assert load_result(path) == run_of()


def test_run_that_fails_leaves_no_result(tmp_path, monkeypatch):
    def watch(bench, job, run):
        raise AfterplayError("broken")

    monkeypatch.setattr(measure, "_watch", watch)
    monkeypatch.setattr(measure, "start_run", lambda *_, **__: threading.Lock())
    with pytest.raises(AfterplayError, match="broken"):
        bench(tmp_path).measure(Job("on", 0, (), "f"))
    assert not (tmp_path / "results" / "on-0.json").exists()


def test_stopped_benchmark_starts_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "start_run", lambda *_, **__: pytest.fail("started"))
    stopped = bench(tmp_path)
    stopped.stop.set()
    with pytest.raises(Stopped):
        stopped.measure(Job("on", 0, (), "f"))


def test_score_of_an_evaluation_is_taken_once_it_is_complete(tmp_path):
    file = tmp_path / "evaluations.jsonl"
    file.write_text(
        '{"evaluation": 0, "updates": 0, "status": "complete", "score": 0.0}\n'
        '{"evaluation": 1, "updates": 4, "status": "timeout", "score": 0.5}\n'
    )
    run = SimpleNamespace(directory=SimpleNamespace(evaluations_file=file))
    assert (measure._evaluated(run, 0), measure._evaluated(run, 8)) == ([0.0], [])
    with pytest.raises(AfterplayError, match="version 4, got timeout"):
        measure._evaluated(run, 4)
