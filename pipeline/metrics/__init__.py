"""Prometheus metrics of every role. The only package that imports ``prometheus_client``."""

from pipeline.metrics.actor import ActorMetrics
from pipeline.metrics.base import CollectorRegistry, Histogram
from pipeline.metrics.learner import LearnerMetrics
from pipeline.metrics.process import ProcessMetrics
from pipeline.metrics.replay import ReplayMetrics
from pipeline.metrics.server import MetricsServer

__all__ = [
    "ActorMetrics",
    "CollectorRegistry",
    "Histogram",
    "LearnerMetrics",
    "MetricsServer",
    "ProcessMetrics",
    "ReplayMetrics",
]
