"""Exactly the passes that are asked for, each number at its token."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from learner.data.rows import Batch
from learner.observability.timing import Stopwatch
from learner.policy.policy import Backbone
from learner.policy.reference import AdaptersOff, FrozenCopy
from learner.training.critic import Critic, explained_variance
from learner.training.trainer import Trainer
from pipeline.errors import ConfigurationError, Interrupted
from tests.unit.learner.conftest import learner_config, make_rows, run_config, tiny_model, tiny_policy

WATCH = Stopwatch(torch.device("cpu"))


@pytest.fixture
def needs(monkeypatch):
    """Makes estimator and loss ask for what the test wants."""

    def ask(*names):
        monkeypatch.setattr("learner.training.trainer.needed_scores", lambda config: frozenset(names))
        monkeypatch.setattr("learner.process.build.needed_scores", lambda config: frozenset(names))

    return ask


def count_passes(policy, monkeypatch):
    calls = []
    score = policy.score
    monkeypatch.setattr(policy, "score", lambda part: calls.append(part.n_sampled) or score(part))
    return calls


@pytest.mark.parametrize(
    ("names", "passes"), [((), 0), (("logprobs",), 1), (("entropies",), 1), (("logprobs", "entropies"), 1)]
)
def test_logprobs_and_entropies_are_one_pass_and_none_is_made_unasked(needs, monkeypatch, names, passes):
    needs(*names)
    trainer = Trainer(tiny_policy(), run_config())
    rows = make_rows(5)
    calls = count_passes(trainer.policy, monkeypatch)
    scores = trainer.token_scores(rows)
    assert len(calls) == passes
    assert (scores.logprobs is None) == (scores.entropies is None) == (passes == 0)
    assert scores.reference is None
    assert scores.values is None
    if passes:
        np.testing.assert_array_equal(scores.logprobs, trainer.score(rows))


def test_gathered_logprobs_are_not_computed_again_by_the_step(needs, monkeypatch, train):
    """Two mini-batches and the proximal anchor need log π before the first step: the pass made for the KL serves."""
    needs("logprobs")
    config = run_config({"minibatches": 2}, importance={"anchor": "proximal"})
    trainer = Trainer(tiny_policy(), config)
    calls = count_passes(trainer.policy, monkeypatch)
    train(trainer, 1)
    assert sum(calls) == 2 * sum(row.n_sampled for row in make_rows(6, seed=0))


def test_one_optimizer_step_needs_no_pass_before_it(monkeypatch, train):
    trainer = Trainer(tiny_policy(), run_config(importance={"anchor": "proximal"}))
    calls = count_passes(trainer.policy, monkeypatch)
    train(trainer, 1)
    assert sum(calls) == sum(row.n_sampled for row in make_rows(6, seed=0))


def test_what_is_asked_for_and_not_there_is_an_error(needs):
    for name, word in (("reference", "reference policy"), ("values", "critic")):
        needs(name)
        trainer = Trainer(tiny_policy(), run_config())
        with pytest.raises(ConfigurationError, match=word):
            trainer.token_scores(make_rows(1))


def test_parts_that_nothing_asks_for_are_not_loaded(needs, config_of, initial, resume):
    needs()
    trainer = resume(config_of(), initial)
    assert (trainer.reference, trainer.critic) == (None, None)


@pytest.mark.parametrize("lora", [0, 2])
def test_the_reference_stays_the_initial_policy_while_the_policy_learns(needs, config_of, initial, resume, train, lora):
    needs("reference")
    trainer = resume(config_of({"lora": {"rank": lora}}), initial)
    assert isinstance(trainer.reference, AdaptersOff if lora else FrozenCopy)
    rows = make_rows(6, seed=0)
    first = trainer.token_scores(rows).reference
    np.testing.assert_array_equal(first, trainer.score(rows))
    train(trainer, 3)
    np.testing.assert_array_equal(trainer.token_scores(rows).reference, first)
    assert not np.allclose(trainer.score(rows), first, atol=1e-4)


def test_a_copy_in_bfloat16_is_near_the_float32_one(needs, config_of, initial, resume):
    needs("reference")
    rows = make_rows(6)
    half = resume(config_of({"compute_dtype": "bfloat16", "reference": {"dtype": "bfloat16"}}), initial)
    whole = resume(config_of(), initial)
    np.testing.assert_allclose(half.token_scores(rows).reference, whole.token_scores(rows).reference, atol=0.15)


def parts_of(rows, tokens_max):
    return tiny_policy(packing="padded", tokens_per_microbatch=tokens_max).microbatches(rows, WATCH)


def critic_of(seed=0, grad_clip=1.0, **critic):
    config = learner_config(grad_clip=grad_clip, critic={"learning_rate": 1e-2, **critic})
    backbone = Backbone(tiny_model(seed).base_model, config, torch.device("cpu"))
    critic = Critic(backbone, config, owns=True)
    with torch.no_grad():
        critic._head.weight.normal_()
    return critic


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.integers(0, 10_000), st.integers(1, 60), st.randoms(use_true_random=False))
def test_a_value_is_that_of_the_state_before_its_token(n, seed, budget, shuffle):
    """The state before a token holds the tokens before it and nothing later: it equals that of the cut sequence's last
    position, whatever micro-batch, padding and order the row travelled in."""
    critic = critic_of()
    critic.backbone._config = critic.backbone._config.model_copy(update={"tokens_per_microbatch": budget})
    rows = list(make_rows(n, seed=seed))
    shuffle.shuffle(rows)
    came = iter(critic.values(rows, WATCH))
    with torch.no_grad():
        for row in rows:
            for t in np.flatnonzero(row.loss_mask):
                prefix = torch.from_numpy(row.token_ids[:t].astype(np.int64))[None]
                hidden = critic.backbone.model(input_ids=prefix, use_cache=False).last_hidden_state[0, -1]
                expected = float(critic._head(hidden))
                assert next(came) == pytest.approx(expected, abs=1e-4)
    assert next(came, None) is None


def test_a_head_alone_reads_the_policy_and_never_changes_it(needs, config_of, initial, resume, train):
    needs("values")
    learner = {"critic": {"backbone": "none", "warmup_updates": 99, "learning_rate": 0.1}}
    trainer = resume(config_of(learner), initial)
    before = trainer.policy.snapshot("float32")
    reports = train(trainer, 3)
    after = trainer.policy.snapshot("float32")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert reports[-1].optimizer_steps == 0
    assert len(trainer.critic.parameters) == 2
    assert any(bool((p != 0).any()) for p in trainer.critic.parameters)


def test_a_head_alone_has_its_values_from_the_pass_of_the_logprobs(needs, config_of, initial, resume, monkeypatch):
    needs("values", "logprobs")
    trainer = resume(config_of({"critic": {"backbone": "none"}, "tokens_per_microbatch": 1000}), initial)
    with torch.no_grad():
        trainer.critic._head.weight.normal_()
    rows, calls = make_rows(5), []
    hidden = trainer.policy.hidden
    monkeypatch.setattr(trainer.policy, "hidden", lambda part: calls.append(1) or hidden(part))
    scores = trainer.token_scores(rows)
    assert len(calls) == 1
    np.testing.assert_array_equal(scores.values, trainer.critic.values(rows, WATCH))
    np.testing.assert_array_equal(scores.logprobs, trainer.score(rows))


def test_only_the_critic_learns_while_it_warms_up(needs, config_of, initial, resume, train):
    needs("values")
    trainer = resume(config_of({"critic": {"warmup_updates": 2}}), initial)
    before = trainer.policy.snapshot("float32")
    warm = train(trainer, 2)
    same = trainer.policy.snapshot("float32")
    assert all(torch.equal(before[name], same[name]) for name in before)
    assert [r.optimizer_steps for r in warm] == [0, 0]
    assert all(r.critic.grad_norm > 0 for r in warm)
    assert train(trainer, 1)[0].optimizer_steps == 1


def test_a_critic_learns_returns_that_follow_from_the_state():
    critic = critic_of(clip=None)
    rows = make_rows(8, seed=3)
    first = {int(row.token_ids[0]) for row in rows}
    goal = {token: float(i % 2) for i, token in enumerate(sorted(first))}
    returns = np.concatenate([np.full(r.n_sampled, goal[int(r.token_ids[0])], np.float32) for r in rows])
    parts = parts_of(rows, 4096)
    reports = [critic.learn(parts, critic.values(rows, WATCH), returns, 3e-2, WATCH) for _ in range(40)]
    assert reports[-1].loss < 0.1 * reports[0].loss
    assert reports[-1].explained_variance > 0.8


@pytest.mark.parametrize("budget", [1, 30, 1000])
def test_splitting_changes_neither_loss_nor_gradient_of_the_critic(budget):
    found = []
    for tokens in (1000, budget):
        critic, rows, gradients = critic_of(grad_clip=1e9), make_rows(6, seed=1), []
        parts = parts_of(rows, tokens)
        values = critic.values(rows, WATCH)
        returns = values + np.linspace(-1, 1, len(values), dtype=np.float32)
        old = values + np.linspace(0.5, -0.5, len(values), dtype=np.float32)
        critic.optimizer.register_step_pre_hook(
            lambda *_, c=critic, g=gradients: g.extend(p.grad.clone() for p in c.parameters if p.grad is not None)
        )
        found.append((critic.learn(parts, old, returns, 1e-2, WATCH), gradients))
    (whole, gradients), (split, others) = found
    assert split.loss == pytest.approx(whole.loss, rel=1e-4)
    assert 0 < split.clip_ratio == whole.clip_ratio < 1
    for a, b in zip(gradients, others, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_a_value_step_that_is_not_finite_is_skipped_and_counted(needs, config_of, initial, resume):
    needs("values")
    trainer = resume(config_of(), initial)
    rows = make_rows(3)
    scores = trainer.token_scores(rows)
    scores = replace(scores, returns=np.full_like(scores.values, np.inf))
    before = [p.detach().clone() for p in trainer.critic.parameters]
    report = trainer.step(Batch(0, (), rows), 0, scores)
    assert report.nonfinite["value"] == 1
    assert report.critic.skipped
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.critic.parameters, strict=True))


def test_explained_variance():
    assert explained_variance([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert explained_variance([0.0, 0.0], [1.0, 2.0]) == 0.0
    assert explained_variance([1.0, 2.0], [3.0, 3.0]) is None


def test_interrupt_stops_reference_and_critic_too(needs, config_of, initial, resume):
    needs("reference", "values")
    trainer = resume(config_of(), initial)
    trainer.policy.interrupt.set()
    with pytest.raises(Interrupted):
        trainer.reference.logprobs(make_rows(1), WATCH)
    with pytest.raises(Interrupted):
        trainer.critic.values(make_rows(1), WATCH)
