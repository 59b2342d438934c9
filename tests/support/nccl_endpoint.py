"""Double of vLLM's sender of weights by NCCL: its calls and their order, with memory of the process for the network."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from pipeline.errors import EngineRefused


class NcclPeer:
    """The workers of one engine: what the client asks of them, and the other end of the broadcasts.

    ``fault``: it ``refuses`` to join a group or hangs at it (``joins``, until ``goes_on``), ``dies`` or ``hangs`` with
    its first weight, or fails at ``start``, ``update`` or ``finish``.
    """

    def __init__(self, workers: int = 2) -> None:
        self.fault = ""
        self.workers = workers
        self.joined, self.closed = 0, 0
        self.places: list[tuple[int, int]] = []
        """Of each group that it joined: rank of its first worker, and size."""
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
        if self.fault == "joins":
            assert self.goes_on.wait(30)
        self.places.append((init_info["rank_offset"], init_info["world_size"]))
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
        with self._came:
            self._tensors.append(tensor.clone())
            self._came.notify_all()
        self.began.set()

    def destroy(self) -> None:
        self.closed += 1
        with self._came:
            self._closed = True
            self._came.notify_all()


_thread = threading.local()


class _Work:
    """A broadcast: whoever stops in a ring stops all."""

    def __init__(self, peers: Sequence[NcclPeer]) -> None:
        self.peers = peers

    def query(self) -> bool:
        return all(peer.goes_on.is_set() and peer.fault not in ("dies", "hangs") for peer in self.peers)


def work_of(device: torch.device) -> Any:
    """In place of :func:`learner.weights.weight_pass.work_of`: the broadcast that this thread began last."""
    return getattr(_thread, "work", None)


class BroadcastEndpoint:
    """``NCCLTrainerWeightTransferEngine`` of vLLM 0.32, not packed."""

    def __init__(self, client: Any, source: Any, peers: Sequence[NcclPeer]) -> None:
        self._client, self._source, self._peers = client, source, peers
        self._request: Future[Any] = Future()
        self._request.set_result(None)
        size = 1 + sum(peer.workers for peer in peers)
        client.init_weight_transfer_engine({"packed": False, "rank_offset": 1, "world_size": size})

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
            self._request = requests.submit(self._client.update_weights, info)
            for (name, tensor), told in zip(self._source, meta, strict=True):
                assert (name, tensor.dtype, tuple(tensor.shape)) == (told.name, told.dtype, told.shape)
                for peer in self._peers:
                    peer.broadcast(tensor, src=0)
                _thread.work = _Work(self._peers)
            self._request.result()
        finally:
            requests.shutdown(wait=False)
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """The abort fails the engines' requests, first that of a healthy one."""
        first, *others = sorted(self._peers, key=lambda peer: bool(peer.fault))
        first.destroy()
        wait([self._request], 30)
        for peer in others:
            peer.destroy()
