"""Throughput of one run while engines join and leave it: rollouts per second for each number of engines.

::

    python -m benchmarks.elastic                        # 1, 2, 3 and again 1 engine, 15 s each
    python -m benchmarks.elastic --engines 1 4 1 --seconds 60 --out results.json

The run is configs/tiny.yaml with its real processes; engines join by ``afterplay engine FILE --join`` and leave on
SIGTERM. Each forward pass of an engine sleeps ``--pass-seconds`` and has at most ``--batch`` requests, so an engine is
slow and uses little CPU, as one on a GPU would: without this, engines on a small machine only take the cores from each
other. So the table shows that throughput follows the number of engines, not what an engine can do.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.run_handle import RunHandle, start_run

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SECONDS_MAX = 400.0
SLOW = """
import os, time
from actors.embedded import batching
deliver = batching._Router.deliver_batch
def slowly(self, outputs):
    time.sleep({seconds})
    deliver(self, outputs)
batching._Router.deliver_batch = slowly
"""
"""``sitecustomize`` of the engines. In this run each request is one token, so each pass delivers."""


def fit_engines(run: RunHandle) -> float:
    return run.metric("actor-0", "actor_engines", 'state="fit"')


def settle(run: RunHandle, joined: list[subprocess.Popen[bytes]], wanted: int) -> float:
    """Let engines join or leave until there are ``wanted``; seconds until the actor uses so many."""
    started = time.monotonic()
    while len(joined) < wanted - 1:
        command = [sys.executable, "-m", "pipeline.cli.app", "engine", str(run.directory.config_file), "--join"]
        with run.output.open("ab") as output:
            joined.append(subprocess.Popen(command, stdout=output, stderr=output))
    while len(joined) > wanted - 1:
        leaving = joined.pop()
        leaving.terminate()
        if leaving.wait(SECONDS_MAX):
            raise RuntimeError(f"an engine left with exit code {leaving.returncode}:\n{run.tail()}")
    run.until(f"{wanted} engines", lambda: fit_engines(run) == wanted, SECONDS_MAX)
    return time.monotonic() - started


def measured(run: RunHandle, seconds: float) -> dict[str, Any]:
    """Rollouts and updates in so many seconds."""
    before, started = run.ledger(), time.monotonic()
    time.sleep(seconds)
    after, took = run.ledger(), time.monotonic() - started
    rollouts = after.orders["delivered"] - before.orders["delivered"]
    return {
        "seconds": round(took, 2),
        "rollouts": rollouts,
        "rollouts_per_second": round(rollouts / took, 2),
        "updates": after.updates - before.updates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3, 1])
    parser.add_argument("--seconds", type=float, default=15.0, help="time for each number of engines")
    parser.add_argument("--settle-seconds", type=float, default=12.0, help="time before, in which conversations move")
    parser.add_argument("--pass-seconds", type=float, default=0.1, help="sleep of an engine in each forward pass")
    parser.add_argument("--batch", type=int, default=4, help="requests of an engine in one forward pass")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "slow"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SLOW.format(seconds=options.pass_seconds))
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", str(TINY.parents[1]))]))
        overrides = ["run.total_steps=100000", f"engine.max_sequences={options.batch}"]
        overrides += [f"engine.env={json.dumps({'PYTHONPATH': path})}", "groups.groups_per_step=8"]
        run = stack.enter_context(start_run(TINY, Path(scratch), "elastic", overrides))
        joined: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: [process.kill() for process in joined])
        run.until_step(1, SECONDS_MAX)
        for wanted in options.engines:
            seconds = settle(run, joined, wanted)
            time.sleep(options.settle_seconds)
            row = {"engines": wanted, "seconds_until_used": round(seconds, 1), **measured(run, options.seconds)}
            rows.append(row)
            print(row, flush=True)
        settle(run, joined, 1)
        run.interrupt()
        ledger = run.ledger(rows=True)
    result = {
        "options": {key: value for key, value in vars(options).items() if key != "out"},
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rows": rows,
        "orders": dict(ledger.orders),
        "audit": ledger.audit(),
    }
    print(f"orders {dict(ledger.orders)}, problems of the ledger: {ledger.audit() or 'none'}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
