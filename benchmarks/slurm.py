"""A run on a real SLURM cluster of two nodes on loopback loses a node, and is then preempted by an urgent job.

    python -m benchmarks.slurm

``configs/tiny.yaml`` with two engines and two actors is submitted by ``afterplay run --on slurm``. After some steps the
second node is lost with its processes, which come back on the first. Later the node returns, and an urgent job preempts
the run: it drains, goes back into the queue, and resumes to its last step once the urgent job has ended. That step is
set while the job waits in the queue, so that a fast machine does not reach it before. Needs the programs of SLURM and
munge (Debian: ``slurm-wlm munge``). Prints and writes what was found; the exit code is 0 if nothing was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.store.ledger import read_ledger
from tests.support.slurm_cluster import SlurmCluster, missing_programs

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "configs" / "tiny.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "slurm.json"
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

    def __init__(self, cluster: SlurmCluster, folder: Path) -> None:
        self.cluster = cluster
        self.directory = RunDirectory(folder / NAME)
        sets = [f"run.directory={folder}", f"run.name={NAME}", f"run.total_steps={ENDLESS}"]
        sets += ["actor.replicas=2", "engine.replicas=2", "checkpoint.every=1"]
        command = [sys.executable, "-m", "pipeline.cli.app", "run", str(FILE), "--on", "slurm", "--nodes", "2"]
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
        """The node of each process that runs."""
        lines = self.cluster.command("squeue", "-h", "-s", "-j", self.number, "-o", "%j %N").splitlines()
        return {name: node for name, node in (line.split() for line in lines) if name not in ("batch", "extern")}

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
        """Nodes and phases of the processes, and the end of what the job and they printed."""
        steps = self.cluster.command("squeue", "-h", "-s", "-j", self.number, "-o", "%i %j %N %M")
        files = [self.directory.path / "slurm.log", *sorted(self.directory.logs.glob("*.log"))]
        printed = "\n".join(f"--- {f.name}\n{f.read_text()[-2500:]}" for f in files if f.exists())
        return f"steps\n{steps}\nphases {self.phases()}\n{printed}"


def end_processes_of(node: str) -> int:
    """Kill the processes of job steps on a node, as its loss does. Returns their number."""
    killed = 0
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"SLURMD_NODENAME={node}\0".encode() in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)
                killed += 1
        except OSError:
            continue
    return killed


def prove(folder: Path, steps: int = STEPS, lost_at: int = LOST_AT, preempted_at: int = PREEMPTED_AT) -> dict[str, Any]:
    """Run it on a cluster of two nodes; times, steps and accounts as JSON values."""
    began = time.monotonic()
    with SlurmCluster(folder / "cluster") as cluster:
        (folder / "runs").mkdir()
        started = time.monotonic()
        job = Job(cluster, folder / "runs")
        job.until_step(lost_at)
        before = job.places()
        lost = sorted(name for name, node in before.items() if node == "n2")
        at = time.monotonic()
        cluster.kill_node("n2")
        killed = end_processes_of("n2")
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
        finished = read_json(job.directory.finished_file)
        lines = job.steps()
        ledger = read_ledger(job.directory.store_file, rows=True)
        solved = [line["signals"]["solved"] for line in lines]
        return {
            "steps": steps,
            "finished": finished,
            "updates": [line["step"] for line in lines] == list(range(1, steps + 1)),
            "places": before,
            "lost": {"node": "n2", "processes": lost, "killed": killed, "places": after},
            "moved_seconds": round(moved_seconds, 1),
            "drained_after_step": drained_step,
            "drained_seconds": round(drained_seconds, 1),
            "drained": sorted(name for name, line in ends.items() if line.endswith(": finished")),
            "resumed": resumed,
            "staleness_max": max(line["staleness_max"] for line in lines),
            "solved_first": sum(solved[:3]) / 3,
            "solved_last": sum(solved[-5:]) / 5,
            "audit": ledger.audit(),
            "orders_in_flight": ledger.orders["in_flight"],
            "said": [
                line.replace(str(job.directory.path), "RUN")
                for line in (job.directory.path / "slurm.log").read_text().splitlines()
                if re.search(r"ended|again|stop|queue|resum|finished", line)
            ],
            "cluster_seconds": round(started - began, 1),
            "seconds": round(time.monotonic() - began, 1),
        }


def problems(found: dict[str, Any]) -> list[str]:
    """Sentences about what was lost; none in a good run."""
    checks = {
        "the run did not finish": found["finished"] is not None and found["finished"]["exit_code"] == 0,
        "an update is missing or was made twice": found["updates"],
        "no process was on the second node": len(found["lost"]["processes"]) >= 2,
        "a group was staler than staleness.max": found["staleness_max"] <= 1,
        "the accounts do not add up": found["audit"] == [] and found["orders_in_flight"] == 0,
        "a role did not drain": set(found["drained"]) >= {"actor-0", "actor-1", "learner", "replay"},
        "nothing was learned": found["solved_last"] > found["solved_first"],
    }
    return [sentence for sentence, holds in checks.items() if not holds]


def main() -> int:
    parser = argparse.ArgumentParser(description="A run on SLURM that loses a node and is preempted.")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    if missing := missing_programs():
        print(f"not there: {', '.join(missing)}. Install SLURM and munge (Debian: slurm-wlm munge)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = prove(Path(folder), options.steps)
    print(json.dumps(found, indent=2))
    options.out.write_text(json.dumps(found, indent=2) + "\n")
    for sentence in problems(found):
        print(sentence, file=sys.stderr)
    return 1 if problems(found) else 0


if __name__ == "__main__":
    sys.exit(main())
