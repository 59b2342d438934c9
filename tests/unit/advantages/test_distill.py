"""Distillation: its gradient by enumeration, a student that becomes its teacher, and teachers that are refused."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.replay_bias import CHOICES, SPREADS, Chain
from learner.advantages.cpo import counterfactual_logprobs
from learner.advantages.estimate import estimate
from learner.data.rows import build_batch
from learner.models.info import require_same_tokenizer
from learner.models.tiny import build_tokenizer
from learner.policy.reference import FrozenCopy
from learner.process.preflight import with_options
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TrainingError
from tests.unit.advantages.cases import advantages_of, config_of, make_scored
from tests.unit.advantages.test_hinted_updates import with_hints
from tests.unit.advantages.test_updates import gradients, groups_of, make_trainer

RULES = {choice.name: choice for choice in CHOICES}["stale: token, no clip"].rules


def reverse_kl_gradient(chain: Chain, teacher: Chain, p_N: np.ndarray) -> np.ndarray:
    """``-∇ Σ_t KL(π(·|state) ‖ π_T(·|state))`` over the states of sequences that come with ``p_N``: by both tokens of
    each state, without a sampled one. The states themselves are held fixed, which is what a discount of 0 means."""
    log_pi, log_teacher = (
        torch.stack([torch.nn.functional.logsigmoid(sign * theta) for sign in (-1.0, 1.0)])
        for theta in (chain.theta, teacher.theta.detach())
    )
    kl = (log_pi.exp() * (log_pi - log_teacher)).sum(0)
    total = torch.zeros((), dtype=torch.float64)
    for p, tokens in zip(p_N.tolist(), chain.sequences_NT.tolist(), strict=True):
        before = 0
        for t, token in enumerate(tokens):
            total = total - p * kl[t, before]
            before = token
    (gradient,) = torch.autograd.grad(total, chain.theta)
    return gradient.flatten().numpy()


@pytest.mark.parametrize(("length", "group"), [(2, 1), (5, 1), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("estimator", ["distill", "self_distill"])
def test_the_expected_gradient_is_that_of_the_reverse_kl_of_each_token(estimator, stale, length, group):
    """Over all groups of all sequences; also of an older policy, whose tokens have their importance ratios."""
    chain = Chain.random(length, SPREADS["small"], 0)
    teacher = Chain.random(length, SPREADS["small"], 10)
    theirs, own = (c.log_pi_NT.detach().numpy() for c in (teacher, chain))
    p_N = chain.p_mu_N if stale else chain.p_pi_N
    weighted_NT = np.zeros_like(own)
    for members in product(range(len(own)), repeat=group):
        scored = [
            make_scored(0.0, (0,) * length, logprobs=own[i], reference=theirs[i], hinted=theirs[i]) for i in members
        ]
        for i, advantages in zip(members, estimate(scored, config_of(estimator)).advantages, strict=True):
            weighted_NT[i] += p_N[list(members)].prod() / p_N[i] / group * advantages
    chain.advantages_N = weighted_NT
    came = p_N @ chain.gradients(RULES, replayed=False, of_pi=not stale)
    np.testing.assert_allclose(came, reverse_kl_gradient(chain, teacher, p_N), rtol=1e-9, atol=1e-12)


def test_a_teacher_equal_to_the_policy_leaves_only_the_reward():
    scored = [make_scored(r, logprobs=[-1, -2, -3], reference=[-1, -2, -3]) for r in (0.0, 1.0)]
    for weight in (0.0, 0.5):
        came = advantages_of(scored, estimator="distill", reward_weight=weight)
        grpo = advantages_of(scored, estimator="grpo")
        np.testing.assert_allclose(came, weight * np.asarray(grpo))


def test_a_trajectory_without_a_hint_has_the_advantage_of_its_reward_alone():
    scored = [make_scored(r, logprobs=[-1, -2, -3], hinted=h) for r, h in ((0.0, None), (1.0, [-1, -1, -1]))]
    without, hinted = advantages_of(scored, estimator="self_distill", reward_weight=1.0)
    np.testing.assert_allclose(without, -1.0, atol=1e-5)
    np.testing.assert_allclose(hinted, [1.0, 2.0, 3.0], atol=1e-5)


def test_tokens_that_the_teacher_never_says_have_a_bounded_advantage():
    (came,) = advantages_of([make_scored(0.0, logprobs=[-1] * 3, reference=[-np.inf, -500, -1])], estimator="distill")
    np.testing.assert_allclose(came, [-20, -20, 0])
    with pytest.raises(TrainingError, match="expected reference"):
        advantages_of([make_scored(0.0, logprobs=[-1] * 3, reference=[np.nan, -1, -1])], estimator="distill")


def distilling(estimator, **reference):
    config = {"advantage": {"estimator": estimator}, "groups": {"n_rollout": 4, "groups_per_step": 2}}
    return make_trainer({"grad_clip": 1e9, "reference": reference}, **config)


def test_a_student_comes_closer_to_its_teacher_on_groups_whose_rewards_are_all_equal():
    torch.manual_seed(0)
    trainer = distilling("distill")
    teacher = make_trainer().policy
    with torch.no_grad():
        for weight in teacher.model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    trainer.reference = FrozenCopy(teacher)
    groups = [
        replace(g, trajectories=tuple(replace(t, reward=0.0) for t in g.trajectories)) for g in groups_of()
    ]  # fmt: skip
    distances = []
    for update in range(4):
        batch = build_batch(update, groups)
        scores = trainer.token_scores(batch.rows)
        distances.append(float(np.square(scores.reference - scores.logprobs).mean()))
        report = trainer.train(batch, update)
    assert distances[-1] < 0.8 * distances[0]
    assert report.statistics.all.reference_kl.value is not None


def test_the_policy_with_a_hint_teaches_the_policy_without():
    trainer = distilling("self_distill")
    batch = build_batch(0, with_hints(groups_of(), lambda t: t.trajectory_id.endswith("1")))
    hinted = counterfactual_logprobs(batch, trainer.score)
    expected = np.where(np.isnan(hinted), 0.0, hinted - trainer.score(batch.rows))  # one with a hint in each group
    seen = {}
    step = trainer.step

    def spy(batch, *rest):
        seen["advantages"] = np.concatenate([row.advantages for row in batch.rows])
        return step(batch, *rest)

    trainer.step = spy
    assert gradients(trainer, batch)
    np.testing.assert_allclose(seen["advantages"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({}, "distill needs a teacher, but learner.reference has neither folder nor url"),
        ({"advantage": {"estimator": "self_distill"}, "loss": {"kl": "reward"}}, "reads no rewards"),
        ({"groups": {"zero_variance": "drop"}}, "also learns from groups with equal rewards"),
    ],
)
def test_run_files_in_which_nothing_would_be_distilled_are_refused(sections, words):
    with pytest.raises(ConfigurationError, match=words):
        with_options(RunConfig.model_validate({"advantage": {"estimator": "distill"}, **sections}))


def test_a_teacher_of_its_own_or_a_weight_on_rewards_makes_a_run_file_valid():
    server = {"reference": {"url": "http://teacher:8000"}}
    rewarded = {"name": "distill", "reward_weight": 1.0}
    for sections in ({"learner": server, "groups": {"n_rollout": 1}}, {"advantage": {"estimator": rewarded}}):
        with_options(RunConfig.model_validate({"advantage": {"estimator": "distill"}, **sections}))


def test_a_teacher_must_have_every_token_of_the_policy_under_the_same_id(tmp_path):
    def folder(name: str, tokenizer: PreTrainedTokenizerFast):
        tokenizer.save_pretrained(tmp_path / name)
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
        return tmp_path / name

    policy = folder("policy", build_tokenizer(4, ("open",)))
    for name in ("same", "larger"):
        words = ("open",) if name == "same" else ("open", "yes")
        require_same_tokenizer(folder(name, build_tokenizer(4, words)), policy, trust_remote_code=False)
    for name, tokenizer in (("moved", build_tokenizer(5, ("open",))), ("missing", build_tokenizer(4, ("yes",)))):
        with pytest.raises(ConfigurationError, match=r"1 tokens of the policy, 'open' among them.*same family"):
            require_same_tokenizer(folder(name, tokenizer), policy, trust_remote_code=False)
    with pytest.raises(ConfigurationError, match=r"learner.reference.folder: expected a model folder"):
        require_same_tokenizer(tmp_path / "absent", policy, trust_remote_code=False)
