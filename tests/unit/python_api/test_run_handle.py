"""The handle of a run: what it tells of a run that others made, and how it ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

import afterplay
from afterplay.commands import load
from afterplay.run import Run, reason_in
from pipeline.errors import AfterplayError, ConfigurationError, RunFailed
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.queries import Span
from pipeline.supervisor.run import RunIsAlive, run_lock
from tests.unit.show.making import make_run
from tests.unit.show.test_reading import ROLLOUTS

ROOT = Path(__file__).parents[3]


def line(step: int, reward: float = 0.5) -> bytes:
    return orjson.dumps({"step": step, "reward_mean": reward}) + b"\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = make_run(tmp_path / "some", ROLLOUTS)
    (path / "metrics.jsonl").write_bytes(line(1) + line(2) + line(2, 0.9) + line(3) + b'{"step": 4, "rew')
    return load(path)


def test_a_run_gives_each_step_once(run: Run) -> None:
    assert [step["step"] for step in run] == [1, 2, 3]
    assert [step["reward_mean"] for step in run.steps()] == [0.5, 0.9, 0.5], "the last line of a repeated step counts"
    assert "not running, 3 steps" in repr(run)


async def test_a_run_can_be_followed_asynchronously(run: Run) -> None:
    assert [step["step"] async for step in run] == [1, 2, 3]


def test_a_failed_run_raises_the_reason_of_its_supervisor_after_its_steps(run: Run) -> None:
    (run.directory / "outcome.json").write_bytes(orjson.dumps({"exit_code": 4, "reason": "learner failed"}))
    seen = []
    with pytest.raises(RunFailed, match="some: learner failed"):
        for step in run:
            seen.append(step["step"])
    assert seen == [1, 2, 3]
    with pytest.raises(RunFailed):
        run.wait()
    assert "failed, 3 steps" in repr(run)
    assert isinstance(RunFailed(), AfterplayError)


def test_a_stopped_run_is_no_failure(run: Run) -> None:
    (run.directory / "outcome.json").write_bytes(orjson.dumps({"exit_code": 0, "reason": "stopped by SIGTERM"}))
    assert run.wait() is run
    run.stop()


def test_a_run_of_another_machine_is_stopped_there(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of a stranger here."""
    monkeypatch.setattr(os, "kill", None)
    with run_lock(RunDirectory(run.directory)):
        monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
        with pytest.raises(AfterplayError, match=f"on {os.uname().nodename}, process {os.getpid()}: stop it there"):
            run.stop()
        taken = pytest.raises(RunIsAlive, match=f"pid {os.getpid()} on {os.uname().nodename}")
        with taken, run_lock(RunDirectory(run.directory)):
            pass


def test_a_run_warns_while_most_of_its_rollouts_fail(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    alive = iter([True, True, False])
    monkeypatch.setattr(Run, "alive", property(lambda self: next(alive)))
    sentence = "environment maze: all 9 rollouts failed, most often with score: mine.py:pay raised KeyError"
    states = {"replay": {"failed": {"maze": [0, 9, sentence]}}}
    (run.directory / "processes.json").write_bytes(orjson.dumps(states))
    with pytest.warns(UserWarning, match="all 9 rollouts failed") as warned:
        run.wait()
    assert len(warned) == 1 and warned[0].filename == __file__


def test_rollouts_are_flat_rows(run: Run) -> None:
    rows = {row["trajectory_id"]: row for row in run.rollouts()}
    assert len(rows) == len(ROLLOUTS)
    assert not any(isinstance(value, dict) for row in rows.values() for value in row.values())
    kept, freed, failed = rows["g000002.1.0"], rows["g000000.1.0"], rows["g000001.1.0"]
    assert kept["messages"][0] == {"role": "user", "content": "a"} and kept["reply"] == "f" * 30
    assert len(kept["sampled_ids"]) == 3
    assert freed["reply"] is freed["messages"] is freed["sampled_ids"] is None and freed["reward"] == 0.0
    assert "no answer [in] 5 s" in failed["failure"]
    assert [row["trajectory_id"] for row in run.rollouts(step=3)] == ["g000003.0.0"]
    assert {row["environment"] for row in run.rollouts(environment="arithmetic")} == {"arithmetic"}
    assert len(run.rollouts(limit=2)) == 2
    assert {row["trajectory_id"] for row in run.rollouts(kept=True)} == {i for i, row in rows.items() if row["reply"]}
    assert run.rollouts(kept=False) == run.rollouts()
    assert run.rollouts(reward_min=np.float32(0.5)) == run.rollouts(reward_min=0.5)


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"status": "completed"}, "status: expected one of complete, truncated,"),
        ({"environment": "maze"}, "environment: expected one of .*, got 'maze'"),
        ({"task": 3}, "task: expected a valid string, got 3"),
        ({"reward_min": "high"}, "reward_min: expected a valid number.*, got 'high'"),
        ({"limit": 0}, "limit: expected a whole number of 1 to 1,000,000,000,000,000, got 0"),
        ({"limit": "3"}, "limit: expected a whole number of 1 to 1,000,000,000,000,000, got '3'"),
        ({"step": 10**20}, "step: expected a number, or a range .*, got 1000"),
        ({"limit": None}, "limit: expected a whole number"),
        ({"rewards_min": 1}, "rollouts: expected filters among .*reward_min, .*, got rewards_min"),
    ],
)
def test_a_filter_that_no_rollout_can_fit_is_refused(run: Run, filters: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run.rollouts(**filters)


@pytest.mark.parametrize("name", ["step", "version", "evaluation"])
def test_rollouts_are_chosen_by_a_number_or_a_range(run: Run, name: str) -> None:
    def ids(value: Any) -> set[str]:
        return {row["trajectory_id"] for row in run.rollouts(**{name: value})}

    assert ids(range(1, 4)) == ids(1) | ids(np.int64(2)) | ids(Span(3, 3)) and ids(range(3, 4)) == ids(3)
    for wrong in ("3", 1.5, True, range(0), range(0, 9, 2), [1, 2]):
        with pytest.raises(ConfigurationError, match=f"{name}: expected a number, or a range"):
            ids(wrong)


@pytest.mark.parametrize("cls", [afterplay.Episode, afterplay.Environment])
def test_the_docstring_of_a_base_class_explains_its_attributes(cls: type) -> None:
    for name in cls.__annotations__:
        assert f"``{name}``" in (cls.__doc__ or ""), f"help({cls.__name__}) says nothing of {name}"


@pytest.mark.slow
def test_curves_and_page_are_shown_inline(run: Run, tmp_path: Path) -> None:
    shown = run.show()
    html = shown._repr_html_()
    assert html.count("<iframe") == 1 and "data:image/png;base64,iVBOR" in html
    frame = html.partition('srcdoc="')[2].removesuffix('"></iframe>')
    assert '"' not in frame and "<" not in frame, "the page stays inside its frame"
    assert shown.save(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert run.curves()._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_run_without_steps_has_no_curves(tmp_path: Path) -> None:
    run = load(make_run(tmp_path / "some", ()))
    with pytest.raises(AfterplayError, match="has no steps yet"):
        run.curves()
    assert list(run) == run.steps() == run.evaluations() == []


def test_the_policy_of_a_run_that_has_ended_is_in_its_checkpoints(run: Run) -> None:
    with pytest.raises(AfterplayError, match="has ended, and its engines with it"):
        run.endpoint()


@pytest.mark.parametrize(("lora", "model"), [("merged", "policy"), ("adapter", "adapter")])
def test_the_endpoint_names_the_model_with_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: str, model: str
) -> None:
    sections = {
        "engine": {"kind": "vllm", "port": 8000},
        "learner": {"lora": {"rank": 4}},
        "publish": {"lora": lora},
    }
    run = load(make_run(tmp_path / "some", (), **sections))
    monkeypatch.setattr("afterplay.run.check_health", lambda url: SimpleNamespace(healthy=True))
    with run_lock(RunDirectory(run.directory)):
        assert run.endpoint()["model"] == model


def test_the_endpoint_is_an_engine_that_actors_find_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = tmp_path / "urls"
    run = load(make_run(tmp_path / "some", (), engine={"kind": "external", "discovery": f"file:{urls}"}))

    def appear(seconds: float) -> None:
        urls.write_text("http://gone:8000\nhttp://b:8000\n")

    monkeypatch.setattr("afterplay.run.time.sleep", appear)
    monkeypatch.setattr("afterplay.run.check_health", lambda url: SimpleNamespace(healthy="//b:" in url))
    with run_lock(RunDirectory(run.directory)):
        assert run.endpoint()["base_url"] == "http://b:8000/v1"


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="expected a run directory"):
        load(tmp_path)


def test_the_reason_of_a_command_is_its_message() -> None:
    assert reason_in("some lines\nafterplay: expected a run file\nand more\n", 2) == "expected a run file\nand more"
    assert reason_in("step 1/9\n", -9) == "it ended (killed by SIGKILL); its output ends:\nstep 1/9"


# The package


def python(program: str) -> str:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_the_import_loads_no_other_package() -> None:
    program = (
        "import sys; before = set(sys.modules); import afterplay; "
        "names = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(names - {'actors', 'afterplay', 'pipeline'} - sys.stdlib_module_names), "
        "[name for name in sys.modules if name.startswith(('actors.', 'pipeline.'))])"
    )
    assert python(program) == "[] []"


def test_a_package_of_the_user_with_a_name_of_ours_is_named(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").touch()
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    assert python(program + "import afterplay; print(afterplay.Task.__module__)") == "pipeline.schema.trajectory"
    wrong = "import pipeline\ntry:\n    import afterplay\nexcept ImportError as error:\n    print(error)"
    assert f"another one was imported from {tmp_path / 'pipeline'}: import" in python(program + "\n" + wrong)


def test_environments_and_handles_need_no_heavy_library() -> None:
    heavy = {"torch", "vllm", "transformers", "matplotlib", "pandas", "openai", "IPython"}
    program = (
        "import sys, afterplay; afterplay.Episode, afterplay.tool, afterplay.train, afterplay.evaluate, "
        "afterplay.load; "
        f"print(sorted({heavy!r} & set(sys.modules)))"
    )
    assert python(program) == "[]"


@pytest.mark.parametrize("name", afterplay.__all__)
def test_every_name_is_there(name: str) -> None:
    found = getattr(afterplay, name)
    assert callable(found)
    assert name in dir(afterplay)


def test_a_notebook_completes_the_names_for_users_alone() -> None:
    assert [name for name in dir(afterplay) if not name.startswith("_")] == sorted(afterplay.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'afterplay' has no attribute 'trian'"):
        afterplay.trian  # noqa: B018
