"""Which rank this process is, by the environment that torchrun sets, and how it meets the others."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from learner.policy import resolve_device
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError, TrainingError


@dataclass(frozen=True, slots=True)
class Place:
    """Of a process among those of a learner."""

    rank: int = 0
    size: int = 1
    local: int = 0
    """Rank among those of the same machine: number of its GPU."""


def place_of(config: LearnerConfig, environment: dict[str, str] | None = None) -> Place:
    """As RANK, WORLD_SIZE and LOCAL_RANK say; without them one process. Raises :class:`ConfigurationError` where they
    contradict ``learner.ranks``."""
    values = dict(os.environ) if environment is None else environment
    try:
        rank, size = int(values.get("RANK", "0")), int(values.get("WORLD_SIZE", "1"))
        local = int(values.get("LOCAL_RANK", str(rank)))
    except ValueError as error:
        raise ConfigurationError(f"expected whole numbers in RANK, WORLD_SIZE and LOCAL_RANK, got {error}") from error
    if not 0 <= rank < size:
        raise ConfigurationError(f"expected RANK below WORLD_SIZE, got {rank} of {size}: start the learner by torchrun")
    if size > 1 and config.ranks not in (1, size):
        raise ConfigurationError(
            f"learner.ranks is {config.ranks}, but WORLD_SIZE is {size}: under torchrun leave learner.ranks out"
        )
    return Place(rank, size, local)


def join(place: Place, config: LearnerConfig, store: Store | None = None) -> torch.device:
    """Meet the other ranks at ``store``, else at MASTER_ADDR:MASTER_PORT: gloo for the CPU, NCCL where the device is
    a GPU. Returns the device of this rank; ranks on CPUs share the cores. Blocks until all are there.

    Raises :class:`TrainingError` when they are not within ``learner.ranks_timeout_seconds``.
    """
    device = resolve_device(config.device)
    backend = "gloo"
    if device.type == "cuda":
        if place.local >= torch.cuda.device_count():
            raise ConfigurationError(
                f"local rank {place.local} needs a GPU of its own, torch sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(place.local)
        device, backend = torch.device("cuda", place.local), "cpu:gloo,cuda:nccl"
    elif config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.size))
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=config.ranks_timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise TrainingError(f"rank {place.rank} of {place.size} did not meet the others: {error}") from error
    return device


def leave() -> None:
    """Close the connections. Not a collective: the others see it."""
    if dist.is_initialized():
        dist.destroy_process_group()
