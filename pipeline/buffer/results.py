"""What a buffer gives back."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.buffer.index import Ints
from pipeline.buffer.layout import Array


@dataclass(frozen=True, slots=True)
class Batch:
    """``n`` drawn units."""

    arrays: dict[str, Array]
    """``[n, ...]`` by name; the caller's own."""
    ids: Ints
    """int64 ``[n]``: the trajectory of each unit."""
    units: Ints
    """int64 ``[n]``: its place in that trajectory."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counts of a buffer. Evicted trajectories are in none but ``added`` and ``evicted``."""

    trajectories: int
    units: int
    n_bytes: int
    """Of live payloads."""
    added: int
    evicted: int
    draws: int
    pending: int
    """Live or not, accepted and not yet durable."""
    cached: int
    cached_bytes: int
