"""Queries that many panels ask in the same form."""

from __future__ import annotations

from grafana import promql as q
from grafana.specs import Query
from grafana.thresholds import WINDOW


def by_label(label: str, name: str, *matchers: str, window: str = q.RATE) -> Query:
    """A counter's rate, one line for each value of ``label``."""
    return Query(f"sum by ({label}) ({q.rate(name, *matchers, window=window)})", f"{{{{{label}}}}}")


def largest(label: str, name: str, *matchers: str) -> Query:
    """The largest value of a gauge, one line for each value of ``label``."""
    return Query(f"max by ({label}) ({q.metric(name, *matchers)})", f"{{{{{label}}}}}")


def p50_p95(name: str, *matchers: str, by: str = "", window: str = WINDOW, legend: str = "") -> tuple[Query, Query]:
    """Two quantiles of a histogram; ``legend`` follows the name of each."""

    def one(quantile: float) -> Query:
        text = f"p{100 * quantile:.0f}"
        return Query(q.quantile(quantile, name, *matchers, by=by, window=window), f"{text}{legend}")

    return one(0.5), one(0.95)
