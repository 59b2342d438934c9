"""A Ray cluster of two nodes on one machine: each in a network namespace of its own, joined by a pair of links.

``ip netns exec`` gives each command a mount namespace too, so each node has its own ``/tmp/ray``, and may have a disk
that the other does not see. Needs root, ``ip`` and Ray.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import AfterplayError
from pipeline.runtime.run_directory import RunDirectory
from tests.support.run_handle import STOP_SECONDS_MAX, RunHandle

ROOT = Path(__file__).resolve().parents[2]
PORT = 6379
START_ATTEMPTS = 3
"""Ray's node manager gives up when its agent is slow, as it is on a busy machine."""
START_SECONDS_MAX = 120.0
GONE_SECONDS_MAX = 30.0
END_SECONDS_MAX = 600.0
OWN = (b"pipeline.cli.app", b"pipeline/runtime/children.py", b"ray::Keeper")
"""Parts of the command lines of a run's processes."""


def missing() -> str:
    """Reason for which there can be no such cluster here; empty if there can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (pip install '.[ray]')"
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "network namespaces need root and the program ip"
    probe = f"afterplay-{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"ip netns add failed: {done.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True, check=False)
    return ""


@dataclass(frozen=True, slots=True)
class RayNode:
    """One node. ``disk``: a folder and the path at which only this node sees it. ``gpus``: what Ray is told it has."""

    namespace: str
    address: str
    folder: Path
    cpus: int
    disk: tuple[Path, Path] | None = None
    gpus: int = 0

    def command(self, command: Sequence[str]) -> list[str]:
        """``command`` in the namespaces of this node."""
        mounts = [(self.folder, Path("/tmp/ray")), *([self.disk] if self.disk else [])]
        script = " && ".join(f"mount --bind {shlex.quote(str(a))} {shlex.quote(str(b))}" for a, b in mounts)
        return ["ip", "netns", "exec", self.namespace, "sh", "-c", f'{script} && exec "$@"', "sh", *command]

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in found.stdout.split()]

    def pid_of_rank(self, rank: int) -> int:
        """Process of the learner's rank of that number. Raises :class:`AfterplayError` if it is not here."""
        for pid in self.pids():
            with suppress(ProcessLookupError, FileNotFoundError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return pid
        raise AfterplayError(f"expected rank {rank} of the learner in {self.namespace}, found none")

    def kill(self) -> None:
        """SIGKILL to everything in the namespace, as when the machine loses its power."""
        deadline = time.monotonic() + GONE_SECONDS_MAX
        while pids := self.pids():
            self._signal(pids, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise AfterplayError(f"{len(pids)} processes in {self.namespace} survive SIGKILL")
            time.sleep(0.05)

    def processes(self) -> list[int]:
        """Processes of the run here: those of its roles, and their keepers and reapers."""
        return [pid for pid in self.pids() if any(word in _command_line(pid) for word in OWN)]

    def stop(self) -> None:
        """SIGSTOP to everything in the namespace, as when the machine hangs: no connection is closed."""
        stopped: list[int] = []
        while (pids := self.pids()) != stopped:  # until none has started another meanwhile
            self._signal(pids, signal.SIGSTOP)
            stopped = pids

    def go_on(self) -> None:
        """SIGCONT to everything in the namespace."""
        self._signal(self.pids(), signal.SIGCONT)

    def until_ended(self, pids: Sequence[int]) -> None:
        """Wait until none of ``pids`` is here any more. Raises :class:`AfterplayError`."""
        deadline = time.monotonic() + END_SECONDS_MAX
        while left := set(pids).intersection(self.pids()):
            if time.monotonic() > deadline:
                raise AfterplayError(f"in {self.namespace} there is still {[_command_line(pid) for pid in left]}")
            time.sleep(0.05)

    def _signal(self, pids: Sequence[int], number: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class RayCluster:
    """``head`` and ``worker``; the driver of a run is on the head."""

    def __init__(
        self, folder: Path, head_cpus: int, worker_cpus: int, worker_disk: tuple[Path, Path] | None, gpus: int
    ) -> None:
        tag = f"ap{os.getpid()}"
        self.head = RayNode(f"{tag}a", "10.77.0.1", folder / "a", head_cpus, gpus=gpus)
        self.worker = RayNode(f"{tag}b", "10.77.0.2", folder / "b", worker_cpus, worker_disk, gpus)
        self._folder = folder

    def start(self, node: RayNode) -> None:
        """Start Ray on ``node``; the head first. Raises :class:`AfterplayError`."""
        where = (
            [f"--address={self.head.address}:{PORT}"]
            if node is self.worker
            else ["--head", f"--port={PORT}", "--include-dashboard=false"]
        )
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where]
        command += [f"--node-ip-address={node.address}", f"--num-cpus={node.cpus}", f"--num-gpus={node.gpus}"]
        command.append("--disable-usage-stats")
        for _ in range(START_ATTEMPTS):
            log = self._folder / f"{node.namespace}.log"
            with log.open("ab") as output:
                done = subprocess.run(
                    node.command(command),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    timeout=START_SECONDS_MAX,
                    check=False,
                )
            if done.returncode == 0:
                return
            node.kill()
        raise AfterplayError(f"ray start failed {START_ATTEMPTS} times: {log.read_text()[-2000:]}")

    def cut(self) -> None:
        """Drop every packet between the two nodes, as a switch that fails does: each sends to an address of Ethernet
        that nobody has."""
        self._reach("replace", "lladdr", "02:00:00:00:00:00", "nud", "permanent")

    def mend(self) -> None:
        """Pass packets again."""
        self._reach("delete")

    def _reach(self, verb: str, *how: str) -> None:
        for node, other in ((self.head, self.worker), (self.worker, self.head)):
            _ip("-n", node.namespace, "neighbour", verb, other.address, *how, "dev", f"{node.namespace}-l")

    def reserve(self, cpus: int) -> None:
        """Take cores of the head, so that what needs more than the others goes to the worker."""
        bundle = {"CPU": cpus, f"node:{self.head.address}": 0.001}
        self._tell(
            f"ray.get(ray.util.placement_group([{bundle!r}], name='reserved', lifetime='detached').ready(), timeout=60)"
        )

    def release(self) -> None:
        """Give them back."""
        self._tell("ray.util.remove_placement_group(ray.util.get_placement_group('reserved'))")

    def _tell(self, statement: str) -> None:
        program = f"import ray; ray.init(address='{self.head.address}:{PORT}', namespace='tests'); {statement}"
        command = self.head.command([sys.executable, "-c", program])
        subprocess.run(command, check=True, env=_environment(), timeout=START_SECONDS_MAX, capture_output=True)

    @contextmanager
    def run(self, file: Path, name: str, overrides: Sequence[str]) -> Iterator[RunHandle]:
        """``afterplay run FILE --on ray`` on the head."""
        command = [sys.executable, "-m", "pipeline.cli.app", "run", str(file), "--on", "ray"]
        for override in (f"run.directory={self._folder}", f"run.name={name}", *overrides):
            command += ["--set", override]
        output = self._folder / f"{name}.out"
        with output.open("wb") as sink:
            process = subprocess.Popen(
                self.head.command(command),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=_environment() | {"RAY_ADDRESS": f"{self.head.address}:{PORT}"},
                start_new_session=True,
            )
        try:
            yield RunHandle(process, RunDirectory(self._folder / name), output)
        finally:
            if process.poll() is None:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_SECONDS_MAX)


@contextmanager
def two_nodes(
    folder: Path,
    head_cpus: int = 16,
    worker_cpus: int = 4,
    worker_disk: tuple[Path, Path] | None = None,
    gpus: int = 0,
) -> Iterator[RayCluster]:
    """A cluster with Ray on both nodes; all its processes are killed at the end. ``gpus``: of each node."""
    cluster = RayCluster(folder, head_cpus, worker_cpus, worker_disk, gpus)
    nodes = (cluster.head, cluster.worker)
    Path("/tmp/ray").mkdir(exist_ok=True)
    try:
        for node in nodes:
            node.folder.mkdir(parents=True, exist_ok=True)
            _ip("netns", "add", node.namespace)
        first, second = (f"{node.namespace}-l" for node in nodes)
        _ip("link", "add", first, "netns", nodes[0].namespace, "type", "veth", "peer", "name", second, "netns",
            nodes[1].namespace)  # fmt: skip
        for node, link in zip(nodes, (first, second), strict=True):
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", link)
            _ip("-n", node.namespace, "link", "set", "lo", "up")
            _ip("-n", node.namespace, "link", "set", link, "up")
            _ip("-n", node.namespace, "route", "add", "default", "dev", link)
        for node in nodes:
            cluster.start(node)
        yield cluster
    finally:
        for node in nodes:
            with suppress(subprocess.CalledProcessError):
                node.kill()
                _ip("netns", "delete", node.namespace)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": "0"}
