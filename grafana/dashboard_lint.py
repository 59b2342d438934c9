"""Checks of a dashboard's JSON that need no Prometheus, and the names of series that others export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

from grafana.declarations import RECORDS

ALL = ".+"
"""Value of our variables when a reader has chosen nothing."""

INTERVALS = {"$__rate_interval": "1m", "$__interval": "15s", "$__range": "5m", "${window}": "300", "$run": ".*"}
GOAL = {"$goal": "-Inf"}
"""Reward to reach that every run has reached."""
_SUFFIXES = ("_bucket", "_sum", "_count")

VLLM_UPDATE = "vllm:rl_weight_update_operation_duration_seconds"

TRANSFER_ONLY = frozenset({f"{VLLM_UPDATE}_sum", f"{VLLM_UPDATE}_count"})
"""Series that vLLM exports only once weights travel through its own transfer engines (``engine.weight_transfer`` nccl
or ipc)."""

VLLM_ONLY = TRANSFER_ONLY | {"vllm:num_preemptions_total"}
"""Series that vLLM exports and the embedded engine does not."""

ENGINE = VLLM_ONLY | {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:generation_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:kv_cache_usage_perc",
}
"""Series that either engine exports."""

TOOLS_ONLY = frozenset({"afterplay_actor_tool_duration_seconds_bucket", "afterplay_actor_tool_duration_seconds_sum"})
"""Series that an actor exports only once a tool was called."""

EVALUATED_ONLY = frozenset({"afterplay_replay_evaluation_score", "afterplay_replay_evaluation_pass_ratio"})
"""Series without a number before the first evaluation."""

EXPERTS_ONLY = frozenset({"afterplay_learner_router_entropy_nats", "afterplay_learner_expert_imbalance_ratio"})
"""Series of models with a mixture of experts."""

RUNTIME = frozenset({"up", "ALERTS", "process_start_time_seconds", *RECORDS})
"""Series that Prometheus, its client library and our recording rules make."""

NOT_SHOWN = {
    "afterplay_actor_leaked_tasks_total": "0 unless an environment is broken, and the actor's log then says so",
    "afterplay_build_info": "identifies a build: to be joined in ad-hoc queries",
    "afterplay_run_info": "identifies a run: to be joined in ad-hoc queries",
    "afterplay_learner_weight_load_duration_seconds": "one engine's part of a publication, which is shown",
    "afterplay_replay_score_retries_total": "to look at when a judge or reward model is slow; what fails in spite of "
    "retries is in the panel of score failures",
    "afterplay_replay_score_value": "one part of a reward: to be drawn by hand for the parts that a run has",
    "afterplay_replay_task_rows": "fixed when the data is opened: to look at once, after a start",
}
"""Metrics of ours that are in no panel and in no rule, and why. ``process_*`` is shown as far as it helps."""


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One target of one panel, as it stands in the JSON. ``panel`` is the title."""

    panel: str
    panel_id: int
    expr: str
    legend: str
    kind: str


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel that is not a row, nested ones included."""
    pending = list(dashboard["panels"])
    while pending:
        panel = pending.pop(0)
        pending.extend(panel.get("panels") or [])
        if panel["type"] != "row":
            yield panel


def queries(dashboard: dict[str, Any]) -> list[PanelQuery]:
    return [
        PanelQuery(panel["title"], panel["id"], target["expr"], target.get("legendFormat", ""), panel["type"])
        for panel in panels(dashboard)
        for target in panel.get("targets") or []
    ]


def annotation_expressions(dashboard: dict[str, Any]) -> list[str]:
    return [a["expr"] for a in dashboard["annotations"]["list"] if a.get("expr")]


def variable_queries(dashboard: dict[str, Any]) -> dict[str, str]:
    """``label_values(...)`` query of each variable that has one."""
    variables = dashboard["templating"]["list"]
    return {v["name"]: v["query"]["query"] for v in variables if v["type"] == "query"}


def substitute(expr: str, values: dict[str, str] | None = None) -> str:
    """The expression with Grafana's variables replaced, as Grafana would send it with everything selected.

    >>> substitute('rate(a{job=~"$job"}[$__rate_interval])')
    'rate(a{job=~".+"}[1m])'
    """
    for name, value in {**INTERVALS, **GOAL, **(values or {})}.items():
        expr = expr.replace(name, value)
    return re.sub(r"\$\{?[a-z]\w*\}?", ALL, expr)


def nodes(expr: str) -> Iterator[Any]:
    """Every part of a PromQL expression. Raises ``ValueError`` when it is not PromQL."""
    pending: list[Any] = [promql_parser.parse(expr)]
    while pending:
        node = pending.pop()
        yield node
        children = [getattr(node, name, None) for name in ("lhs", "rhs", "expr", "param", "vector_selector")]
        children += getattr(node, "args", None) or ()
        pending.extend(child for child in children if isinstance(child, promql_parser.Expr))


def metric_names(expr: str) -> set[str]:
    """Names of all series that a PromQL expression reads. Raises ``ValueError`` when it is not PromQL."""
    return {str(node.name) for node in nodes(expr) if isinstance(node, promql_parser.VectorSelector)}


def mixtures(expr: str) -> list[str]:
    """Parts of an expression that add up or compare several runs, or clocks of several machines."""
    found = []
    for node in nodes(expr):
        if isinstance(node, promql_parser.AggregateExpr):
            labels = node.modifier
            apart = labels is not None and ("run" in labels.labels) == (labels.type is promql_parser.AggModifierType.By)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier and node.modifier.matching:
            on = str(node.modifier.matching).startswith("on")
            absent = isinstance(node.rhs, promql_parser.Call) and node.rhs.func.name == "absent"
            apart = absent or ("run" in node.modifier.matching.labels) == on
        elif isinstance(node, promql_parser.Call):
            apart = node.func.name not in ("time", "vector", "scalar")
        else:
            apart = True
        if not apart:
            found.append(str(node))
    return found


def base_name(series: str, histograms: frozenset[str]) -> str:
    """``x_bucket`` is ``x`` when ``x`` is a histogram; other names are themselves."""
    for suffix in _SUFFIXES:
        if series.endswith(suffix) and series.removesuffix(suffix) in histograms:
            return series.removesuffix(suffix)
    return series


def static_problems(dashboard: dict[str, Any], known: frozenset[str]) -> list[str]:
    """Ids, units, descriptions, PromQL and metric names (``known`` has the names of series, ``_bucket`` included)."""
    found: list[str] = []
    ids = [panel["id"] for panel in panels(dashboard)] + [p["id"] for p in dashboard["panels"] if p["type"] == "row"]
    if len(set(ids)) != len(ids):
        found.append(f"panel ids are not unique: {sorted(i for i in set(ids) if ids.count(i) > 1)}")
    for panel in panels(dashboard):
        if not panel.get("description"):
            found.append(f"{panel['title']}: no description")
        if not panel["fieldConfig"]["defaults"].get("unit"):
            found.append(f"{panel['title']}: no unit")
        if not panel.get("targets"):
            found.append(f"{panel['title']}: no query")
    sources = [(query.panel, query.expr) for query in queries(dashboard)]
    sources += [("annotation", expr) for expr in annotation_expressions(dashboard)]
    for place, expr in sources:
        try:
            names = metric_names(substitute(expr))
        except ValueError as error:
            found.append(f"{place}: not PromQL ({error}): {expr}")
            continue
        found.extend(f"{place}: unknown metric {name}" for name in sorted(names - known))
        found.extend(f"{place}: mixes runs or clocks: {part}" for part in mixtures(substitute(expr)))
    return found
