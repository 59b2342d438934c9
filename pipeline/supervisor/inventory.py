"""Nodes that a run may use, with their cores, memory and GPUs: found on this machine, or given by options."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigurationError
from pipeline.runtime.processor import cores

VISIBLE = "CUDA_VISIBLE_DEVICES"
LIST_SECONDS_MAX = 60.0
"""For ``nvidia-smi``, which takes a fraction of a second where the driver is loaded. Without ``nvidia-persistenced``
each call loads it, for seconds on each GPU."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    name: str
    gpus: tuple[str, ...] = ()
    """Names for ``CUDA_VISIBLE_DEVICES`` on this machine: numbers, UUIDs or MIG devices."""
    cpus: int | None = None
    """Cores; None: unknown."""
    memory_bytes: int | None = None
    address: str = "127.0.0.1"
    """Address at which the other nodes reach it."""
    taken_ports: tuple[int, ...] | None = None
    """Ports there where no server could listen; None: unknown."""
    gpu_bytes: int | None = None
    """Memory of its smallest GPU; None: unknown."""

    @property
    def has_mig(self) -> bool:
        """True if its GPUs are MIG devices, of which CUDA shows a process only one."""
        return any(name.startswith("MIG-") for name in self.gpus)


@dataclass(frozen=True, slots=True)
class Inventory:
    """The nodes of a run; the first has the disk of the replay stage."""

    nodes: tuple[Node, ...]
    lack: str = ""
    """Reason for which no GPU was found."""

    def __post_init__(self) -> None:
        names = [node.name for node in self.nodes]
        if not names or len(set(names)) < len(names):
            raise ConfigurationError(f"expected nodes with different names, got {', '.join(names) or 'none'}")

    @property
    def gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the smallest GPU; None: unknown for some."""
        sizes = [node.gpu_bytes for node in self.nodes if node.gpus]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    @property
    def addresses(self) -> dict[str, str]:
        """Address of each node by its name."""
        return {node.name: node.address for node in self.nodes}

    @property
    def where(self) -> str:
        """The nodes, for sentences."""
        return self.nodes[0].name if len(self.nodes) == 1 else f"{len(self.nodes)} nodes"


def local_inventory(environment: Mapping[str, str] | None = None, torch_has_cuda: bool | None = None) -> Inventory:
    """This machine. Imports no torch: GPUs are those of ``nvidia-smi -L`` that ``CUDA_VISIBLE_DEVICES`` leaves, and
    none where PyTorch is a build for CPUs."""
    environment = os.environ if environment is None else environment
    node = Node("this machine", cpus=cores(), memory_bytes=_memory())
    if not (_builds_for_cuda() if torch_has_cuda is None else torch_has_cuda):
        return Inventory((node,), "PyTorch in this environment is a build for CPUs")
    listed, lack = list_gpus(environment.get("PATH"))
    gpus = visible_gpus(listed, environment.get(VISIBLE))
    if listed and not gpus:
        lack = f"{VISIBLE}={environment[VISIBLE]} leaves none of {len(listed)}"
    node = replace(node, gpus=gpus)
    if gpus and not node.has_mig:
        node = replace(node, gpu_bytes=_gpu_bytes(environment.get("PATH")))
    return Inventory((node,), lack)


COUNT_MAX = 10_000
"""A bound on nodes, and on the GPUs of one."""


def given_inventory(gpus: int | None, nodes: str, here: Inventory, gib: float | None = None) -> Inventory:
    """The inventory of ``--gpus N``, ``--nodes`` and ``--gpu-memory``: a number of nodes, or ``NAME:GPUS,NAME:GPUS``.
    Each node has ``gpus`` GPUs of ``gib`` GiB unless ``nodes`` says otherwise; cores and other memory are unknown.
    Raises :class:`ConfigurationError`."""
    size = None if gib is None else int(gib * 2**30)
    if nodes.isdecimal() and int(nodes) > COUNT_MAX:
        raise ConfigurationError(f"--nodes: expected at most {COUNT_MAX}, got {nodes}")
    if not nodes:
        if gpus is None:
            return here if size is None else replace(here, nodes=tuple(replace(n, gpu_bytes=size) for n in here.nodes))
        return Inventory((Node("a machine", _numbered(gpus), gpu_bytes=size),), "--gpus is 0")
    parts = [f"node-{i}" for i in range(int(nodes))] if nodes.isdecimal() else nodes.split(",")
    found = []
    for part in parts:
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?::(\d+))?", part.strip())
        if match is None:
            raise ConfigurationError(f"--nodes: expected a number, or NAME:GPUS,NAME:GPUS, got {nodes!r}")
        number = int(match[2]) if match[2] else gpus or 0
        if number > COUNT_MAX:
            raise ConfigurationError(f"--nodes: expected at most {COUNT_MAX} GPUs on a node, got {number}")
        found.append(Node(match[1], _numbered(number), gpu_bytes=size, address=match[1]))
    return Inventory(tuple(found), "--nodes and --gpus give none")


def _numbered(gpus: int) -> tuple[str, ...]:
    return tuple(map(str, range(gpus)))


@dataclass(frozen=True, slots=True)
class _Gpu:
    """One line of ``nvidia-smi -L``, with the MIG devices below it."""

    uuid: str
    """Empty if unknown."""
    mig: tuple[str, ...] = ()


def list_gpus(path: str | None = None) -> tuple[tuple[_Gpu, ...], str]:
    """The GPUs of the driver, and a reason if there are none. ``path``: where programs are looked for."""
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
        return tuple(_Gpu("") for _ in devices), "" if devices else "no NVIDIA driver was found"
    try:
        done = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=LIST_SECONDS_MAX, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi -L failed: {error}"
    if done.returncode:
        return (), f"nvidia-smi -L failed: {(done.stdout + done.stderr).strip()[:200]}"
    found = parse_list(done.stdout)
    return found, "" if found else "nvidia-smi -L lists none"


def _gpu_bytes(path: str | None) -> int | None:
    """Memory of the smallest GPU of the driver; None where ``nvidia-smi`` does not tell."""
    query = [shutil.which("nvidia-smi", path=path) or "", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=LIST_SECONDS_MAX, stdin=subprocess.DEVNULL, check=True
        )
        return min(int(line) for line in done.stdout.split()) * 2**20
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def parse_list(text: str) -> tuple[_Gpu, ...]:
    """GPUs from the output of ``nvidia-smi -L``."""
    found: list[_Gpu] = []
    for line in text.splitlines():
        if match := re.match(r"GPU \d+: .*\(UUID: (GPU-[^)]+)\)", line):
            found.append(_Gpu(match[1]))
        elif found and (match := re.match(r"\s+MIG .*\(UUID: (MIG-[^)]+)\)", line)):
            found[-1] = _Gpu(found[-1].uuid, (*found[-1].mig, match[1]))
    return tuple(found)


def visible_gpus(there: Sequence[_Gpu], setting: str | None) -> tuple[str, ...]:
    """Names of the GPUs that processes may use. As CUDA reads it, ``setting`` ends at its first name that does not
    exist. GPUs have numbers, but UUIDs where one of them is divided into MIG devices."""
    if setting is None:
        if any(gpu.mig for gpu in there):
            return tuple(name for gpu in there for name in gpu.mig or (gpu.uuid,))
        return _numbered(len(there))
    uuids = [name for gpu in there for name in (gpu.uuid, *gpu.mig) if name]
    found: list[str] = []
    for name in (part.strip() for part in setting.split(",")):
        if name.isdecimal():
            exists = int(name) < len(there)
        else:
            exists = name.startswith(("GPU-", "MIG-")) and (not uuids or any(uuid.startswith(name) for uuid in uuids))
        if not exists or not there:
            break
        found.append(name)
    return tuple(dict.fromkeys(found))


def _builds_for_cuda() -> bool:
    """False if PyTorch is installed as a build for CPUs. Reads its ``version.py`` and imports nothing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return True
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return True
    return re.search(r"^cuda\b[^=]*=\s*None", text, re.MULTILINE) is None


def _memory() -> int:
    """Bytes of the machine, or of the container where it has less."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return there
    return min(there, int(limit)) if limit.isdecimal() else there
