"""Demonstrations from a file as training rows; a step draws some as a pure function of seed and step."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from learner.data.rows import Row, trajectory_rows
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, StoreError, TrainingError
from pipeline.replay.demonstrations import Render, read_demonstrations
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import vocabulary_size
from pipeline.schema import Trajectory
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.store.archive import is_archive, read_archive

log = logging.getLogger(__name__)
RENDERER = "actors.env_commands.demonstrate:Demonstrator"
"""Renders messages with the chat template of the run's model; loaded by path, because the learner imports no actor."""


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Rows of each trajectory. All temperatures are 1: cross-entropy is that of the model itself."""

    rows: tuple[tuple[Row, ...], ...]

    def __len__(self) -> int:
        """Trajectories."""
        return len(self.rows)

    def draw(self, seed: Sequence[int], step: int, batch: int) -> tuple[Row, ...]:
        """Rows of ``batch`` trajectories for the given step: the trajectories come in passes over all of them, each
        pass shuffled by ``seed`` and its number, and a step may end one pass and begin the next."""
        n, rows = len(self), []
        for index, drawn in enumerate(range(step * batch, (step + 1) * batch)):
            order = np.random.default_rng([*seed, drawn // n]).permutation(n)
            rows += [replace(row, trajectory_index=index) for row in self.rows[order[drawn % n]]]
        return tuple(rows)


def load_demonstrations(
    file: Path, config: RunConfig, model_folder: Path, render: Render | None = None
) -> Demonstrations:
    """Read and check the whole file; failures (``replay.success_threshold``) are left out. Blocks for seconds.

    Raises :class:`ConfigurationError` where there is no file, :class:`StoreError` for one that is damaged, has nothing
    to train or is of another tokenizer.
    """
    if not file.is_file():
        raise ConfigurationError(f"expected a file of demonstrations, got {file}, which is not a file")
    model = config.model
    render = render or load_main(RENDERER)(model_folder, model.chat_template, model.trust_remote_code)
    vocabulary = vocabulary_size(model_folder)
    demonstrations, failures = [], 0
    for trajectory in _trajectories(file, render, Limits(tokens_max=config.stage.tokens_max)):
        if trajectory.reward is None or trajectory.reward < config.replay.success_threshold:
            failures += 1
            continue
        try:
            rows = trajectory_rows(trajectory, 0)
        except TrainingError as error:
            raise StoreError(f"{file}: {error}") from error
        largest = max((int(row.token_ids.max()) for row in rows), default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise StoreError(
                f"{file}: expected token ids below the model's vocabulary of {vocabulary}, got {largest}: the file is "
                "of another tokenizer"
            )
        if rows:
            demonstrations.append(tuple(replace(row, temperatures=np.ones_like(row.temperatures)) for row in rows))
    if not demonstrations:
        raise StoreError(
            f"{file} has no trajectory with sampled tokens and a reward of at least replay.success_threshold "
            f"({config.replay.success_threshold}): {failures} failed"
        )
    log.info("%d demonstrations in %s (%d below replay.success_threshold)", len(demonstrations), file, failures)
    return Demonstrations(tuple(demonstrations))


def _trajectories(file: Path, render: Render, limits: Limits) -> Iterator[Trajectory]:
    if not is_archive(file):
        yield from read_demonstrations(file, render, 0)
        return
    for portable in read_archive(file, limits):
        try:
            trajectory = decode_trajectory(portable.frames, limits)
        except AfterplayError as error:
            raise StoreError(f"{file} contains an invalid trajectory: {error}") from error
        reward = portable.marks.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise StoreError(f"{file}: expected {trajectory.trajectory_id} with its reward, got {reward!r}")
        turns = tuple(replace(turn, experts=None) for turn in trajectory.turns)  # of another model, perhaps
        yield replace(trajectory, turns=turns).scored(float(reward), {})
