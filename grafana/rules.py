"""One alert rule: a name, an expression that a panel shows too, and how long it must hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grafana import thresholds as limits


@dataclass(frozen=True, slots=True)
class Alert:
    name: str
    expr: str
    for_: str
    severity: Literal["warning", "critical"]
    summary: str


def beyond(expr: str, limit: limits.Limit, severity: Literal["warning", "critical"] = "warning") -> str:
    value = limit.critical if severity == "critical" else limit.warning
    return f"({expr}) {'>' if limit.bad == 'above' else '<'} {value:g}"


def off_band(expr: str, band: limits.Band) -> str:
    """The rule: ``expr`` is further from the centre than the band allows. Its value is the distance."""
    return f"abs({expr} - {band.center:g}) > {band.tolerance:g}"
