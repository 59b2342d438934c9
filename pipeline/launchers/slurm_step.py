"""Steps of a SLURM job: the description of a node, and one process of a run on one of the nodes.

The supervisor starts ``run``, which turns into ``srun``: SIGTERM is passed on to the process, and its exit code is
ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict

import orjson

from pipeline.runtime.process import ADDRESS, ExitCode
from pipeline.supervisor.inventory import local_inventory


def describe() -> None:
    """Print cores, memory and GPUs of this node as one line of JSON."""
    inventory = local_inventory()
    facts = asdict(inventory.nodes[0]) | {"name": os.environ["SLURMD_NODENAME"], "lack": inventory.lack}
    print(orjson.dumps(facts).decode(), flush=True)


def choose_node(nodes: Sequence[str], alive: Sequence[str], pinned: bool) -> str | None:
    """The first of ``nodes`` if it is alive, else the next one that is; None: none is, or ``pinned`` and it is lost."""
    return next((node for node in (nodes[:1] if pinned else nodes) if node in alive), None)


def run(name: str, addresses: dict[str, str], pinned: bool, command: Sequence[str]) -> None:
    """Become the step ``name`` on the first of the nodes in ``addresses`` that the job still has.

    A process that needs the GPUs of a lost node ends the run instead: its parent, the supervisor, gets SIGTERM, and the
    job goes back into the queue for another node.
    """
    job = os.environ["SLURM_JOB_ID"]
    node = choose_node(tuple(addresses), nodes_of(job), pinned)
    if node is None:
        print(f"{name}: its node {next(iter(addresses))} is lost, and with it the GPUs: ending the run", flush=True)
        os.kill(os.getppid(), signal.SIGTERM)
        sys.exit(ExitCode.FAILED)
    end_steps(job, name)
    step = [
        "srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", f"--job-name={name}", "--cpu-bind=none",
        "--mem=0", "--input=none", "--kill-on-bad-exit=0", "env", f"{ADDRESS}={addresses[node]}",
    ]  # fmt: skip
    os.execvp("srun", [*step, *command])


def nodes_of(job: str) -> list[str]:
    """Nodes that a job has now. One that is lost leaves the list."""
    return _lines("scontrol", "show", "hostnames", *_lines("squeue", "-h", "-j", job, "-o", "%N"))


def end_steps(job: str, name: str) -> None:
    """Kill what is left of earlier steps of this name: ``srun`` can be killed without its process."""
    for line in _lines("squeue", "-h", "-s", "-j", job, "-o", "%i %j"):
        step, _, found = line.strip().partition(" ")
        if found.strip() == name:
            with suppress(subprocess.CalledProcessError):  # it has ended by itself
                subprocess.run(["scancel", "--signal=KILL", step], check=True, capture_output=True)


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


def main(arguments: Sequence[str]) -> None:
    """``describe``, or ``run NAME NODE=ADDRESS,… pinned|free VARIABLE=VALUE … -- COMMAND``."""
    if arguments[0] == "describe":
        return describe()
    _, name, nodes, kind, *rest = arguments
    end = rest.index("--")
    addresses = dict(node.split("=", 1) for node in nodes.split(","))
    variables = [variable for variable in rest[:end] if not variable.startswith(f"{ADDRESS}=")]
    run(name, addresses, kind == "pinned", [*variables, *rest[end + 1 :]])


if __name__ == "__main__":
    main(sys.argv[1:])
