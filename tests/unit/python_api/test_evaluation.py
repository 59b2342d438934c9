"""``afterplay.evaluate`` is ``afterplay eval``: the same options, and the result that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

import afterplay
from afterplay import commands
from pipeline.errors import ConfigurationError, RunFailed
from pipeline.supervisor.run import RunIsAlive
from tests.unit.show.making import make_run


class Child:
    """Says what a command says, and remembers its arguments."""

    stdout = stderr = ""
    code = 0
    asked: list[list[str]]

    def __init__(self, command: list[str], reaper: Any, **options: Any) -> None:
        self.asked.append(command[command.index("eval") + 1 :])
        self.end: Future[int] = Future()
        self.end.set_result(self.code)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[Child]:
    results = tmp_path / "evaluations.jsonl"
    results.write_bytes(orjson.dumps({"evaluation": 0, "updates": 2, "score": 0.5, "status": "complete"}) + b"\n")
    asked: list[list[str]] = []
    fresh = type("Fresh", (Child,), {"asked": asked, "stdout": f"score 0.5\nwritten to {results}\n"})
    monkeypatch.setattr(commands, "ChildGroup", fresh)
    return fresh


def test_a_run_is_evaluated_with_the_options_of_the_command(child: type[Child], tmp_path: Path) -> None:
    run = afterplay.load(make_run(tmp_path / "some", ()))
    found = afterplay.evaluate(
        run, checkpoint="best", tasks=4, samples=2, greedy=False, pass_at=[1, 2], engine__threads=1
    )
    assert found["score"] == 0.5
    assert child.asked == [
        [str(run.directory), "--set=engine.threads=1", "--checkpoint=best", "--tasks=4", "--samples=2", "--sampled",
         "--pass-at=1", "--pass-at=2"]
    ]  # fmt: skip


def test_a_run_below_the_home_folder_is_evaluated(
    child: type[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    directory = make_run(tmp_path / "some", ())
    afterplay.evaluate("~/some")
    assert child.asked == [[str(directory)]]


def test_the_initial_model_of_a_configuration_is_evaluated(child: type[Child], tmp_path: Path) -> None:
    afterplay.evaluate("@tiny", "babyai", run__directory=str(tmp_path))
    afterplay.evaluate("@tiny", "babyai", run__directory=str(tmp_path), pass_at=4)
    file = str(tmp_path / "tiny" / "source" / "run.yaml")
    afterplay.evaluate("@tiny", "babyai", run__directory=str(tmp_path), checkpoint="best")
    initial = [file, "--checkpoint=initial"]
    assert child.asked == [initial, [*initial, "--pass-at=4"], [file, "--checkpoint=best"]]


def test_a_run_of_this_process_keeps_its_run_file_before_it_has_the_lock(
    child: type[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process reads the file, and takes the lock, some seconds after it is started."""
    started = SimpleNamespace(child=SimpleNamespace(end=Future()), stop=lambda: None)
    monkeypatch.setattr(commands, "Supervised", lambda *_: started)
    first = afterplay.train("@tiny", "babyai", run__directory=str(tmp_path), run__seed=1)
    file = tmp_path / "tiny" / "source" / "run.yaml"
    text = file.read_text()
    for again in (afterplay.train, afterplay.evaluate):
        with pytest.raises(RunIsAlive, match=r"a run that this process has started: stop that one \(run.stop\(\)\)"):
            again("@tiny", "babyai", run__directory=str(tmp_path), run__seed=2)
    with pytest.raises(RunIsAlive):
        afterplay.train("@tiny", "babyai", fresh=True, run__directory=str(tmp_path))
    assert file.read_text() == text and first.alive
    started.child.end.set_result(0)
    afterplay.train("@tiny", "babyai", run__directory=str(tmp_path), run__seed=2)
    assert file.read_text() != text


@pytest.mark.parametrize("again", [afterplay.train, afterplay.evaluate])
def test_a_run_file_belongs_to_one_thread_until_its_run_is_known_or_its_evaluation_has_ended(
    again: Callable[..., Any], child: type[Child], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end: Future[int] = Future()
    texts: list[str] = []

    def other_thread(*_: object, **__: object) -> SimpleNamespace:
        file = tmp_path / "tiny" / "source" / "run.yaml"
        before = file.read_text()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(again, "@tiny", "babyai", run__directory=str(tmp_path), run__seed=2)
            with pytest.raises(RunIsAlive, match="in use by another thread of this process"):
                call.result()
        texts.extend((before, file.read_text()))
        return SimpleNamespace(child=SimpleNamespace(end=end), end=end, stdout=child.stdout)

    end.set_result(0)
    monkeypatch.setattr(commands, "Supervised", other_thread)
    monkeypatch.setattr(commands, "ChildGroup", other_thread)
    afterplay.train("@tiny", "babyai", run__directory=str(tmp_path), run__seed=1)
    afterplay.evaluate("@tiny", "babyai", run__directory=str(tmp_path), run__seed=1)
    assert len(texts) == 4 and len(set(texts)) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"model__source": "./nowhere"},
        {"loss__policy": "ppoo"},
        {"learner__device": "cuda"},
        {"engine": {"kind": "external", "urls": ["http://127.0.0.1:9"]}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_fresh_start_that_is_refused_removes_nothing(wrong: dict[str, Any], tmp_path: Path) -> None:
    run = make_run(tmp_path / "tiny", ())
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigurationError):
        afterplay.train("@tiny", fresh=True, run__directory=str(tmp_path), **wrong)
    assert [path for path in before if not path.exists()] == []


def test_an_evaluation_without_a_result_raises_its_message(child: type[Child], tmp_path: Path) -> None:
    child.stdout, child.stderr, child.code = "run directory x\n", "afterplay: --checkpoint: expected best\n", 2
    with pytest.raises(RunFailed, match=r"^--checkpoint: expected best$"):
        afterplay.evaluate(make_run(tmp_path / "some", ()))


def test_an_evaluation_that_was_stopped_raises_its_reason_and_not_its_progress(
    child: type[Child], tmp_path: Path
) -> None:
    made = tmp_path / "initial-1"
    made.mkdir()
    (made / "outcome.json").write_bytes(orjson.dumps({"exit_code": 2, "reason": "evaluation.split is exam"}))
    child.stdout, child.code = f"run directory {made}  (logs in {made}/logs)\n0:00  preparing the model\n", 2
    with pytest.raises(RunFailed, match=r"^evaluation.split is exam$"):
        afterplay.evaluate(make_run(tmp_path / "some", ()))


def test_a_run_keeps_its_own_environments(child: type[Child], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has its own environments"):
        afterplay.evaluate(make_run(tmp_path / "some", ()), "babyai")
