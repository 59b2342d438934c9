"""What a real vLLM recorded is what the model says: log-probabilities and versions, token by token, of multi-turn
trajectories."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.engine.servers import vllm_available
from pipeline.codec import decode_trajectory
from pipeline.replay import store_file
from pipeline.rundir import RunDirectory
from pipeline.schema import Trajectory
from pipeline.supervisor.handle import RunHandle, start_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHORT = [
    "run.total_steps=100",  # far more than are made: the run is interrupted
    "environments.arithmetic.options.attempts=4",
    "environments.arithmetic.options.low=10",
    "environments.arithmetic.options.high=99",
    "sampling.max_tokens=24",
    "groups.n_rollout=4",
    "groups.groups_per_step=4",
    "staleness.max=8",
    "actor.concurrency=4",  # few at a time: play goes on while weights are published
    "checkpoint.every=1000",  # payloads are kept until a checkpoint covers them
    "checkpoint.at_end=false",
    "publish.keep=100",
]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


@dataclass(frozen=True)
class Differences:
    """|recorded − recomputed| of sampled tokens, nats."""

    aligned: np.ndarray
    shifted: np.ndarray
    """The same with the recorded values moved by one token: what a misalignment would look like."""


def stored(directory: RunDirectory) -> list[Trajectory]:
    with closing(store_file.connect(directory.store_file, read_only=True)) as connection:
        rows = connection.execute("SELECT header, token_ids, logprobs, spans FROM payloads").fetchall()
    return [decode_trajectory(row) for row in rows]


def published_in_the_middle(run: RunHandle) -> int:
    """Trajectories whose tokens come from more than one policy version."""
    if not run.directory.store_file.exists():
        return 0
    with store_file.connect(run.directory.store_file, read_only=True) as connection:
        return int(
            connection.execute("SELECT count(*) FROM trajectories WHERE version_min < version_max").fetchone()[0]
        )


def differences(trajectories: list[Trajectory], folder: Path) -> Differences:
    """Under the float32 weights in ``folder``, one forward pass for each branch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    aligned, shifted = [], []
    for flat in (branch for t in trajectories for branch in t.branches()):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(flat.token_ids.astype(np.int64))[None]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(flat.token_ids[1:].astype(np.int64))[:, None])
        recomputed = np.concatenate([[0.0], logprobs[:, 0].numpy()])
        mask = flat.loss_mask
        aligned.append(np.abs(flat.behaviour_logprobs - recomputed)[mask])
        shifted.append(np.abs(np.roll(flat.behaviour_logprobs, 1) - recomputed)[mask])
    return Differences(np.concatenate(aligned), np.concatenate(shifted))


def of_version(trajectories: list[Trajectory], version: int) -> list[Trajectory]:
    """Multi-turn trajectories sampled wholly under one version."""
    return [t for t in trajectories if len(t.turns) > 1 and t.version_range() == (version, version)]


@pytest.mark.parametrize(("dtype", "mean_max"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_recorded_logprobs_are_those_of_the_version_that_sampled_them(
    tmp_path: Path, dtype: str, mean_max: float
) -> None:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    overrides = [*SHORT, f"engine.dtype={dtype}", f"publish.dtype={dtype}", "learner.compute_dtype=float32"]
    with start_run(QUICKSTART, tmp_path, "truth", overrides) as run:
        run.until("play while weights were published", lambda: published_in_the_middle(run) >= 3, 1500)
        assert run.interrupt() < 10
        trajectories = stored(run.directory)
        checked = 0
        for version in (0, 1, 2, 3):
            mine = of_version(trajectories, version)
            if not mine:
                continue
            folder = run.directory.weights(version) if version else run.directory.model
            found = differences(mine[:12], folder)
            checked += len(found.aligned)
            assert found.aligned.mean() < mean_max
            assert found.shifted.mean() > 10 * max(found.aligned.mean(), 0.01)
        assert checked > 500
        at_lag_zero = [step["logprob_diff_mean"] for step in run.steps() if step["logprob_diff_mean"] is not None]
        assert at_lag_zero and max(at_lag_zero) < mean_max
