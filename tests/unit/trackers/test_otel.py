"""Traces of rollouts, with the in-memory exporter of OpenTelemetry's own SDK."""

from __future__ import annotations

import json
import threading
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="NO OPENTELEMETRY: pip install '.[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from typer.testing import CliRunner

from pipeline.cli.app import app
from pipeline.cli.replay import open_run
from pipeline.errors import TrackerError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Failure
from pipeline.store import tables
from pipeline.trackers.otel import OpenTelemetry
from pipeline.trackers.reporter import Reporter, describe_delivery
from pipeline.trackers.tracker import trace_id
from tests.unit.show.making import Rollout, make_run

ROLLOUTS = [
    Rollout(0, 7, step=9),
    Rollout(0, 6, step=9),
    Rollout(0, 5, step=9),
    Rollout(1, 0),
    Rollout(1, 1),  # the last of its group, and traced by nobody
    Rollout(1, 2, stored=False),
    Rollout(1, 3, None, state="dropped", reason="failed", failure=Failure("environment step", "ValueError", "no")),
]
"""The stage received them a second apart, and each episode began at 1e9 and took 2 s."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = make_run(tmp_path / "some", ROLLOUTS, trackers={"rollouts": 0})
    line = {"step": 1, "time": 1e9 + 30, "started": 1e9 + 20, "finished": 1e9 + 30}
    (path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    count_updates(path, 1)
    return path


def count_updates(run: Path, updates: int) -> None:
    with closing(tables.STORE.connect(run / "replay.sqlite")) as connection:
        connection.execute("INSERT OR REPLACE INTO meta VALUES ('consumed', ?)", (str(updates),))


def report(run: Path, exporter: SpanExporter) -> str:
    """Send the run; returns its id at the tracker."""
    reporter = Reporter("otel", *open_run(run), lambda _, tracked: OpenTelemetry(tracked, exporter))
    reporter.close()
    return str(reporter._delivery.run)


def traces(exporter: InMemorySpanExporter) -> dict[str, dict[str, tuple[float, float]]]:
    """By trajectory: name of each span with begin and end, seconds after 1e9."""
    spans = exporter.get_finished_spans()
    names = {s.context.trace_id: s.attributes["afterplay.trajectory"] for s in spans if s.name == "rollout"}
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for s in spans:
        times = tuple(round(t / 1e9 - 1e9, 3) for t in (s.start_time, s.end_time))
        found.setdefault(names[s.context.trace_id], {})[s.name] = times
    return found


def test_a_rollout_is_one_trace_from_its_order_to_its_update(run: Path) -> None:
    exporter = InMemorySpanExporter()
    name = report(run, exporter)
    found = traces(exporter)
    assert found.keys() == {"g000001.0.0", "g000001.1.0", "g000001.2.0", "g000001.3.0"}
    assert found["g000001.0.0"] == {
        "rollout": (-1, 30),
        "order": (-1, 0),
        "episode": (0, 2),
        "generate": (0.25, 1.75),
        "delivery": (2, 3),
        "group": (3, 5),
        "batch": (5, 20),
        "update": (20, 30),
    }
    assert found["g000001.2.0"]["order and episode"] == (-1, 5), "its tokens are gone"
    spans = [s for s in exporter.get_finished_spans() if s.context.trace_id == int(trace_id(name, "g000001.0.0"), 16)]
    parents = {s.name: s.parent and s.parent.span_id for s in spans}
    ids = {s.name: s.context.span_id for s in spans}
    assert parents == {n: ids["episode" if n == "generate" else "rollout"] for n in ids} | {"rollout": None}
    assert len(set(ids.values())) == len(ids)
    shown = CliRunner().invoke(app, ["show", str(run), "g000001.0.0"]).output
    assert f"trace  {trace_id(name, 'g000001.0.0')} at http://localhost:4318" in shown


def test_a_failed_attempt_is_an_error_that_no_update_follows(run: Path) -> None:
    exporter = InMemorySpanExporter()
    report(run, exporter)
    (failed,) = [s for s in exporter.get_finished_spans() if s.status.status_code is StatusCode.ERROR]
    assert failed.status.description == "environment step: ValueError: no"
    assert traces(exporter)["g000001.3.0"].keys() == {"rollout", "order", "episode", "generate", "delivery"}


def test_traces_of_an_update_wait_until_the_stage_has_counted_it(run: Path) -> None:
    count_updates(run, 0)
    report(run, InMemorySpanExporter())
    exporter = InMemorySpanExporter()
    assert describe_delivery(RunDirectory(run), "otel").startswith("otel has 0 of 1 steps")
    with closing(Reporter("otel", *open_run(run), lambda _, tracked: OpenTelemetry(tracked, exporter))) as reporter:
        assert reporter.advance() == 0
        count_updates(run, 1)
        assert reporter.advance() == 1
    assert len(traces(exporter)) == 4


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, as a real one does."""

    requests: ClassVar[list[ExportTraceServiceRequest]] = []

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.requests.append(ExportTraceServiceRequest.FromString(data))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing is printed."""


def test_afterplay_report_sends_otlp_to_the_endpoint_of_the_environment(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setattr("signal.signal", lambda *_: None)
        told = CliRunner().invoke(app, ["report", str(run), "--to", "otel"], catch_exceptions=False).output
        server.shutdown()
    assert told == f"otel has all 1 steps: {address}\n"
    resources = [found for request in Collector.requests for found in request.resource_spans]
    named = {a.key: a.value.string_value for found in resources for a in found.resource.attributes}
    assert (named["service.name"], named["afterplay.run"]) == ("afterplay", "some")
    spans = [span for found in resources for scope in found.scope_spans for span in scope.spans]
    assert sum(span.name == "rollout" for span in spans) == 4


class Refusing(InMemorySpanExporter):
    """A collector that is down until it was asked once."""

    refused = False

    def export(self, spans) -> SpanExportResult:
        if self.refused:
            return super().export(spans)
        self.refused = True
        return SpanExportResult.FAILURE


def test_what_a_collector_did_not_take_is_sent_again_with_the_same_ids(run: Path) -> None:
    first, second = InMemorySpanExporter(), Refusing()
    name = report(run, first)
    (run / "trackers" / "otel.jsonl").write_text(json.dumps({"run": name}) + "\n")
    reporter = Reporter("otel", *open_run(run), lambda _, tracked: OpenTelemetry(tracked, second))
    with pytest.raises(TrackerError, match="expected the collector at"):
        reporter.advance()
    reporter._file.close()
    reporter._lock.release()
    assert report(run, second) == name
    contexts = [{(s.name, s.context.span_id) for s in one.get_finished_spans()} for one in (first, second)]
    assert contexts[0] == contexts[1]
