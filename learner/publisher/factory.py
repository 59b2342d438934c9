"""The publisher of a run file."""

from __future__ import annotations

from learner.policy import Policy
from learner.publisher.base import WeightLoader
from learner.publisher.publisher import FolderLoader, Publisher
from pipeline.config import RunConfig
from pipeline.metrics.learner import LearnerMetrics
from pipeline.rundir import RunDirectory


def make_publisher(config: RunConfig, directory: RunDirectory, policy: Policy, metrics: LearnerMetrics) -> Publisher:
    """Files, or vLLM's own transfer where ``engine.weight_transfer`` says so.

    Raises :class:`pipeline.errors.ConfigurationError` when the transfer needs something that is not there.
    """
    return Publisher(
        config.engine.addresses(),
        directory,
        config.publish,
        policy.model,
        _loader(config),
        metrics.weight_publish_failures_total.inc,
    )


def _loader(config: RunConfig) -> WeightLoader:
    if config.engine.weight_transfer == "files":
        return FolderLoader()
    from learner.publisher.vllm_transfer import VllmTransferLoader

    return VllmTransferLoader(config.engine.weight_transfer, config.publish.timeout_seconds)
