"""Buckets, builders and the histogram that numpy fills.

Every label child is made when the metric is built, so ``rate()`` sees a 0 before the first event.
``prometheus_client`` is imported in this package and nowhere else.

What every process tells about itself.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import platform
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry as CollectorRegistry
from prometheus_client import Counter, Gauge, ProcessCollector, disable_created_metrics
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

disable_created_metrics()  # type: ignore[no-untyped-call]


LAT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Seconds of one request or one stage of a step."""
LONG = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
"""Seconds of an episode, a publication, a checkpoint."""
RATIO = (
    *(0.01, 0.05, 0.1, 0.2, 0.333, 0.5, 0.667, 0.8, 0.9, 0.95, 0.98, 0.99, 1.0),
    *(1.01, 1.02, 1.05, 1.1, 1.2, 1.28, 1.5, 2, 3, 5, 10, 20, 100),
)
"""Importance ratios, dense around 1."""
LAG = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
"""Policy versions."""
TOK = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of an episode."""
AGE = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 900)
"""Seconds from insertion to sampling."""
NATS = (1e-05, 0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)
"""Differences of log-probabilities."""
REW = (-10, -5, -2, -1, -0.5, -0.25, 0, 0.1, 0.25, 0.5, 0.75, 0.9, 1, 2, 5, 10)
"""Undiscounted episode rewards."""
SAMPLES = (1, 2, 3, 4, 6, 8, 16)
"""Times one trajectory was handed to a learner."""
SOURCES = ("fresh", "replay")
"""Where a trained token comes from."""

Labels = Mapping[str, Sequence[str]]
"""Label name to the values it may take, in the order of the metric's labels."""


def counter(registry: CollectorRegistry, name: str, help: str, labels: Labels | None = None) -> Counter:
    """A counter with every child at 0. ``name`` ends in ``_total``."""
    metric = Counter(name, help, tuple(labels or ()), registry=registry)
    for values in _children(labels):
        metric.labels(*values)
    return metric


def gauge(registry: CollectorRegistry, name: str, help: str, labels: Labels | None = None) -> Gauge:
    """A gauge with every child at 0."""
    metric = Gauge(name, help, tuple(labels or ()), registry=registry)
    for values in _children(labels):
        metric.labels(*values)
    return metric


def histogram(
    registry: CollectorRegistry, name: str, help: str, buckets: Sequence[float], labels: Labels | None = None
) -> Histogram:
    """A :class:`Histogram` with every child empty, registered."""
    metric = Histogram(name, help, buckets, tuple(labels or ()))
    for values in _children(labels):
        metric.labels(*values)
    registry.register(metric)
    return metric


def _children(labels: Labels | None) -> Iterable[tuple[str, ...]]:
    return itertools.product(*labels.values()) if labels else ()


class HistogramChild:
    """Counts of one label combination. Safe to fill from one thread and read from another."""

    __slots__ = ("_bounds", "_bounds32", "_counts", "_lock", "_sum")

    def __init__(self, bounds: npt.NDArray[np.float64]) -> None:
        self._bounds = bounds
        self._bounds32 = bounds.astype(np.float32)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value. A value that is not finite is left out, as in :meth:`observe_many`."""
        if not np.isfinite(value):
            return
        index = int(np.searchsorted(self._bounds, value, side="left"))
        with self._lock:
            self._counts[index] += 1
            self._sum += float(value)

    def observe_many(self, values: npt.ArrayLike) -> None:
        """Count every element of an array of any shape and number type.

        NaN and infinities are left out: one of them would make the sum useless for the rest of the process's life.
        Whoever can meet them counts them (``afterplay_learner_rejected_tokens_total{reason="nonfinite"}``).
        """
        flat = np.asarray(values).ravel()
        if flat.dtype.kind == "f" and not np.isfinite(flat).all():
            flat = flat[np.isfinite(flat)]
        if flat.size == 0:
            return
        bounds = self._bounds32 if flat.dtype == np.float32 else self._bounds
        counts = np.bincount(np.searchsorted(bounds, flat, side="left"), minlength=len(self._counts))
        total = float(flat.sum(dtype=np.float64))
        with self._lock:
            self._counts += counts
            self._sum += total

    def snapshot(self) -> tuple[npt.NDArray[np.int64], float]:
        """Counts of each bucket (not cumulative; the last is above the largest bound) and the sum, of one moment."""
        with self._lock:
            return self._counts.copy(), self._sum


class Histogram(Collector):
    """Prometheus' histogram, filled by numpy: an array costs one ``searchsorted`` and one ``bincount``.

    ``buckets`` are upper bounds, inclusive, rising; ``+Inf`` is added. Without label names it is its own only child.
    Count and sum are there for negative buckets too, which ``prometheus_client`` leaves out: a mean reward needs them.
    """

    def __init__(self, name: str, help: str, buckets: Sequence[float], labelnames: Sequence[str] = ()) -> None:
        bounds = np.asarray(buckets, dtype=np.float64)
        if bounds.size == 0 or not (np.diff(bounds) > 0).all() or not np.isfinite(bounds).all():
            raise ValueError(f"histogram {name}: expected finite rising bucket bounds, got {list(buckets)}")
        self._name = name
        self._help = help
        self._labelnames = tuple(labelnames)
        self._bounds = bounds
        self._le = [*map(floatToGoString, buckets), "+Inf"]
        self._lock = threading.Lock()
        self._metrics: dict[tuple[str, ...], HistogramChild] = {}
        if not self._labelnames:
            self._metrics[()] = HistogramChild(bounds)

    def labels(self, *values: Any, **named: Any) -> HistogramChild:
        """The child of these label values, by position or by name; made when it is new."""
        if named:
            if values or set(named) != set(self._labelnames):
                raise ValueError(f"histogram {self._name}: expected labels {self._labelnames}, got {sorted(named)}")
            values = tuple(named[name] for name in self._labelnames)
        if len(values) != len(self._labelnames):
            raise ValueError(f"histogram {self._name}: expected labels {self._labelnames}, got {values}")
        key = tuple(map(str, values))
        child = self._metrics.get(key)
        if child is None:
            with self._lock:
                child = self._metrics.setdefault(key, HistogramChild(self._bounds))
        return child

    def observe(self, value: float) -> None:
        """Count one value; only without labels."""
        self.labels().observe(value)

    def observe_many(self, values: npt.ArrayLike) -> None:
        """Count an array; only without labels."""
        self.labels().observe_many(values)

    def describe(self) -> list[Metric]:
        return [HistogramMetricFamily(self._name, self._help, labels=self._labelnames)]

    def collect(self) -> list[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labelnames)
        for values, child in list(self._metrics.items()):
            counts, total = child.snapshot()
            cumulative = np.cumsum(counts)
            labels = dict(zip(self._labelnames, values, strict=True))
            for bound, count in zip(self._le, cumulative.tolist(), strict=True):
                family.add_sample(f"{self._name}_bucket", {**labels, "le": bound}, count)
            family.add_sample(f"{self._name}_count", labels, int(cumulative[-1]))
            family.add_sample(f"{self._name}_sum", labels, total)
        return [family]


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
