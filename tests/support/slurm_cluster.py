"""A SLURM cluster on this machine's loopback: munged, slurmctld, and a slurmd for each of several nodes.

Everything is below one folder and belongs to this user; nothing is installed and no service of the machine is touched.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
START_SECONDS_MAX = 30.0
LOOK_SECONDS = 0.1
END_SECONDS_MAX = 20.0
CONFIGURATION = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SlurmctldParameters=preempt_send_user_signal
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""
GRACE_SECONDS = 120
"""Time that a job of the first partition has to end when a job of the partition ``urgent`` needs its nodes."""


def missing_programs() -> list[str]:
    """Programs of SLURM that are not on the PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None and not Path("/usr/sbin", name).exists()]


class SlurmCluster:
    """Nodes ``n1``, ``n2`` …, all on 127.0.0.1, or with ``own_addresses`` on 127.0.0.1, 127.0.0.2 …. ``environment`` is
    for clients."""

    def __init__(self, folder: Path, nodes: int = 2, cpus: int = 16, own_addresses: bool = False) -> None:
        self.folder = folder
        self._own_addresses = own_addresses
        self.nodes = [f"n{i + 1}" for i in range(nodes)]
        self._cpus = cpus
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._stopped: dict[str, set[int]] = {}
        self.environment: Mapping[str, str] = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def __enter__(self) -> SlurmCluster:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        folder.chmod(0o755)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._spawn(
            "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
            f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed",
        )  # fmt: skip
        self.until(lambda: (folder / "munge.socket").exists(), "munged")
        ports = _free_ports(1 + len(self.nodes))
        host = socket.gethostname()
        lines = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.{i if self._own_addresses else 1} Port={port} "
            f"CPUs={self._cpus} RealMemory=1000000 State=UNKNOWN"
            for i, (node, port) in enumerate(zip(self.nodes, ports[1:], strict=True), 1)
        ]
        text = CONFIGURATION.format(
            host=host, port=ports[0], user=getpass.getuser(), folder=folder, nodes="\n".join(lines), grace=GRACE_SECONDS
        )
        (folder / "slurm.conf").write_text(text)
        self._spawn("slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: set(self.states().values()) == {"IDLE"}, "the nodes")

    def start_node(self, node: str) -> None:
        (self.folder / node).mkdir(exist_ok=True)
        self._spawn("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> int:
        """Lose a node: its daemon is killed, the controller told that it is down, as a cloud's hook does, and the
        processes of job steps are killed. Returns their number."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=preempted")
        tasks = self.tasks(node)
        signal_all(tasks, signal.SIGKILL)
        return len(tasks)

    def stop_node(self, node: str) -> set[int]:
        """Let a node stand still, as one that hangs: its daemon, the daemons of its steps, and their processes. Returns
        those of its steps."""
        self._stopped[node] = stopped = {self._daemons[node].pid}
        while (tasks := self.tasks(node)).keys() - stopped:  # until none has started another meanwhile
            stopped |= {*tasks, *tasks.values()} - {1}
            signal_all(stopped, signal.SIGSTOP)
        return stopped - {self._daemons[node].pid}

    def continue_node(self, node: str) -> None:
        """Let it go on."""
        signal_all(self._stopped.pop(node), signal.SIGCONT)

    def tasks(self, node: str) -> dict[int, int]:
        """Processes of job steps on a node, and the parent of each."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if f"SLURMD_NODENAME={node}\0".encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def states(self) -> dict[str, str]:
        """State of each node; empty while the controller does not answer."""
        done = self._run("sinfo", "-h", "-N", "-o", "%N %T")
        return {line.split()[0]: line.split()[1].upper() for line in done.stdout.splitlines()}

    def job_state(self, job: str) -> str:
        """For example PENDING, RUNNING, COMPLETED."""
        shown = self.command("scontrol", "-o", "show", "job", job)
        return next(word for word in shown.split() if word.startswith("JobState=")).removeprefix("JobState=")

    def command(self, *arguments: str) -> str:
        """Standard output of a program of SLURM."""
        done = self._run(*arguments)
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments)}: {done.stderr}")
        return done.stdout

    def stop(self) -> None:
        """End all jobs, then the daemons."""
        for node in list(self._stopped):
            self.continue_node(node)
        if "slurmctld" in self._daemons:
            self._run("scancel", "--me")
            deadline = time.monotonic() + END_SECONDS_MAX
            while time.monotonic() < deadline and self._run("squeue", "-h").stdout.strip():
                time.sleep(LOOK_SECONDS)
        for name in sorted(self._daemons, key=lambda name: name == "munged"):
            daemon = self._daemons[name]
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(END_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, env=self.environment, capture_output=True, text=True, timeout=60, check=False)

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        path = shutil.which(program) or f"/usr/sbin/{program}"
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments], env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def until(self, ready, what: str) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not ready():
            dead = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in self.folder.glob("*.out"))
                raise RuntimeError(f"{what} did not start ({', '.join(dead) or 'no answer'}):\n{logs}")
            time.sleep(LOOK_SECONDS)


def signal_all(pids: Iterable[int], number: int) -> None:
    """Send a signal to those that are still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
