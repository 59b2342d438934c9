"""``checkpoints/best`` survives pruning, is replaced whole, and is never made of other weights than those evaluated."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.from_thread
import orjson
import pytest
from prometheus_client import CollectorRegistry

from learner.checkpoints.best import BestKeeper, is_evaluated, keep_best
from learner.checkpoints.checkpoint import (
    CheckpointImage,
    CheckpointState,
    checkpoint_path,
    find_checkpoints,
    is_complete,
)
from learner.checkpoints.writer import CheckpointWriter
from learner.metrics import LearnerMetrics
from pipeline.config.evaluation import EvaluationConfig
from pipeline.runtime.folders import write_contents


def write(root: Path, updates: int, version: int | None = None) -> Path:
    folder = checkpoint_path(root, updates)
    (folder / "model").mkdir(parents=True)
    version = updates if version is None else version
    (folder / "model" / "weights").write_text(f"{updates} {version}")
    state = CheckpointState(updates, version, {})
    (folder / "state.json").write_bytes(orjson.dumps(state.as_json(), option=orjson.OPT_NON_STR_KEYS))
    write_contents(folder)
    return folder


def best_of(updates: int, value: float = 0.5, version: int | None = None) -> dict[str, Any]:
    version = updates if version is None else version
    return {"evaluation": updates, "updates": updates, "policy_version": version, "metric": "score", "value": value}


def test_it_survives_the_checkpoint_that_it_was_made_of(tmp_path: Path) -> None:
    source = write(tmp_path, 10)
    assert keep_best(tmp_path, best_of(10)) == tmp_path / "best-u000010"
    shutil.rmtree(source)
    assert is_complete(tmp_path / "best")
    assert (tmp_path / "best" / "model" / "weights").read_text() == "10 10"
    assert orjson.loads((tmp_path / "best" / "evaluation.json").read_bytes())["value"] == 0.5
    assert find_checkpoints(tmp_path) == [], "nothing resumes from it by accident"
    assert keep_best(tmp_path, best_of(10)) is not None, "asked again it stays"


def test_it_is_kept_on_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    source = write(tmp_path, 10)
    assert keep_best(tmp_path, best_of(10)) == tmp_path / "best-u000010"
    assert (tmp_path / "best" / "model" / "weights").read_text() == (source / "model" / "weights").read_text()
    assert is_complete(tmp_path / "best")


def test_a_better_one_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20)
    keep_best(tmp_path, best_of(10))
    keep_best(tmp_path, best_of(20, 0.9))
    assert (tmp_path / "best" / "model" / "weights").read_text() == "20 20"
    assert not (tmp_path / "best-u000010").exists()


def test_other_weights_under_the_same_number_are_not_taken(tmp_path: Path) -> None:
    write(tmp_path, 10, version=14)
    assert keep_best(tmp_path, best_of(10, version=10)) is None
    assert not (tmp_path / "best").exists()
    assert keep_best(tmp_path, best_of(10, version=14)) is not None
    assert keep_best(tmp_path, best_of(30)) is None


def keeper_of(root: Path, keep: str | None = "score") -> tuple[BestKeeper, CheckpointWriter]:
    async def durable(updates: int) -> None: ...

    writer = CheckpointWriter(root, root, 1, durable, LearnerMetrics(CollectorRegistry(), environments=()))
    section = EvaluationConfig(every=5, keep_best=keep)
    return BestKeeper(section, writer, dict, anyio.sleep_forever), writer


def test_a_checkpoint_that_was_published_again_under_a_newer_version_is_taken(tmp_path: Path) -> None:
    write(tmp_path, 20)
    assert keep_best(tmp_path, best_of(20, version=25)) == tmp_path / "best-u000020"


async def test_what_is_evaluated_is_spared_until_it_is_decided(tmp_path: Path) -> None:
    keeper, writer = keeper_of(tmp_path)
    await keeper.apply({"evaluating": 10, "last": None, "best": None})
    assert writer.protected == {10}
    told = {"evaluating": None, "last": {"environments": {"a": 0.25}}, "best": best_of(10)}
    await keeper.apply(told)
    assert writer.protected == {10} and not (tmp_path / "best").exists(), "its checkpoint is still to be written"
    write(tmp_path, 10)
    await keeper.apply(told)
    assert is_complete(tmp_path / "best")
    await keeper.apply({**told, "evaluating": 15})
    assert writer.protected == {15}


async def test_what_is_evaluated_since_a_write_began_is_spared_when_it_ends(tmp_path: Path) -> None:
    keeper, writer = keeper_of(tmp_path)
    writer.initial_model = tmp_path / "model"
    write(tmp_path, 10)

    def save_pretrained(folder: Path, state_dict: dict[str, Any]) -> None:
        folder.mkdir()
        anyio.from_thread.run(keeper.apply, {"evaluating": 10, "last": None, "best": None})

    policy = SimpleNamespace(model=SimpleNamespace(save_pretrained=save_pretrained), adapters=None)
    image = CheckpointImage(CheckpointState(11, 11, {}), {}, None, {}, None, policy)  # type: ignore[arg-type]
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            async with writer.slot(11) as submit:
                submit(image)
            await writer.idle()
            tasks.cancel_scope.cancel()
    assert find_checkpoints(tmp_path) == [checkpoint_path(tmp_path, 11), checkpoint_path(tmp_path, 10)]


async def test_the_best_is_in_place_when_the_last_result_comes_as_the_run_ends(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 15)
    keeper, _ = keeper_of(tmp_path)
    await keeper.apply({"best": best_of(10)})
    header = {"best": best_of(15, 0.9)}
    keeper.evaluation = lambda: header
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keeper.run)
        await keeper.settle()
        assert (tmp_path / "best").resolve().name == "best-u000015"
        tasks.cancel_scope.cancel()


async def test_the_best_takes_its_place_as_soon_as_its_checkpoint_is_reported_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper, writer = keeper_of(tmp_path)
    monkeypatch.setattr("learner.checkpoints.writer.write_image", lambda root, image, *_: write(root, image.updates))
    kept_at_report = []

    async def durable(updates: int) -> None:
        await keeper.apply({"best": best_of(updates)})
        kept_at_report.append(is_complete(tmp_path / "best"))

    writer.durable = durable
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            async with writer.slot(10) as submit:
                submit(SimpleNamespace(updates=10, shards=None, n_bytes=0))  # type: ignore[arg-type]
            await writer.idle()
            tasks.cancel_scope.cancel()
    assert kept_at_report == [True]


async def test_a_checkpoint_that_is_gone_leaves_the_best_as_it_was(tmp_path: Path) -> None:
    keeper, _ = keeper_of(tmp_path)
    write(tmp_path, 10)
    await keeper.apply({"best": best_of(10)})
    write(tmp_path, 25)
    await keeper.apply({"best": best_of(20, 0.9)})
    assert (tmp_path / "best" / "model" / "weights").read_text() == "10 10"


async def test_without_keep_best_only_the_score_is_told(tmp_path: Path) -> None:
    keeper, writer = keeper_of(tmp_path, None)
    write(tmp_path, 10)
    await keeper.apply({"evaluating": 10, "best": best_of(10)})
    assert writer.protected == frozenset() and not (tmp_path / "best").exists()


def test_the_last_weights_are_evaluated_when_nothing_plays_any_more() -> None:
    assert not is_evaluated({}, 6)
    assert not is_evaluated({"begun": 6, "evaluating": 6}, 6)
    assert not is_evaluated({"begun": 4, "evaluating": None}, 6)
    assert is_evaluated({"begun": 6, "evaluating": None}, 6)
