"""The offline stores of the four trackers after a reporter process was killed and started again: each step once, with
the numbers of ``metrics.jsonl``."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.load import dump, loads
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically
from pipeline.trackers.delivery import DeliveryFile, TrackerRecord
from pipeline.trackers.records import SECTIONS, numbers_of, step_numbers
from pipeline.trackers.reporter import delivery_path
from pipeline.trackers.tracker import TrackedRun

Rows = Iterator[tuple[int, str, float]]
"""Step, name and value of each number in a store."""
SECONDS_MAX = 120
GROUPS = {name for name, _ in SECTIONS} | {"eval"}


def tensorboard_rows(run: Path) -> Rows:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    for name in found.Tags()["scalars"]:
        for event in found.Scalars(name):
            yield event.step, name, event.value


def wandb_rows(run: Path) -> Rows:
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
        for line in subprocess.run(command, capture_output=True, check=False).stdout.splitlines():
            item = (json.loads(line).get("history") or {}).get("item") or {}
            for name, value in item.items():
                if name.split("/")[0] in GROUPS:
                    yield item["step"], name, value
                for inner, deep in value.items() if isinstance(value, dict) else ():
                    if name.startswith(("train", "eval")):
                        yield item["step"], f"{name}/{inner}", deep


def mlflow_rows(run: Path) -> Rows:
    from mlflow import MlflowClient

    client = MlflowClient(os.environ["MLFLOW_TRACKING_URI"])
    (found,) = client.search_runs([client.get_experiment_by_name("afterplay").experiment_id])
    for name in found.data.metrics:
        for metric in client.get_metric_history(found.info.run_id, name):
            yield metric.step, name, metric.value


def trackio_rows(run: Path) -> Rows:
    program = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "(name,) = S.get_runs('afterplay')\n"
        "print(json.dumps(S.get_logs('afterplay', name), default=str))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    for row in json.loads(printed):
        for name, value in row.items():
            if name.split("/")[0] in GROUPS:
                yield row["step"], name, value


READERS = {"tensorboard": tensorboard_rows, "wandb": wandb_rows, "mlflow": mlflow_rows, "trackio": trackio_rows}


def append(path: Path, lines: list[dict]) -> None:
    with path.open("ab") as file:
        file.write(b"".join(json.dumps(line).encode() + b"\n" for line in lines))


def steps(first: int, last: int, made: int) -> list[dict]:
    return [
        {"step": n, "time": 1.8e9 + n, "reward_mean": made + n / 7, "seconds": {"forward": n / 3}, "kl_k3": None}
        for n in range(first, last + 1)
    ]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.filterwarnings("ignore")
def test_the_store_of_a_tracker_has_each_step_once_after_a_kill(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"NO {name.upper()} HERE: pip install '.[{name}]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory(tmp_path / "some").create()
    trackers = f"report_to: [{name}]\ntrackers: {{rollouts: 0}}"
    config = loads(f"{trackers}\nenvironments: {{guess: {{name: number_guess}}}}")
    run = config.run.model_copy(update={"directory": tmp_path, "name": "some"})
    directory.config_file.write_text(dump(config.model_copy(update={"run": run})))
    append(directory.metrics_file, steps(1, 20, 0))
    command = [sys.executable, "-m", "pipeline.cli.app", "reporter", str(directory.config_file)]
    with subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        while b"reporting" not in (line := process.stderr.readline()):
            assert line, f"the reporter ended with {process.wait()}"
        path = delivery_path(directory, name)
        while '"step/20"' not in path.read_text():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
    # as if the kill had come between the tracker and the journal: what was sent last is in doubt
    path.write_text(path.read_text().removesuffix('{"sent":true}\n'))
    # the learner resumes from step 15, and makes some steps again
    kept = directory.metrics_file.read_bytes().splitlines(keepends=True)[:15]
    write_bytes_atomically(directory.metrics_file, b"".join(kept))
    append(directory.metrics_file, steps(16, 24, 100))
    evaluation = {
        "evaluation": 0,
        "updates": 24,
        "score": 0.25,
        "pass_at": {"1": 0.5},
        "started_at": 1.8e9,
        "seconds": 1,
    }
    append(directory.evaluations_file, [evaluation])
    command = [sys.executable, "-m", "pipeline.cli.app", "report", str(directory.path), "--to", name]
    told = subprocess.run(command, capture_output=True, check=True, text=True, timeout=SECONDS_MAX).stdout
    assert f"{name} has all 24 steps" in told

    rows = list(READERS[name](directory.path))
    twice = [place for place, count in Counter((step, key) for step, key, _ in rows).items() if count > 1]
    assert twice == []
    lines = [json.loads(line) for line in directory.metrics_file.read_bytes().splitlines()]
    wanted = {(line["step"], key): v for line in lines for key, v in step_numbers(line).items()}
    wanted |= {(24, key): v for key, v in numbers_of(evaluation, "eval").items()}
    found = {(step, key): value for step, key, value in rows}
    assert found.keys() == wanted.keys()
    first = {(line["step"], key): v for line in steps(16, 20, 0) for key, v in step_numbers(line).items()}
    close = {"rel": 1e-6} if name == "tensorboard" else {"rel": 1e-12}  # event files hold float32
    for place, value in found.items():
        allowed = [wanted[place]] if name == "tensorboard" else [wanted[place], first.get(place, wanted[place])]
        assert any(value == pytest.approx(one, **close) for one in allowed), place
    file = DeliveryFile(path)
    assert file.delivery.doubtful == () and file.delivery.last_step == 24
    file.close()


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_all_parameters_after_a_kill_takes_any_name_and_knows_how_the_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="NO MLFLOW HERE: pip install '.[mlflow]'")
    from pipeline.trackers.mlflow import MLflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    config = loads("environments: {guess: {name: number_guess}}")
    run = TrackedRun("a" * 32, "name", "project", tmp_path, config)
    with monkeypatch.context() as patch:
        send = mlflow.MlflowClient.log_batch
        answers = iter([send])
        patch.setattr(mlflow.MlflowClient, "log_batch", lambda *a, **named: next(answers)(*a, **named))
        with pytest.raises(StopIteration):  # killed after the first request
            MLflow(run)
    tracker = MLflow(run)
    names = ("acc/", "a//b", "../a", "", "..", "x" * 300, "\u2265 0,5")
    numbers = {f"episode/signals/{name}": 0.5 for name in names}
    tracker.send([(TrackerRecord("step/1", 1, 1.8e9, numbers), 0)])
    for finished, status in ((False, "KILLED"), (True, "FINISHED")):
        tracker.close(finished)
        client = mlflow.MlflowClient()
        (found,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
        assert found.info.status == status
    assert len(found.data.params) == len(run.settings)
    assert len(found.data.metrics) == len(names)
