"""OpenTelemetry: a trace of each rollout of an update, its failed attempts included, from the times in the store.

==============  =================================================================================================
``rollout``     from its order to the end of its update
``order``       until an actor began
``episode``     at the actor
``generate``    in the episode: a request to an engine, for a turn or a part of a long one; between them are the
                environment, its tools and the agent loop
``delivery``    until the stage had stored it
``group``       until all rollouts of its group were stored
``batch``       until its update began: the scorer, and groups whose deadlines are earlier
``update``      the learner
==============  =================================================================================================

Clocks of several machines differ: a span that would end before its begin has no length. Ids follow from those of run
and rollout, so what is sent twice, after a kill, has the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import StatusCode, set_span_in_context

from pipeline.errors import TrackerError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Timings
from pipeline.store.queries import Filters, Span, orders_of_update
from pipeline.store.store import store_path
from pipeline.trackers.delivery import SentEntry, TrackerRecord
from pipeline.trackers.tracker import TrackedRun, Tracker, trace_id
from pipeline.views.reader import Found, RunReader

SPANS_MAX = 512
"""Spans of one request to the collector."""
Piece = tuple[str, float, float]
"""Name, begin and end of a span, Unix seconds."""


class OpenTelemetry(Tracker):
    """Sends traces to a collector by OTLP over HTTP. Where to, how many and under which name is said by the variables
    of OpenTelemetry: ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, ``OTEL_SERVICE_NAME``."""

    reads_store = True

    def __init__(self, run: TrackedRun, exporter: SpanExporter | None = None) -> None:
        self._run, self._ids = run, _Ids()
        self._path = store_path(run.config, RunDirectory(run.directory))
        self._exporter, self._ended = exporter or OTLPSpanExporter(), InMemorySpanExporter()
        name = os.environ.get("OTEL_SERVICE_NAME", "afterplay")
        resource = Resource.create({"service.name": name, "afterplay.run": run.name})
        self._provider = TracerProvider(resource=resource, id_generator=self._ids)
        self._provider.add_span_processor(SimpleSpanProcessor(self._ended))
        self._tracer = self._provider.get_tracer("afterplay")

    @property
    def place(self) -> str:
        base = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
        return os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", base)

    def is_empty(self) -> bool:
        """Always, because spans that are sent twice have the same ids."""
        return True

    def held(self, entries: Sequence[SentEntry]) -> set[str]:
        """A collector cannot be asked."""
        return set()

    def send(self, records: Sequence[tuple[TrackerRecord, int]]) -> None:
        """Raises :class:`TrackerError` if the collector does not take the spans."""
        reader = RunReader(self._run.config, RunDirectory(self._run.directory))  # once: it looks at every trace file
        for record, _ in records:
            if record.name == "step":
                self._trace(record, reader)

    def close(self, finished: bool = True) -> None:
        self._provider.shutdown()
        self._exporter.shutdown()

    def _trace(self, record: TrackerRecord, reader: RunReader) -> None:
        begin, end = (record.numbers.get(f"time/{name}", record.time) for name in ("started", "finished"))
        orders = orders_of_update(self._path, record.step - 1)
        rows = reader.listing(Filters(among=frozenset(orders)), "oldest", limit=len(orders)).rows
        for found in reader.find(rows, Span(record.step, record.step)):
            self._rollout(found, list(pieces(found, *orders[found.listed.trajectory_id], begin, end)))
        spans = self._ended.get_finished_spans()
        self._ended.clear()
        for at in range(0, len(spans), SPANS_MAX):
            if self._exporter.export(spans[at : at + SPANS_MAX]) is not SpanExportResult.SUCCESS:
                raise TrackerError(f"expected the collector at {self.place} to take spans, and it did not")

    def _rollout(self, found: Found, parts: list[Piece]) -> None:
        row = found.listed
        self._ids.trace = int(trace_id(self._run.id, row.trajectory_id), 16)
        self._ids.spans = 0
        values = {
            "trajectory": row.trajectory_id, "group": row.group_number, "task": row.task_id, "actor": row.actor,
            "environment": row.environment, "status": row.status, "state": row.state, "reason": row.reason,
            "reward": row.reward, "step": row.step, "turns": row.n_turns, "sampled_tokens": row.n_sampled,
            "version_min": row.version_min, "version_max": row.version_max,
        }  # fmt: skip
        attributes: dict[str, Any] = {f"afterplay.{key}": value for key, value in values.items() if value is not None}
        start = min(begin for _, begin, _ in parts)
        whole = self._tracer.start_span("rollout", start_time=_nanoseconds(start), attributes=attributes)
        if row.failure is not None:
            words = "{boundary}: {kind}: {message}".format(**row.failure)
            whole.set_status(StatusCode.ERROR, words)
        outer = inner = set_span_in_context(whole)
        episode = None
        for name, begin, end in parts:
            span = self._tracer.start_span(name, inner if name == "generate" else outer, start_time=_nanoseconds(begin))
            if name == "episode":
                episode, inner = (span, end), set_span_in_context(span)
            else:
                span.end(_nanoseconds(end))
        if episode is not None:
            episode[0].end(_nanoseconds(episode[1]))
        whole.end(_nanoseconds(max(end for _, _, end in parts)))


def pieces(found: Found, issued_at: float, complete_at: float | None, begin: float, end: float) -> Iterator[Piece]:
    """Spans of a rollout, in the table's order, without the whole. ``complete_at``: the last rollout of its group was
    stored; None: its group counts without it. ``begin``, ``end``: of the update."""
    row = found.listed
    known = found.transcript.trajectory.timings if found.transcript else Timings()
    at = issued_at

    def until(name: str, time: float) -> Piece:
        nonlocal at
        before, at = at, max(at, time)
        return name, before, at

    if known.started_at:
        yield until("order", known.started_at)
        yield (episode := until("episode", known.finished_at))
        for since, seconds in known.requests:
            first = min(episode[1] + since, episode[2])
            yield "generate", first, min(first + seconds, episode[2])
        yield until("delivery", row.received_at)
    else:  # its tokens are not kept
        yield until("order and episode", row.received_at)
    if complete_at is not None:
        yield until("group", complete_at)
        yield until("batch", begin)
        yield until("update", end)


class _Ids(IdGenerator):
    """Ids of one trace after another."""

    trace = spans = 0

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        self.spans += 1
        digest = blake2b(self.spans.to_bytes(8, "big"), key=self.trace.to_bytes(16, "big"), digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def _nanoseconds(seconds: float) -> int:
    return round(1e9 * seconds)
