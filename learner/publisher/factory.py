"""The publisher of a run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from learner.backbone import DTYPES
from learner.policy import Policy
from learner.publisher.base import WeightLoader
from learner.publisher.colocated import SharedDevice
from learner.publisher.publisher import AdapterLoader, FolderLoader, Publisher, write_adapters
from pipeline.config import RunConfig
from pipeline.config.training import PublishConfig
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
        _writer(config, policy),
        SharedDevice(config.engine.addresses(), metrics) if config.engine.colocate == "sleep" else None,
        config.engine.sleep_level,
    )


def weights_to_publish(policy: Policy, config: PublishConfig) -> dict[str, Tensor]:
    """Copies of what ``publish.lora`` says: whole weights, or the adapters alone."""
    if config.lora == "adapter" and policy.adapters is not None:
        return policy.adapter_snapshot(DTYPES[config.dtype]) or {}
    return policy.snapshot(config.dtype)


def _writer(config: RunConfig, policy: Policy) -> Callable[[Path, Mapping[str, Tensor]], int] | None:
    if config.publish.lora == "merged" or policy.adapters is None:
        return None
    return partial(write_adapters, policy.adapters)


def _loader(config: RunConfig) -> WeightLoader:
    if config.publish.lora == "adapter":
        return AdapterLoader(config.publish.adapter_name)
    if config.engine.weight_transfer == "files":
        return FolderLoader()
    from learner.publisher.vllm_transfer import VllmTransferLoader

    return VllmTransferLoader(config.engine.weight_transfer, config.publish.timeout_seconds)
