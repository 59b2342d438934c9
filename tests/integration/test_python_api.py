"""The environment of docs/PYTHON.md, trained from Python and from its run file: the same run twice."""

from __future__ import annotations

import re
import runpy
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest

import afterplay
import afterplay.run
from pipeline.runtime.children import OrphanReaper
from tests.support.fork_server import ForkServer

PAGE = Path(__file__).parents[2] / "docs" / "PYTHON.md"
SECONDS_MAX = 240
STEPS = 2
SAME = {
    "RUN__TOTAL_STEPS": str(STEPS),
    "RUN__SEED": "0",
    "ENGINE__ARGS": "[--seed=1]",
    "ACTOR__CONCURRENCY": "1",
    "STALENESS__MAX": "0",
    "GROUPS__GROUPS_PER_STEP": "3",
    "TRACES__TRAINED": "24",
}
"""The keys that the page names, and a smaller run whose tokens are all kept."""
OF_THE_MACHINE = {"time", "started", "finished", "seconds", "tokens_per_second", "published", "saved"}
OF_THE_MACHINE |= {"mfu", "peak_memory_bytes", "generation_started", "generation_finished"}


class ForkedChild:
    """A child group whose program is forked, so that it pays for no imports."""

    def __init__(
        self,
        server: ForkServer,
        command: list[str],
        reaper: OrphanReaper,
        *,
        environment: Mapping[str, str],
        output: IO[bytes],
    ) -> None:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        self._process = server.start(command, env=environment, forks=True, **streams)
        self.end: Future[int] = Future()
        threading.Thread(target=lambda: self.end.set_result(self._process.wait()), daemon=True).start()

    def stop(self, grace_seconds: float) -> bool:
        self._process.terminate()
        self.end.result(grace_seconds)
        return True


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files of the page, which is the working folder."""
    for name in ("bank.py", "run.yaml"):
        found = re.search(rf"^```\w+\n(# {re.escape(name)}\n.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        assert found and len(found[1].splitlines()) < 40, name
        (tmp_path / name).write_text(found[1])
    monkeypatch.chdir(tmp_path)
    for key, value in SAME.items():
        monkeypatch.setenv(f"AFTERPLAY__{key}", value)
    return tmp_path


def played(run: afterplay.Run, step: int) -> dict[str, tuple[Any, ...]]:
    rows = run.rollouts(step=step)
    assert len(rows) == 24 and all(row["sampled_ids"] for row in rows)
    return {row["trajectory_id"]: (row["task_id"], row["messages"], row["sampled_ids"], row["reward"]) for row in rows}


def tasks(run: afterplay.Run) -> dict[str, str]:
    """The task of each rollout of all steps."""
    return {row["trajectory_id"]: row["task_id"] for row in run.rollouts() if row["step"] is not None}


def trained(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in OF_THE_MACHINE}


@pytest.mark.timeout(2 * SECONDS_MAX)
def test_a_script_and_its_run_file_make_the_same_first_steps(
    page: Path,
    fork_server: ForkServer,
    forked_run: partial,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with forked_run(page / "run.yaml", page / "runs", "by_file") as run:
        assert run.finish(SECONDS_MAX) == 0, run.tail()
    monkeypatch.setattr(afterplay.run, "ChildGroup", partial(ForkedChild, fork_server))
    monkeypatch.setenv("AFTERPLAY__RUN__NAME", "by_script")
    runpy.run_path("bank.py", run_name="__main__")
    script, file = afterplay.load("runs/by_script"), afterplay.load("runs/by_file")
    copied = page / "runs" / "by_script" / "source" / "environment.py"
    assert script.config.environments["bank"].name == f"{copied}:Bank"
    assert file.config.environments["bank"].name == "bank.py:Bank"
    printed = [[float(word) for word in line.split()] for line in capsys.readouterr().out.splitlines()]
    assert printed == [[line["step"], line["reward_mean"]] for line in script.steps()] and len(printed) == STEPS
    assert played(script, 1) == played(file, 1)
    assert trained(script.steps()[0]) == trained(file.steps()[0])
    assert tasks(script) == tasks(file)


@pytest.mark.timeout(SECONDS_MAX)
def test_a_run_that_fails_raises_the_reason(
    page: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(afterplay.run, "ChildGroup", partial(ForkedChild, fork_server))
    Path("closed.py").write_text("class Closed:\n    def start(self, task):\n        1 / 0\n")
    run = afterplay.train("run.yaml", environment="closed.py:Closed")
    with pytest.raises(afterplay.RunFailed, match="ZeroDivisionError"):
        run.wait()
    assert not run.alive
