"""``afterplay eval`` without its processes: which weights, which run file, what is printed, which exit code."""

from __future__ import annotations

import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError
from rich.console import Console

from learner.models.info import ModelInfo
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.config.load import dump, loads
from pipeline.config.rollouts import EngineConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.folders import write_contents
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.evaluate import (
    EvaluationRequest,
    Weights,
    evaluate_checkpoint,
    evaluation_config,
    find_weights,
    print_result,
)
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import plan
from pipeline.views.step_lines import describe_evaluation
from tests.support.damage import DAMAGES, truncate


def checkpoint(run: RunDirectory, updates: int) -> Path:
    folder = run.checkpoints / f"u{updates:06d}"
    (folder / "model").mkdir(parents=True)
    (folder / "state.json").write_bytes(orjson.dumps({"updates": updates, "policy_version": updates + 1}))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run").create()


def test_the_weights_that_are_asked_for(run: RunDirectory) -> None:
    assert find_weights(run, None) == Weights("initial", None)
    with pytest.raises(ConfigurationError, match="none yet"):
        find_weights(run, "latest")
    with pytest.raises(ConfigurationError, match="keep_best"):
        find_weights(run, "best")
    ten, twenty = checkpoint(run, 10), checkpoint(run, 20)
    assert find_weights(run, None).updates == 20 and find_weights(run, "latest").model == twenty / "model"
    for name in ("10", "u000010", "000010"):
        assert find_weights(run, name) == Weights("u000010", ten / "model", 10, 11)
    (run.checkpoints / "best").symlink_to(ten.name)
    assert find_weights(run, "best").updates == 10
    assert find_weights(run, "initial").model is None
    for name in ("30", "newest", ""):
        with pytest.raises(ConfigurationError, match=r"best, latest, initial or one of .*10, 20"):
            find_weights(run, name)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_weights_are_not_evaluated(run: RunDirectory, damage: str) -> None:
    run.config_file.write_text(dump(RunConfig()))
    checkpoint(run, 10)
    newest = checkpoint(run, 20)
    (newest / "model" / "model.safetensors").write_bytes(bytes(range(99)))
    write_contents(newest)
    DAMAGES[damage](newest / "model" / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"u000020 .* is damaged \(model/model.safetensors .* one of 10, 20"):
        evaluate_checkpoint(run.path, EvaluationRequest())


def test_its_run_file_only_evaluates_and_touches_nothing_of_the_run(run: RunDirectory) -> None:
    config = RunConfig.model_validate(
        {
            "run": {"directory": run.path.parent, "name": "run", "total_steps": 50},
            "environments": {"arithmetic": {"held_out": {"test": 9}}},
            "groups": {"groups_per_step": 4},
            "stage": {"store": "/elsewhere.sqlite", "address": "tcp://127.0.0.1:5555"},
            "metrics": {"port": 9000},
            "evaluation": {"every": 5, "split": "test", "keep_best": "score", "strict": True},
        }
    )
    folder = RunDirectory(run.evaluations / "u000020-1")
    weights = Weights("u000020", run.checkpoints / "u000020" / "model", 20, 22)
    made = evaluation_config(config, weights, EvaluationRequest(tasks=7, samples=8), folder)
    assert made.run.path == folder.path and made.run.total_steps == 21
    section = made.evaluation
    assert (section.tasks, section.samples, section.greedy, section.split) == (7, 8, False, "test")
    assert not made.trained_environments
    assert section.pass_at == (1, 8) and section.keep_best is None and not section.strict
    assert section.is_due(20, 21)
    assert made.stage.store is None and made.stage.address == "ipc://"
    assert made.metrics.port == 0 and made.engine.port == 0
    assert made.model.source == str(weights.model)
    assert loads(dump(made), "config.yaml", (), {}) == made, "it goes through its file"
    names = [place.name for place in plan(made, Inventory((Node("laptop"),)), center="evaluator").places]
    assert "evaluator" in names and "learner" not in names


@pytest.mark.parametrize(
    "engine",
    [
        {"urls": ["http://node-1:8100", "http://node-2:8101"], "replicas": 2, "port": 8100},  # SLURM, two machines
        {"discovery": "file:/elsewhere/engine_urls"},  # Ray
        {"discovery": "dns:engines:8100"},
    ],
)
def test_its_engines_are_looked_up_where_it_starts_them(run: RunDirectory, engine: dict[str, Any]) -> None:
    def made(engine: dict[str, Any]) -> EngineConfig:
        sections = {"environments": {"a": {"held_out": {"eval": 9}}}, "engine": engine}
        weights, folder = Weights("initial", None), RunDirectory(run.evaluations / "initial-1")
        config = RunConfig.model_validate(sections)
        return resolve(evaluation_config(config, weights, EvaluationRequest(), folder)).engine

    own = made({"host": "0.0.0.0", **engine})
    assert own.discovery is None and own.replicas == engine.get("replicas", 1)
    assert own.addresses() == tuple(f"http://127.0.0.1:{own.port + i}" for i in range(own.replicas))
    others = {"kind": "external", "urls": ["http://node-1:8100"]}
    assert made(others).addresses() == ("http://node-1:8100",), "those of others are where they are"


def test_greedy_takes_one_rollout_of_each_task_whatever_the_run_file_samples(run: RunDirectory) -> None:
    evaluation = {"temperature": 1, "samples": 4, "pass_at": [1, 4], "keep_best": "pass@4"}
    config = RunConfig.model_validate({"environments": {"a": {"held_out": {"eval": 9}}}, "evaluation": evaluation})
    weights, folder = Weights("initial", None), RunDirectory(run.evaluations / "initial-1")
    made = evaluation_config(config, weights, EvaluationRequest(greedy=True), folder).evaluation
    assert (made.temperature, made.samples, made.pass_at) == (0, 1, (1,))
    with pytest.raises(ConfigurationError, match="all greedy rollouts of a task are the same"):
        evaluation_config(config, weights, EvaluationRequest(greedy=True, samples=4), folder)


def test_options_that_do_not_fit_are_refused_and_leave_no_folder(run: RunDirectory) -> None:
    run.config_file.write_text(dump(RunConfig()))
    with pytest.raises(ConfigurationError, match="from 1 to samples"):
        evaluate_checkpoint(run.path, EvaluationRequest(samples=2, pass_at=(4,)))
    assert not run.evaluations.exists()
    with pytest.raises(ConfigurationError, match=r"no config\.yaml"):
        evaluate_checkpoint(run.checkpoints, EvaluationRequest())


@pytest.mark.parametrize("refused", ["model.source=./nowhere", "engine={kind: external, urls: ['http://127.0.0.1:9']}"])
def test_an_evaluation_that_is_refused_starts_nothing_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    monkeypatch.setattr("pipeline.supervisor.evaluate.supervise", lambda *_: pytest.fail("it started"))
    file = tmp_path / "run.yaml"
    file.write_text("environments: {guess: {name: number_guess}}\nengine: {kind: embedded}\nmodel: {source: tiny}")
    with pytest.raises(ConfigurationError, match=r"^(model.source|engine.urls): "):
        evaluate_checkpoint(file, EvaluationRequest(), [f"run.directory={tmp_path / 'runs'}", refused])
    assert list(tmp_path.iterdir()) == [file]


def test_data_without_the_split_is_refused_before_anything_starts(run: RunDirectory) -> None:
    data = {"kind": "jsonl", "path": "rows.jsonl"}
    asked = {"name": "number_guess", "tasks_from": data}
    run.config_file.write_text(dump(RunConfig.model_validate({"environments": {"asked": asked}})))
    with pytest.raises(ConfigurationError, match=r"evaluation.split is eval, but environments.asked.tasks_from.splits"):
        evaluate_checkpoint(run.path, EvaluationRequest())


@pytest.mark.parametrize(
    ("weight", "other", "refused"),
    [(1, "train", True), (1, "eval", False), (0, "eval", False), (0, None, False), (1, None, False)],
)
def test_some_environment_must_have_the_split(weight: float, other: str | None, refused: bool) -> None:
    def data(split: str) -> dict[str, Any]:
        return {"kind": "jsonl", "splits": {split: "rows.jsonl", "train": "rows.jsonl"}}

    environments = {
        "a": {"tasks_from": data("train"), "weight": weight},
        "b": {"weight": weight} if other is None else {"tasks_from": data(other), "weight": weight},
    }
    sections = {"environments": environments, "evaluation": {"every": 1}}
    with pytest.raises(ValidationError, match="add it there") if refused else nullcontext():
        RunConfig.model_validate(sections)


def test_environments_are_checked_beside_its_start(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def supervise(config: Any, specs: Any, *rest: Any) -> ExitCode:
        started.extend(spec.name for spec in specs)
        return ExitCode.CONFIGURATION

    monkeypatch.setattr("pipeline.supervisor.evaluate.supervise", supervise)
    run.config_file.write_text(dump(loads("environments: {guess: {name: number_guess}}\nengine: {kind: embedded}")))
    assert evaluate_checkpoint(run.path, EvaluationRequest()) is ExitCode.CONFIGURATION
    assert started[0] == "preflight" and "evaluator" in started


def test_the_initial_model_of_a_run_is_the_one_that_it_began_with(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``model.source`` may be relative to another folder, and a repository of the hub may have changed."""
    started: list[str] = []
    monkeypatch.setattr("pipeline.supervisor.evaluate.check_before_run", lambda config: [])  # no folder is there
    monkeypatch.setattr(
        "pipeline.supervisor.evaluate.supervise",
        lambda config, *rest: started.append(config.model.source) or ExitCode.FAILED,
    )
    run_file = "environments: {guess: {name: number_guess}}\nmodel: {source: ./mine}\nengine: {kind: embedded}"
    run.config_file.write_text(dump(loads(run_file)))
    run.model.mkdir()
    request = {"source": "./mine", "tiny": {}, "chat_template": None}
    facts = ModelInfo(run.model, "./mine", request, "LlamaForCausalLM", 1, 9, 64, (2,))
    facts.save()
    ask = EvaluationRequest(checkpoint="initial")
    evaluate_checkpoint(run.path, ask)
    evaluate_checkpoint(run.path, ask, ["model.source=./other"])
    assert started == [str(run.model), "./other"]
    (run.model / "model.safetensors").write_bytes(bytes(range(99)))
    write_contents(run.model)
    truncate(run.model / "model.safetensors")
    evaluate_checkpoint(run.path, ask)
    assert started[2:] == ["./mine"], "a damaged one is made again"


def result(score: float | None = 0.5, status: str = "complete", **more: Any) -> dict[str, Any]:
    told = {"tasks": 4, "score": score, "se": None if score is None else 0.1, "pass_at": {"1": score, "4": None},
            "truncated": 1, "failed": 2, "missing": 3}  # fmt: skip
    return {
        "updates": 20, "split": "eval", "greedy": False, "samples": 4, "temperature": 0.7, "status": status,
        "score": score, "se": told["se"], "pass_at": told["pass_at"], "environments": {"a": told}, "versions": [20, 22],
        **more,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("told", "code"),
    [
        (result(), ExitCode.FINISHED),
        (result(status="timed_out"), ExitCode.FAILED),
        (result(score=None), ExitCode.FAILED),
    ],
)
def test_the_table_and_the_exit_code(told: dict[str, Any], code: ExitCode, run: RunDirectory) -> None:
    written = io.StringIO()
    assert print_result(told, "u000020", run, Console(file=written, width=140)) is code
    text = written.getvalue()
    assert "u000020: 20 updates, split eval, 4 rollouts a task at temperature 0.7" in text
    assert ("0.500 ± 0.100" in text) is (told["score"] is not None)
    assert "pass@4" in text and "missing" in text


def test_a_result_in_one_line_for_the_progress() -> None:
    assert describe_evaluation(result()) == (
        "evaluation after step 20  score 0.500 ± 0.100  pass@1 0.500  missing 3  versions 20 to 22"
    )
    two = result()
    two["environments"] = {"a": {"score": 0.25}, "b": {"score": None}, "c": {"score": 1.0}}
    assert "a 0.250  c 1.000" in describe_evaluation(two)
    assert "timed_out" in describe_evaluation(result(score=None, status="timed_out"))
    assert describe_evaluation({}) == "evaluation after step None  None"
