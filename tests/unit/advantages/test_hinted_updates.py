"""CPO through the trainer: log π under the prompt with the hint, and a signal for groups that all failed."""

from dataclasses import replace

import numpy as np
import pytest

from learner.advantages.cpo import counterfactual_logprobs
from learner.advantages.estimate import estimate, scored_of
from learner.data.rows import Group, StoredRollout, build_batch, trajectory_rows, with_contexts
from pipeline.errors import SchemaError, TrainingError
from pipeline.schema import GroupPlan, Task
from tests.unit.advantages.test_updates import gradients, groups_of, make_trainer


def with_hints(groups, chosen=lambda t: True):
    def hinted(t):
        if not chosen(t):
            return t
        first = t.turns[0].context.token_ids.tolist()
        return replace(t, hinted_contexts={0: (5, 7, 9, *first)})

    return [replace(g, trajectories=tuple(hinted(t) for t in g.trajectories)) for g in groups]


def failed(groups):
    return [replace(g, trajectories=tuple(replace(t, reward=0.0) for t in g.trajectories)) for g in groups]


def test_hinted_log_probabilities_are_those_of_the_rows_with_the_hint():
    trainer = make_trainer({"tokens_per_microbatch": 40}, advantage={"estimator": "cpo"})
    groups = with_hints(groups_of(), lambda t: not t.trajectory_id.endswith("2"))
    batch = build_batch(0, groups)
    hinted = counterfactual_logprobs(batch, trainer.score)
    plain = trainer.score(batch.rows)
    first = 0
    for row, t in zip(batch.rows, batch.trajectories, strict=True):
        part = slice(first, first + row.n_sampled)
        first += row.n_sampled
        if not t.hinted_contexts:
            assert np.isnan(hinted[part]).all()
            continue
        (alone,) = trajectory_rows(with_contexts(t, t.hinted_contexts), 0)
        assert len(alone) == len(row) + 3 and alone.n_sampled == row.n_sampled
        np.testing.assert_allclose(hinted[part], trainer.score([alone]), atol=1e-5)
        assert np.abs(hinted[part] - plain[part]).max() > 1e-3


def test_a_trajectory_in_two_branches_and_a_replay_keep_their_token_numbers():
    trainer = make_trainer(advantage={"estimator": "cpo"})
    group = next(g for g in groups_of() if any(len(t.turns) == 3 for t in g.trajectories))
    (group,) = with_hints([group])
    long = next(t for t in group.trajectories if len(t.turns) == 3)
    forked = replace(
        long,
        turns=(*long.turns[:1], *(replace(t, branch=1) for t in long.turns[1:])),
        hinted_contexts={**long.hinted_contexts, 1: (5, 7, 9, 1, 2)},
    )
    alone = replace(long, trajectory_id="stored")
    plan = GroupPlan("g", Task("t", "toy", 0), 2, 1, ("stored",))
    batch = build_batch(0, [Group(plan, (forked, alone), {"stored": StoredRollout()})])
    assert [row.trajectory_index for row in batch.rows] == [0, 0, 1]
    hinted = counterfactual_logprobs(batch, trainer.score)
    expected = trainer.score(
        [
            *trajectory_rows(with_contexts(forked, forked.hinted_contexts), 0),
            *trajectory_rows(with_contexts(alone, alone.hinted_contexts), 1, StoredRollout()),
        ]
    )
    np.testing.assert_allclose(hinted, expected, atol=1e-5)


def test_groups_that_all_failed_learn_from_hints_and_only_from_hints():
    moved = {}
    for name, groups in (("hinted", with_hints(failed(groups_of()))), ("plain", failed(groups_of()))):
        trainer = make_trainer(advantage={"estimator": "cpo"})
        moved[name] = bool(gradients(trainer, build_batch(0, groups)))
    assert moved == {"hinted": True, "plain": False}


def test_the_gradient_of_a_failed_group_is_the_signal_times_that_of_log_pi():
    groups = with_hints(failed(groups_of()))
    options = {"loss": {"policy": {"name": "ppo", "dual_clip": None}, "aggregation": "token_mean"}}
    trainer = make_trainer(
        {"grad_clip": 1e9}, advantage={"estimator": "cpo"}, importance={"anchor": "proximal"}, **options
    )
    batch = build_batch(0, groups)
    scores = trainer.token_scores(batch.rows)
    scores = replace(scores, hinted=counterfactual_logprobs(batch, trainer.score))
    advantages = np.concatenate(estimate(scored_of(batch, scores), trainer._config.advantage).advantages)
    g, o, h = (np.asarray(a, np.float64) for a in (scores.hinted, scores.logprobs, scores.entropies))
    scale = np.concatenate([np.full(sum(r.n_sampled for r in batch.rows[i : i + 4]), 0.0) for i in (0, 4)])
    first = sum(r.n_sampled for r in batch.rows[:4])
    scale[:first], scale[first:] = h[:first].max(), h[first:].max()
    np.testing.assert_allclose(advantages, np.exp(g) * (g - o) * h / scale, rtol=1e-5, atol=1e-7)
    assert len(gradients(trainer, batch)) > 0


def test_what_does_not_fit_the_trajectory_is_an_error():
    t = groups_of()[0].trajectories[0]
    with pytest.raises(SchemaError, match="hinted turns"):
        replace(t, hinted_contexts={len(t.turns): (1,)})
    with pytest.raises(TrainingError, match="contexts of the"):
        with_contexts(t, {len(t.turns): (1,)})
