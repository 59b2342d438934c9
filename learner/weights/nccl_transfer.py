"""Groups of NCCL: rank 0 of the learner, which broadcasts weights, and the workers of one engine or of several.

Written against ``vllm.distributed.weight_transfer`` of vLLM 0.32, in which an engine learns its place in a group from
``rank_offset`` and ``world_size``. NCCL broadcasts along a ring: in a group of several engines each passes on what it
gets, and rank 0 sends one copy for all of them. The price is that a communicator cannot lose a member. Where one engine
dies, the group is closed, and the others have to load again (:mod:`learner.weights.fan_out`).

A send ends where a request to an engine fails, or the pass gives it up (:mod:`learner.weights.weight_pass`). The group
then aborts its communicator, because a broadcast whose peer is gone never ends on the device. So that the broadcasts of
one group wait for no other, each has a stream of its own, and weights are not packed: vLLM (0.32) packs on streams that
all groups of a process share.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from torch import Tensor

from learner.weights.weight_pass import Send
from pipeline.errors import EngineRefused, EngineUnavailable


class ParameterMeta(NamedTuple):
    """Has the fields of vLLM's ``ParamMeta``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """One engine of a group."""

    url: str
    workers: int
    client: Any
    """vLLM's, for the requests to the engine."""


class NcclGroup:
    """Rank 0 and the workers of ``members``. Blocks while it is made and while it sends: for worker threads."""

    def __init__(
        self, members: Sequence[Member], device: torch.device, failed: Callable[[str, Exception], None]
    ) -> None:
        """``failed`` gets the engine that does not join, and its error: the constructor would wait for it."""
        self.members = tuple(members)
        self.culprit = ""
        """Engine of which a request failed first, before the group was closed: the abort fails those of all."""
        self._closed = False
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._failed = failed
        self._send: Send | None = None
        urls, workers = [member.url for member in members], sum(member.workers for member in members)
        self._endpoint = nccl_endpoint(self, self, urls, workers)

    def send(self, send: Send) -> None:
        """Send one version. After an error the group is closed."""
        self._send = send
        try:
            with torch.cuda.stream(self._stream):
                self._endpoint.send_weights()
        except BaseException:
            self.close()  # by the one thread that broadcasts
            send.check()
            send.stop(EngineUnavailable("the transfer was not finished"))
            raise

    def close(self) -> None:
        """Abort the communicator."""
        self._closed = True
        self._endpoint.shutdown()

    # vLLM's WeightSource

    def metadata(self) -> list[ParameterMeta]:
        assert self._send is not None
        return [ParameterMeta(name, kind, tuple(shape)) for name, kind, shape in self._send.description]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self._send is not None
        return self._send.pairs(self._device)

    # vLLM's client, of all members at once

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        offsets, offset = {}, init_info["rank_offset"]
        for member in self.members:
            offsets[member.url], offset = offset, offset + member.workers

        def join(member: Member) -> None:
            member.client.init_weight_transfer_engine(init_info | {"rank_offset": offsets[member.url]})

        try:
            self._each(join)
        except Exception as error:
            self._failed(self.culprit, error)
            raise

    def start_weight_update(self) -> None:
        self._each(lambda member: member.client.start_weight_update())

    def update_weights(self, update_info: Any) -> None:
        """The engines take the weights meanwhile. Where one fails, the broadcasts to it would never end."""
        send = self._send
        assert send is not None
        try:
            self._each(lambda member: member.client.update_weights(update_info))
        except Exception as error:
            send.stop(error)
            raise

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._each(lambda member: member.client.finish_weight_update(weight_version))

    def _each(self, call: Callable[[Member], None]) -> None:
        """Raises the first error at once, while other requests are under way."""
        threads = ThreadPoolExecutor(len(self.members))
        try:
            calls = {threads.submit(call, member): member for member in self.members}
            for done in as_completed(calls):
                if done.exception() is not None:
                    if not self._closed:
                        self.culprit = self.culprit or calls[done].url
                    done.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def nccl_endpoint(client: Any, source: Any, urls: Sequence[str], workers: int) -> Any:
    """vLLM's sender."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    hosts = [address_towards(url) for url in urls]
    host = next((host for host in hosts if not host.startswith("127.")), hosts[0])
    info = NCCLTrainerInitInfo(
        master_address=host, master_port=_free_port(host), world_size=1 + workers, rank=0, packed=False
    )
    return NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)


def address_towards(url: str) -> str:
    """Our address as the engine's machine sees it. Raises :class:`EngineRefused` for an engine at an IPv6 address: vLLM
    (0.32) meets at addresses of IPv4 only."""
    host = urlsplit(url).hostname or "127.0.0.1"
    if ":" in host:
        raise EngineRefused(f"vLLM forms groups over IPv4 only, and {url} is an address of IPv6")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
