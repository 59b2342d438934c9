"""Row about the processes of one role: event loop, memory, processor, files."""

from __future__ import annotations

from grafana import promql as q
from grafana.promql import metric, rate
from grafana.specs import PanelSpec, Query, RowSpec


def processes(role: str) -> RowSpec:
    job = q.job(role)
    open_files = metric("process_open_fds", *job)
    return RowSpec(
        "Processes",
        (
            PanelSpec(
                "Event loop lag p99",
                "s",
                (Query(q.quantile(0.99, "event_loop_lag_seconds", *job, by="instance"), "{{instance}}"),),
                "some milliseconds.",
                "something blocks the loop: a plug-in without blocking: true, a slow disk, too few processors.",
                width=6,
                runbook="LoopStuck",
            ),
            PanelSpec(
                "Memory",
                "bytes",
                (Query(metric("process_resident_memory_bytes", *job), "{{instance}}"),),
                "flat after the start.",
                "a steady climb is a leak; a process that is killed without a message ran out of memory.",
                width=6,
                runbook="TargetDown",
            ),
            PanelSpec(
                "Processor time",
                "percentunit",
                (Query(rate("process_cpu_seconds_total", *job), "{{instance}}"),),
                "below the number of cores that the process may use (100 % is one core).",
                "at its limit: more processes of this role, or fewer on this machine.",
                width=6,
            ),
            PanelSpec(
                "Open files",
                "percentunit",
                (Query(f"{open_files} / ({metric('process_max_fds', *job)} > 0)", "{{instance}}"),),
                "far below 100 % of the limit.",
                "raise the limit of open files (ulimit -n); a steady climb is a leak of connections.",
                width=6,
            ),
        ),
    )
