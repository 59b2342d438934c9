"""Runs of configs/tiny.yaml on a Ray cluster of two nodes, one of which is lost in the middle.

    python -m benchmarks.ray_cluster --json ray.json
    python -m benchmarks.ray_cluster --scene worker

Scenes: ``end`` runs to its end; in ``worker`` all processes of the node with the learner are killed; in ``stopped``
they stand still, and go on once others have their places; in ``disk`` those of the node with the replay stage's disk
are killed, and it comes back later; in ``gang`` the learner has a rank on each node (Ray is told of a GPU on each, the
ranks are on CPUs): that of the worker is killed, and later the network between the nodes is cut. Each scene has a
cluster of its own, in two network namespaces of this machine (tests/support/ray_cluster.py). The exit code is 0 if
every run ended with 0 and its accounts add up, and 77 where there is no Ray, no root or no namespace.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.runtime.run_directory import read_json
from pipeline.store.ledger import read_ledger
from tests.support.ray_cluster import ROOT, RayCluster, RayNode, missing, two_nodes
from tests.support.run_handle import RunHandle

TINY = ROOT / "configs" / "tiny.yaml"
SKIPPED = 77
START_SECONDS_MAX = 300.0
RUN_SECONDS_MAX = 600.0
ROLES = ("engine.replicas=2", "actor.replicas=2", "checkpoint.every=1")


def nodes_of(run: RunHandle) -> dict[str, list[str]]:
    """Addresses of the nodes with a learner, a replay stage, actors and engines."""
    found: dict[str, list[str]] = {}
    for role in ("learner", "replay", "actor-0", "actor-1"):
        if record := read_json(run.directory.process_file(role)):
            found.setdefault(role.split("-")[0], []).append(str(record["metrics_host"]))
    lines = (run.directory.path / "engine_urls").read_text().splitlines()
    return found | {"engine": [str(urlsplit(line.split()[0]).hostname) for line in lines]}


def report(run: RunHandle, store: Path, seconds: float, code: int) -> dict[str, Any]:
    """Steps, restarts and accounts of a run that has ended."""
    steps, ledger = run.steps(), read_ledger(store, rows=True)
    states = read_json(run.directory.processes_file) or {}
    return {
        "exit_code": code,
        "seconds": round(seconds, 1),
        "steps": len(steps),
        "restarts": {name: state["restarts"] for name, state in states.items() if state["restarts"]},
        "audit": ledger.audit(),
        "orders": dict(ledger.orders),
        "trajectories": dict(ledger.trajectories),
        "groups": dict(ledger.groups),
        "staleness_max": max(step["staleness_max"] for step in steps),
        "solved": [round(sum(s["signals"]["solved"] for s in part) / 5, 3) for part in (steps[:5], steps[-5:])],
    }


def said(run: RunHandle) -> list[str]:
    """Lines of the driver about losses, waits and restarts."""
    words = ("is lost", "waits for", "resum", "; restart")
    return [line for line in run.output.read_text().splitlines() if any(word in line for word in words)][:20]


def to_the_end(folder: Path) -> dict[str, Any]:
    with two_nodes(folder, worker_cpus=6) as cluster, cluster.run(TINY, "end", []) as run:
        begun = time.monotonic()
        run.until_step(1, START_SECONDS_MAX)
        first, placed = time.monotonic() - begun, nodes_of(run)
        code = run.finish(RUN_SECONDS_MAX)
        return {"first_step_seconds": round(first, 1), "nodes": placed} | report(
            run, run.directory.store_file, time.monotonic() - begun, code
        )


def worker_lost(folder: Path) -> dict[str, Any]:
    """The head has room for all processes once the worker is lost, and for the learner only then."""
    with two_nodes(folder, head_cpus=16, worker_cpus=6) as cluster:
        cluster.reserve(13)
        with cluster.run(TINY, "worker", [*ROLES, "run.total_steps=30"]) as run:
            run.until_step(1, START_SECONDS_MAX)
            cluster.release()
            return lose_worker(cluster, run, run.directory.store_file, 10, lambda: None)


def worker_stopped(folder: Path) -> dict[str, Any]:
    """As :func:`worker_lost`, but the old processes go on while the new ones work."""
    with two_nodes(folder, head_cpus=16, worker_cpus=6) as cluster:
        cluster.reserve(13)
        with cluster.run(TINY, "stopped", [*ROLES, "run.total_steps=30"]) as run:
            run.until_step(1, START_SECONDS_MAX)
            cluster.release()
            run.until_step(10, START_SECONDS_MAX + RUN_SECONDS_MAX)
            before, known = nodes_of(run), len(run.steps())
            old = cluster.worker.processes()
            cluster.worker.stop()
            begun, at = time.monotonic(), time.time()
            run.until("Ray to notice", lambda: b" is lost" in run.output.read_bytes(), RUN_SECONDS_MAX)
            noticed = time.monotonic() - begun
            run.until("all processes elsewhere", lambda: all_run_outside(cluster.worker, run), RUN_SECONDS_MAX)
            moved, after = time.monotonic() - begun, nodes_of(run)
            run.until("an update after that", lambda: run.steps()[-1]["finished"] > at, RUN_SECONDS_MAX)
            back, continued = time.monotonic() - begun, time.monotonic()
            cluster.worker.go_on()
            cluster.worker.until_ended(old)
            ended, seen = time.monotonic() - continued, len(run.steps())
            code = run.finish(RUN_SECONDS_MAX)
            facts = {"stopped_after_step": known, "nodes_before": before, "nodes_after": after}
            facts |= {"seconds_until_noticed": round(noticed, 1), "seconds_until_moved": round(moved, 1)}
            facts |= {"seconds_to_the_next_update": round(back, 1), "seconds_to_the_end_of_the_old": round(ended, 1)}
            facts |= {"old_ended_after_step": seen, "said": said(run)}
            return facts | report(run, run.directory.store_file, time.monotonic() - begun, code)


def all_run_outside(node: RayNode, run: RunHandle) -> bool:
    """True once all processes run, and none on ``node``."""
    states, places = read_json(run.directory.processes_file) or {}, nodes_of(run)
    return (
        all(state["phase"] in ("running", "done") for state in states.values())
        and [len(places.get(role, ())) for role in ("learner", "actor", "engine")] == [1, 2, 2]
        and not any(node.address in nodes for nodes in places.values())
    )


def disk_lost(folder: Path) -> dict[str, Any]:
    """The folder ``private/disk`` exists on the worker alone."""
    real, seen = folder / "worker-disk", folder / "private"
    (real / "disk").mkdir(parents=True)
    seen.mkdir()
    overrides = ["run.total_steps=24", "checkpoint.every=5", f"stage.store={seen / 'disk' / 'replay.sqlite'}"]
    with two_nodes(folder, worker_disk=(real, seen)) as cluster, cluster.run(TINY, "disk", overrides) as run:

        def come_back() -> None:
            run.until("the wait for the node", lambda: b"replay waits for" in run.output.read_bytes(), RUN_SECONDS_MAX)
            cluster.start(cluster.worker)

        return lose_worker(cluster, run, real / "disk" / "replay.sqlite", 6, come_back)


def rank_lost(folder: Path) -> dict[str, Any]:
    """The GPUs are only numbers to Ray: without CUDA the ranks take the CPU."""
    overrides = ["run.total_steps=26", "checkpoint.every=2", "placement.learner_gpus=2", "engine.device=cpu"]
    with two_nodes(folder, gpus=1) as cluster, cluster.run(TINY, "gang", overrides) as run:
        begun = time.monotonic()
        run.until_step(6, START_SECONDS_MAX + RUN_SECONDS_MAX)
        known = len(run.steps())
        os.kill(cluster.worker.pid_of_rank(1), signal.SIGKILL)
        facts: dict[str, Any] = {"lost_after_step": known} | {"seconds_to_the_next_update": until_next(run)}
        run.until_step(14, RUN_SECONDS_MAX)
        known, old = len(run.steps()), cluster.worker.processes()
        cluster.cut()
        cut = time.monotonic()
        run.until("the wait for a node", lambda: b"learner-1 waits for" in run.output.read_bytes(), RUN_SECONDS_MAX)
        noticed = time.monotonic() - cut
        cluster.worker.until_ended(old)
        ended = time.monotonic() - cut
        cluster.mend()
        cluster.start(cluster.worker)
        facts |= {"cut_after_step": known, "seconds_until_noticed": round(noticed, 1)}
        facts |= {"seconds_to_the_end_of_the_old": round(ended, 1), "seconds_from_node_to_update": until_next(run)}
        code = run.finish(RUN_SECONDS_MAX)
        return facts | {"said": said(run)} | report(run, run.directory.store_file, time.monotonic() - begun, code)


def until_next(run: RunHandle) -> float:
    """Seconds from now to the end of an update."""
    begun, at = time.monotonic(), time.time()
    run.until("an update after the loss", lambda: run.steps()[-1]["finished"] > at, RUN_SECONDS_MAX)
    return round(time.monotonic() - begun, 1)


def lose_worker(
    cluster: RayCluster, run: RunHandle, store: Path, step: int, then: Callable[[], None]
) -> dict[str, Any]:
    """Kill the worker after ``step``, do ``then``, and wait for the end."""
    begun = time.monotonic()
    run.until_step(step, START_SECONDS_MAX + RUN_SECONDS_MAX)
    before, known = nodes_of(run), len(run.steps())
    cluster.worker.kill()
    lost, at = time.monotonic(), time.time()
    then()
    run.until("an update after the loss", lambda: run.steps()[-1]["finished"] > at, RUN_SECONDS_MAX)
    back, after = time.monotonic() - lost, nodes_of(run)
    code = run.finish(RUN_SECONDS_MAX)
    facts = {"lost_after_step": known, "nodes_before": before, "nodes_after": after}
    facts |= {"seconds_to_the_next_update": round(back, 1)}
    facts["said"] = said(run)
    return facts | report(run, store, time.monotonic() - begun, code)


SCENES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "end": to_the_end,
    "worker": worker_lost,
    "stopped": worker_stopped,
    "disk": disk_lost,
    "gang": rank_lost,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scene", choices=SCENES, action="append", help="may be repeated; all of them without it")
    parser.add_argument("--json", type=Path, help="file for the results; scenes that it has and that are not run stay")
    options = parser.parse_args()
    if reason := missing():
        print(f"SKIPPED: {reason}", file=sys.stderr)
        return SKIPPED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # or the cluster would stay
    results: dict[str, Any] = (read_json(options.json) if options.json else None) or {"scenes": {}}
    results |= {"ray": metadata.version("ray"), "python": platform.python_version(), "file": "configs/tiny.yaml"}
    for name in options.scene or SCENES:
        with tempfile.TemporaryDirectory(prefix="ray-") as folder:
            found = results["scenes"][name] = SCENES[name](Path(folder))
        print(json.dumps({name: found}, indent=2), flush=True)
        if options.json:
            options.json.write_text(json.dumps(results, indent=2) + "\n")
    scenes = [results["scenes"][name] for name in options.scene or SCENES]
    return int(any(scene["exit_code"] or scene["audit"] for scene in scenes))


if __name__ == "__main__":
    sys.exit(main())
