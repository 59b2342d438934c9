"""Prove a dashboard: every panel's query must return data from a real Prometheus that scrapes real processes.

``python -m grafana.prove --target afterplay-learner=127.0.0.1:9401 …`` starts a Prometheus of its own;
``--url http://127.0.0.1:9090`` asks one that runs already. Exit code 1 and a list of problems otherwise.
Every run fills the overview; ``--dashboard afterplay-experience`` needs one with ``replay.enabled`` and
``lessons.enabled``.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from grafana.dashboard_lint import (
    EVALUATED_ONLY,
    EXPERTS_ONLY,
    TOOLS_ONLY,
    TRANSFER_ONLY,
    VLLM_ONLY,
    metric_names,
    queries,
    substitute,
    variable_queries,
)
from grafana.prometheus_process import Api, PrometheusProcess, Target

FOLDER = Path(__file__).parent / "dashboards"
EVERY_RUN = ("afterplay-overview",)
"""Dashboards that every run fills."""
EVERY_DASHBOARD = tuple(sorted(path.stem for path in FOLDER.glob("*.json")))
MAY_LACK = {"embedded": VLLM_ONLY, "vllm": TRANSFER_ONLY, "vllm-transfer": frozenset[str]()}
"""Metrics that need not have data, by what the engines are and how weights reach them."""
_LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


def load(uid: str) -> dict[str, Any]:
    """A committed dashboard."""
    found: dict[str, Any] = json.loads((FOLDER / f"{uid}.json").read_text())
    return found


def prove(
    dashboard: dict[str, Any],
    api: Api,
    without_data: Iterable[str] = (),
    window_seconds: float = 120.0,
) -> list[str]:
    """Problems found at this moment; empty when every query returns at least one number.

    A query that reads a metric of ``without_data`` need not return data (metrics that only vLLM exports, while the run
    uses the embedded engine). NaN is not data. A legend that names a label which no series has is a problem too.
    """
    exempt = frozenset(without_data)
    end = time.time()
    found: list[str] = []
    for name, source in variable_queries(dashboard).items():
        if name != "run" and not _variable_values(api, source):  # one run needs no label
            found.append(f"variable {name}: no values from {source}")
    for query in queries(dashboard):
        expr = substitute(query.expr)
        names = metric_names(expr)
        if names and names & exempt:
            continue
        result = api.get("/api/v1/query_range", query=expr, start=end - window_seconds, end=end, step=2)["result"]
        numbers = [v for series in result for v in series["values"] if not math.isnan(float(v[1]))]
        if not numbers:
            found.append(f"{query.panel}: no data from {expr}")
            continue
        labels = set().union(*(series["metric"] for series in result))
        for label in _LEGEND.findall(query.legend):
            if label not in labels | {"run"}:
                found.append(f"{query.panel}: legend names label {label}, series have {sorted(labels)}")
    return found


def prove_within(
    dashboard: dict[str, Any], api: Api, seconds: float, without_data: Iterable[str] = (), pause_seconds: float = 1.0
) -> list[str]:
    """Problems that are left when ``seconds`` have passed, or nothing as soon as there are none."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    exempt = frozenset(without_data)
    while True:
        found = prove(dashboard, api, exempt)
        if not found or time.monotonic() > deadline:
            return found
        pause.wait(pause_seconds)


def _variable_values(api: Api, query: str) -> list[str]:
    if asked := re.fullmatch(r"query_result\((.+)\)", query):
        found = api.get("/api/v1/query", query=substitute(asked[1]))["result"]
        return [str(series["value"][1]) for series in found]
    match = re.fullmatch(r"label_values\((.+),\s*(\w+)\)", query)
    if match is None:
        raise ValueError(f"expected label_values(metric, label) or query_result(query), got {query}")
    values = api.get(f"/api/v1/label/{match[2]}/values", **{"match[]": substitute(match[1])})
    return [str(value) for value in values]


def parse_target(text: str) -> Target:
    job, _, address = text.partition("=")
    if not address or ":" not in address:
        raise argparse.ArgumentTypeError(f"expected JOB=HOST:PORT, got {text!r}")
    return Target(job, address)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a Prometheus that runs already")
    where.add_argument("--target", type=parse_target, action="append", help="JOB=HOST:PORT to scrape; may be repeated")
    parser.add_argument("--dashboard", action="append", choices=EVERY_DASHBOARD, help="may be repeated")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to wait for the last query to have data")
    parser.add_argument("--without-data", action="append", default=[], metavar="METRIC", help="need not have data")
    parser.add_argument(
        "--engine", choices=sorted(MAY_LACK), default="vllm", help="decides which metrics must be there"
    )
    parser.add_argument("--tools", action="store_true", help="the run calls tools: their metrics must be there")
    options = parser.parse_args(arguments)
    exempt = MAY_LACK[options.engine] | set(options.without_data) | EVALUATED_ONLY | EXPERTS_ONLY
    exempt |= frozenset() if options.tools else TOOLS_ONLY
    if options.url:
        return _report(options, Api(options.url), exempt)
    with PrometheusProcess(options.target) as prometheus:
        return _report(options, Api(prometheus.url), exempt)


def _report(options: argparse.Namespace, api: Api, exempt: Iterable[str]) -> int:
    """Print what is wrong with each dashboard. 1 when something is."""
    failed = False
    for uid in options.dashboard or EVERY_RUN:
        dashboard = load(uid)
        found = prove_within(dashboard, api, options.seconds, exempt)
        failed |= bool(found)
        print(f"{uid}: {len(queries(dashboard))} queries, {len(found)} problems")
        for problem in found:
            print(f" - {problem}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
