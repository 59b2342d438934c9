"""KL, critic, demonstrations and skipped steps reach the metrics and the line of ``metrics.jsonl``."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from learner.data.rows import Batch
from learner.metrics import LearnerMetrics
from learner.observability.statistics import Mean, TokenValues, batch_statistics
from learner.observability.timing import StepTimes
from learner.process.recorder import Update, record_step, step_line
from learner.training.report import CriticReport, StepReport

CRITIC = CriticReport(loss=0.25, clip_ratio=0.1, grad_norm=3.0, explained_variance=0.75)
NONE = dict.fromkeys(("loss", "gradient", "ratio", "value"), 0)


def report_of(**facts) -> StepReport:
    counts = dict.fromkeys(("n_microbatches", "tokens_trained", "tokens_masked", "tokens_padding"), 0)
    plain = dict.fromkeys(("loss", "policy_loss", "entropy_loss", "grad_norm", "learning_rate"), 0.0)
    statistics = batch_statistics(TokenValues.join([]), 0)
    statistics = replace(statistics, all=replace(statistics.all, reference_kl=Mean(6.0, 4)))
    given = {"nonfinite": NONE, "optimizer_steps": 1, "tokens_without_signal": 0, **counts, **plain, **facts}
    return StepReport(update=0, policy_version=0, statistics=statistics, **given)


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def record(registry):
    metrics = LearnerMetrics(registry)
    return lambda report: record_step(metrics, Update(Batch(report.update, (), ()), report, StepTimes(0.0, 0.0, 1.0)))


def test_kl_critic_demonstrations_shared_tokens_and_overlong_trajectories_are_recorded(registry, record):
    facts = {"supervised_tokens": 7, "tokens_shared": 11, "overlong": 2, "critic": CRITIC}
    record(report_of(**facts))
    record(report_of(**{**facts, "critic": None}))
    told = {
        "reference_kl_nats": 1.5,
        "value_explained_variance": 0.75,
        "value_clip_ratio": 0.1,
        "value_grad_norm": 3.0,
        "supervised_tokens_total": 14.0,
        "shared_tokens_total": 22.0,
        "overlong_trajectories_total": 4.0,
    }
    assert {name: registry.get_sample_value(f"afterplay_learner_{name}") for name in told} == told
    assert registry.get_sample_value("afterplay_learner_loss", {"term": "value"}) == 0.25


def test_returns_that_are_all_equal_leave_the_last_explained_variance(registry, record):
    record(report_of(critic=CRITIC))
    record(report_of(critic=replace(CRITIC, explained_variance=None)))
    assert registry.get_sample_value("afterplay_learner_value_explained_variance") == 0.75


def test_skipped_steps_are_counted_by_what_was_not_finite_and_told_in_the_line(registry, record):
    report = report_of(nonfinite={**NONE, "gradient": 1, "value": 2}, optimizer_steps=0)
    record(report)
    counted = {
        where: registry.get_sample_value("afterplay_learner_nonfinite_steps_total", {"where": where}) for where in NONE
    }
    line = step_line(Update(Batch(0, (), ()), report, StepTimes(0.0, 0.0, 1.0)))
    assert counted == line["nonfinite"] == {"loss": 0, "gradient": 1, "ratio": 0, "value": 2}
