"""Steps of a SLURM job: the description of a node, and one process of a run on one of the nodes.

The supervisor starts ``run`` for each process: SIGTERM is passed on to the process, and its exit code is ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

import orjson

from pipeline.config.explain import taken_ports
from pipeline.runtime.process import ADDRESS, ExitCode
from pipeline.supervisor.inventory import local_inventory

PASSED_ON = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that a step waits for: the supervisor's, and the end of ``srun``."""


def describe() -> None:
    """Print cores, memory, GPUs and ports in use of this node as one line of JSON."""
    inventory = local_inventory()
    known = {"name": os.environ["SLURMD_NODENAME"], "taken_ports": taken_ports(), "lack": inventory.lack}
    facts = asdict(inventory.nodes[0]) | known
    print(orjson.dumps(facts).decode(), flush=True)


def choose_node(nodes: Sequence[str], alive: Sequence[str], pinned: bool) -> str | None:
    """The first of ``nodes`` if it is alive, else the next one that is; None: none is, or ``pinned`` and it is lost."""
    return next((node for node in (nodes[:1] if pinned else nodes) if node in alive), None)


def run(name: str, addresses: dict[str, str], pinned: bool, command: Sequence[str]) -> int:
    """Run the step ``name`` on the first of the nodes in ``addresses`` that the job still has; returns its exit code.

    If one that is ``pinned`` to its node has lost it, the code is that of errors that no restart fixes: the
    supervisor drains, and the job goes back into the queue for another node.
    """
    job = os.environ["SLURM_JOB_ID"]
    node = choose_node(tuple(addresses), nodes_of(job), pinned)
    if node is None:
        print(f"{name}: its node {next(iter(addresses))} is lost, and it cannot move: ending the run", flush=True)
        return ExitCode.CONFIGURATION
    signal_steps(job, name, "KILL")  # srun can be killed without its process
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    step = subprocess.Popen(
        [
            "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={name}",
            "--cpu-bind=none", "--mem=0", "--input=none", "--quiet", "env", f"{ADDRESS}={addresses[node]}", *command,
        ],
        preexec_fn=unblock,
    )  # fmt: skip
    while (code := step.poll()) is None:
        # On SIGTERM srun itself would kill the step.
        if signal.sigwait(PASSED_ON) == signal.SIGTERM and not signal_steps(job, name, "TERM"):
            step.terminate()
    return code if code >= 0 else 128 - code


def unblock() -> None:
    """Let a new program have the signals that we wait for."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def nodes_of(job: str) -> list[str]:
    """Nodes that a job has now. One that is lost leaves the list."""
    return _lines("scontrol", "show", "hostnames", *_lines("squeue", "-h", "-j", job, "-o", "%N"))


def signal_steps(job: str, name: str, kind: str) -> bool:
    """Send a signal to the steps of this name; False if there is none."""
    found = [line.split(maxsplit=1) for line in _lines("squeue", "-h", "-s", "-j", job, "-o", "%i %j")]
    steps = [step for step, of in found if of.strip() == name]
    if steps:
        subprocess.run(["scancel", f"--signal={kind}", *steps], check=False, capture_output=True)
    return bool(steps)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main(arguments: Sequence[str]) -> int:
    """``describe``, or ``run NAME NODE=ADDRESS,… pinned|free VARIABLE=VALUE … -- COMMAND``."""
    if arguments[0] == "describe":
        describe()
        return ExitCode.FINISHED
    _, name, nodes, kind, *rest = arguments
    end = rest.index("--")
    addresses = dict(node.split("=", 1) for node in nodes.split(","))
    variables = [variable for variable in rest[:end] if not variable.startswith(f"{ADDRESS}=")]
    return run(name, addresses, kind == "pinned", [*variables, *rest[end + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
