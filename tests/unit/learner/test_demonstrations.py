"""Demonstrations from a file: read whole, only what succeeded, and drawn in passes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.adapters.games import Arithmetic
from learner.data.demonstrations import Demonstrations, load_demonstrations
from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.config.explain import resolve
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Task
from pipeline.schema.codec import encode_trajectory
from pipeline.store.archive import ArchivedTrajectory, Header, write_archive

SEEDS = range(24)
TURNS = [{"context_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.1, -0.2]},
         {"context_ids": [5], "completion_ids": [6]}]  # fmt: skip


def line(**more: object) -> bytes:
    return orjson.dumps({"environment": "arithmetic", "seed": 1, "reward": 1.0, **more}) + b"\n"


def sum_of(seed: int) -> tuple[str, str]:
    """Question and answer."""
    game = Arithmetic(low=0, high=3, attempts=1).start(Task(f"arithmetic/{seed}", "arithmetic", seed))
    return game.messages[0].content, game.hint.rstrip(".").split()[-1]


def write_demonstrations(path: Path) -> Path:
    """Right answers to all the sums, as text; and one wrong answer, which nobody should learn."""
    said = [(seed, *sum_of(seed), 1.0) for seed in SEEDS] + [(0, sum_of(0)[0], "60", 0.0)]
    path.write_bytes(
        b"".join(
            line(
                seed=seed,
                reward=reward,
                messages=[{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
            )
            for seed, question, answer, reward in said
        )
    )
    return path


@pytest.fixture
def game(tmp_path: Path) -> Any:
    """``run()`` makes configuration and directory of a run; ``file`` holds demonstrations of its game."""
    file = write_demonstrations(tmp_path / "demonstrations.jsonl")

    def run(**sections: Any) -> tuple[RunConfig, RunDirectory]:
        config = RunConfig.model_validate(
            {
                "run": {"directory": str(tmp_path), "name": "run", "total_steps": 4},
                "model": {"source": "tiny", "max_length": 64, "tiny": {"hidden_size": 32, "layers": 1, "heads": 2}},
                "sampling": {"max_tokens": 4},
                "environments": {"arithmetic": {}},
                "groups": {"n_rollout": 2, "groups_per_step": 2},
                **sections,
            }
        )
        return config, RunDirectory(config.run.path).create()

    return SimpleNamespace(run=run, file=file)


def test_text_is_rendered_with_the_models_template_and_failures_are_passed_over(game) -> None:
    config, directory = game.run()
    prepare_model(config, directory.model)
    found = load_demonstrations(game.file, config, directory.model)
    assert len(found) == len(SEEDS)
    for (row,) in found.rows:
        assert row.n_sampled == 2, "the answer and the end of the turn"
        assert not row.recorded and (row.temperatures == 1).all()


def test_token_ids_of_several_turns_and_exports_are_read(game, kit, tmp_path) -> None:
    config, directory = game.run()
    prepare_model(config, directory.model)
    file = tmp_path / "ids.jsonl"
    file.write_bytes(line(turns=[{**t, "logprobs": None} for t in TURNS], temperature=0.5))
    ((row,),) = load_demonstrations(file, config, directory.model).rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6] and row.loss_mask.tolist() == [0, 0, 1, 1, 0, 1]
    assert (row.temperatures == 1).all()
    exported = tmp_path / "pool.afterplay"
    records = [
        ArchivedTrajectory({"reward": reward}, encode_trajectory(kit.make_trajectory(f"t{i}", reward=None, seed=i)))
        for i, reward in enumerate((1.0, 0.0, 1.0))
    ]
    write_archive(exported, Header(), records)
    assert len(load_demonstrations(exported, config, directory.model)) == 2


@pytest.mark.parametrize(
    "content, error, words",
    [
        (None, ConfigurationError, "expected a file of demonstrations"),
        (line(turns=TURNS), StoreError, "logprobs in every turn"),
        (line(turns=[TURNS[1]], reward=0.0), StoreError, "1 failed"),
        (line(turns=[{"context_ids": [1], "completion_ids": [5000]}]), StoreError, "another tokenizer"),
        (line(turns=[{"context_ids": [], "completion_ids": [5]}]), StoreError, "start with context"),
        (b"{broken\n", StoreError, "line 1"),
    ],
)
def test_files_that_cannot_be_trained_are_refused(game, tmp_path, content, error, words) -> None:
    config, directory = game.run()
    prepare_model(config, directory.model)
    file = tmp_path / "other.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(error, match=words):
        load_demonstrations(file, config, directory.model)


def test_ids_beyond_the_vocabulary_are_refused_where_the_text_part_of_a_model_has_a_config_of_its_own(game) -> None:
    config, directory = game.run()
    directory.model.mkdir()
    (directory.model / "config.json").write_text('{"text_config": {"vocab_size": 5}}')
    file = game.file.with_name("ids.jsonl")
    file.write_bytes(line(turns=[{"context_ids": [1], "completion_ids": [6]}]))
    with pytest.raises(StoreError, match="vocabulary of 5, got 6"):
        load_demonstrations(file, config, directory.model, lambda *messages: None)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 3))
def test_every_pass_takes_every_trajectory_once_and_a_step_depends_on_its_number_alone(kit, n, batch, seed) -> None:
    kit_rows = kit.make_rows(n)
    found = Demonstrations(tuple((row,) for row in kit_rows))
    steps = max(4, 2 * n)
    drawn = [row.trajectory_id for step in range(steps) for row in found.draw((seed, 0), step, batch)]
    assert len(drawn) == steps * batch
    for start in range(0, len(drawn), n):
        assert max(Counter(drawn[start : start + n]).values()) == 1
    again = found.draw((seed, 0), 3, batch)
    assert [row.trajectory_id for row in again] == drawn[3 * batch : 4 * batch]
    assert [row.trajectory_index for row in again] == list(np.arange(batch)), (
        "the branches of a trajectory share a number"
    )


def test_a_resolved_run_file_finds_its_demonstrations_from_any_folder(game, monkeypatch) -> None:
    monkeypatch.chdir(game.file.parent)
    supervised = {"weight": 0.1, "demonstrations": game.file.name}
    config, _ = game.run(loss={"supervised": supervised})
    found = resolve(config)
    assert found.loss.supervised.demonstrations == game.file
    assert RunConfig.model_validate(found.model_dump(mode="json")).loss.supervised.demonstrations == game.file
