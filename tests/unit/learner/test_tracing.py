"""Traces of trained trajectories hold the values that the learner computed for just these tokens."""

import errno
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.data.rows import Group, StoredRollout, build_batch
from learner.policy.policy import Policy
from learner.process.traces import Tracer, UpdateTokens, drawn, tracing
from learner.training.trainer import Trainer
from pipeline.config.evaluation import TracesConfig
from pipeline.schema.codec import decode_trajectory
from pipeline.store.traces import Flag, TraceWriter, scan_traces, trace_files


def trainer_of(kit, **learner) -> Trainer:
    config = kit.run_config({"tokens_per_microbatch": 30, **learner}, loss={"entropy_bonus": 0.01})
    return Trainer(Policy(kit.tiny_model(), config.learner, torch.device("cpu")), config)


def batch_of(kit):
    """Branches, several lengths, and a group of which one trajectory is replayed."""
    rng = np.random.default_rng(1)
    turns = [kit.make_turn(rng, 4, 3), kit.make_turn(rng, 2, 5), kit.make_turn(rng, 6, 2, branch=1)]
    plain = kit.make_group("g0", [1.0, 0.0, 0.0, 1.0])
    branched = replace(plain.trajectories[2], turns=tuple(turns))
    replayed = replace(
        kit.make_group("g1", [1.0, 0.0, 0.0, 1.0], seed=1, replay=[3]), stored_rollouts={"g1.3": StoredRollout()}
    )
    first = Group(plain.plan, (*plain.trajectories[:2], branched, plain.trajectories[3]))
    return build_batch(0, (first, replayed))


@pytest.mark.parametrize("learner", [{}, {"minibatches": 2}, {"packing": "padded"}])
def test_every_token_has_its_own_value(kit, learner):
    batch, trainer = batch_of(kit), trainer_of(kit, **learner)
    alone = {s: [row for row in batch.rows if row.trajectory_index == s] for s in range(len(batch.trajectories))}
    before = {s: trainer.score(rows) for s, rows in alone.items()}
    report = trainer.train(batch, policy_version=0)
    for sequence in alone:
        trajectory = batch.trajectories[sequence]
        seen = UpdateTokens(batch, report.statistics.values).of(sequence, trajectory)
        assert len(seen) == trajectory.n_sampled
        assert (seen.flags > 0).all()
        behaviour = np.concatenate([turn.completion.behaviour_logprobs for turn in trajectory.turns])
        if learner.get("minibatches", 1) == 1:
            np.testing.assert_allclose(seen.log_ratios + behaviour, before[sequence], atol=2e-5)
        assert (seen.entropies > 0).all()
        assert ((seen.flags & Flag.TRAINED) > 0).all()
        signs = {np.sign(a) for a in seen.advantages}
        assert signs == {1.0 if trajectory.reward else -1.0}


def test_kept_trajectories_come_back_with_their_values(kit, tmp_path):
    batch, trainer = batch_of(kit), trainer_of(kit)
    with tracing(TracesConfig(trained=3), tmp_path, seed=5, updates=0) as tracer:
        report = trainer.train(batch, policy_version=7)
        tracer.record(batch, report)
    entries = list(scan_traces(trace_files(tmp_path)))
    assert [e.trajectory_id for e in entries] == [batch.trajectories[i].trajectory_id for i in drawn(8, 3, 5, 0)]
    for entry, sequence in zip(entries, drawn(8, 3, 5, 0), strict=True):
        trace, trajectory = entry.load(), batch.trajectories[sequence]
        assert decode_trajectory(trace.frames).turns[0].completion.token_ids.tolist() == (
            trajectory.turns[0].completion.token_ids.tolist()
        )
        assert (entry.step, entry.index["policy_version"]) == (1, 7)
        expected = UpdateTokens(batch, report.statistics.values).of(sequence, trajectory)
        np.testing.assert_allclose(trace.seen.log_ratios, expected.log_ratios, rtol=2e-3, atol=1e-6)
        np.testing.assert_array_equal(trace.seen.flags, expected.flags)


def test_every_trajectory_is_drawn_equally_often_and_an_update_always_draws_the_same():
    counts = np.zeros(8)
    for update in range(2000):
        chosen = drawn(8, 2, 0, update)
        assert chosen == drawn(8, 2, 0, update) and len(set(chosen)) == 2
        counts[chosen] += 1
    assert np.abs(counts / 2000 - 0.25).max() < 0.04
    assert drawn(3, 9, 0, 0) == [0, 1, 2]


@pytest.mark.parametrize(("number", "attempts"), [(errno.EIO, 2), (errno.EROFS, 2), (errno.EINVAL, 1)])
def test_a_disk_that_refuses_never_ends_the_learner(kit, tmp_path, caplog, number, attempts):
    class Full(TraceWriter):
        def append(self, *args, **kwargs):
            raise OSError(number, os.strerror(number))

    batch, trainer = batch_of(kit), trainer_of(kit)
    report = trainer.train(batch, policy_version=0)
    tracer = Tracer(Full(tmp_path, "trained", 1 << 20), 2)
    with caplog.at_level(logging.WARNING):
        tracer.record(batch, report)
        tracer.record(batch, report)
    assert caplog.text.count(os.strerror(number)) == attempts, "what may end is tried again at the next step"
    (tmp_path / "file").write_text("")
    with tracing(TracesConfig(), tmp_path / "file", seed=0, updates=0) as refused:
        refused.record(batch, report)


def test_nothing_is_written_where_nothing_is_asked_for(kit, tmp_path):
    batch, trainer = batch_of(kit), trainer_of(kit)
    with tracing(TracesConfig(trained=0), tmp_path / "traces", seed=0, updates=0) as tracer:
        tracer.record(batch, trainer.train(batch, policy_version=0))
    assert not (tmp_path / "traces").exists()
