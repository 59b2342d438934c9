"""Dashboards and alerts as declared in ``grafana/boards/*.yaml``.

Queries there are PromQL without the dashboard's variables; ``@name`` stands for the query of a signal. Panels add the
variables to each selector (:func:`scoped`), alerts take the query as it is: so a panel shows what its alert judges.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

HERE = Path(__file__).parent
FOLDER = HERE / "boards"
NAMES = ("overview", "actors", "replay", "learner", "experience")
SELECTOR = 'run=~"$run",job=~"$job",instance=~"$instance"'
LATEST = "2h:1m"
"""Age up to which the newest value of a signal with ``latest`` holds: a learner whose updates take longer has none
between two of them."""
_SERIES = re.compile(r"(?<![\w:])(afterplay_\w+|vllm:\w+|process_\w+|up)\b(?:\{([^}]*)\})?")
_BY = re.compile(r"(?:sum|max) by \(run, (\w+)\) \(")


@dataclass(frozen=True, slots=True)
class Limit:
    """Bounds of a value, by severity; ``bad`` is the side on which it is too far."""

    bad: Literal["above", "below"]
    warning: float | None = None
    critical: float | None = None


@dataclass(frozen=True, slots=True)
class Band:
    """A value that should stay within ``center ± tolerance``."""

    center: float
    tolerance: float


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; ``queries`` are PromQL by legend."""

    title: str
    unit: str
    queries: Mapping[str, str]
    good: str
    bad: str
    kind: Literal["stat", "timeseries", "heatmap"] = "timeseries"
    limit: Limit | Band | None = None
    width: int = 8
    height: int = 8
    decimals: int | None = None
    runbook: str | None = None
    """Heading of docs/RUNBOOK.md."""
    log_scale: bool = False
    stacked: bool = False
    instant: bool = False
    """Asked for the end of the time range alone."""

    @property
    def description(self) -> str:
        link = f" Runbook: docs/RUNBOOK.md#{self.runbook.lower()}." if self.runbook else ""
        return f"Normal: {self.good} If not: {self.bad}{link}"


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard. Its first row holds the stat panels of signals."""

    title: str
    uid: str
    rows: tuple[Row, ...]
    texts: Mapping[str, tuple[str, str]]
    """Variables that a reader types: label and default by name."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule of ``prometheus/alerts.yml``."""

    name: str
    expr: str
    for_: str
    severity: Literal["warning", "critical"]
    summary: str
    group: str


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


GROUPS: dict[str, dict[str, dict[str, Any]]] = read("signals")
RECORDS: dict[str, str] = GROUPS.pop("records")  # type: ignore[assignment]
"""Queries of recording rules by name."""
SIGNALS = {name: signal for group in GROUPS.values() for name, signal in group.items()}


def query_of(signal: Mapping[str, Any]) -> str:
    """The query of a signal. With ``latest``, a counter: that of the newest window with data, once the counter of the
    process that lives has moved.

    >>> query_of({"query": "rate(a_total[5m]) > 0", "latest": "a_total"})
    '(rate(a_total[5m]) > 0 or last_over_time((rate(a_total[5m]) > 0)[2h:1m])) and on (run) a_total > 0'
    """
    query = str(signal["query"])
    if "latest" in signal:
        query = f"({query} or last_over_time(({query})[{LATEST}])) and on (run) {signal['latest']} > 0"
    return f"{query} or {signal['otherwise']}" if "otherwise" in signal else query


def expand(query: str) -> str:
    """The query with each ``@name`` replaced by the query of that signal."""
    return re.sub(r"@(\w+)", lambda match: query_of(SIGNALS[match[1]]), query)


def scoped(query: str, role: str = "") -> str:
    """The query of a panel: of the chosen jobs and instances, and of one role.

    >>> scoped("sum(up)")
    'sum(up{run=~"$run",job=~"$job",instance=~"$instance"})'
    """
    job = f'job="afterplay-{role}"' if role else ""
    return _SERIES.sub(lambda m: f"{m[1]}{{{','.join(filter(None, (SELECTOR, job, m[2])))}}}", expand(query))


def limit_of(signal: Mapping[str, Any]) -> Limit | Band | None:
    if "near" in signal:
        return Band(**signal["near"])
    for side in ("above", "below"):
        if side in signal:
            return Limit(side, **signal[side])
    return None


def stat(name: str, role: str) -> Panel:
    """Panel of the first row; ``role`` narrows what every role exports."""
    signal = SIGNALS[name]
    query = scoped(signal.get("stat_query", f"@{name}"), role if name in ("heartbeat_age", "targets_down") else "")
    return Panel(
        **signal["stat"], queries={"{{run}}": query}, good=signal["good"], bad=signal["bad"], kind="stat",
        limit=limit_of(signal), width=3, height=4, runbook=signal["alerts"][0]["alert"]["name"],
    )  # fmt: skip


def panel(entry: Mapping[str, Any], role: str) -> Panel:
    """``query`` alone has the label of its first aggregation as its legend. Each legend ends with the run."""
    facts = dict(entry["panel"])
    if "limit" in facts:
        facts["limit"] = limit_of(SIGNALS[facts["limit"]])
    queries = entry.get("queries")
    if queries is None:
        by = _BY.match(entry["query"])
        queries = {f"{{{{{by[1]}}}}}" if by else "": entry["query"]}
    scope = {f"{legend} {{{{run}}}}".lstrip(): scoped(query, role) for legend, query in queries.items()}
    return Panel(**facts, queries=scope, good=entry["good"], bad=entry["bad"])


def board(name: str) -> Board:
    facts, shared = read(name), {row["row"]: row for row in read("shared")}
    role = facts.get("role", "")
    rows = [Row("At a glance", tuple(stat(signal, role) for signal in facts["stats"]))]
    for entry in facts["rows"]:
        row = shared[entry] if isinstance(entry, str) else entry
        of = role if row.get("of_role") else ""
        rows.append(Row(row["row"], tuple(panel(p, of) for p in row["panels"])))
    return Board(facts["title"], facts["uid"], tuple(rows), facts.get("texts", {}))


def alerts() -> Iterator[Alert]:
    for group, signals in GROUPS.items():
        for signal in signals.values():
            for rule in signal["alerts"]:
                name, severity, for_ = (rule["alert"][key] for key in ("name", "severity", "for"))
                expr = rule.get("expr") or judgement(query_of(signal), limit_of(signal), severity)
                yield Alert(name, expand(expr), for_, severity, rule["summary"], group)


def judgement(query: str, limit: Limit | Band | None, severity: str) -> str:
    """The rule: the query's value is beyond its limit, or further from the centre than its band allows."""
    if isinstance(limit, Band):
        return f"abs(({query}) - {limit.center:g}) > {limit.tolerance:g}"
    assert limit is not None
    value = limit.critical if severity == "critical" else limit.warning
    return f"({query}) {'>' if limit.bad == 'above' else '<'} {value:g}"


BOARDS = tuple(map(board, NAMES))
ALERTS = tuple(alerts())
