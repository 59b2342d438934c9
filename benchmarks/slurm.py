"""Runs on real SLURM clusters on loopback: one loses a node and is then preempted, nodes of the others stand still.

    python -m benchmarks.slurm
    python -m benchmarks.slurm --scene stopped
    python -m benchmarks.slurm --scene first

``configs/tiny.yaml`` is submitted by ``afterplay run --on slurm``. In the scene ``lost`` it has two engines and two
actors. After some steps the second node is lost with its processes, which come back on the first. Later the node
returns, and an urgent job preempts the run: it drains, goes back into the queue, and resumes to its last step once the
urgent job has ended. That step is set while the job waits in the queue: a fast machine does not reach it before.

In ``stopped`` the job has three of four nodes, each with an address of its own. First all processes of the third node
stand still: another node takes its actor. Then those of the second, which has an engine: the run drains and resumes
with the fourth node. The old processes go on while the new ones work.

In ``first`` the first of three nodes stands still, of which the job has two: supervisor, replay stage and the lock of
the run directory are there. SLURM starts the job again on the other two, where it finds the lock and goes back into the
queue. Then the first node goes on, its old processes end, and the next start resumes.

Needs the programs of SLURM and munge (Debian: ``slurm-wlm munge``). Prints and writes what was found; the exit code is
0 if nothing was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.launchers.slurm import WATCH
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.store.ledger import read_ledger
from tests.support.slurm_cluster import SlurmCluster, missing_programs

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "configs" / "tiny.yaml"
RESULTS = ROOT / "benchmarks" / "results"
NAME = "slurm"
STEPS, LOST_AT, PREEMPTED_AT = 30, 5, 12
"""Updates: at least of the run, before the loss of a node, before the preemption."""
RESUMED_STEPS = 5
"""At least so many come after the preemption."""
ENDLESS = 1_000_000
URGENT_SECONDS = 5
LOOK_SECONDS = 0.2
WAIT_SECONDS_MAX = 300.0


class Job:
    """The submitted run."""

    def __init__(self, cluster: SlurmCluster, folder: Path, nodes: int = 2, *more: str) -> None:
        folder.mkdir()
        self.cluster = cluster
        self.directory = RunDirectory(folder / NAME)
        sets = [f"run.directory={folder}", f"run.name={NAME}", f"run.total_steps={ENDLESS}", "checkpoint.every=1"]
        sets += ["engine.replicas=2", f"actor.replicas={nodes}", *more]
        command = [sys.executable, "-m", "pipeline.cli.app", "run", str(FILE), "--on", "slurm", "--nodes", str(nodes)]
        for override in sets:
            command += ["--set", override]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [*command, "--", "--cpus-per-task=4"],
            env={**cluster.environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)
        self.output = done.stdout
        self.number = re.findall(r"submitted as job (\d+)", done.stdout)[0]

    @property
    def state(self) -> str:
        return self.cluster.job_state(self.number)

    def steps(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl`` so far."""
        file = self.directory.metrics_file
        return [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]] if file.exists() else []

    def places(self) -> dict[str, str]:
        """The node of each process that runs, but for those that end by themselves at the start."""
        lines = self.cluster.command("squeue", "-h", "-s", "-j", self.number, "-o", "%j %N").splitlines()
        others = ("batch", "extern", WATCH, "prepare", "preflight")
        found = ((name.partition("@")[0], node) for name, node in (line.split() for line in lines))
        return {name: node for name, node in found if name not in others}

    def places_at(self, step: int) -> dict[str, str]:
        """The node of each process at ``step`` or later, once the preflight has ended."""
        self.until_step(step)
        self.until("the end of the preflight", lambda: self.phases()["preflight"] == "done")
        return self.places()

    def phases(self) -> dict[str, str]:
        """The phase of each process, as the supervisor writes it."""
        return {name: facts["phase"] for name, facts in (read_json(self.directory.processes_file) or {}).items()}

    def until(self, what: str, look: Callable[[], Any]) -> Any:
        """The first true value of ``look``. Raises :class:`RuntimeError` if the job ends or takes too long."""
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while not (value := look()):
            state = self.state
            if state in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL") and not (value := look()):
                raise RuntimeError(f"the job is {state} before {what}:\n{self.tail()}")
            if value:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} took longer than {WAIT_SECONDS_MAX:g} s:\n{self.tail()}")
            time.sleep(LOOK_SECONDS)
        return value

    def end_at(self, step: int) -> None:
        """Change the last step in the copy of the run file, which the job reads when it begins again."""
        file = self.directory.path / "slurm.yaml"
        file.write_text(file.read_text().replace(f"total_steps: {ENDLESS}", f"total_steps: {step}"))

    def until_step(self, step: int) -> None:
        self.until(f"step {step}", lambda: (lines := self.steps()) and lines[-1]["step"] >= step)

    def tail(self) -> str:
        """The job, nodes and phases of the processes, and the end of what the job and they printed."""
        steps = self.cluster.command("squeue", "-h", "-s", "-j", self.number, "-o", "%i %j %N %M")
        files = [self.directory.path / "slurm.log", *sorted(self.directory.logs.glob("*.log"))]
        printed = "\n".join(f"--- {f.name}\n{f.read_text()[-2500:]}" for f in files if f.exists())
        job = self.cluster.command("scontrol", "-o", "show", "job", self.number)
        return f"{job}nodes {self.cluster.states()}\nsteps\n{steps}\nphases {self.phases()}\n{printed}"


def prove(folder: Path, steps: int = STEPS, lost_at: int = LOST_AT, preempted_at: int = PREEMPTED_AT) -> dict[str, Any]:
    """Run it on a cluster of two nodes; times, steps and accounts as JSON values."""
    began = time.monotonic()
    with SlurmCluster(folder / "cluster") as cluster:
        started = time.monotonic()
        job = Job(cluster, folder / "runs")
        before = job.places_at(lost_at)
        lost = sorted(name for name, node in before.items() if node == "n2")
        at = time.monotonic()
        killed = cluster.kill_node("n2")
        after = job.until(
            "all processes on the first node",
            lambda: (
                (places := job.places())
                and set(places) == set(before)
                and set(places.values()) == {"n1"}
                and all(job.phases()[name] == "running" for name in before)
                and places
            ),
        )
        moved_seconds = time.monotonic() - at
        moved_step = job.steps()[-1]["step"]
        cluster.start_node("n2")
        job.until_step(max(preempted_at, moved_step + 3))
        cluster.until(lambda: cluster.states().get("n2") == "IDLE", "n2")
        at = time.monotonic()
        urgent = ("--partition=urgent", f"--nodes={len(cluster.nodes)}", "--exclusive", "--output=/dev/null")
        other = cluster.command("sbatch", "--parsable", *urgent, f"--wrap=sleep {URGENT_SECONDS}").strip()
        job.until("the job in the queue", lambda: job.state == "PENDING")
        drained_seconds = time.monotonic() - at
        drained_step = job.steps()[-1]["step"]
        steps = max(steps, drained_step + RESUMED_STEPS)
        job.end_at(steps)
        ends = {name: job.directory.log_file(name).read_text().rstrip().splitlines()[-1] for name in before}
        job.until("the urgent job", lambda: cluster.job_state(other) == "RUNNING")
        cluster.command("scontrol", "update", f"jobid={job.number}", "starttime=now")
        job.until("the resumed job", lambda: job.state == "RUNNING")
        resumed = job.until("processes on both nodes", lambda: (p := job.places()) and set(p) == set(before) and p)
        job.until("the end", lambda: job.state == "COMPLETED")
        solved = [line["signals"]["solved"] for line in job.steps()]
        return {
            "steps": steps,
            "places": before,
            "lost": {"node": "n2", "processes": lost, "killed": killed, "places": after},
            "moved_seconds": round(moved_seconds, 1),
            "drained_after_step": drained_step,
            "drained_seconds": round(drained_seconds, 1),
            "drained": sorted(name for name, line in ends.items() if line.endswith(": finished")),
            "resumed": resumed,
            "solved_first": sum(solved[:3]) / 3,
            "solved_last": sum(solved[-5:]) / 5,
            "cluster_seconds": round(started - began, 1),
        } | accounts(job, began)


def prove_stopped(folder: Path) -> dict[str, Any]:
    """The scene ``stopped``; times, steps and accounts as JSON values."""
    began = time.monotonic()
    with SlurmCluster(folder / "cluster", nodes=4, own_addresses=True) as cluster:
        job = Job(cluster, folder / "runs", 3, "engine.host=0.0.0.0")
        before = job.places_at(LOST_AT)

        def without(node: str) -> dict[str, str]:
            """The places of all processes, once all run and none is on ``node``; else empty."""
            places, phases = job.places(), job.phases()
            runs = places.keys() == before.keys() and all(phases[name] == "running" for name in before)
            return places if runs and node not in places.values() else {}

        def requeued() -> dict[str, str]:
            job.until("the job in the queue", lambda: job.state == "PENDING")
            job.end_at(job.steps()[-1]["step"] + STEPS)
            cluster.command("scontrol", "update", f"jobid={job.number}", "starttime=now")
            return job.until("all processes on the new nodes", lambda: without("n2"))

        def stand_still(node: str, look: Callable[[], dict[str, str]]) -> dict[str, Any]:
            """Stop ``node`` until ``look`` finds its processes elsewhere; then the old ones go on, and should end."""
            old, at = cluster.tasks(node).keys(), time.monotonic()
            cluster.stop_node(node)
            places = job.until(f"the processes of {node} elsewhere", look)
            moved, step = time.monotonic() - at, job.steps()[-1]["step"]
            cluster.continue_node(node)
            job.until(f"the end of the old processes of {node}", lambda: not old & cluster.tasks(node).keys())
            job.until_step(step + 3)
            states = read_json(job.directory.processes_file) or {}
            restarts = {name: state["restarts"] for name, state in states.items() if state["restarts"]}
            lost = sorted(name for name, place in before.items() if place == node)
            return {"lost": lost, "places": places, "moved_seconds": round(moved, 1), "restarts": restarts}

        facts = {"actor": stand_still("n3", lambda: without("n3")), "engine": stand_still("n2", requeued)}
        job.until("the end", lambda: job.state == "COMPLETED")
        return {"places": before} | facts | accounts(job, began)


def prove_first(folder: Path) -> dict[str, Any]:
    """The scene ``first``; times, steps and accounts as JSON values."""
    began = time.monotonic()
    with SlurmCluster(folder / "cluster", nodes=3, own_addresses=True) as cluster:
        job = Job(cluster, folder / "runs", 2, "engine.host=0.0.0.0")
        before, at = job.places_at(LOST_AT), time.monotonic()
        old = cluster.stop_node("n1")
        job.until("the job in the queue", lambda: job.state == "PENDING")
        down_seconds, step = time.monotonic() - at, job.steps()[-1]["step"]
        job.end_at(step + STEPS)
        again = "goes back into the queue, and continues from"
        cluster.command("scontrol", "update", f"jobid={job.number}", "starttime=now")
        job.until("a start that finds the lock", lambda: again in (job.directory.path / "slurm.log").read_text())
        job.until("the job in the queue again", lambda: job.state == "PENDING")
        assert job.steps()[-1]["step"] == step
        cluster.continue_node("n1")
        # SLURM drains a node, and holds the job, if it starts the job there beside its old steps.
        job.until("the end of the old steps", lambda: not any(Path(f"/proc/{pid}").exists() for pid in old))
        cluster.command("scontrol", "update", f"jobid={job.number}", "starttime=now")
        places = job.until("all processes", lambda: (p := job.places()).keys() >= before.keys() and p)
        job.until("the end", lambda: job.state == "COMPLETED")
        found = {"places": before, "down_seconds": round(down_seconds, 1), "stopped_after_step": step}
        return found | {"resumed": places} | accounts(job, began)


def accounts(job: Job, began: float) -> dict[str, Any]:
    """Updates, staleness and accounts of a job that has ended."""
    lines, ledger = job.steps(), read_ledger(job.directory.store_file, rows=True)
    return {
        "finished": read_json(job.directory.finished_file),
        "updates": [line["step"] for line in lines] == list(range(1, len(lines) + 1)),
        "staleness_max": max(line["staleness_max"] for line in lines),
        "audit": ledger.audit(),
        "orders_in_flight": ledger.orders["in_flight"],
        "said": [
            line.replace(str(job.directory.path), "RUN")
            for line in (job.directory.path / "slurm.log").read_text().splitlines()
            if re.search(r"ended|again|stop|queue|resum|finished|is lost", line)
        ],
        "seconds": round(time.monotonic() - began, 1),
    }


def problems(found: dict[str, Any]) -> list[str]:
    """Sentences about what was lost; none in a good run."""
    checks = {
        "the run did not finish": found["finished"] is not None and found["finished"]["exit_code"] == 0,
        "an update is missing or was made twice": found["updates"],
        "a group was staler than staleness.max": found["staleness_max"] <= 1,
        "the accounts do not add up": found["audit"] == [] and found["orders_in_flight"] == 0,
    }
    if "lost" in found:
        checks |= {
            "no process was on the second node": len(found["lost"]["processes"]) >= 2,
            "a role did not drain": set(found["drained"]) >= {"actor-0", "actor-1", "learner", "replay"},
            "nothing was learned": found["solved_last"] > found["solved_first"],
        }
    elif "actor" in found:
        checks |= {
            "no actor was on the third node": found["actor"]["lost"] == ["actor-2"],
            "an old process disturbed the new one": found["actor"]["restarts"] == {"actor-2": 1},
            "no engine was on the second node": "engine-1" in found["engine"]["lost"],
        }
    return [sentence for sentence, holds in checks.items() if not holds]


SCENES = {
    "lost": (prove, RESULTS / "slurm.json"),
    "stopped": (prove_stopped, RESULTS / "slurm-stopped.json"),
    "first": (prove_first, RESULTS / "slurm-first.json"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs on SLURM that lose nodes and are preempted.")
    parser.add_argument("--scene", choices=SCENES, default="lost")
    parser.add_argument("--out", type=Path, help="file for what was found")
    options = parser.parse_args()
    if missing := missing_programs():
        print(f"not there: {', '.join(missing)}. Install SLURM and munge (Debian: slurm-wlm munge)", file=sys.stderr)
        return 2
    scene, results = SCENES[options.scene]
    with tempfile.TemporaryDirectory() as folder:
        found = scene(Path(folder))
    print(json.dumps(found, indent=2))
    (options.out or results).write_text(json.dumps(found, indent=2) + "\n")
    for sentence in problems(found):
        print(sentence, file=sys.stderr)
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main())
