"""Gauges of the newest evaluation."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry

from pipeline.stage.metrics import Observer, ReplayMetrics


def test_a_score_that_is_not_known_is_not_that_of_an_earlier_evaluation() -> None:
    observer = Observer(ReplayMetrics(registry := CollectorRegistry(), environments=("a",), pass_at=(2,), split="eval"))

    def shown(score: float | None, passed: float | None) -> tuple[float | None, float | None]:
        counts = dict.fromkeys(("rollouts", "truncated", "failed", "missing"), 0)
        scores = {"score": score, "pass_at": {"2": passed}, **counts}
        result = {"split": "eval", "updates": 1, "policy_version": 1, "environments": {"a": scores}}
        observer._evaluated(result)
        labels = {"env": "a", "split": "eval"}
        name = "afterplay_replay_evaluation_{}"
        return (
            registry.get_sample_value(name.format("score"), labels),
            registry.get_sample_value(name.format("pass_ratio"), {**labels, "k": "2"}),
        )

    assert shown(0.5, 0.75) == (0.5, 0.75)
    assert all(value is not None and math.isnan(value) for value in shown(None, None))
