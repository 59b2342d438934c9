"""Prometheus is pointed at exactly the processes of a run that live."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from grafana.targets import file_sd, main, targets_of_run
from pipeline.runtime.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run").create()
    directory.config_file.write_text(yaml.safe_dump({"engine": {"kind": "embedded", "port": 8123, "replicas": 2}}))
    for name, port in (("actor-0", 41), ("actor-1", 42), ("learner", 43), ("replay", 44)):
        directory.process_file(name).write_text(json.dumps({"pid": 1, "metrics_port": port}))
    return directory


def test_every_live_process_and_every_engine_is_scraped_under_its_role(run: RunDirectory) -> None:
    assert file_sd(targets_of_run(run.path), "r") == [
        {"targets": ["127.0.0.1:41", "127.0.0.1:42"], "labels": {"job": "afterplay-actor", "run": "r"}},
        {"targets": ["127.0.0.1:43"], "labels": {"job": "afterplay-learner", "run": "r"}},
        {"targets": ["127.0.0.1:44"], "labels": {"job": "afterplay-replay", "run": "r"}},
        {"targets": ["127.0.0.1:8123", "127.0.0.1:8124"], "labels": {"job": "afterplay-engine", "run": "r"}},
    ]


def test_processes_of_other_machines_are_scraped_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("grafana.targets.socket.gethostname", lambda: "here")
    records = {
        "actor-0": ("here", "0.0.0.0"),
        "actor-1": ("there", "0.0.0.0"),
        "learner": ("there", "10.0.0.7"),
        "replay": ("here", "127.0.0.1"),
        "actor-2": ("there", "127.0.0.1"),
        "actor-3": ("there", "fd00::7"),
    }
    for name, (machine, host) in records.items():
        record = {"pid": 1, "machine": machine, "metrics_host": host, "metrics_port": 41}
        run.process_file(name).write_text(json.dumps(record))
    found = [target.address for target in targets_of_run(run.path) if target.job != "afterplay-engine"]
    assert found == ["127.0.0.1:41", "there:41", "[fd00::7]:41", "10.0.0.7:41", "127.0.0.1:41"]
    assert "actor-2 is left out: it listens on 127.0.0.1 of there" in capsys.readouterr().err


def test_targets_file_is_written_for_file_sd(run: RunDirectory, tmp_path: Path) -> None:
    output = tmp_path / "targets.json"
    assert main([str(run.path), "-o", str(output)]) == 0
    assert [entry["labels"]["job"] for entry in json.loads(output.read_text())] == [
        "afterplay-actor", "afterplay-learner", "afterplay-replay", "afterplay-engine",
    ]  # fmt: skip
