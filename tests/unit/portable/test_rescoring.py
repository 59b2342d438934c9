"""Stored rewards are compared with what the score functions say today, and nothing is changed."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.config import RunConfig
from pipeline.config.show import show
from pipeline.errors import StoreError
from pipeline.replay.importing import Importer
from pipeline.replay.rescoring import rescore
from pipeline.replay.store import store_path
from pipeline.rundir import RunDirectory

FUNCTION = """
import math
def score(trajectory):
    seed = trajectory.task.seed
    if seed == 3:
        raise KeyError("gone")
    return {1: 0.25, 2: 1.0 + 1e-9}.get(seed, 1.0)
"""


@pytest.fixture
def run(tmp_path: Path) -> tuple[RunConfig, RunDirectory]:
    """A run with a pool of 12 trajectories of 6 tasks, stored with reward 1."""
    plugin = tmp_path / "judge.py"
    plugin.write_text(FUNCTION)
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "directory": str(tmp_path)},
            "groups": {"n_rollout": 4, "groups_per_step": 2},
            "environments": {"a": {"name": "arithmetic"}},
            "scorer": {"environment_weight": 0.0, "functions": [{"path": f"{plugin}:score", "name": "judge"}]},
            "replay": {"enabled": True},
        }
    )
    directory = RunDirectory(tmp_path / "r").create()
    directory.config_file.write_text(show(config, True))
    lines = [
        {"environment": "a", "seed": seed, "reward": 1.0,
         "turns": [{"context_ids": [1, n], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25]}]}
        for seed in range(6) for n in range(2)
    ]  # fmt: skip
    file = tmp_path / "d.jsonl"
    file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    Importer(config, directory, None).run(file)  # type: ignore[arg-type]
    return config, directory


def test_disagreements_and_failures_are_told_and_nothing_is_changed(run: tuple[RunConfig, RunDirectory]) -> None:
    config, directory = run
    path = store_path(config, directory)
    before = path.read_bytes()
    found = rescore(config, path, 100)
    assert (found.pooled, found.checked, found.agreed) == (12, 12, 8)
    assert [(d.task_id, d.stored, d.reward) for d in found.different] == [("a/1", 1.0, 0.25)] * 2
    assert [(d.task_id, d.reward, d.reason) for d in found.unscored] == [("a/3", None, "judge: raised")] * 2
    assert path.read_bytes() == before


def test_a_part_of_the_pool_is_drawn_by_the_seed(run: tuple[RunConfig, RunDirectory]) -> None:
    config, directory = run
    path = store_path(config, directory)
    found = rescore(config, path, 5)
    assert found.checked == 5 and found.pooled == 12
    assert rescore(config, path, 5) == found


def test_the_environments_own_score_is_taken_as_it_was_recorded(run: tuple[RunConfig, RunDirectory]) -> None:
    config, directory = run
    weighed = config.model_copy(update={"scorer": config.scorer.model_copy(update={"environment_weight": 0.5})})
    found = rescore(weighed, store_path(config, directory), 100)
    assert found.agreed == 0 and len(found.unscored) == 2
    assert [(d.task_id, d.reward) for d in found.different[-2:]] == [("a/1", 0.75)] * 2
    assert all(d.reward == pytest.approx(1.5) for d in found.different[:-2])


def test_a_run_without_a_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="has the run been started"):
        rescore(RunConfig(), tmp_path / "replay.sqlite", 3)


def test_the_command_tells_people_and_machines(run: tuple[RunConfig, RunDirectory]) -> None:
    _, directory = run
    command = ["replay", "inspect", str(directory.path), "--rescore", "50"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False).output
    assert "scored 12 of 12 pooled trajectories again: 8 as stored, 2 otherwise, 2 not at all" in shown
    assert "judge: raised" in shown and "0.25" in shown
    value = orjson.loads(CliRunner().invoke(app, [*command, "--json"], catch_exceptions=False).stdout)
    assert value["rescored"]["agreed"] == 8 and value["rescored"]["different"][0]["reward"] == 0.25
    plain = orjson.loads(CliRunner().invoke(app, [*command[:3], "--json"], catch_exceptions=False).stdout)
    assert "rescored" not in plain
