"""Exports one role's metrics and moves them: ``metrics_process.py ROLE [PORT]`` prints its port and ends on EOF.

Not a test. It makes the dashboard provable in seconds, without models and engines; the real run is proved beside it.
"""

from __future__ import annotations

import sys
import time
from threading import Event, Thread
from typing import Any

import numpy as np

from grafana.names import VLLM_UPDATE
from pipeline.metrics import (
    ActorMetrics,
    CollectorRegistry,
    LearnerMetrics,
    MetricsServer,
    ProcessMetrics,
    ReplayMetrics,
)
from pipeline.metrics.base import counter, gauge, histogram
from pipeline.metrics.replay import POPULATIONS

ENV = "arithmetic"


class Actor:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.m = ActorMetrics(registry, [ENV])

    def move(self, i: int) -> None:
        self.m.policy_version.set(i)
        self.m.trajectories_total.labels(env=ENV, outcome="complete").inc()
        self.m.tokens_total.labels(kind="generated").inc(50)
        self.m.episode_reward.labels(env=ENV).observe(0.5)
        self.m.generate_duration_seconds.labels(backend="vllm").observe(0.2)
        self.m.env_step_duration_seconds.labels(env=ENV).observe(0.001)
        self.m.lesson_searches_total.labels(outcome="found").inc()
        self.m.lesson_search_duration_seconds.observe(0.004)
        self.m.guided_episodes_total.labels(train="keep").inc()
        for guided, reward in (("yes", 0.6), ("no", 0.5)):
            self.m.guidance_reward.labels(guided=guided).observe(reward)


class Replay:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.m = ReplayMetrics(registry, [ENV])

    def move(self, i: int) -> None:
        self.m.trajectories.set(10)
        self.m.capacity_trajectories.set(100)
        self.m.inserted_trajectories_total.labels(env=ENV).inc()
        self.m.terminal_trajectories_total.labels(state="trained").inc()
        self.m.experience_pool_entries.set(min(i, 50))
        self.m.experience_pool_capacity.set(50)
        self.m.experience_saved_total.labels(origin="rollout").inc()
        self.m.replays_trained_total.inc()
        for population in POPULATIONS:
            self.m.audit_tokens.labels(population=population).observe(40)
            self.m.audit_duration_seconds.labels(population=population).observe(1.5)
            self.m.audit_reward.labels(population=population).observe(0.5)
            self.m.audit_age_versions.labels(population=population).observe(1)
        self.m.lesson_groups_total.labels(outcome="written").inc()
        self.m.lesson_searches_total.labels(outcome="found").inc()
        self.m.lesson_search_duration_seconds.observe(0.002)


class Learner:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.m = LearnerMetrics(registry, [ENV])
        self.random = np.random.default_rng(0)

    def move(self, i: int) -> None:
        m = self.m
        for source, width in (("fresh", 0.05), ("replay", 0.4)):
            ratios = np.exp(self.random.normal(0, width, 1000))
            m.importance_ratio.labels(level="token", source=source).observe_many(ratios)
            m.importance_ratio_squared_total.labels(level="token", source=source).inc(float((ratios**2).sum()))
        m.replay_age_versions.observe(12)
        m.policy_version.set(i)
        m.steps_total.inc()
        m.wait_seconds_total.inc(0.01)
        m.tokens_total.labels(kind="trained").inc(ratios.size)
        for statistic in ("mean", "min", "max"):
            m.batch_importance_ratio.labels(level="token", stat=statistic).set(getattr(ratios, statistic)())
        m.batch_ess_ratio.labels(level="token").set(0.9)
        m.staleness_versions.observe(1)
        m.logprob_diff_nats.observe(0.01)
        m.reward_mean.labels(env=ENV).set(0.5)
        m.step_duration_seconds.labels(stage="forward").observe(0.05)
        m.weight_publish_duration_seconds.observe(0.3)
        m.checkpoint_timestamp_seconds.set(time.time())


class Engine:
    def __init__(self, registry: CollectorRegistry) -> None:
        g, c = gauge, counter
        self.gauges = [
            g(registry, f"vllm:{n}", n) for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        ]
        self.counters = [
            c(registry, f"vllm:{n}", n)
            for n in (
                "generation_tokens_total",
                "prefix_cache_hits_total",
                "prefix_cache_queries_total",
                "num_preemptions_total",
            )
        ]
        labels = {"operation": ("update",)}
        self.update = histogram(registry, VLLM_UPDATE, "seconds", (0.1, 1, 10), labels)

    def move(self, i: int) -> None:
        for metric in (*self.gauges, *self.counters):
            metric.inc()
        self.update.labels(operation="update").observe(0.5)


ROLES: dict[str, Any] = {"actor": Actor, "replay": Replay, "learner": Learner, "engine": Engine}


def main(role: str, port: int = 0) -> None:
    registry, stop = CollectorRegistry(), Event()
    process = ProcessMetrics(registry, "test", "grpo", "tiny") if role != "engine" else None
    body = ROLES[role](registry)

    def run() -> None:
        i = 0
        while not stop.wait(0.1):
            i += 1
            body.move(i)
            if process is not None:
                process.heartbeat_timestamp_seconds.set(time.time())

    with MetricsServer(registry, lambda: (True, {}), port=port) as server:
        thread = Thread(target=run)
        thread.start()
        print(server.port, flush=True)
        sys.stdin.read()
        stop.set()
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
