"""Runs that are not running, demonstrations, and what became of their pools."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config import RunConfig
from pipeline.config.explain import show
from pipeline.errors import StoreError
from pipeline.replay.report import examine_run
from pipeline.replay.transfer import Importer, export_run
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema.codec import decode_trajectory
from pipeline.stage.core import StageCore
from pipeline.store.ledger import read_ledger
from pipeline.store.store import ReplayStore, store_path

SECTIONS: dict[str, Any] = {
    "groups": {"n_rollout": 4, "groups_per_step": 2},
    "environments": {"a": {"name": "arithmetic", "max_seconds": 10}},
}


@dataclass
class Run:
    """One run that has never been started, or is not running."""

    config: RunConfig
    directory: RunDirectory

    @property
    def path(self) -> Path:
        return self.directory.path

    def import_(self, file: Path, render: Any = None) -> dict[str, int]:
        return +Importer(self.config, self.directory, render).run(file)

    def examine(self) -> dict[str, Any]:
        return examine_run(store_path(self.config, self.directory)).json(self.config)

    def files(self) -> dict[str, bytes]:
        """All but what every reader of a store leaves beside it."""
        found = {str(p.relative_to(self.path)): p.read_bytes() for p in self.path.rglob("*") if p.is_file()}
        return {
            name: data for name, data in found.items() if not name.endswith("-shm") and (data or name[-4:] != "-wal")
        }


def demonstration(seed: int, n: int = 0, *, logprobs: bool = True, **more: Any) -> dict[str, Any]:
    """Two turns; ``n`` tells demonstrations of one task apart."""
    turns = [
        {"context_ids": [1, 2, n], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25]},
        {"context_ids": [5], "completion_ids": [6, 7, 8], "logprobs": [-0.5, 0.0, -1.0]},
    ]
    if not logprobs:
        for turn in turns:
            del turn["logprobs"]
    return {"environment": "a", "seed": seed, "reward": 1.0, "turns": turns, **more}


def write_lines(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def build(folder: Path, name: str, **replay: Any) -> Run:
    sections = {**SECTIONS, "stage": {"synchronous": "NORMAL"}, "replay": {"enabled": True, "mode": "mix", **replay}}
    config = RunConfig.model_validate({**sections, "run": {"name": name, "directory": str(folder)}})
    directory = RunDirectory(folder / name).create()
    directory.config_file.write_text(show(config, True))
    return Run(config, directory)


@pytest.fixture
def make_run(tmp_path: Path) -> Any:
    def make(name: str = "r", **replay: Any) -> Run:
        return build(tmp_path, name, **replay)

    return make


def pooled(run: Run) -> dict[str, Any]:
    """Trajectories of the pool by id, with their entries; the store is one that a stage would start from."""
    path = store_path(run.config, run.directory)
    if not path.exists():
        return {}
    assert read_ledger(path, rows=True).audit() == []
    with ReplayStore(path) as store:
        snapshot = store.load()
        StageCore(run.config, snapshot)
        frames = store.payloads([entry.row_id for entry in snapshot.entries])
    found = {}
    for entry in snapshot.entries:
        trajectory = decode_trajectory(frames[entry.row_id])
        assert trajectory.trajectory_id == entry.trajectory_id and trajectory.recorded == entry.recorded
        found[entry.trajectory_id] = (entry, trajectory)
    return found


def exported(make_run, tmp_path, n=5):
    one = make_run("one")
    one.import_(write_lines(tmp_path / "d.jsonl", *(demonstration(s, s) for s in range(n))))
    export_run(one.config, one.directory, tmp_path / "pool")
    return one, tmp_path / "pool"


def refuses_unharmed(run, file, words):
    before = run.files()
    with pytest.raises(StoreError, match=words) as caught:
        run.import_(file)
    assert run.files() == before
    return str(caught.value)
