"""The success rate of weights is measured by play alone, and is the one that their probabilities give."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from actors.adapters.games import Passcode
from actors.rendering.renderer import Renderer
from benchmarks.replay_efficiency.examine import Examination, load_score, sample
from learner.models.tiny import TinyOptions, build_tokenizer, write_tiny_model
from pipeline.config.load import load
from pipeline.errors import ConfigurationError
from pipeline.schema import Task

BASE = Path(__file__).parents[3] / "configs" / "replay_tiny.yaml"
SET = ["environments.locks.options={lengths: [1, 2], answers: [2, 1], numbers: 4, compact: true}",
       "environments.locks.tasks=4", "model.tiny.numbers=4"]  # fmt: skip


@pytest.fixture
def examination():
    return Examination(load(BASE, SET, environment={}), Renderer(build_tokenizer(4, ("open", "yes"))), plays=400)


def knowing(examination, right):
    """A policy that says a right number with probability ``right`` at every place, and any wrong one otherwise."""
    tokenizer, options = build_tokenizer(4, ("open", "yes")), Passcode(lengths=(1, 2), answers=(2, 1), numbers=4)
    vocabulary = tokenizer.get_vocab()

    def score(contexts):
        table = np.full((len(contexts), len(vocabulary)), -np.inf)
        for row, context in zip(table, contexts, strict=True):
            words = tokenizer.decode(list(context)).replace("<|", " <|").replace("|>", "|> ").split()
            code = options.code(int(words[words.index("open") + 1]))[words.count("yes")]
            for number in range(4):
                share = right / len(code) if number in code else (1 - right) / (4 - len(code))
                row[vocabulary[str(number)]] = math.log(share) if share else -np.inf
        return table

    return score


def test_policy_that_knows_every_code_always_succeeds_and_one_that_knows_none_never(examination):
    assert examination.success(knowing(examination, 1.0), 3).tolist() == [1.0] * 4
    assert examination.success(knowing(examination, 0.0), 3).tolist() == [0.0] * 4


def test_measured_success_is_the_product_over_the_places_of_a_code(examination):
    found = examination.success(knowing(examination, 0.7), 0)
    # 400 plays: five standard errors are below 0.13
    assert found == pytest.approx([0.7, 0.49, 0.7, 0.49], abs=0.13)


def test_the_exact_probability_of_success_is_that_product(examination):
    assert examination.probability(knowing(examination, 0.7)) == pytest.approx((0.7 + 0.49) / 2)


def test_measurement_depends_on_weights_and_version_only(examination):
    policy = knowing(examination, 0.6)
    first = examination.success(policy, 7)
    examination.success(policy, 8)
    assert (examination.success(policy, 7) == first).all()
    assert (examination.success(policy, 8) != first).any()


def test_success_of_saved_weights_is_that_of_their_exact_probabilities(tmp_path, examination):
    options = TinyOptions.parse(
        {"hidden_size": 16, "numbers": 4, "words": ["open", "yes"], "initializer_range": 0.6}, 64
    )
    write_tiny_model(options, tmp_path / "model")
    score, renderer = load_score(tmp_path / "model"), Renderer(build_tokenizer(4, ("open", "yes")))
    locks = Passcode(lengths=(1, 2), answers=(2, 1), numbers=4, compact=True)
    vocabulary = build_tokenizer(4, ("open", "yes")).get_vocab()
    exact = []
    for lock in range(4):
        total = 0.0
        for numbers in product(*locks.code(lock)):
            episode = locks.start(Task(f"locks/{lock}", "locks", lock))
            conversation, log_probability = renderer.start(episode.messages), 0.0
            for number in numbers:
                ids = (vocabulary[str(number)],)
                log_probability += score([conversation.prompt_ids])[0, ids[0]]
                said = renderer.completed(ids)
                step = episode.step(said.text)
                if not step.done:
                    conversation = renderer.extend(conversation, ids, said, step.messages)
            total += math.exp(log_probability)
        exact.append(total)
    found = examination.success(score, 0)
    error = np.sqrt(np.array(exact) * (1 - np.array(exact)) / 400)
    assert (np.abs(found - exact) <= 5 * error + 1e-9).all()


def test_scores_do_not_depend_on_what_else_is_in_the_batch(tmp_path):
    write_tiny_model(TinyOptions.parse({"hidden_size": 16, "numbers": 4, "initializer_range": 0.6}, 64), tmp_path / "m")
    score, short, long = load_score(tmp_path / "m"), (5, 8, 9), (5, 8, 9, 4, 7, 2, 1)
    assert score([short, long])[0] == pytest.approx(score([short])[0], abs=1e-5)
    assert np.exp(score([long])).sum() == pytest.approx(1)


def test_tokens_are_drawn_with_their_probability():
    p = np.array([0.1, 0.0, 0.6, 0.3])
    with np.errstate(divide="ignore"):
        logs = np.log(p)
    drawn = sample([(1,)] * 20_000, lambda contexts: np.tile(logs, (len(contexts), 1)), np.random.default_rng(0))
    assert np.bincount(drawn, minlength=4) / 20_000 == pytest.approx(p, abs=0.02)
    assert 1 not in drawn


def test_environment_with_endless_tasks_is_refused():
    config = load(BASE, ["environments.locks.tasks=null"], environment={})
    with pytest.raises(ConfigurationError, match=r"environments\.locks\.tasks"):
        Examination(config, Renderer(build_tokenizer(24, ("open", "yes"))), 1)


def test_held_out_tasks_are_those_of_the_environment_s_own_split(monkeypatch):
    config, renderer = load(BASE, SET, environment={}), Renderer(build_tokenizer(4, ("open", "yes")))
    with pytest.raises(ConfigurationError, match="a split eval of its own"):
        Examination(config, renderer, 1, held_out=3)
    monkeypatch.setattr(Passcode, "splits", {"train": range(4), "eval": range(70, 80)}, raising=False)
    assert [task.seed for task in Examination(config, renderer, 1, held_out=3).tasks] == [70, 71, 72]
