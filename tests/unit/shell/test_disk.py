"""Disk use of a run: what is kept and removed, and the lines that say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config import RunConfig
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.history import describe_disk, disk_usage, remove_published


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    """A finished run of two checkpoints, of which one is the best too, and three versions, of which two are there."""
    made = RunDirectory(tmp_path / "r").create()

    def put(name: str, n_bytes: int) -> None:
        path = made.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(n_bytes))

    put("model/model.safetensors", 1_000_000)
    for version in (2, 3):
        put(f"weights/v{version:06d}/model.safetensors", 1_000_000)
    put("checkpoints/u000003/model/model.safetensors", 2_000_000)
    put("checkpoints/u000003/state.json", 100)
    (made.checkpoints / "best-u000003").mkdir()
    os.link(made.checkpoints / "u000003/model/model.safetensors", made.checkpoints / "best-u000003/model.safetensors")
    put("replay.sqlite", 30_000)
    put("replay.sqlite-wal", 4_000)
    put("traces/trained-00000000.traces", 5_000)
    put("logs/learner.log", 600)
    put("curves.png", 70)
    return made


LINES = [
    {"step": 1, "published": {"policy_version": 0}},
    {"step": 2, "published": {"policy_version": 1}, "saved": {"updates": 1}},
    {"step": 3, "published": {"policy_version": 2}, "saved": {}},
]


def test_every_kind_is_counted_and_a_hard_link_once(directory: RunDirectory) -> None:
    assert disk_usage(directory) == {
        "model": 1_000_000, "weights": 2_000_000, "checkpoints": 2_000_100, "replay.sqlite": 34_000, "traces": 5_000,
        "evaluations": 0, "logs": 600, "chaos": 0, "other": 70,
        "updates": 0,
    }  # fmt: skip


def test_the_account_names_what_is_kept_and_counts_what_was_removed(directory: RunDirectory) -> None:
    removed = remove_published(RunConfig(), directory)
    assert removed == ["v000002", "v000003"]
    assert describe_disk(directory, LINES, removed) == [
        "kept: the initial model 1 MB, checkpoints 2 MB (u000003), trajectories 34 kB, traces 5 kB, logs 600 B, "
        "other 70 B",
        "removed: 3 versions of the weights, 1 checkpoint",
        "folder size: 3 MB",
    ]


@pytest.mark.parametrize(
    ("sections", "left"),
    [
        ({}, []),
        ({"checkpoint": {"at_end": False}}, ["v000002", "v000003"]),
    ],
)
def test_published_weights_of_a_finished_run_are_removed_unless_they_are_its_only_result(
    directory: RunDirectory, sections: dict[str, object], left: list[str]
) -> None:
    remove_published(RunConfig.model_validate(sections), directory)
    assert sorted(path.name for path in (directory.path / "weights").iterdir()) == left


def test_an_empty_run_keeps_nothing(tmp_path: Path) -> None:
    assert describe_disk(RunDirectory(tmp_path / "none"), []) == [
        "kept: nothing",
        "removed: nothing",
        "folder size: 0 B",
    ]
