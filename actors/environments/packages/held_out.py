"""Splits of environments that have as many tasks as there are seeds."""

from __future__ import annotations

from collections.abc import Mapping


def held_out(first: int) -> Mapping[str, range]:
    """Seeds below ``first`` are for training, as many from there on are the ``eval`` split."""
    return {"train": range(first), "eval": range(first, 2 * first)}
