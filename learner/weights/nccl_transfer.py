"""Transfer of weights to one engine by NCCL, straight from the device on which they are trained.

A thread gets the weights one after another, with several ranks by gathering the shards of each; another one, in which
vLLM's sender runs, broadcasts a weight while the next is got. Beside the trained ones there are at most three whole
weights: these two, and the one sent before, which vLLM's loop holds until it gets another.

A send ends where its engine fails: where a request of the sender to the engine fails, where the engine takes no weight
for :data:`STALL_SECONDS`, or where the loader gives up. It then aborts its communicator, because a broadcast whose peer
is gone never ends on the device. The other ranks finish their gathers in any case. So that the broadcasts of one
engine wait for no other, each group has a stream of its own, and weights are not packed: vLLM (0.32) packs on streams
that all groups of a process share.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from pipeline.errors import EngineUnavailable

AHEAD = 2
"""Whole weights that are made and not sent: one is sent, one is made."""
STALL_SECONDS = 30.0
"""An engine that does not take one weight within this time has stopped. Other engines may wait for the ranks."""
POLL_SECONDS = 0.0005

Description = Sequence[tuple[str, torch.dtype, Sequence[int]]]
"""Name, type and shape of each tensor."""


class ParameterMeta(NamedTuple):
    """Has the fields of vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Send:
    """One version on its way to one engine: hand-over between the thread that gets weights and the one that sends."""

    def __init__(self, description: Description, read: Callable[[], Iterator[tuple[str, Tensor]]]) -> None:
        self.description = description
        self.error: Exception | None = None
        self._read = read
        self._free = threading.Semaphore(AHEAD)
        self._got: queue.SimpleQueue[tuple[str, Tensor, Any] | None] = queue.SimpleQueue()

    def stop(self, error: Exception) -> None:
        """End it in any thread; the first error stays."""
        self.error = self.error or error
        self._free.release()
        self._got.put(None)

    def check(self) -> None:
        """Raise the error that ended it."""
        if self.error is not None:
            raise self.error

    def pairs(self, device: torch.device) -> Iterator[tuple[str, Tensor]]:
        """Weights on ``device``, each valid until the next is asked for. Raises what ended the send."""
        threading.Thread(target=self._get, args=(device,), name="weights", daemon=True).start()
        finished = False
        try:
            while (got := self._got.get()) is not None:
                self.check()
                name, tensor, ready = got
                if ready is not None:
                    ready.wait()
                yield name, tensor
                self._until_done(device)
                del got, tensor
                self._free.release()
            self.check()
            finished = True
        finally:
            if not finished:
                self.stop(EngineUnavailable("the transfer was not finished"))

    def _get(self, device: torch.device) -> None:
        try:
            with contextlib.closing(self._read()) as weights:  # type: ignore[type-var]
                while self._may_get():
                    found = next(weights, None)
                    if found is None:
                        break
                    name, tensor = found[0], found[1].to(device, non_blocking=True)
                    del found
                    self._got.put((name, tensor, work_of(device)))
                    del tensor
            self._got.put(None)
        except Exception as error:
            self.stop(error)

    def _may_get(self) -> bool:
        if not self._free.acquire(timeout=STALL_SECONDS):
            self.stop(EngineUnavailable(f"the engine has taken no weight for {STALL_SECONDS:g} s"))
        return self.error is None

    def _until_done(self, device: torch.device) -> None:
        """Wait for the broadcast of the last weight, or for the end of the send."""
        work, idle = work_of(device), threading.Event()
        while work is not None and not work.query():
            self.check()
            idle.wait(POLL_SECONDS)
        self.check()


def work_of(device: torch.device) -> Any:
    """Event after all work of this thread's stream; None where work is done at once."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


class NcclGroup:
    """Group of rank 0 and the workers of one engine. Blocks while it is made and while it sends: for worker threads."""

    def __init__(
        self, url: str, workers: int, client: Any, device: torch.device, failed: Callable[[Exception], None]
    ) -> None:
        """``client``: vLLM's, for the requests to the engine. ``failed`` gets the error of an engine that does not
        join: the constructor would wait for it."""
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._client = client
        self._failed = failed
        self._send: Send | None = None
        self._endpoint = nccl_endpoint(self, self, url, workers)

    def send(self, send: Send) -> None:
        """Send one version. After an error the group is closed."""
        self._send = send
        try:
            with torch.cuda.stream(self._stream):
                self._endpoint.send_weights()
        except BaseException:
            self._endpoint.shutdown()  # by the one thread that broadcasts
            send.check()
            raise

    # vLLM's WeightSource

    def metadata(self) -> list[ParameterMeta]:
        assert self._send is not None
        return [ParameterMeta(name, kind, tuple(shape)) for name, kind, shape in self._send.description]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self._send is not None
        return self._send.pairs(self._device)

    # vLLM's client

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        try:
            self._client.init_weight_transfer_engine(init_info)
        except Exception as error:
            self._failed(error)
            raise

    def start_weight_update(self) -> None:
        self._client.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        """The engine takes the weights meanwhile. Where it fails, the broadcasts to it would never end."""
        send = self._send
        assert send is not None
        try:
            self._client.update_weights(update_info)
        except Exception as error:
            send.stop(error)
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._client.finish_weight_update(weight_version)


def nccl_endpoint(client: Any, source: Any, url: str, workers: int) -> Any:
    """vLLM's sender."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    host = address_towards(url)
    info = NCCLTrainerInitInfo(
        master_address=host, master_port=_free_port(host), world_size=1 + workers, rank=0, packed=False
    )
    return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def address_towards(url: str) -> str:
    """Our address as the engine's machine sees it."""
    host = urlsplit(url).hostname or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
