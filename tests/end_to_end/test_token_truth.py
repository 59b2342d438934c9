"""Log-probabilities and versions recorded by a real vLLM are those of the model, token by token, in multi-turn
trajectories: fresh ones and replays from the store."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.data.rows import Batch, Group, Row, build_batch
from learner.process.batches import choose_replays
from learner.process.build import make_policy
from learner.process.session import LearnerProgress, LearnerSession
from learner.training.report import StepReport
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.runtime.process import RoleContext
from pipeline.runtime.processor import fast_dtype
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import FlatTokens, Trajectory
from pipeline.schema.codec import Limits
from pipeline.stage.role import serve
from tests.end_to_end.recorded_runs import COMPARED_MAX, FLOAT32_UPDATES, TWO_ENGINES_STEPS, StoppedRun, stored
from tests.support.memory_transport import MemoryHub, MemoryLink, MemoryNetwork

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]
MEAN_MAX = {"float32": 1e-3, "bfloat16": 0.1}
"""Bound of the mean |recorded − recomputed| by the engine's dtype, nats."""


@dataclass(frozen=True)
class Differences:
    """|recorded − recomputed| of sampled tokens, nats."""

    aligned: np.ndarray
    shifted: np.ndarray
    """The same with the recorded values moved by one token: what a misalignment would look like."""


@dataclass(frozen=True)
class Played:
    """A recorded run, and the replays that a new learner trains with its store."""

    dtype: str
    mean_max: float
    directory: RunDirectory
    config: RunConfig
    steps: list[dict[str, Any]]
    stored: list[Trajectory]
    replays: list[Row]

    def weights(self, version: int) -> Path:
        return self.directory.weights(version) if version else self.directory.model


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other in a loop are slower than one where other processes have the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["float32", "two_engines"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    """Recorded by one float32 engine, stopped while it played, and by two engines of a finished run, in bfloat16 where
    this processor computes in it."""
    dtype = "float32" if request.param == "float32" else fast_dtype()
    if request.param == "float32":
        recorded: StoppedRun = request.getfixturevalue("float32_run")
        run, store, updates = recorded.run, recorded.store_before, FLOAT32_UPDATES
        assert store is not None
    else:
        run = request.getfixturevalue("two_engines_run").run
        store, updates = run.directory.store_file, TWO_ENGINES_STEPS
    config = load(run.directory.config_file, environment={})
    assert config.engine.dtype == (dtype if request.param == "float32" else "auto")
    found = Played(dtype, MEAN_MAX[dtype], run.directory, config, run.steps(), stored(RunDirectory(store.parent)), [])
    copy = RunDirectory(tmp_path_factory.mktemp("again")).create()  # the stage writes into the store
    for file in store.parent.glob(f"{store.name}*"):
        shutil.copy(file, copy.path)
    found.replays.extend(replayed_rows(found, anyio.run(delivered_again, config, copy, updates)))
    return found


async def delivered_again(config: RunConfig, directory: RunDirectory, updates: int) -> list[Group]:
    """A learner without a checkpoint connects to the stage over the store of the run: what was trained is planned and
    delivered once more, with the replays that were chosen then."""
    network = MemoryNetwork()
    ctx = RoleContext("replay", 0, config, directory)
    link = MemoryLink(network, "learner", heartbeat_seconds=1.0, silence_seconds_max=10.0)
    groups: list[Group] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve, ctx, MemoryHub(network, heartbeat_seconds=1.0, silence_seconds_max=10.0))
            async with link, anyio.create_task_group() as learning:
                credit = updates * config.groups.groups_per_step
                session = LearnerSession(link, config.groups, credit, LearnerProgress(), Limits.of(config))
                learning.start_soon(session.run)
                for update in range(updates):
                    groups += await session.ready(update)
                learning.cancel_scope.cancel()
            ctx.stopping.set()
    return groups


def differences(sequences: Sequence[FlatTokens | Row], folder: Path) -> Differences:
    """Under the float32 weights in ``folder``, one forward pass for each sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    aligned, shifted = [], []
    for flat in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(flat.token_ids.astype(np.int64))[None]).logits[0]
        logprobs = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(flat.token_ids[1:].astype(np.int64))[:, None])
        recomputed = np.concatenate([[0.0], logprobs[:, 0].numpy()])
        mask = flat.loss_mask
        aligned.append(np.abs(flat.behaviour_logprobs - recomputed)[mask])
        shifted.append(np.abs(np.roll(flat.behaviour_logprobs, 1) - recomputed)[mask])
    return Differences(np.concatenate(aligned), np.concatenate(shifted))


def assert_recorded_is_recomputed(found: Differences, mean_max: float) -> None:
    assert found.aligned.mean() < mean_max
    assert found.shifted.mean() > 10 * max(found.aligned.mean(), 0.01)


def multi_turn_of_one_version(trajectory: Trajectory) -> bool:
    return len(trajectory.turns) > 1 and len(versions_of(trajectory)) == 1


def versions_of(trajectory: Trajectory) -> set[int]:
    return {span.policy_version for turn in trajectory.turns for span in turn.completion.version_spans}


def test_recorded_logprobs_are_those_of_the_version_that_sampled_them(played: Played) -> None:
    checked = 0
    comparable = [t for t in played.stored if multi_turn_of_one_version(t)]
    for version in sorted(set().union(*map(versions_of, comparable))):
        mine = [t for t in comparable if version in versions_of(t)]
        branches = [branch for t in mine[:COMPARED_MAX] for branch in t.branches()]
        found = differences(branches, played.weights(version))
        checked += len(found.aligned)
        assert_recorded_is_recomputed(found, played.mean_max)
    assert checked > 500
    at_lag_zero = [step["logprob_diff_mean"] for step in played.steps if step["logprob_diff_mean"] is not None]
    assert at_lag_zero and max(at_lag_zero) < played.mean_max


def replayed_rows(played: Played, groups: Sequence[Group]) -> list[Row]:
    """As the learner makes them: with the choices that were made, so nothing is scored."""
    choice = choose_replays(groups, played.config.replay, lambda rows: pytest.fail("a choice was made again"))
    assert any(group.n_replayed for group in groups) and not choice.failed and not choice.scored
    rows = build_batch(0, choice.groups).rows
    return [row for row in rows if row.replayed]


def trainer_at(played: Played, version: int) -> Trainer:
    """With the weights of ``version``, and steps so small that float32 does not see them."""
    still = ["learner.learning_rate=1e-30", "learner.grad_clip=1e9", "learner.weight_decay=0"]
    config = load(played.directory.config_file, still, environment={})
    return Trainer(make_policy(config, played.weights(version), None), config)


def gradients(trainer: Trainer, rows: Sequence[Row]) -> tuple[StepReport, dict[str, torch.Tensor]]:
    seen: dict[str, torch.Tensor] = {}

    def grab(*args: Any, **kwargs: Any) -> None:
        named = trainer.policy.model.named_parameters()
        seen.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    hook = trainer.optimizer.register_step_pre_hook(grab)
    report = trainer.step(Batch(trainer.updates, (), tuple(rows)), policy_version=0)
    hook.remove()
    return report, seen


def test_replays_come_back_as_they_were_recorded(played: Played) -> None:
    """Identities 7 and 8 of replayed rows: store, delivery, choice and assembly moved no token."""
    sources = {t.trajectory_id: t for t in played.stored}
    rows = played.replays
    several = {row.trajectory_id for row in rows if len(sources[row.trajectory_id].turns) > 1}
    assert len(several) >= 3, "few trajectories of several turns were replayed"
    for row in rows:
        np.testing.assert_array_equal(row.policy_versions >= 0, row.loss_mask)
        assert (np.diff(row.policy_versions[row.loss_mask]) >= 0).all()
    for name in several:
        mine, turns = [row for row in rows if row.trajectory_id == name], sources[name].turns
        n = len(list(sources[name].branches()))
        for field in ("token_ids", "behaviour_logprobs"):
            came = np.concatenate([getattr(row, field)[row.loss_mask] for row in mine[:n]])
            np.testing.assert_array_equal(came, np.concatenate([getattr(t.completion, field) for t in turns]))
        versions = np.concatenate([row.policy_versions[row.loss_mask] for row in mine[:n]])
        np.testing.assert_array_equal(versions, np.concatenate([t.completion.versions() for t in turns]))
    checked = 0
    for version, mine in by_version(played).items():
        found = differences(mine[:12], played.weights(version))
        checked += len(found.aligned)
        assert_recorded_is_recomputed(found, played.mean_max)
    assert checked > 100


def by_version(played: Played) -> dict[int, list[Row]]:
    """Rows of several turns sampled wholly under one version, each trajectory once."""
    wanted = {t.trajectory_id: min(versions_of(t)) for t in played.stored if multi_turn_of_one_version(t)}
    out: dict[int, list[Row]] = {}
    once = {(row.trajectory_id, row.token_ids.tobytes()): row for row in played.replays}
    for row in once.values():
        if row.trajectory_id in wanted:
            out.setdefault(wanted[row.trajectory_id], []).append(row)
    return out


def test_a_replay_under_the_weights_that_recorded_it_is_the_plain_loss(played: Played) -> None:
    """Identity 1, against the loss of the same rows as fresh ones and against -A log π by full logits. To a rounding:
    matrix products of this size need not repeat to the last bit; the unit tests of the loss ask for that."""
    if played.dtype != "float32":
        pytest.skip("engine and learner agree to a rounding only in float32")
    version, rows = max(by_version(played).items(), key=lambda item: len(item[1]))
    signs = [1.0 if i % 2 else -0.5 for i in range(4)]
    rows = [
        replace(row, advantages=np.full(row.n_sampled, a, np.float32)) for row, a in zip(rows[:4], signs, strict=False)
    ]
    trainer = trainer_at(played, version)
    replay, came = gradients(trainer, rows)
    ratio = replay.statistics.by_source["replay"].ratio
    assert ratio.count == sum(row.n_sampled for row in rows)
    assert ratio.smallest == pytest.approx(1, abs=1e-3) and ratio.largest == pytest.approx(1, abs=1e-3)
    plain, expected = gradients(trainer, [replace(row, replayed=False) for row in rows])
    assert replay.loss == pytest.approx(plain.loss, rel=1e-4)
    assert replay.loss == pytest.approx(-sum(float(r.advantages.sum()) for r in rows) / ratio.count, abs=1e-4)
    assert came.keys() == expected.keys()

    model = AutoModelForCausalLM.from_pretrained(played.weights(version), dtype=torch.float32)
    spread = dict.fromkeys(expected, 0.0)
    """Sum of the norms of the rows' own gradients: what a row adds may cancel what another adds, its rounding not."""
    for row in rows:
        places = torch.from_numpy(np.flatnonzero(row.loss_mask))
        ids = torch.from_numpy(row.token_ids.astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, places - 1].log_softmax(-1).gather(1, ids[places][:, None])
        before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        (-float(row.advantages[0]) * logprobs.sum() / ratio.count).backward()
        for name, parameter in model.named_parameters():
            spread[name] += float((parameter.grad - before.get(name, 0.0)).norm())
    for name, parameter in model.named_parameters():
        for gradient in (came[name], expected[name]):
            assert (gradient - parameter.grad).norm() <= 2e-3 * spread[name], name
