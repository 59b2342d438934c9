"""Recorded sizes hold all that routing and the division of rows look at."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import rank_division
from benchmarks.recorded import NUMBER_GUESS, QUICKSTART, Origin, RecordedRow, read, write
from benchmarks.recorded.__main__ import recorded
from benchmarks.routing.conversations import recorded as conversations
from learner.data.rows import trajectory_rows
from pipeline.schema import FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn
from pipeline.schema.trajectory import Timings


def trajectory(draw: np.random.Generator, group: int, number: int) -> Trajectory:
    """One to three turns after a prompt that is the group's own, after 20 tokens that all groups have."""
    prompt = np.concatenate([np.arange(20), 100 + group + np.zeros(group + 10, int)])
    turns = [
        Turn(
            TokenSpan.context(prompt if i == 0 else draw.integers(0, 4, 2)),
            TokenSpan.sampled(draw.integers(0, 2, n := int(draw.integers(1, 30))), -np.ones(n), 0),
            (Message("user", "u"),), Message("assistant", "a"), FinishReason.STOP, 1.0,
        )
        for i in range(draw.integers(1, 4))
    ]  # fmt: skip
    return Trajectory(
        f"t{group}.{number}", f"g{group}", Task(f"e/{group}", "e", group), tuple(turns), TrajectoryStatus.COMPLETE,
        rewards={"environment": 1.0}, reward=1.0, timings=Timings(environment_seconds=0.5),
    )  # fmt: skip


@pytest.fixture
def updates() -> dict[int, list[Trajectory]]:
    draw = np.random.default_rng(0)
    return {u: [trajectory(draw, g, n) for g in range(4 * u, 4 * u + 4) for n in range(6)] for u in range(2)}


@pytest.fixture
def file(updates: dict[int, list[Trajectory]], tmp_path: Path) -> Path:
    path = tmp_path / "run.jsonl"
    assert write(path, Origin("r", "m", "vllm 0", 2), recorded(updates)) == 48
    return path


def test_a_file_reads_as_it_was_written(updates: dict[int, list[Trajectory]], file: Path) -> None:
    assert list(read(file)) == list(recorded(updates))


@pytest.mark.parametrize("ranks", rank_division.RANKS)
def test_recorded_rows_cost_what_those_of_the_run_cost(
    updates: dict[int, list[Trajectory]], file: Path, ranks: int
) -> None:
    for rule in rank_division.DIVISIONS.values():
        for update, rows in zip(updates.values(), rank_division.recorded(file), strict=True):
            real = [row for i, t in enumerate(update) for row in trajectory_rows(t, i)]
            order = sorted(range(len(real)), key=lambda i: real[i].token_ids.tolist())
            real = [real[i] for i in order]
            found, expected = (rank_division.measure(r, rule(r, ranks), 200) for r in (rows, real))
            assert found == expected


def test_conversations_have_the_turns_of_the_rollouts(updates: dict[int, list[Trajectory]], file: Path) -> None:
    of_run = {
        tuple((len(turn.context), len(turn.completion)) for turn in t.turns) for each in updates.values() for t in each
    }
    drawn = conversations(file, 40, seed=0)
    assert all(len(group) == 6 for group in drawn)
    assert {tuple((turn.prompt, turn.sampled) for turn in rollout) for group in drawn for rollout in group} <= of_run
    assert all(sum(turn.seconds for turn in rollout) == pytest.approx(0.5) for group in drawn for rollout in group)


def test_number_guess_has_a_long_tail() -> None:
    turns = sorted(len(row.turns) for row in read(NUMBER_GUESS))
    assert len(turns) == 320 and turns[160] == 6 and turns[288] >= 3 * turns[160] and turns[-1] == 48


@pytest.mark.parametrize("file", [QUICKSTART, NUMBER_GUESS], ids=lambda file: file.stem)
def test_the_recorded_run_has_whole_groups_of_one_branch_each(file: Path) -> None:
    rows: dict[int, list[RecordedRow]] = {}
    for row in read(file):
        rows.setdefault(row.group, []).append(row)
    assert {len(group) for group in rows.values()} == {8}
    assert len({row.rollout for group in rows.values() for row in group}) == 8 * len(rows)
