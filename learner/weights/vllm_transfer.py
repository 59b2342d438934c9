"""vLLM's own weight transfer (NCCL broadcast or CUDA IPC), for engines and learner on GPUs.

Written against ``vllm.distributed.weight_transfer`` of vLLM 0.32. The control messages
(``/init_weight_transfer_engine``, ``/start_weight_update``, ``/update_weights``, ``/finish_weight_update``) are sent
by vLLM's trainer-side classes; pause, stamp and resume stay with the keeper. Needs vLLM in the learner's environment
and GPUs on both sides.

One transfer group per engine, so an engine that dies takes only its own group with it. A broadcast whose peer died
cannot be cancelled: its thread is abandoned and a new group is created.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import torch
from torch import Tensor

from learner.weights.engine_control import EngineControl
from learner.weights.engine_keeper import Target
from pipeline.errors import ConfigurationError, EngineError, EngineUnavailable
from pipeline.runtime.engine_keys import authorization


class VllmTransferLoader:
    """Implements :class:`learner.weights.engine_keeper.WeightLoader`."""

    reads_memory = True

    def __init__(self, backend: Literal["nccl", "ipc"], timeout_seconds: float, key: str | None = None) -> None:
        if not torch.cuda.is_available() or importlib.util.find_spec("vllm") is None:
            raise ConfigurationError(
                f"engine.weight_transfer is {backend}, which needs vLLM and a GPU in the learner's environment: "
                "install afterplay[vllm] there, or set engine.weight_transfer=files"
            )
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._key = key
        self._groups: dict[str, _TransferGroup] = {}

    async def load(self, engine: EngineControl, target: Target) -> None:
        if target.tensors is None:
            await engine.reload(target.folder)
            return
        group = self._groups.pop(engine.url, None)
        try:
            if group is None:
                group = await self._open(engine)
            await anyio.to_thread.run_sync(partial(group.send, target.tensors), abandon_on_cancel=True)
        except EngineError:
            raise
        except Exception as error:
            raise EngineUnavailable(
                f"{self._backend} transfer to {engine.url} failed: {type(error).__name__}: {error}"
            ) from error
        self._groups[engine.url] = group

    async def _open(self, engine: EngineControl) -> _TransferGroup:
        workers = await engine.world_size()
        return await anyio.to_thread.run_sync(
            partial(_TransferGroup, self._backend, engine.url, workers, self._timeout_seconds, self._key),
            abandon_on_cancel=True,
        )


class _Weights:
    """vLLM's ``WeightSource``: the tensors that are set, one after another, on the GPU."""

    def __init__(self) -> None:
        self.tensors: Mapping[str, Tensor] = {}

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.cuda(non_blocking=True)


class _TransferGroup:
    """One engine's transfer endpoint. Blocks while it is built and while it sends: for worker threads."""

    def __init__(
        self, backend: Literal["nccl", "ipc"], url: str, workers: int, timeout_seconds: float, key: str | None
    ) -> None:
        from vllm.distributed.weight_transfer.base import WeightSource
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

        class Source(_Weights, WeightSource):  # type: ignore[misc]
            pass

        self._source = Source()

        class Client(HTTPVLLMWeightSyncClient):  # type: ignore[misc]
            """vLLM's client, which has no place for a key."""

            def _post(self, path: str, json: dict[str, Any] | None = None) -> None:
                import requests

                address, headers = f"{self.base_url}/{path}", authorization(key)
                requests.post(address, json=json, headers=headers, timeout=self.timeout).raise_for_status()

        client = Client(url, timeout=timeout_seconds)
        if backend == "nccl":
            from vllm.distributed.weight_transfer.nccl_engine import (
                NCCLTrainerInitInfo,
                NCCLTrainerWeightTransferEngine,
            )

            host = _address_towards(url)
            info = NCCLTrainerInitInfo(
                master_address=host, master_port=_free_port(host), world_size=1 + workers, rank=0
            )
            self._engine = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=self._source)
        else:
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

            self._engine = IPCTrainerWeightTransferEngine.trainer_init(
                IPCTrainerInitInfo(rank=0), client=client, source=self._source
            )

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        self._source.tensors = tensors
        self._engine.send_weights()


def _address_towards(url: str) -> str:
    """Our address as the engine's machine sees it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
