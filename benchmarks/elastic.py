"""Throughput of one run while engines or actors join and leave it: rollouts per second for each number of them.

::

    python -m benchmarks.elastic                        # 1, 2, 3 and again 1 engine, 15 s each
    python -m benchmarks.elastic --engines 1 4 1 --seconds 60 --out results.json
    python -m benchmarks.elastic --actors 1 4 1 --pass-seconds 0.3 --batch 64 --set actor.concurrency=8
    python -m benchmarks.elastic --file configs/quickstart.yaml --engines 1 2 1 --pass-seconds 0 --out vllm.json

The run is configs/tiny.yaml, or ``--file``, with its real processes; engines and actors join by ``afterplay
engine|actor FILE --join`` and leave on SIGTERM. Each forward pass of an embedded engine sleeps ``--pass-seconds`` and
has at most ``--batch`` requests, so it is slow and uses little CPU, as one on a GPU would: without this, processes on
a small machine only take the cores from each other. So the table shows that throughput follows their number, not what
an engine can do. With ``--pass-seconds 0`` engines are as the run file says: the rows show who serves, and that nothing
is lost.
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
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from actors.engine.answers import read_report
from pipeline.config.load import load
from pipeline.runtime.engine_addresses import EngineRegistry
from tests.support.run_handle import RunHandle, start_run

TINY = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SECONDS_MAX = 400.0
ACTORS_MAX = 8
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


def used(run: RunHandle, role: str) -> float:
    """Engines to which the first actor sends, or actors that answer."""
    if role == "engine":
        return run.metric("actor-0", "actor_engines", 'state="fit"')
    found = [run.metric(f"actor-{i}", "actor_inflight_episodes") for i in range(ACTORS_MAX)]
    return sum(episodes > 0 for episodes in found)


def settle(run: RunHandle, role: str, joined: list[subprocess.Popen[bytes]], wanted: int) -> float:
    """Let processes of ``role`` join or leave until there are ``wanted``; seconds until so many are used."""
    started = time.monotonic()
    while len(joined) < wanted - 1:
        command = [sys.executable, "-m", "pipeline.cli.app", role, str(run.directory.config_file), "--join"]
        with run.output.open("ab") as output:
            joined.append(subprocess.Popen(command, stdout=output, stderr=output))
    while len(joined) > wanted - 1:
        leaving = joined.pop()
        leaving.terminate()
        if leaving.wait(SECONDS_MAX):
            raise RuntimeError(f"an {role} left with exit code {leaving.returncode}:\n{run.tail()}")
    run.until(f"{wanted} of {role}", lambda: used(run, role) == wanted, SECONDS_MAX)
    return time.monotonic() - started


def sampled(run: RunHandle) -> dict[str, float]:
    """Tokens that each engine says it has sampled, by its address."""
    found = {}
    urls = load(run.directory.config_file, environment={}).engine.addresses()
    for url in (*urls, *EngineRegistry(run.directory.engines).read()):
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            report = read_report(answer.read().decode())
        found[url] = 0.0 if report is None else report.sampled
    return found


def measured(run: RunHandle, seconds: float) -> dict[str, Any]:
    """Rollouts, updates and tokens of each engine in so many seconds."""
    before, tokens, started = run.ledger(), sampled(run), time.monotonic()
    time.sleep(seconds)
    after, took = run.ledger(), time.monotonic() - started
    now = sampled(run)
    rollouts = after.orders["delivered"] - before.orders["delivered"]
    return {
        "seconds": round(took, 2),
        "rollouts": rollouts,
        "rollouts_per_second": round(rollouts / took, 2),
        "updates": after.updates - before.updates,
        "sampled_tokens": {url: int(now[url] - tokens.get(url, 0)) for url in now},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=TINY, help="run file")
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 3, 1])
    parser.add_argument("--actors", type=int, nargs="+", help=f"in place of --engines; at most {ACTORS_MAX}")
    parser.add_argument("--set", dest="sets", metavar="KEY=VALUE", action="append", default=[], help="of the run file")
    parser.add_argument("--seconds", type=float, default=15.0, help="time for each number of engines")
    parser.add_argument("--settle-seconds", type=float, default=12.0, help="time before, in which conversations move")
    parser.add_argument("--pass-seconds", type=float, default=0.1, help="sleep of an engine in each forward pass")
    parser.add_argument("--batch", type=int, default=4, help="requests of an engine in one forward pass")
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes end
    role, numbers = ("actor", options.actors) if options.actors else ("engine", options.engines)
    rows = []
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        overrides = ["run.total_steps=100000", "groups.groups_per_step=8"]
        if options.pass_seconds:
            folder = Path(scratch) / "slow"
            folder.mkdir()
            (folder / "sitecustomize.py").write_text(SLOW.format(seconds=options.pass_seconds))
            path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", str(TINY.parents[1]))]))
            overrides += [f"engine.max_sequences={options.batch}", f"engine.env={json.dumps({'PYTHONPATH': path})}"]
        run = stack.enter_context(start_run(options.file, Path(scratch), "elastic", [*overrides, *options.sets]))
        joined: list[subprocess.Popen[bytes]] = []
        stack.callback(lambda: [process.kill() for process in joined])
        run.until_step(1, SECONDS_MAX)
        for wanted in numbers:
            seconds = settle(run, role, joined, wanted)
            time.sleep(options.settle_seconds)
            row = {f"{role}s": wanted, "seconds_until_used": round(seconds, 1), **measured(run, options.seconds)}
            rows.append(row)
            print(row, flush=True)
        settle(run, role, joined, 1)
        run.interrupt()
        ledger, steps = run.ledger(rows=True), run.steps()
        said = (run.directory.logs / "learner.log").read_text().splitlines()
        said = [line for line in said if "engine http" in line]
    result = {
        "options": {key: value for key, value in vars(options).items() if key not in ("file", "out")},
        "file": options.file.name,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rows": rows,
        "learner": said,
        "steps": len(steps),
        "staleness_max": max(step["staleness_max"] for step in steps),
        "orders": dict(ledger.orders),
        "trajectories": dict(ledger.trajectories),
        "audit": ledger.audit(),
    }
    print(f"orders {dict(ledger.orders)}, problems of the ledger: {ledger.audit() or 'none'}")
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
