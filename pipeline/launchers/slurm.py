"""SLURM: a batch job whose first node runs the supervisor, and a job step for each process.

``afterplay run FILE --on slurm`` submits the job. Inside a job, also one of ``salloc``, the same command runs it: the
supervisor starts each process by this module as a program (:func:`run_step`), which runs it by ``srun --overlap`` on
its node: SIGTERM is passed on to the process, and its exit code is that of the step.

SIGTERM means drain. SLURM sends it some time before the limit of the job (``--signal=B:TERM@SECONDS``), and before a
preemption where the cluster has ``PreemptParameters=send_user_signal``. A drained job puts itself back into the queue
and resumes from the run directory; ``scancel`` ends it for good. A job that loses a node other than the first
continues without it (``--no-kill``), unless engines or GPUs were there: then it drains, to get another node. SLURM also
keeps a job that has lost its first node; a step on the others (:func:`watch`) puts it back into the queue.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from pipeline.config.explain import taken_ports
from pipeline.config.load import ENVIRONMENT_PREFIX, dump
from pipeline.errors import ConfigurationError
from pipeline.launchers.launcher import Launch, require_program, run_program
from pipeline.runtime.children import module_command
from pipeline.runtime.process import ADDRESS, ExitCode
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically
from pipeline.supervisor.cluster import Cluster
from pipeline.supervisor.inventory import Inventory, Node, given_inventory, local_inventory
from pipeline.supervisor.plan import Place, Plan, plan
from pipeline.supervisor.run import empty_directory, require_unused_store, run, run_lock

JOB = "SLURM_JOB_ID"
NOTICE_SECONDS = 60
"""SLURM sends the signal up to a minute late, so the notice is so much longer than the drain."""
COMMAND_SECONDS_MAX = 60.0
"""For one command of SLURM."""
RETRY_SECONDS = 1.0
"""Between two attempts to ask SLURM's controller."""
WATCH = "watch"
WATCH_SECONDS = 30.0
"""Name of the step that watches the first node, and the time between two looks."""
RESTARTS = "AFTERPLAY_JOB_RESTARTS"
"""Environment variable of this start of a job and of its steps: how often SLURM had started the job before."""
SCRIPT, FILE, LOG = "slurm.sh", "slurm.yaml", "slurm.log"
"""Job script, its run file, and its output, in the run directory."""


def launch(request: Launch) -> int:
    """Submit a job, or run inside of one. Raises :class:`ConfigurationError`."""
    if request.dry_run or JOB not in os.environ:
        return submit(request)
    if request.arguments or request.nodes or request.gpus is not None:
        raise ConfigurationError(
            f"--nodes, --gpus and arguments for sbatch are for a new job, but this is already job {os.environ[JOB]} of "
            f"SLURM, which has its nodes: omit them, or unset {JOB} to submit another job"
        )
    return run_job(os.environ[JOB], request)


def submit(request: Launch) -> int:
    """Write script and run file, and submit them. The copy of the run file is what the job reads, so later changes of
    the original have no effect on it."""
    if not re.fullmatch(r"\d*", request.nodes):
        raise ConfigurationError(f"--nodes: expected a number, for SLURM chooses the nodes, got {request.nodes!r}")
    if not request.dry_run:
        require_program("sbatch", "run this on a login node of the cluster, or see the job with --dry-run")
    inventory = given_inventory(request.gpus, request.nodes or "1", Inventory((Node("here"),)))
    chosen = plan(request.config, inventory).fitting()
    directory = RunDirectory(request.config.run.path.absolute())
    folder = directory.path if request.out is None else request.out.absolute()
    text = job_script(chosen, request.arguments, folder)
    if request.dry_run and request.out is None:
        print(text, end="")
        return ExitCode.FINISHED
    if not request.dry_run:
        with run_lock(directory, mark=False):
            if request.fresh:
                require_unused_store(request.config, directory, fresh=True)
                run_program(["sbatch", "--test-only"], text)  # a job that is refused costs no run
                empty_directory(directory)
    placed = request.config.updated(run={"directory": directory.path.parent})
    write_bytes_atomically(folder / FILE, dump(placed).encode())
    write_bytes_atomically(folder / SCRIPT, text.encode())
    if request.dry_run:
        print(f"submit it with: sbatch {shlex.quote(str(folder / SCRIPT))}")
        return ExitCode.FINISHED
    number = command_output("sbatch", "--parsable", str(folder / SCRIPT)).split(";")[0].strip()
    print(
        f"submitted as job {number}: {folder / LOG} has its output, afterplay status {directory.path} its state, and "
        f"scancel {number} ends it"
    )
    return ExitCode.FINISHED


def job_script(chosen: Plan, arguments: Sequence[str], folder: Path) -> str:
    """The script for sbatch: its nodes, cores and GPUs are those of the plan. ``arguments`` come last and win."""
    config = chosen.config
    cores = Counter[str]()
    gpus: dict[str, set[str]] = {}
    for place in chosen.places:
        cores[place.node] += 0 if place.rule.once else place.cpus
        gpus.setdefault(place.node, set()).update(place.gpus)
    most = max(map(len, gpus.values()))
    options = [
        f"--job-name={config.run.name}",
        f"--nodes={len(gpus)}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(cores.values())}",
        *([f"--gpus-per-node={most}"] if most else []),
        f"--signal=B:TERM@{math.ceil(config.checkpoint.drain_seconds_max) + NOTICE_SECONDS}",
        "--requeue",
        "--no-kill",
        "--open-mode=append",
        f"--output={str(folder / LOG).replace('%', '%%')}",
        f"--chdir={Path.cwd()}",
        *arguments,
    ]
    command = module_command("pipeline.cli.app", "run", str(folder / FILE), "--on", "slurm")
    variables = f'unset "${{!{ENVIRONMENT_PREFIX}@}}"'  # of the shell that submits; the run file has their values
    lines = ["#!/bin/bash", *(f"#SBATCH {shlex.quote(option)}" for option in options), variables]
    lines.append(f"exec {shlex.join(command)}")
    return "\n".join(lines) + "\n"


def run_job(job: str, request: Launch) -> int:
    """Run to the end on the nodes of ``job``. If the run was stopped before, or ended because a node was lost, the job
    goes back into the queue. Only its first start empties the run directory: the next ones continue."""
    directory = RunDirectory(request.config.run.path.absolute())
    facts = job_facts(job)
    os.environ[RESTARTS] = restarts = facts.get("Restarts", "0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    code, lost = ExitCode.FINISHED, set[str]()
    try:
        inventory = job_inventory()
        if facts.get("BatchFlag") == "1" and len(inventory.nodes) > 1:
            start_watch(inventory, directory.path / LOG)
        cluster = Cluster(inventory, partial(step_command, inventory, directory.path))
        code = run(request.config, request.fresh and restarts == "0", cluster=cluster)
        lost = {node.name for node in inventory.nodes} - set(nodes_of(job))
    except SystemExit:  # SIGTERM, before the supervisor listens to it
        print("stopped by SIGTERM before the run began", flush=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # only the queue is left
    stopped = (lost or code in (ExitCode.FINISHED, ExitCode.FORCED)) and not directory.finished_file.exists()
    # The start before, on a first node that hangs, may hold the lock until that node is back or given up.
    waits = code == ExitCode.BUSY and restarts != "0"
    if (stopped or waits) and goes_back(job_facts(job)):
        print(f"job {job} goes back into the queue, and continues from {directory.path}", flush=True)
        command_output("scontrol", "requeue", job)
    return code


def job_facts(job: str) -> dict[str, str]:
    """Facts of ``scontrol show job``; none if SLURM has started the job again, for which this process, on a node that
    hung and came back, must do nothing."""
    facts = dict(re.findall(r"(\w+)=(\S*)", command_output("scontrol", "-o", "show", "job", job)))
    restarts = facts.get("Restarts")
    return facts if os.environ.get(RESTARTS, restarts) == restarts else {}


def goes_back(facts: Mapping[str, str]) -> bool:
    """True for a batch job that may be requeued and that nobody has cancelled."""
    return (facts.get("JobState"), facts.get("BatchFlag"), facts.get("Requeue")) == ("RUNNING", "1", "1")


def start_watch(inventory: Inventory, log: Path) -> None:
    """Start :func:`watch` on all nodes but the first. It ends with the job."""
    first, *others = (node.name for node in inventory.nodes)
    subprocess.Popen(
        [
            "srun", "--overlap", "--no-kill", f"--nodes={len(others)}", f"--ntasks={len(others)}",
            "--ntasks-per-node=1", f"--exclude={first}", f"--job-name={WATCH}", "--cpu-bind=none", "--mem=0",
            "--input=none", "--quiet", *module_command("pipeline.launchers.slurm", WATCH, str(log)),
        ],
    )  # fmt: skip


def watch(log: Path) -> None:
    """Once the first node is lost, and the supervisor with it, put the job back into the queue, or cancel it if it may
    not go back: SLURM would keep it without anybody who ends it."""
    job = os.environ[JOB]
    while True:
        time.sleep(WATCH_SECONDS)
        with suppress(ConfigurationError):  # the controller does not answer
            facts = job_facts(job)
            if facts.get("JobState") != "RUNNING" or facts["BatchHost"] in node_names(facts):
                continue
            back = goes_back(facts)
            with suppress(OSError), log.open("a") as file:  # the line matters less than the job
                file.write(
                    f"job {job} has lost its first node {facts['BatchHost']}, and "
                    f"{'goes back into the queue' if back else 'is cancelled'}\n"
                )
            command_output(*(("scontrol", "requeue") if back else ("scancel",)), job)


def job_inventory() -> Inventory:
    """The nodes of this job, this one first: GPUs and cores as a step sees them, addresses as SLURM knows them."""
    describe = module_command("pipeline.launchers.slurm", "describe")
    nodes = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    lines = command_output(
        "srun", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--cpu-bind=none",
        "--input=none", *describe,
    ).splitlines()  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for facts in (orjson.loads(line) for line in lines if line.startswith("{")):  # a TaskProlog may print others
        ports = facts.pop("taken_ports")
        found.setdefault(facts["name"], {"taken_ports": []}).update(facts)
        found[facts["name"]]["taken_ports"] += ports
    here, inventory = os.environ.get("SLURMD_NODENAME", ""), []
    for name, facts in sorted(found.items(), key=lambda item: (item[0] != here, item[0])):
        match = re.search(r"\bNodeAddr=(\S+)", command_output("scontrol", "-o", "show", "node", name))
        address, gpus, ports = match[1] if match else name, tuple(facts["gpus"]), tuple(facts["taken_ports"])
        inventory.append(Node(name, gpus, facts["cpus"], facts["memory_bytes"], address, ports))
    return Inventory(tuple(inventory), "; ".join({facts["lack"]: None for facts in found.values() if facts["lack"]}))


def step_command(inventory: Inventory, folder: Path, place: Place, command: Sequence[str]) -> list[str]:
    """Command on the first node that runs ``command`` as a step: on the node of the plan, or on another one if that is
    lost and the process needs neither its GPUs nor its address. The step's name has the run directory ``folder`` in it:
    several runs may share an allocation."""
    fixed = place.role == "engine" and len({node.address for node in inventory.nodes}) > 1
    nodes = sorted(inventory.nodes, key=lambda node: node.name != place.node)
    others = nodes[1:]
    turn = place.index % len(others) if others else 0
    return [
        *module_command("pipeline.launchers.slurm", "run"),
        f"{place.name}@{folder}",
        ",".join(f"{node.name}={node.address}" for node in (nodes[0], *others[turn:], *others[:turn])),
        "pinned" if place.gpus or fixed else "free",
        *(f"{name}={value}" for name, value in place.environment.items()),
        "--",
        *command,
    ]


def command_output(name: str, *arguments: str) -> str:
    """Standard output of a program of SLURM. Raises :class:`ConfigurationError` with what it said if it fails: one that
    asks the controller only after ``COMMAND_SECONDS_MAX``, for that may be starting again."""
    program, begun = require_program(name, "run this where SLURM is installed"), time.monotonic()
    while True:
        try:
            return run_program([program, *arguments], seconds_max=COMMAND_SECONDS_MAX).stdout
        except ConfigurationError:
            if name not in ("scontrol", "squeue") or time.monotonic() - begun > COMMAND_SECONDS_MAX:
                raise
        time.sleep(RETRY_SECONDS)


PASSED_ON = (signal.SIGTERM, signal.SIGCHLD)
"""Signals that a step waits for: the supervisor's, and the end of ``srun``."""
PORTS_A_LINE = 100


def describe_node() -> None:
    """Print cores, memory, GPUs and ports in use of this node as lines of JSON: ``srun`` mixes lines of several nodes
    that are longer than 1,024 bytes."""
    inventory, name, ports = local_inventory(), os.environ["SLURMD_NODENAME"], taken_ports()
    facts = asdict(inventory.nodes[0]) | {"name": name, "lack": inventory.lack, "taken_ports": ()}
    parts = [{"name": name, "taken_ports": ports[i : i + PORTS_A_LINE]} for i in range(0, len(ports), PORTS_A_LINE)]
    print(b"\n".join(map(orjson.dumps, [facts, *parts])).decode(), flush=True)


def choose_node(nodes: Sequence[str], alive: Sequence[str], pinned: bool) -> str | None:
    """The first of ``nodes`` if it is alive, else the next one that is; None: none is, or ``pinned`` and it is lost."""
    return next((node for node in (nodes[:1] if pinned else nodes) if node in alive), None)


def run_step(name: str, addresses: dict[str, str], pinned: bool, command: Sequence[str]) -> int:
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
        preexec_fn=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, PASSED_ON),
    )  # fmt: skip
    while (code := step.poll()) is None:
        # On SIGTERM srun itself would kill the step.
        if signal.sigwait(PASSED_ON) == signal.SIGTERM and not signal_steps(job, name, "TERM"):
            step.terminate()
    return code if code >= 0 else 128 - code


def nodes_of(job: str) -> list[str]:
    """Nodes that this start of a job has now. One that is lost leaves the list."""
    return node_names(job_facts(job))


def node_names(facts: Mapping[str, str]) -> list[str]:
    """The nodes in facts of a job."""
    nodes = facts.get("NodeList")
    return command_output("scontrol", "show", "hostnames", nodes).splitlines() if nodes else []


def signal_steps(job: str, name: str, kind: str) -> bool:
    """Send a signal to the steps of this name; False if there is none."""
    if not job_facts(job):
        return False
    shown = command_output("squeue", "-h", "-s", "-j", job, "-o", "%i %j").splitlines()
    found = [line.split(maxsplit=1) for line in shown]
    steps = [step for step, of in found if of.strip() == name]
    if steps:
        subprocess.run(["scancel", f"--signal={kind}", *steps], check=False, capture_output=True)
    return bool(steps)


def main(arguments: Sequence[str]) -> int:
    """``describe``, ``watch LOG``, or ``run NAME NODE=ADDRESS,… pinned|free VARIABLE=VALUE … -- COMMAND``."""
    if arguments[0] == "describe":
        describe_node()
        return ExitCode.FINISHED
    if arguments[0] == WATCH:
        watch(Path(arguments[1]))
    _, name, nodes, kind, *rest = arguments
    end = rest.index("--")
    addresses = dict(node.split("=", 1) for node in nodes.split(","))
    variables = [variable for variable in rest[:end] if not variable.startswith(f"{ADDRESS}=")]
    return run_step(name, addresses, kind == "pinned", [*variables, *rest[end + 1 :]])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
