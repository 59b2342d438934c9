"""What every process tells about itself."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import time

from prometheus_client import ProcessCollector

from pipeline.metrics.base import LAT, CollectorRegistry, gauge, histogram


class ProcessMetrics:
    """Build, run, event loop and heartbeat, and the usual ``process_*`` numbers."""

    def __init__(self, registry: CollectorRegistry, run_id: str, algorithm: str, model: str) -> None:
        build = {"version": (version(),), "revision": (revision(),), "python": (platform.python_version(),)}
        self.build_info = gauge(registry, "afterplay_build_info", "Constant 1; labels identify the build.", build)
        self.build_info.labels(*(v[0] for v in build.values())).set(1)
        run = {"run_id": (run_id,), "algorithm": (algorithm,), "model": (model,)}
        self.run_info = gauge(
            registry,
            "afterplay_run_info",
            "Constant 1; labels identify the run (join with group_left, never label other series).",
            run,
        )
        self.run_info.labels(*(v[0] for v in run.values())).set(1)
        self.event_loop_lag_seconds = histogram(
            registry,
            "afterplay_event_loop_lag_seconds",
            "Delay between a scheduled and an actual event-loop wake-up.",
            LAT,
        )
        self.heartbeat_timestamp_seconds = gauge(
            registry,
            "afterplay_heartbeat_timestamp_seconds",
            "Unix time of the last completed main-loop iteration.",
        )
        self.heartbeat_timestamp_seconds.set(time.time())
        ProcessCollector(registry=registry)


def version() -> str:
    """Version of the installed distribution; ``0+unknown`` when run from a folder that is not installed."""
    try:
        return importlib.metadata.version("afterplay")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def revision() -> str:
    """Commit the build was made from: ``AFTERPLAY_REVISION``, set where images are built."""
    return os.environ.get("AFTERPLAY_REVISION", "unknown")
