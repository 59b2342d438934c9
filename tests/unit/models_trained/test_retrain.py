"""An update is made again bit for bit from what the run stored, and what differs is named with its stage."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import zipfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import orjson
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

import afterplay
import learner.policy.policy as policy_module
import learner.process.batches as batches
import learner.training.critic as critic_module
import learner.training.optimizer as optimizer_module
import learner.training.optimizer_step as optimizer_step
import learner.training.trainer as trainer_module
from learner.checkpoints.checkpoint import find_checkpoints, read_state
from learner.data.rows import Batch
from learner.distributed.ranks import Ranks
from learner.models.info import MANIFEST
from learner.policy.policy import Policy
from learner.process import update_record
from learner.process.bundle import SECTIONS, open_source, portable, portable_sections, write_bundle
from learner.process.contributions import contributions
from learner.process.retrain import OF_THE_MACHINE, RunSource, begin, configuration_at, retrain
from learner.process.update_record import UpdateRecord, read_record, write_record
from learner.training.optimizer import bit_sums
from learner.training.report import AppliedStep, StepTotals
from pipeline.cli.app import app
from pipeline.cli.retrain import PHASES, free_folder
from pipeline.config.base import Given, Section
from pipeline.config.load import dump
from pipeline.errors import ConfigurationError, DamagedFiles, StoreError
from pipeline.runtime.folders import CONTENTS
from pipeline.schema import FinishReason, PromptLessons, SpanSource, TrajectoryStatus
from pipeline.schema.codec import encode_trajectory
from pipeline.store.store import store_path
from pipeline.supervisor.history import difference, newest_checkpoint
from tests.support.damage import flip
from tests.support.families import with_infinity
from tests.unit.learner import test_learner_role
from tests.unit.learner.test_learner_role import config_of, kill_after, stop_after, world
from tests.unit.models_trained.test_whole_learner import EVERYTHING
from tests.unit.transport.test_codec import trajectories

__all__ = ["world"]
MIX = {"enabled": True, "mode": "mix", "start_ratio": 0.0, "task_ratio": 0.5}
GROUPS = {"enabled": True, "mode": "groups", "start_ratio": 0.0}
KINDS = {
    "plain": {},
    "everything": EVERYTHING,
    "bfloat16": {"learner": {"compute_dtype": "bfloat16", "optimizer_dtype": "bfloat16"}},
    "minibatches": {"learner": {"minibatches": 2, "epochs": 2}},
    "mix": {"replay": MIX},
    "groups": {"replay": GROUPS},
    "dropped": {"groups": {"n_rollout": 2, "groups_per_step": 2, "zero_variance": "drop"}},
    "reference": {"loss": {"kl": "loss"}},
    "remax": {"advantage": {"estimator": "remax"}},
    "lora": {"learner": {"lora": {"rank": 2}}},
    "critic": {"advantage": {"estimator": "gae"}, "learner": {"critic": {"backbone": "none"}}},
    "lessons": {"loss": {"off_clip_lessons": "discarded"}},
    "hints": {"advantage": {"estimator": "self_distill"}},
}
SLOW = {*KINDS} - {"plain", "everything", "mix"}


async def made(world, steps=6, **sections):
    """The directory of a run that has made its steps."""
    async with world(total_steps=steps, **sections) as w:
        await w.learn()
    w.directory.config_file.write_text(dump(w.config))
    return w.directory.path


def differing(path, **more):
    """By step, the differences of each update that is made again."""
    return {found.step: found.differences for found in retrain(RunSource.open(path), **more)}


def of_kind(kind):
    """A parameter of tests."""
    return pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ())


def policy_tensors(path):
    """Names of the trained tensors of a run's only checkpoint."""
    (folder,) = find_checkpoints(RunSource.open(path).directory.checkpoints)
    with safe_open(folder / "model" / "model.safetensors", "pt") as saved:
        yield from saved.keys()


def with_lessons(trajectory):
    """Half of the rollouts are trained on the prompt without the lessons."""
    keep = trajectory.trajectory_id.split(".")[1] == "0"
    lessons = PromptLessons(("1",), keep, {} if keep else {0: (2,)})
    return replace(trajectory, lessons=lessons)


def with_hints(trajectory):
    return replace(trajectory, hinted_contexts={0: (1, 5, 2)})


PLAYED = {"lessons": with_lessons, "hints": with_hints}


@pytest.mark.parametrize("kind", [of_kind(kind) for kind in KINDS])
async def test_every_kept_update_is_the_same_bit_for_bit(world, kind, monkeypatch):
    played = PLAYED.get(kind, lambda trajectory: trajectory)
    monkeypatch.setattr(test_learner_role, "encode_trajectory", lambda t: encode_trajectory(played(t)))
    path = await made(world, **KINDS[kind])
    assert differing(path, step=1) == {step: () for step in range(1, 7)}
    assert differing(path) == {5: (), 6: ()}, "behind the newest checkpoint that has some"


def of_rows(change):
    """A mutant of the rows that a batch is built with."""

    def mutate(patch):
        build = batches.build_batch
        patch.setattr(batches, "build_batch", lambda *args: changed(build(*args), change))

    return mutate


def changed(batch, change):
    return Batch(batch.update, batch.groups, tuple(change(list(batch.rows))))


def with_bit(array, index):
    """A copy with the last bit of one value flipped."""
    found = array.copy()
    found.view(np.uint32)[index] ^= 1
    return found


def flipped(rows):
    rows[2] = replace(rows[2], behaviour_logprobs=with_bit(rows[2].behaviour_logprobs, 3))
    return rows


def masked(rows):
    mask = rows[1].loss_mask.copy()
    mask[2] = False
    rows[1] = replace(rows[1], loss_mask=mask, advantages=rows[1].advantages[1:])
    return rows


def of_advantages(patch):
    estimate = trainer_module.with_advantages

    def scaled(*args):
        batch, scores = estimate(*args)
        rows = [replace(row, advantages=row.advantages * np.float32(1.5)) for row in batch.rows]
        return Batch(batch.update, batch.groups, tuple(rows)), scores

    patch.setattr(trainer_module, "with_advantages", scaled)


def of_log_probs(patch):
    """One bit of log π of the last token of a micro-batch."""
    score = Policy.score

    def flipped(policy, *args):
        logprobs, entropy = score(policy, *args)
        other = logprobs.detach().clone()
        other.view(torch.int32)[-1] ^= 1
        return logprobs + (other - logprobs.detach()), entropy

    patch.setattr(Policy, "score", flipped)


def of_loss(patch):
    loss = optimizer_step.policy_loss

    def scaled(*args):
        terms = loss(*args)
        return replace(terms, loss=terms.loss * 1.01, token_losses=terms.token_losses * 1.01)

    patch.setattr(optimizer_step, "policy_loss", scaled)


def of_clip(patch):
    rules = trainer_module.loss_rules

    def wider(loss, *args):
        policy = loss.policy.model_copy(update={"clip_low": 0.9, "clip_high": 90.0})
        return rules(loss.model_copy(update={"policy": policy}), *args)

    patch.setattr(trainer_module, "loss_rules", wider)


def of_gradient(patch):
    norm = optimizer_step.gradient_norm

    def doubled(parameters, *ranks):
        for p in parameters:
            p.grad = None if p.grad is None else p.grad * 2
        return norm(parameters, *ranks)

    patch.setattr(optimizer_step, "gradient_norm", doubled)


def of_gradient_clipping(patch):
    patch.setattr(optimizer_module, "clip_gradients", lambda *args: None)


def of_optimizer(patch):
    set_rate = optimizer_module.set_rate
    patch.setattr(optimizer_module, "set_rate", lambda optimizer, rate: set_rate(optimizer, rate * 1.01))


def of_critic_loss(patch):
    loss = critic_module.value_loss

    def scaled(*args):
        terms = loss(*args)
        return replace(terms, loss=terms.loss * 1.01)

    patch.setattr(critic_module, "value_loss", scaled)


def of_critic_step(changed):
    """A mutant of the critic's optimizer step alone: of arguments behind the parameters."""

    def mutate(patch):
        step = critic_module.clip_and_step

        def other(optimizer, parameters, *numbers, summed):
            return step(optimizer, parameters, *changed(*numbers), summed=summed)

        patch.setattr(critic_module, "clip_and_step", other)

    return mutate


MUTANTS = {
    "rows": [of_rows(lambda rows: rows[::-1]), of_rows(masked), of_rows(flipped)],
    "advantages": [of_advantages],
    "log-probs": [of_log_probs],
    "loss": [of_loss, of_clip],
    "gradient": [of_gradient, of_gradient_clipping],
    "optimizer": [of_optimizer],
}


async def test_every_mutant_is_found_in_the_first_update_and_in_its_stage(world, monkeypatch):
    path = await made(world, steps=3, learner={"grad_clip": 0.01})
    for stage, mutants in MUTANTS.items():
        for mutate in mutants:
            with monkeypatch.context() as patch:
                mutate(patch)
                found = differing(path, step=1)
            assert found[1], (stage, mutate)
            first = found[1][0]
            assert first.stage == stage, first
            if mutate is MUTANTS["rows"][2]:
                assert (first.row, first.token) == (2, 3) and "behaviour_logprobs" in first.where
            if stage in ("log-probs", "loss", "advantages"):
                assert first.row is not None and first.token is not None and first.largest > 0, first
            if stage == "log-probs":
                assert first.count == 1 and first.token == 3 and "micro-batch" in first.where


CRITIC_MUTANTS = {
    "loss": [of_critic_loss],
    "gradient": [of_critic_step(lambda norm, rate, limit: (norm, rate, 1e9))],
    "optimizer": [of_critic_step(lambda norm, rate, limit: (norm, rate * 1.01, limit))],
}


@pytest.mark.parametrize("backbone", ["none", pytest.param("own", marks=pytest.mark.slow)])
async def test_a_mutant_of_the_critic_alone_is_found_in_its_stage_and_its_model(world, monkeypatch, backbone):
    learner = {"grad_clip": 0.01, "critic": {"backbone": backbone}}
    path = await made(world, steps=2, advantage={"estimator": "gae"}, learner=learner)
    for stage, mutants in CRITIC_MUTANTS.items():
        for mutate in mutants:
            with monkeypatch.context() as patch:
                mutate(patch)
                first = differing(path, step=1)[1][0]
            assert first.stage == stage and first.where.endswith("(critic)"), first
    file = RunSource.open(path).directory.checkpoints / "u000002" / "training.pt"
    saved = torch.load(file, weights_only=True)
    saved["critic"]["head"]["bias"] += 1.0
    torch.save(saved, file)
    (found,) = differing(path, step=1)[2]
    assert found.stage == "optimizer" and found.where.startswith("bias of the critic's head of checkpoint u000002")


async def test_an_update_is_the_same_after_a_kill_a_damaged_checkpoint_and_a_resume(world):
    async with world(total_steps=8, checkpoint={"every": 2, "keep": 2}) as w:
        await kill_after(w, 5)
        if len(found := find_checkpoints(w.directory.checkpoints)) > 1:
            flip(found[0] / "training.pt")
        await stop_after(w, 6)
        await w.learn()
    w.directory.config_file.write_text(dump(w.config))
    assert differing(w.directory.path, step=1) == {step: () for step in range(1, 9)}


@pytest.mark.slow
async def test_a_run_of_several_ranks_without_the_optimizer_in_checkpoints_is_repeated_from_any_step(world):
    path = await made(world, steps=4, checkpoint={"optimizer": False})
    ranks = RunSource.open(path).config.updated(learner={"ranks": 2})
    (path / "config.yaml").write_text(dump(ranks))
    [found] = retrain(RunSource.open(path), step=4, count=1, overrides=(f"run.seed={ranks.run.seed}",))
    numbers = ("loss", "grad_norm", "entropy", "ratio_mean")
    assert [found.line[name] for name in numbers] == pytest.approx([found.recorded[name] for name in numbers], rel=1e-4)


@pytest.mark.slow
async def test_a_resume_without_the_optimizer_is_repeated_on_all_ranks(world):
    async with world(total_steps=6, checkpoint={"every": 2, "keep": 1, "optimizer": False}) as w:
        await kill_after(w, 4)
        resumed = newest_checkpoint(w.directory)
        _, run = w.learner()
        await run()
    w.directory.config_file.write_text(dump(w.config.updated(learner={"ranks": 2})))
    source = RunSource.open(w.directory.path)
    assert read_record(w.directory.updates, resumed).fresh_optimizer and 0 < resumed < 5
    [found] = retrain(source, step=resumed + 2, count=1, overrides=(f"run.seed={source.config.run.seed}",))
    numbers = ("loss", "grad_norm", "entropy", "ratio_mean")
    assert [found.line[name] for name in numbers] == pytest.approx([found.recorded[name] for name in numbers], rel=1e-4)


async def test_a_checkpoint_without_optimizer_begins_no_repetition_and_a_resume_from_it_is_repeated(world):
    async with world(total_steps=8, checkpoint={"every": 2, "keep": 1, "optimizer": False}) as w:
        await stop_after(w, 3)
        resumed = newest_checkpoint(w.directory)
        await w.learn()
    w.directory.config_file.write_text(dump(w.config))
    path = w.directory.path
    assert begin(RunSource.open(path), resumed + 2) == (resumed + 1, 0)
    assert differing(path, step=1) == {step: () for step in range(1, 9)}
    fresh = [read_record(w.directory.updates, update).fresh_optimizer for update in range(8)]
    assert fresh == [update in (0, resumed) for update in range(8)]
    file = path.parent / "b.afterplay"
    write_bundle(RunSource.open(path), 8, file)
    with open_source(file) as opened:
        assert [found.differences for found in retrain(opened)] == [()]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]), st.data())
def test_every_value_of_every_tensor_counts_in_its_sum_of_bits(sizes, dtype, data):
    tensors = [torch.arange(11, dtype=dtype)[data.draw(st.integers(0, 2)) :][:size] for size in sizes]
    which = data.draw(st.integers(0, len(sizes) - 1))
    at = data.draw(st.integers(0, sizes[which] - 1))
    bits = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    before = bit_sums([*tensors, None])
    tensors[which].view(bits)[at] ^= 1 << data.draw(st.integers(0, 8 * dtype.itemsize - 2))
    assert (bit_sums([*tensors, None]) != before).nonzero().flatten().tolist() == [which]


class Recorder(Ranks):
    """One rank whose sums are added to those of another, if it has them."""

    def __init__(self, others=()):
        self.sums, self.others = [], list(others)

    def summed(self, values):
        self.sums.append(list(values))
        return [a + b for a, b in zip(values, self.others.pop(0) if self.others else [0] * len(values), strict=True)]


@given(st.lists(st.tuples(*[st.integers(-(2**63), 2**63 - 1)] * 4), min_size=1, max_size=3))
def test_sums_of_bits_of_two_ranks_add_up_in_all_their_bits(sums):

    def add(ranks, rank):
        totals = StepTotals(*[None] * 4, rules=None, scores=None, critic_only=False, n_sampled=0)
        pairs = torch.tensor([[a[rank] for a in sums], [a[rank + 2] for a in sums]])
        totals.applied.append((AppliedStep("policy", 0.0, 0.0, 0.0, fresh_optimizer=False), pairs))
        totals.add_ranks(ranks)
        return totals.steps[0]

    add(first := Recorder(), 0)
    found = add(Recorder(first.sums), 1).sums.tolist()
    assert found == [[(a + b) % 2**64 for a, b, _, _ in sums], [(a + b) % 2**64 for _, _, a, b in sums]]


async def test_a_record_has_twelve_bytes_a_sampled_token_sixteen_a_weight_tensor_and_112_a_row(world):
    path = await made(world, steps=1)
    (found,), record = retrain(RunSource.open(path)), read_record(RunSource.open(path).directory.updates, 0)
    assert sum(array.nbytes for array in record.tokens.values()) == 12 * found.batch.n_sampled
    assert [step.sums.nbytes for step in record.steps] == [16 * len(list(policy_tensors(path)))]
    assert record.rows.nbytes == 112 * len(found.batch.rows)


async def test_what_the_run_left_to_its_machine_is_as_it_was_there(world, monkeypatch):
    monkeypatch.setattr(policy_module, "fast_dtype", lambda: "float32")
    path = await made(world, steps=2, learner={"compute_dtype": "auto"})
    monkeypatch.setattr(policy_module, "fast_dtype", lambda: "bfloat16")
    assert differing(path, step=1) == {1: (), 2: ()}


async def test_a_list_of_rollouts_marks_the_steps_that_are_made_again(world, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    path = await made(world, steps=8, replay={"keep_trained": 1}, checkpoint={"every": 3, "keep": 2})
    lines = CliRunner().invoke(app, ["show", str(path)]).output.splitlines()
    cells = [line.split() for line in lines if line.lstrip(" ●").startswith("g0")]
    marked = {int(words[i - 1]) for words in cells for i, word in enumerate(words) if word == "↻"}
    assert marked == set(differing(path, step=min(marked))) == {7, 8}


@pytest.mark.parametrize("damaged", [False, True])
async def test_steps_before_a_change_of_the_run_file_are_made_with_the_keys_of_their_time(world, damaged):
    """A change at a start with a damaged newest checkpoint is dated by it, and applies from the one before."""
    async with world(total_steps=8, checkpoint={"every": 2, "keep": 8}) as w:
        await stop_after(w, 3)
        saved = find_checkpoints(w.directory.checkpoints)
        made = read_state(saved[damaged]).updates
        before, w.config = w.config, w.config.updated(learner={"learning_rate": 1e-2})
        dated = read_state(saved[0]).updates
        lines = [{"step": 0}, {"step": dated, "changes": difference(before, w.config)}]
        w.directory.history_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        if damaged:
            flip(saved[0] / "training.pt")
        await w.learn()
    w.directory.config_file.write_text(dump(w.config))
    path = w.directory.path
    assert configuration_at(RunSource.open(path), 0)[1] == made
    assert differing(path, step=1) == {step: () for step in range(1, made + 1)}
    assert differing(path, step=made + 1) == {step: () for step in range(made + 1, 9)}


async def test_each_step_is_a_line_of_json_whose_times_are_those_of_the_step_and_of_the_run(world, monkeypatch):
    path = await made(world, steps=2)
    monkeypatch.setenv("OMP_WAIT_POLICY", "")
    monkeypatch.delenv("OMP_WAIT_POLICY")
    done = CliRunner().invoke(app, ["retrain", str(path), "--from", "1", "--json"])
    lines = [orjson.loads(line) for line in done.output.splitlines()]
    recorded = [orjson.loads(line) for line in RunSource.open(path).directory.metrics_file.read_bytes().splitlines()]
    assert done.exit_code == 0 and [line["step"] for line in lines] == [1, 2]
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE", "as a learner's"
    for line, of_run in zip(lines, recorded, strict=True):
        assert line["compared"] and line["differences"] == []
        assert line["recorded_seconds"] == pytest.approx(sum(of_run["seconds"][phase] for phase in PHASES))
        assert line["seconds"] >= line["update_seconds"] > 0 and line["cpu_seconds"] > 0
    refused = CliRunner().invoke(app, ["retrain", str(path), "--json", "--set", "loss.policy=sapo"])
    assert isinstance(refused.exception, ConfigurationError)


async def test_what_an_update_does_not_read_is_refused_with_the_reason(world):
    path = await made(world, steps=2)
    sets = ("environments.toy.tasks=3", "staleness.max=4", "learner.lora.rank=2", "metrics.port=1")
    with pytest.raises(ConfigurationError) as error:
        list(retrain(RunSource.open(path), overrides=sets))
    reasons = (
        "the rollouts are recorded",
        "importance.* has their correction",
        "adapters of one shape",
        "takes no part",
    )
    for line, key, reason in zip(str(error.value).splitlines(), sets, reasons, strict=True):
        assert key.partition("=")[0] in line and reason in line
    with pytest.raises(ConfigurationError, match="step 9 cannot be made again, only steps 1-2"):
        list(retrain(RunSource.open(path), step=9))


def own_loss(tokens, rules):
    return -3.0 * tokens.advantages * tokens.logprobs


async def test_a_change_applies_from_its_step_on_to_the_recorded_weights(world):
    path = await made(world)
    same, *_ = afterplay.retrain(path, step=6, learner={"learning_rate": 1e-3})
    assert same.differences is None and all(
        same.line[key] == value for key, value in same.recorded.items() if key not in OF_THE_MACHINE
    )
    one, two = afterplay.retrain(path, step=5, loss={"policy": own_loss}, learner={"grad_clip": 1e9})
    assert (one.step, two.step) == (5, 6)
    assert one.line["entropy"] == one.recorded["entropy"] and one.line["loss"] != one.recorded["loss"]
    assert two.line["entropy"] != two.recorded["entropy"], "other weights"


def test_a_changed_update_replaces_no_results_of_an_earlier_one(tmp_path):
    for name in ("retrain", "retrain-2", "retrain-3"):
        assert free_folder(tmp_path / "retrain") == tmp_path / name
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").touch()


@pytest.mark.parametrize("function", [lambda tokens, rules: 0, made.__get__(1), Path.exists])
def test_a_function_that_no_module_has_under_its_name_is_refused_by_its_place(function):
    def local(tokens, rules):
        return 0

    for one in (function, local):
        with pytest.raises(ConfigurationError, match=r"^loss\.policy: expected "):
            afterplay.retrain("nowhere", loss={"policy": one})


@pytest.mark.parametrize("number", ["2", 0, True, 1.5])
def test_a_step_that_is_no_number_of_one_is_refused(number):
    for name in ("step", "updates"):
        with pytest.raises(ConfigurationError, match=f"^{name}: expected a whole number of 1 to "):
            afterplay.retrain("nowhere", **{name: number})


@pytest.mark.parametrize("kind", ["plain", *(pytest.param(k, marks=pytest.mark.slow) for k in ("everything", "mix"))])
async def test_a_bundle_is_made_again_without_its_run_and_tells_nothing_of_the_machine(kind, world, tmp_path):
    async with world(total_steps=1) as w:
        await w.learn()
    shutil.copytree(w.directory.model, own := tmp_path / "own", ignore=shutil.ignore_patterns(MANIFEST, CONTENTS))
    with_infinity(own)
    shutil.rmtree(w.directory.path)
    path = await made(world, model={"source": str(own), "max_length": 64}, **KINDS[kind])
    source = RunSource.open(path)
    file = tmp_path / "reports" / "step6.afterplay"  # the folder is made, as for pages and pictures
    assert write_bundle(source, 6, file, texts=False) == file.stat().st_size
    secrets = [str(tmp_path), "127.0.0.1", "/root", "tcp://", "ipc://", "actor-0", '"content":"u"']
    with zipfile.ZipFile(file) as packed:
        for name in packed.namelist():
            data = packed.read(name)
            assert [secret for secret in secrets if secret.encode() in data] == [], name
    shutil.rmtree(path)
    with open_source(file) as opened:
        (found,) = retrain(opened)
    assert (found.step, found.differences, found.compared) == (6, (), True)


async def test_a_bundle_of_a_step_before_a_change_has_the_model_that_its_own_keys_need(world, tmp_path):
    async with world(total_steps=4, checkpoint={"every": 2, "keep": 8}, loss={"kl": "loss"}) as w:
        await stop_after(w, 2)
        before, w.config = w.config, w.config.updated(loss={"kl": "none"})
        lines = [{"step": 0}, {"step": newest_checkpoint(w.directory), "changes": difference(before, w.config)}]
        w.directory.history_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
        await w.learn()
    w.directory.config_file.write_text(dump(w.config))
    write_bundle(RunSource.open(w.directory.path), 1, file := tmp_path / "b.afterplay")
    with open_source(file) as opened:
        assert [found.differences for found in retrain(opened)] == [()]


async def test_an_update_whose_rollouts_were_freed_since_the_first_look_is_refused(world):
    source = RunSource.open(await made(world, steps=2))
    assert source.updates == {0, 1}
    with closing(sqlite3.connect(store_path(source.config, source.directory))) as connection:
        connection.execute("DELETE FROM payloads WHERE row_id = (SELECT max(row_id) FROM payloads)")
        connection.commit()
    with pytest.raises(StoreError, match=r"freed meanwhile \(replay\.keep_trained\)"):
        [source.sent(update) for update in (0, 1)]


def paths_of(section, prefix=()):
    """Keys of a section whose type is a path, however deep, as tuples."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from paths_of(value, (*prefix, name))
        elif Path in (field.annotation, *get_args(field.annotation)):
            yield (*prefix, name)


def with_value(section, key, value):
    name, *rest = key
    return section.model_copy(update={name: with_value(getattr(section, name), rest, value) if rest else value})


CONFIG = config_of(Path(), "http://127.0.0.1:1")
OF_FILES = [(name, *key) for name in SECTIONS for key in paths_of(getattr(CONFIG, name))]
NAMES = st.text("ab.", min_size=1, max_size=5)


@given(st.sampled_from(OF_FILES), st.lists(NAMES, min_size=1, max_size=3), st.booleans())
def test_a_bundle_is_refused_for_every_key_whose_type_is_a_path_however_it_is_written(key, parts, absolute):
    assert {("loss", "supervised", "demonstrations"), ("learner", "reference", "folder")} <= {*OF_FILES}
    path = Path("/" if absolute else "", *parts)
    with pytest.raises(ConfigurationError, match=rf"{'[.]'.join(key)} is .*no bundle"):
        portable_sections(with_value(CONFIG, key, path))


@given(st.lists(NAMES, min_size=2, max_size=3), st.sampled_from(["", "/", "~/", "http://", "C:\\"]), st.integers(0, 2))
def test_a_bundle_is_refused_for_options_of_an_own_loss_that_name_places(parts, start, depth):
    value = start + "/".join(parts)
    for _ in range(depth):
        value = [{"inner": value}]
    options = Given(name="my/own.py:loss", table=value)
    config = with_value(CONFIG, ("loss", "policy"), options)
    with pytest.raises(ConfigurationError, match=r"loss\.policy\.table.*no bundle"):
        portable_sections(config)
    kept = portable_sections(with_value(CONFIG, ("loss", "policy"), Given(name="my/own.py:loss", table=["a", 1])))
    assert kept["loss"]["policy"] == {"name": "own.py:loss", "table": ["a", 1]}


def texts_in(value):
    """Every text of a value, however deep."""
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Mapping):
        yield from (text for pair in value.items() for one in pair for text in texts_in(one))
    elif isinstance(value, list | tuple):
        yield from (text for one in value for text in texts_in(one))
    elif isinstance(value, str):
        yield value


@settings(max_examples=30, deadline=None)
@given(trajectories())
def test_without_texts_a_trajectory_keeps_only_ids_names_and_words_of_ours(trajectory):
    assume(trajectory.failure is None)  # as of all that are trained
    found = portable(trajectory, texts=False)
    ids = {trajectory.trajectory_id, trajectory.group_id, trajectory.task.task_id, trajectory.task.environment}
    names = {*trajectory.rewards, *(name for turn in trajectory.turns for name in turn.signals)}
    roles = {m.role for turn in trajectory.turns for m in (*turn.context_messages, turn.completion_message)}
    ours = {"actor", "unknown", "", *SpanSource, *FinishReason, *TrajectoryStatus}
    assert set(texts_in(found)) <= ids | names | roles | ours
    for a, b in zip(trajectory.branches(), found.branches(), strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and np.array_equal(a.behaviour_logprobs, b.behaviour_logprobs)


async def test_a_large_checkpoint_lies_beside_its_bundle_which_knows_its_bytes(world, tmp_path, monkeypatch):
    path = await made(world, steps=2)
    monkeypatch.setattr("learner.process.bundle.WHOLE_BYTES_MAX", 0)
    file = tmp_path / "b.afterplay"
    assert write_bundle(RunSource.open(path), 2, file) < 100_000
    (tmp_path / "small.afterplay.weights").mkdir()
    (tmp_path / "small.afterplay.weights" / CONTENTS).write_text("of a bundle that is replaced")
    with monkeypatch.context() as small:
        small.setattr("learner.process.bundle.WHOLE_BYTES_MAX", 1 << 30)
        write_bundle(RunSource.open(path), 2, tmp_path / "small.afterplay")
    with open_source(tmp_path / "small.afterplay"):
        pass
    with open_source(file) as opened:
        assert [found.differences for found in retrain(opened)] == [()]
    flip(tmp_path / "b.afterplay.weights" / "training.pt")
    with pytest.raises(DamagedFiles, match=r"training\.pt"), open_source(file):
        pass
    shutil.rmtree(tmp_path / "b.afterplay.weights")
    with pytest.raises(DamagedFiles, match="missing"), open_source(file):
        pass


@pytest.mark.parametrize("refused", ["shutil.copytree", "zipfile.ZipFile.write"])
async def test_a_bundle_that_does_not_fit_on_the_disk_leaves_the_one_it_would_replace(
    world, tmp_path, monkeypatch, refused
):
    source = RunSource.open(await made(world, steps=2))
    monkeypatch.setattr("learner.process.bundle.WHOLE_BYTES_MAX", 0)
    file = tmp_path / "bundles" / "b.afterplay"
    write_bundle(source, 2, file)
    with monkeypatch.context() as full:
        full.setattr(refused, refuse_below(file.parent, refused))
        with pytest.raises(OSError, match="No space left"):
            write_bundle(source, 1, file)
    assert {path.name for path in file.parent.iterdir()} == {file.name, f"{file.name}.weights"}
    with open_source(file) as opened:
        assert [found.step for found in retrain(opened)] == [2]


def refuse_below(folder: Path, name: str) -> Any:
    """A function of this name that finds no room in ``folder``."""
    original = shutil.copytree if name == "shutil.copytree" else zipfile.ZipFile.write

    def refuse(*arguments: Any, **more: Any) -> Any:
        if any(str(folder) in str(getattr(argument, "filename", argument)) for argument in arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*arguments, **more)

    return refuse


async def test_shares_of_the_loss_add_up_in_every_way_of_counting(world):
    path = await made(world, steps=3, replay=MIX)
    *_, made_again = retrain(RunSource.open(path), step=3, count=1)
    found, values = contributions(made_again), made_again.report.statistics.values
    moves = values.trained & ~values.clipped_low & ~values.clipped_high
    total = np.abs(values.losses[moves]).sum()
    for kind, shares in found["shares"].items():
        assert sum(one["tokens"] for one in shares) == len(values), kind
        assert sum(one["share"] for one in shares) == pytest.approx(1.0 if total else 0.0), kind
    fresh = next((one["share"] for one in found["shares"]["source"] if one["label"] == "fresh"), 0.0)
    assert fresh == pytest.approx(np.abs(values.losses[moves & ~values.replayed]).sum() / total if total else 0.0)
    rows = made_again.batch.rows
    for token in found["largest"]:
        assert rows[token["row"]].trajectory_id == token["trajectory"] and rows[token["row"]].loss_mask[token["token"]]


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), st.data())
def test_one_changed_word_is_found_by_the_sums_alone(words, data):
    array = np.asarray(words, np.uint32).view(np.float32)
    at = data.draw(st.integers(0, len(words) - 1))
    other = array.copy()
    other.view(np.uint32)[at] ^= 1 << data.draw(st.integers(0, 31))
    sums = [update_record._fletcher(a) for a in (array, other)]
    assert update_record._changed_word(*sums, len(words)) == at


@pytest.mark.parametrize("call", ["mkdir", "unlink"])
def test_a_record_that_the_disk_does_not_take_stops_no_update(tmp_path, monkeypatch, caplog, call):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    folder, numbers = tmp_path / "updates", np.zeros((0, 7, 2), np.uint64)
    records = [UpdateRecord(n, n, {}, [], (), numbers, {}) for n in range(3)]
    if call == "unlink":
        write_record(folder, records[0], 1)
    monkeypatch.setattr(Path, call, refuse)
    write_record(folder, records[1], 1)
    assert call == "unlink" or "what update 2 computed was not recorded" in caplog.text
    monkeypatch.undo()
    write_record(folder, records[2], 1)
    assert [file.name for file in folder.iterdir()] == ["u000002.record"]
