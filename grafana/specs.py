"""What a dashboard says: a panel is declared once, with everything a reader needs.

Ids are ours and stable: row ``r`` (1, 2, …) has id ``100·r`` and its panels ``100·r + 1`` …, so links to panels survive
additions to other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grafana.thresholds import Band, Limit


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class PanelSpec:
    """One panel. ``normal`` says what a healthy run shows, ``action`` what to do otherwise: the description."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    normal: str
    action: str
    kind: Literal["stat", "timeseries", "heatmap"] = "timeseries"
    limit: Limit | Band | None = None
    width: int = 8
    height: int = 8
    decimals: int | None = None
    runbook: str | None = None
    """Heading of docs/RUNBOOK.md, where an alert judges the same expression."""
    log_scale: bool = False
    stacked: bool = False

    @property
    def description(self) -> str:
        link = f" Runbook: docs/RUNBOOK.md#{self.runbook.lower()}." if self.runbook else ""
        return f"Normal: {self.normal} If not: {self.action}{link}"


@dataclass(frozen=True, slots=True)
class RowSpec:
    title: str
    panels: tuple[PanelSpec, ...]


@dataclass(frozen=True, slots=True)
class BoardSpec:
    """One dashboard. Its first row holds the stat panels that alerts judge (:func:`alert_stat`)."""

    title: str
    uid: str
    """Also the name of its file."""
    rows: tuple[RowSpec, ...]


def alert_stat(
    title: str,
    unit: str,
    expr: str,
    limit: Limit | Band,
    runbook: str,
    normal: str,
    action: str,
    decimals: int | None = None,
) -> PanelSpec:
    """A panel of the first row: one number, coloured where the alert ``runbook`` fires on it."""
    queries = (Query(expr),)
    return PanelSpec(
        title, unit, queries, normal, action, "stat", limit, width=3, height=4, runbook=runbook, decimals=decimals
    )
