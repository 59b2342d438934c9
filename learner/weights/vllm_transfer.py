"""vLLM's own weight transfer (NCCL broadcast or CUDA IPC), for engines and learner on GPUs.

Written against ``vllm.distributed.weight_transfer`` of vLLM 0.32. The control messages
(``/init_weight_transfer_engine``, ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``) are sent
by vLLM's trainer-side classes; pause, stamp and resume stay with the keeper. Needs vLLM in the learner's environment
and GPUs on both sides.

NCCL sends one pass over the weights to groups of rank 0 and engines (:mod:`learner.weights.fan_out`). An engine that
answers that it cannot join one gets a folder instead, until the learner starts again.

IPC passes handles of GPU memory. vLLM's sender gathers those of all ranks, for workers that share a GPU with another
rank than 0, so all ranks take part (:func:`follow`): each gets every tensor from rank 0 and exports its own copy. Only
rank 0 talks to the engine. A failure there is raised after the collectives, in which the others would wait without end.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist
from torch import Tensor

from learner.distributed.ranks import ALONE, Ranks, free_cached
from learner.metrics import LearnerMetrics
from learner.weights.device_weights import Write
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import Target
from learner.weights.fan_out import FanOut, Outcome
from learner.weights.nccl_transfer import Member, ParameterMeta
from pipeline.errors import ConfigurationError, EngineError, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.engine_keys import authorization

log = logging.getLogger(__name__)
HOLD_SECONDS = 5.0
"""Time for which one engine may hold up the others in a transfer by NCCL; an eighth of ``publish.timeout_seconds`` if
that is less."""


class VllmTransferLoader:
    """Implements :class:`learner.weights.engine_keeper.WeightLoader`."""

    reads_memory = True

    def __init__(
        self,
        backend: Literal["nccl", "ipc"],
        timeout_seconds: float,
        write: Write,
        key: str | None = None,
        ranks: Ranks = ALONE,
        device: torch.device | None = None,
        metrics: LearnerMetrics | None = None,
    ) -> None:
        """``write`` makes a whole folder. ``device`` holds the weights; None: the GPU, which must be there."""
        if device is None and (not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None):
            raise ConfigurationError(
                f"engine.weight_transfer is {backend}, which needs vLLM and a GPU in the learner's environment: "
                "install Afterplay there with the extra vllm, or set engine.weight_transfer=files"
            )
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._write = write
        self._key = key
        self._ranks = ranks
        self._device = device or torch.device("cuda")
        self._groups: dict[str, IpcGroup] = {}
        self._fan_out = FanOut(self._device, min(HOLD_SECONDS, timeout_seconds / 8), metrics)
        self._members: dict[str, tuple[int, Member]] = {}
        """Engines as they last joined a group, each with the number of its start."""
        self._without_group: set[str] = set()
        """Engines that answered that they cannot join one."""

    async def load(self, engine: EngineControl, target: Target) -> None:
        weights = target.weights
        if weights is None and target.tensors is None:
            await engine.reload(target.folder)
        elif engine.url in self._without_group or (weights is not None and weights.retired):
            await self._load_folder(engine, target)
        else:
            with contextlib.nullcontext() if weights is None else weights.reading():
                sent = await self._transfer(engine, target)
            if not sent:
                await self._load_folder(engine, target)

    async def _transfer(self, engine: EngineControl, target: Target) -> bool:
        """False where the engine cannot join a group; nothing has changed then."""
        try:
            await (self._send if self._backend == "nccl" else self._share)(engine, target)
        except EngineRefused as error:
            if self._backend != "nccl":
                raise
            log.warning("engine %s gets its weights as folders: it cannot join a group of NCCL: %s", engine.url, error)
            self._without_group.add(engine.url)
            return False
        except EngineError:
            raise
        except Exception as error:
            raise EngineUnavailable(
                f"{self._backend} transfer to {engine.url} failed: {type(error).__name__}: {error}"
            ) from error
        return True

    async def _load_folder(self, engine: EngineControl, target: Target) -> None:
        """The folder of the version, which is written for the first engine that needs it."""
        if target.weights is not None and not target.initial:
            await target.weights.write(target.written, target.version, self._write)
        await engine.reload(target.folder)

    async def _send(self, engine: EngineControl, target: Target) -> None:
        """By NCCL. Raises :class:`EngineRefused` where the engine answers that it cannot take part."""
        start, member = self._members.get(engine.url, (-1, None))
        if member is None or start != engine.starts:
            client = await self._client(engine)
            member = Member(engine.url, await engine.world_size(), client)
            self._members[engine.url] = engine.starts, member
        outcome = await self._fan_out.send(member, target)
        while outcome is not Outcome.SENT:  # each time without the engine that failed, or alone
            with contextlib.suppress(EngineRefused, EngineProtocolError):
                await engine.abandon_update()
            outcome = await self._fan_out.send(member, target, alone=outcome is Outcome.ALONE)

    async def _share(self, engine: EngineControl, target: Target) -> None:
        """By IPC."""
        group = self._groups.pop(engine.url, None)
        if group is None:
            make = partial(IpcGroup, await self._client(engine), self._ranks, self._device)
            group = await anyio.to_thread.run_sync(make, abandon_on_cancel=True)
        assert target.tensors is not None
        abandoned = threading.Event()
        try:
            await anyio.to_thread.run_sync(group.send, target.tensors, abandoned, abandon_on_cancel=True)
        finally:
            abandoned.set()
        self._groups[engine.url] = group

    async def _client(self, engine: EngineControl) -> Any:
        connect = partial(_client, engine.url, self._timeout_seconds, self._key)
        return await anyio.to_thread.run_sync(connect, abandon_on_cancel=True)  # vLLM takes seconds to import


Description = Sequence[tuple[str, str, Sequence[int]]]
"""Name, name of the type, and shape of each tensor."""


class _Weights:
    """Tensors on this rank's device, one after another (vLLM's ``WeightSource``). With several ``ranks`` each tensor
    comes from rank 0, which alone has them."""

    def __init__(self, device: torch.device, ranks: Ranks = ALONE) -> None:
        self.tensors: Mapping[str, Tensor] = {}
        self.described: Description = ()
        self._device = device
        self._ranks = ranks

    def metadata(self) -> list[Any]:
        return [ParameterMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in self.described]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in self.described:
            if self._ranks.rank:
                tensor = torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=self._device)
            else:
                tensor = self.tensors[name].to(self._device, non_blocking=True)
            if self._ranks.size > 1:
                dist.broadcast(tensor, 0)
            yield name, tensor


def ipc_endpoint(client: Any, source: _Weights, rank: int) -> Any:
    """vLLM's sender of this rank."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    return IPCTrainerWeightTransferEngine.trainer_init(IPCTrainerInitInfo(rank=rank), client=client, source=source)


def follow(ranks: Ranks, device: torch.device, described: Description) -> None:
    """The part of a rank other than 0 in one transfer by IPC."""
    source = _Weights(device, ranks)
    source.described = described
    endpoint = ipc_endpoint(None, source, ranks.rank)
    if not ranks.agree():
        _send_copies(endpoint, ranks, device)


def _send_copies(endpoint: Any, ranks: Ranks, device: torch.device) -> None:
    """The engine reads copies of all weights on the devices of ``ranks``, and then takes the memory for its cache:
    returns when every rank has given its copies back."""
    endpoint.send_weights()
    free_cached(device)
    ranks.summed([0.0])


class _LateErrors:
    """A client of an engine whose first failure is kept, and ends its calls, until :meth:`check`."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._error: Exception | None = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Before any collective, so it may fail at once."""
        self._client.init_weight_transfer_engine(init_info)

    def start_weight_update(self) -> None:
        self._try(self._client.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        self._try(partial(self._client.update_weights, update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._try(partial(self._client.finish_weight_update, weight_version))

    def check(self) -> None:
        """Raise what went wrong since the last call."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _try(self, call: Callable[[], None]) -> None:
        if self._error is None:
            try:
                call()
            except Exception as error:
                self._error = error


class IpcGroup:
    """One engine's endpoint for IPC. Blocks while it is made and while it sends: for worker threads."""

    def __init__(self, client: Any, ranks: Ranks, device: torch.device) -> None:
        self._ranks, self._device = ranks, device
        self._source = _Weights(device, ranks)
        self._late = _LateErrors(client)
        self._engine = ipc_endpoint(self._late if ranks.size > 1 else client, self._source, 0)

    def send(self, tensors: Mapping[str, Tensor], abandoned: threading.Event) -> None:
        """Send one version. With several ranks not before an update under way has ended; then not at all where it was
        ``abandoned`` meanwhile."""
        described = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]
        self._source.tensors, self._source.described = tensors, described
        with self._ranks.together("transfer", facts={"tensors": described}):
            if not self._ranks.agree(int(abandoned.is_set())):
                _send_copies(self._engine, self._ranks, self._device)
        self._late.check()


def _client(url: str, timeout_seconds: float, key: str | None) -> Any:
    import requests
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
        """vLLM's client, which has no place for a key."""

        def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
            with requests.Session() as session:
                session.trust_env = False  # no proxy between, and no password of ~/.netrc in place of the key
                address, headers = f"{self.base_url}/{path}", authorization(key)
                session.post(address, json=json, headers=headers, timeout=self.timeout).raise_for_status()

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            try:
                super().init_weight_transfer_engine(init_info)
            except requests.HTTPError as error:
                raise EngineRefused(str(error)) from error

    return Client(url, timeout=timeout_seconds)
