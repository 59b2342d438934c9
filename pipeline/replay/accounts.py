"""The accounts of a run over all its replay stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeline.replay.ledger import Ledger, read_ledger


def read_ledgers(paths: Iterable[Path], *, rows: bool = False) -> list[Ledger]:
    """Of the store of each stage. Raises :class:`StoreError` when one is missing or not ours."""
    return [read_ledger(path, rows=rows) for path in paths]


def total(ledgers: Sequence[Ledger]) -> Ledger:
    """Counts add up; ``updates`` is what every stage has recorded, ``policy_version`` the newest that any knows.

    An error of one stage may be hidden by that of another: audit each on its own too.
    """
    summed: dict[str, Any] = {
        field.name: _sum([getattr(ledger, field.name) for ledger in ledgers])
        for field in fields(Ledger)
        if isinstance(getattr(ledgers[0], field.name), Mapping)
    }
    return Ledger(
        **summed,
        updates=min(ledger.updates for ledger in ledgers),
        policy_version=max(ledger.policy_version for ledger in ledgers),
    )


def audit(ledgers: Sequence[Ledger]) -> list[str]:
    """What does not add up in any of them, in words."""
    if len(ledgers) == 1:
        return ledgers[0].audit()
    return [f"stage {index}: {problem}" for index, ledger in enumerate(ledgers) for problem in ledger.audit()]


def _sum(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed: dict[str, Any] = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping):
                summed[key] = _sum([summed.get(key, {}), value])
            else:
                summed[key] = summed.get(key, 0) + value
    return summed
