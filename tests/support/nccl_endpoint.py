"""Double of vLLM's sender of weights by NCCL: its calls and their order, with memory of the process for the network."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from pipeline.errors import EngineRefused


class NcclPeer:
    """The workers of one engine: what the client asks of them, and the other end of the broadcasts.

    ``fault``: it ``refuses`` to join a group, ``dies`` or ``hangs`` with its first weight, or fails at ``start``,
    ``update`` or ``finish``.
    """

    def __init__(self) -> None:
        self.fault = ""
        self.joined, self.closed = 0, 0
        self.received: list[dict[str, torch.Tensor]] = []
        """Whole updates."""
        self.began = threading.Event()
        """Set when the first weight of an update has come."""
        self.goes_on = threading.Event()
        """Cleared: it takes no more weights for now."""
        self.goes_on.set()
        self._came = threading.Condition()
        self._closed = False
        self._tensors: list[torch.Tensor] = []
        self._update: dict[str, torch.Tensor] = {}

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        assert init_info["packed"] is False
        if self.fault == "refuses":
            raise EngineRefused("500 Server Error: weight transfer is not configured")
        self.joined += 1

    def start_weight_update(self) -> None:
        self._fail("start")
        self._tensors, self._update = [], {}
        self._closed = False
        self.began.clear()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if self.fault == "dies":
            assert self.began.wait(30)
            raise ConnectionError("the connection was reset")
        self._fail("update")
        n = len(update_info["names"])
        with self._came:
            assert self._came.wait_for(lambda: self._closed or len(self._tensors) == n, 30)
        told = list(zip(update_info["dtype_names"], update_info["shapes"], strict=True))
        assert [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in self._tensors] == told
        self._update = dict(zip(update_info["names"], self._tensors, strict=True))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._fail("finish")
        self.received.append(self._update)

    def _fail(self, call: str) -> None:
        if self.fault == call:
            raise ConnectionError(f"the engine failed at {call}")

    def broadcast(self, tensor: torch.Tensor, src: int, stream: Any = None) -> None:
        """As vLLM's communicator: the weight is not yet sent when it returns."""
        _thread.peer = self
        with self._came:
            self._tensors.append(tensor.clone())
            self._came.notify()
        self.began.set()

    def destroy(self) -> None:
        self.closed += 1
        with self._came:
            self._closed = True
            self._came.notify()


_thread = threading.local()


class _Work:
    def __init__(self, peer: NcclPeer) -> None:
        self._peer = peer

    def query(self) -> bool:
        return self._peer.goes_on.is_set() and self._peer.fault not in ("dies", "hangs")


def work_of(device: torch.device) -> Any:
    """In place of :func:`learner.weights.nccl_transfer.work_of`: the broadcast that this thread began last."""
    peer = getattr(_thread, "peer", None)
    return None if peer is None else _Work(peer)


class BroadcastEndpoint:
    """``NCCLTrainerWeightTransferEngine`` of vLLM 0.32, not packed."""

    def __init__(self, client: Any, source: Any, peer: NcclPeer) -> None:
        self._client, self._source, self._peer = client, source, peer
        client.init_weight_transfer_engine({"packed": False})

    def send_weights(self) -> None:
        meta = self._source.metadata()
        info = {
            "names": [m.name for m in meta],
            "dtype_names": [str(m.dtype).split(".")[-1] for m in meta],
            "shapes": [list(m.shape) for m in meta],
        }
        self._client.start_weight_update()
        requests = ThreadPoolExecutor(max_workers=1)
        try:
            future = requests.submit(self._client.update_weights, info)
            for (name, tensor), told in zip(self._source, meta, strict=True):
                assert (name, tensor.dtype, tuple(tensor.shape)) == (told.name, told.dtype, told.shape)
                self._peer.broadcast(tensor, src=0)
            future.result()
        finally:
            requests.shutdown(wait=False)
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        self._peer.destroy()
