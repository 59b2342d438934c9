"""Which rollouts of a group are guided, and which of these are trained as played: decided by group and slot alone."""

from __future__ import annotations

import zlib
from math import floor

from pipeline.config.replay import LessonsConfig


def guided(config: LessonsConfig, group_id: str, slot: int) -> bool:
    """Whether the rollout gets lessons. With ``mixed``, ``rollout_ratio`` of every group's slots do, evenly spread:
    ``n * ratio`` of the first n, rounded up or down by the group, so both kinds are in a group that has room for
    both."""
    if not config.enabled or config.rollout_mode == "without":
        return False
    return config.rollout_mode == "all" or _chosen(slot, config.rollout_ratio, _offset("guided", group_id))


def kept(config: LessonsConfig, group_id: str, slot: int) -> bool:
    """Whether a guided rollout is trained on the prompt as played. With ``hybrid``, ``keep_ratio`` of the group's
    guided slots are, evenly spread among them."""
    if config.train_mode != "hybrid":
        return config.train_mode == "keep"
    rank = slot
    if config.rollout_mode == "mixed":
        rank = _count(slot, config.rollout_ratio, _offset("guided", group_id))
    return _chosen(rank, config.keep_ratio, _offset("kept", group_id))


def _chosen(index: int, ratio: float, offset: float) -> bool:
    return _count(index + 1, ratio, offset) > _count(index, ratio, offset)


def _count(n: int, ratio: float, offset: float) -> int:
    """How many of the first n are chosen."""
    return floor(n * ratio + offset)


def _offset(purpose: str, group_id: str) -> float:
    """In [0, 1), the same in every process."""
    return zlib.crc32(f"{purpose}/{group_id}".encode()) / 2**32
