"""Prints each alert that an Alertmanager sends, one a line: ``python alert_log.py [PORT]``. Needs Python alone."""

from __future__ import annotations

import json
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def line(alert: dict[str, Any]) -> str:
    """
    >>> line({"status": "firing", "startsAt": "2026-01-01T00:00:00Z", "endsAt": "0001-01-01T00:00:00Z",
    ...       "labels": {"alertname": "RunDown", "severity": "critical"},
    ...       "annotations": {"summary": "No process answers.", "runbook": "docs/RUNBOOK.md#rundown"}})
    '2026-01-01T00:00:00Z firing critical RunDown: No process answers. docs/RUNBOOK.md#rundown'
    """
    labels, notes = alert["labels"], alert["annotations"]
    when = alert["endsAt" if alert["status"] == "resolved" else "startsAt"]
    what = f"{alert['status']} {labels.get('severity', 'none')} {labels['alertname']}"
    return f"{when} {what}: {notes.get('summary', '')} {notes.get('runbook', '')}".rstrip()


class Receiver(BaseHTTPRequestHandler):
    """Webhook of an Alertmanager. Answers 200 to a GET, for health checks."""

    timeout = 10

    def do_GET(self) -> None:
        self._answer(200)

    def do_POST(self) -> None:
        try:
            alerts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["alerts"]
            print("\n".join(map(line, alerts)), flush=True)
        except (KeyError, TypeError, ValueError) as error:
            print(
                f"expected alerts of an Alertmanager, got: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
            return self._answer(400)
        self._answer(200)

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Nothing: the log has alerts alone."""


def main(port: int = 9095) -> None:
    server = ThreadingHTTPServer(("0.0.0.0", port), Receiver)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print(f"waits for alerts on port {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
