"""Rank group of a distributed learner: rendezvous, and collectives over small numpy arrays and over shards.

Arrays travel over gloo from the CPU, weights and gradients over the backend of the device. Every collective ends within
the group's timeout, and at once when gloo sees that a peer's connection closed. Rank and size of this process come from
the environment that torchrun sets.

gloo takes the address that the machine's own name resolves to. On many machines that is a loopback address, at which
no other one reaches it. A launcher sets the address of its machine in each process, which chooses the interface here.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from learner.data.division import divide_with_context
from learner.data.microbatch import Form
from learner.data.rows import Row, TokenScores
from learner.distributed.context import ContextGroup
from learner.distributed.messages import CommandRows, pack, pack_command, unpack, unpack_command
from learner.distributed.ranks import Interrupt, Ranks, T, local_part, resolve_device
from learner.observability.statistics import TokenValues, Weights
from pipeline.config.learner import LearnerConfig
from pipeline.errors import ConfigurationError, Interrupted, TrainingError
from pipeline.runtime.process import ADDRESS

VARIABLE = "GLOO_SOCKET_IFNAME"
"""Environment variable in which gloo reads the name of an interface."""
SIOCGIFADDR = 0x8915
"""Request for the address of an interface (Linux)."""
NAME_BYTES_MAX = 15
"""Longest name of an interface (Linux)."""
_STOP = 1 << 32
"""Larger than any code."""
BUCKET_BYTES = 2**28
"""Bytes of gradients that replicas sum at once: a copy of so many beside the gradients."""


def choose_interface() -> None:
    """Let gloo use the interface with the address that a launcher told, unless the user has chosen one."""
    address = os.environ.get(ADDRESS)
    if address and VARIABLE not in os.environ and (name := interface_of(address)) is not None:
        os.environ[VARIABLE] = name


def interface_of(address: str) -> str | None:
    """Name of the interface with this address, of which a name is resolved. None for a loopback address, where no
    interface has it, and where the system cannot be asked (IPv6, macOS)."""
    if sys.platform != "linux":
        return None
    import fcntl

    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        address = socket.gethostbyname(address)
        if address.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:NAME_BYTES_MAX])
            with suppress(OSError):  # it has no address
                if socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24]) == address:
                    return name
    return None


class RankGroup(Ranks):
    """One of several ranks. ``interrupt`` stops them at their next agreement.

    The mesh has two dimensions: each of ``replicas`` holds all weights, divided among its ranks (shards). The ranks of
    a replica follow one another, so that they are neighbours. Within a replica weights are gathered and gradients
    reduced in every micro-batch; between replicas gradients are summed once an optimizer step.

    ``torch.distributed`` must be initialised (:func:`join`), and ``replicas`` divide the number of ranks.
    """

    def __init__(
        self,
        device: torch.device,
        interrupt: Interrupt,
        timeout_seconds: float,
        replicas: int = 1,
        context_ranks: int = 1,
    ) -> None:
        self.interrupt = interrupt
        self._lock = threading.Lock()
        self._worker: int | None = None
        """Thread that works with the other ranks."""
        self._rows = CommandRows()
        """Rows of the command under way."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        timeout = timedelta(seconds=timeout_seconds)
        shape, names = (replicas, self.size // replicas), ("replicas", "shards")
        mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self.mesh = mesh["shards"]
        """The ranks of this replica, among which weights are divided."""
        self.replica, self.shard = mesh.get_local_rank("replicas"), mesh.get_local_rank("shards")
        self.replicas = replicas
        self._replicas = mesh.get_group("replicas")
        """This rank and those with the same shard."""
        self._device = device
        self._arrays = dist.new_group(backend="gloo", timeout=timeout)
        self.saving = dist.new_group(backend="gloo", timeout=timeout)
        """Group of the threads that write checkpoints during training."""
        if context_ranks > 1:
            group, _ = dist.new_subgroups(context_ranks, timeout=timeout)  # type: ignore[no-untyped-call]
            self.context = ContextGroup(dist.get_rank(group), context_ranks, group)

    def mine(self, rows: Sequence[Row], form: Form, tokens_max: int) -> tuple[list[int], list[int]]:
        """Rank 0 divides the rows of a command, and sends each rank its own. Other rows every rank has, and divides."""
        context = 1 if self.context is None else self.context.size
        if self.size == 1 or not rows or rows[0] not in self._rows:
            return divide_with_context(rows, self.size, context, tokens_max, form)[self.rank]
        if self.rank:
            facts, arrays = unpack(self._receive())
            if size := facts["sizes"][self.rank]:
                message = torch.empty(size, dtype=torch.uint8)
                dist.recv(message, 0, group=self._arrays)
                self._rows.take(message.numpy())
            owners, together = arrays["owners"], arrays["together"]
            shared = together & (owners // context == self.rank // context)
            return np.flatnonzero(shared).tolist(), np.flatnonzero(~together & (owners == self.rank)).tolist()
        parts = divide_with_context(rows, self.size, context, tokens_max, form)
        owners, together = np.zeros(len(rows), np.int32), np.zeros(len(rows), np.bool_)
        messages = [np.zeros(0, np.uint8)]
        for rank in range(1, self.size):
            divided, alone = parts[rank]
            owners[divided + alone] = rank
            messages.append(self._rows.message([rows[i] for i in divided + alone], rank))
        together[[i for divided, _ in parts for i in divided]] = True
        self._send(pack({"sizes": [len(message) for message in messages]}, {"owners": owners, "together": together}))
        sent = [(rank, torch.from_numpy(message)) for rank, message in enumerate(messages) if len(message)]
        for work in [dist.isend(message, rank, group=self._arrays) for rank, message in sent]:
            assert work is not None, "this rank belongs to the group"
            work.wait()
        return parts[0]

    def whole_row(self, row: Row) -> Row:
        return self._rows.whole(row)

    @contextmanager
    def together(
        self,
        command: str,
        rows: Sequence[Row] = (),
        facts: Mapping[str, Any] | None = None,
        scores: TokenScores | None = None,
    ) -> Iterator[None]:
        if self.rank or self._worker == threading.get_ident():
            yield
            return
        with self._lock:
            self._worker = threading.get_ident()
            try:
                self._rows = CommandRows(rows, self.size)
                self._send(pack_command(command, rows, facts or {}, scores))
                yield
            finally:
                self._worker, self._rows = None, CommandRows()

    def end(self) -> None:
        """Rank 0: end the others."""
        with self.together("end"):
            pass

    def heartbeat(self) -> None:
        """Rank 0: send a heartbeat, unless it is at work with the others, or another thread is."""
        if self._lock.acquire(blocking=False):
            try:
                self._send(pack_command("heartbeat"))
            finally:
                self._lock.release()

    def agree(self, code: int = 0) -> int:
        worst = self._largest(_STOP if self.interrupt.is_set() else code)
        if worst == _STOP:
            raise Interrupted
        return worst

    def padded(self, parts: list[T]) -> list[T | None]:
        return [*parts, *[None] * (self._largest(len(parts)) - len(parts))]

    def summed(self, values: Sequence[float]) -> list[float]:
        return self._reduced(np.asarray(values, np.float64), dist.ReduceOp.SUM).tolist()  # type: ignore[no-any-return]

    def _largest(self, code: int) -> int:
        return int(self._reduced(np.asarray([code], np.int64), dist.ReduceOp.MAX)[0])

    def merged(self, arrays: tuple[npt.NDArray[np.float32], ...]) -> tuple[npt.NDArray[np.float32], ...]:
        if not arrays:
            return arrays
        joined = self._reduced(np.stack(arrays), dist.ReduceOp.SUM)
        return tuple(joined)

    def ratios(self, weights: Weights) -> Weights:
        count, total, squares = self.summed([weights.count, weights.total, weights.total_squared])
        extremes = np.asarray([-weights.smallest, weights.largest], np.float64)
        smallest, largest = self._reduced(extremes, dist.ReduceOp.MAX).tolist()
        return Weights(int(count), total, squares, -smallest, largest)

    def values(self, values: list[TokenValues]) -> list[TokenValues]:
        own = {f.name: getattr(TokenValues.join(values), f.name) for f in fields(TokenValues)} if values else {}
        return [TokenValues(**arrays) for _, arrays in self.everyones({}, own) if arrays]

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) and not self.replica else tensor

    def sum_replicas(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        if self.replicas == 1:
            return
        for bucket in _buckets([local_part(p.grad) for p in parameters if p.grad is not None]):
            joined = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(joined, group=self._replicas)
            for gradient, part in zip(bucket, torch.split(joined, [g.numel() for g in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))
        on_gpu = self._device.type == "cuda"
        state = self.of_first_replica(torch.cuda.get_rng_state() if on_gpu else torch.get_rng_state())
        (torch.cuda if on_gpu else torch).set_rng_state(state)

    def of_first_replica(self, tensor: Tensor) -> Tensor:
        if self.replicas == 1:
            return tensor
        copy = tensor.to(self._device, copy=True)
        dist.broadcast(copy, group=self._replicas, group_src=0)
        return copy.to(tensor.device)

    def divide(self, module: torch.nn.Module) -> None:
        fully_shard(module, mesh=self.mesh, reshard_after_forward=True)
        sum_gradients(module)

    def everyones(self, header: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> list[Any]:
        """Header and arrays of every rank, in order of rank."""
        message, sizes = pack(header, arrays), np.zeros(self.size, np.int64)
        sizes[self.rank] = len(message)
        sizes = self._reduced(sizes, dist.ReduceOp.SUM)
        own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        own[: len(message)] = torch.from_numpy(message)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self._arrays)
        return [unpack(part.numpy()[:n]) for part, n in zip(found, sizes.tolist(), strict=True)]

    def broadcast_text(self, text: str) -> str:
        """``text`` of rank 0, on all ranks, over the connections of the checkpoint writers."""
        message = np.frombuffer(bytearray(text.encode()), np.uint8)
        return _broadcast(None if self.rank else message, self.saving).tobytes().decode()

    def _send(self, message: npt.NDArray[np.uint8]) -> None:
        _broadcast(message, self._arrays)

    def receive(self) -> tuple[dict[str, Any], tuple[Row, ...], TokenScores]:
        """The next command of rank 0, for the others, as :func:`unpack_command` gives it. Raises :class:`RuntimeError`
        when it is gone or silent for the timeout."""
        self._rows = CommandRows()
        facts, rows, scores = unpack_command(self._receive())
        self._rows = CommandRows(rows)
        return facts, rows, scores

    def _receive(self) -> npt.NDArray[np.uint8]:
        return _broadcast(None, self._arrays)

    def _reduced(self, array: npt.NDArray[Any], how: Any) -> npt.NDArray[Any]:
        tensor = torch.from_numpy(array.copy())
        dist.all_reduce(tensor, how, group=self._arrays)
        return tensor.numpy()


def _broadcast(message: npt.NDArray[np.uint8] | None, group: dist.ProcessGroup) -> npt.NDArray[np.uint8]:
    """``message`` of rank 0; the others have none."""
    length = torch.tensor([0 if message is None else len(message)])
    dist.broadcast(length, 0, group=group)
    data = torch.zeros(int(length), dtype=torch.uint8) if message is None else torch.from_numpy(message)
    dist.broadcast(data, 0, group=group)
    return data.numpy()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, those that follow one another in lists of at most ``BUCKET_BYTES``, or of one tensor."""
    bucket = list[Tensor]()
    for tensor in tensors:
        if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def divided_modules(root: torch.nn.Module) -> list[FSDPModule]:
    """The modules below ``root``, and itself, whose weights are divided one by one (:meth:`RankGroup.divide`)."""
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


def sum_gradients(root: torch.nn.Module) -> None:
    """Let FSDP reduce by sums instead of means, in all modules below."""
    for module in divided_modules(root):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def follow_moved(root: torch.nn.Module) -> None:
    """Let FSDP use the memory to which its shards were moved: it keeps a flat view of each, and only a private
    function takes another (PyTorch 2.13)."""
    for module in divided_modules(root):
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class ProcessRank:
    """Rank of a process among those of a learner."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Rank among those of the same machine: number of its GPU."""


def process_rank(config: LearnerConfig, environment: dict[str, str] | None = None) -> ProcessRank:
    """The rank by RANK, WORLD_SIZE and LOCAL_RANK; without them one process. Raises :class:`ConfigurationError` where
    they contradict ``learner.ranks``, or ``learner.replicas`` times ``context_ranks`` does not divide their number."""
    values = dict(os.environ) if environment is None else environment
    try:
        rank, size = int(values.get("RANK", "0")), int(values.get("WORLD_SIZE", "1"))
        local = int(values.get("LOCAL_RANK", str(rank)))
    except ValueError as error:
        raise ConfigurationError(f"expected whole numbers in RANK, WORLD_SIZE and LOCAL_RANK, got {error}") from error
    if not 0 <= rank < size:
        raise ConfigurationError(f"expected RANK below WORLD_SIZE, got {rank} of {size}: start the learner by torchrun")
    if size > 1 and config.ranks not in (1, size):
        raise ConfigurationError(
            f"learner.ranks is {config.ranks}, but WORLD_SIZE is {size}: omit learner.ranks under torchrun"
        )
    ranks = size if size > 1 else config.ranks
    if ranks % (config.replicas * config.context_ranks):
        raise ConfigurationError(
            f"expected a number of ranks that is a multiple of learner.replicas ({config.replicas}) times "
            f"learner.context_ranks ({config.context_ranks}), got {ranks} ranks: change one of them"
        )
    return ProcessRank(rank, size, local)


def join(process: ProcessRank, config: LearnerConfig, store: Store | None = None) -> torch.device:
    """Meet the other ranks at ``store``, else at MASTER_ADDR:MASTER_PORT: gloo for the CPU, NCCL where the device is
    a GPU. Returns the device of this rank; ranks on CPUs share the cores. Blocks until all are there.

    Raises :class:`TrainingError` when they are not within ``learner.ranks_timeout_seconds``.
    """
    device = resolve_device(config.device)
    backend = "gloo"
    if device.type == "cuda":
        if process.local_rank >= torch.cuda.device_count():
            raise ConfigurationError(
                f"local rank {process.local_rank} needs a GPU of its own, torch sees {torch.cuda.device_count()}"
            )
        torch.cuda.set_device(process.local_rank)
        device, backend = torch.device("cuda", process.local_rank), "cpu:gloo,cuda:nccl"
    elif config.threads is None and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // process.world_size))
    if store is None:
        choose_interface()
    try:
        dist.init_process_group(
            backend,
            store=store,
            rank=process.rank,
            world_size=process.world_size,
            timeout=timedelta(seconds=config.ranks_timeout_seconds),
        )
    except (RuntimeError, ValueError) as error:
        raise TrainingError(
            f"rank {process.rank} of {process.world_size} could not connect to the others: {error}"
        ) from error
    return device


def leave() -> None:
    """Close the connections. Not a collective: the others see it."""
    if dist.is_initialized():
        dist.destroy_process_group()
