"""NOT GRAFANA. A stand-in for the container test, where no Grafana can be had: it reads what Grafana would read.

Healthy (``/api/health``) only when the provisioning files are understood, the data source answers and every dashboard
is JSON with a uid.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.request import urlopen

PROVISIONING = Path("/etc/grafana/provisioning")


def check() -> dict[str, object]:
    """What a Grafana would have loaded. Raises on whatever it would have refused."""
    source = (PROVISIONING / "datasources" / "prometheus.yml").read_text()
    url = re.search(r"^\s*url:\s*(\S+)$", source, flags=re.MULTILINE)[1]
    url = re.sub(r"\$\{?(\w+)\}?", lambda match: os.environ[match[1]], url)
    with urlopen(f"{url}/-/ready", timeout=3) as reply:
        assert reply.status == 200
    provider = (PROVISIONING / "dashboards" / "afterplay.yml").read_text()
    folder = Path(re.search(r"^\s*path:\s*(\S+)$", provider, flags=re.MULTILINE)[1])
    boards = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    assert boards and all(board["uid"] and board["panels"] for board in boards)
    return {"stand_in": True, "database": "ok", "dashboards": [board["uid"] for board in boards]}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        try:
            status, body = 200, check()
        except Exception as error:
            status, body = 503, {"stand_in": True, "error": f"{type(error).__name__}: {error}"}
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    ThreadingHTTPServer(("0.0.0.0", 3000), Handler).serve_forever()
