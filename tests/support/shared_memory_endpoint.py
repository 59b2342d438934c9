"""Double of vLLM's sender of weights by CUDA IPC: the collectives of the real one, with digests for handles."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist


class SharedMemoryEndpoint:
    """``send_weights`` as in vLLM 0.32: all ranks gather their handles in the default group and meet at its end."""

    def __init__(self, client: Any, source: Any, rank: int) -> None:
        self._client = client
        self._source = source
        self._rank = rank
        if rank == 0:
            client.init_weight_transfer_engine({"packed": False})

    def send_weights(self) -> None:
        if self._rank == 0:
            self._client.start_weight_update()
        names, handles = [], []
        for name, tensor in self._source:
            names.append(name)
            data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            handles.append({f"GPU-{self._rank}": hashlib.sha256(data).hexdigest()})
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, handles)
        dist.barrier()
        if self._rank == 0:
            merged = [{uuid: h for part in parts for uuid, h in part.items()} for parts in zip(*gathered, strict=True)]
            self._client.update_weights({"names": names, "ipc_handles": merged})
            self._client.finish_weight_update()
        dist.barrier()


class RecordingClient:
    """Client of an engine that keeps what it gets. ``faults``: calls that fail."""

    def __init__(self) -> None:
        self.faults: set[str] = set()
        self.calls: list[str] = []
        self.update: dict[str, Any] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init")

    def start_weight_update(self) -> None:
        self._called("start")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._called("update")
        self.update = update_info

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._called("finish")

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.faults:
            raise ConnectionError(f"the engine died at {name}")
