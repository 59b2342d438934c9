"""Passes, time and memory of a fan-out of weights to 1 to 64 engines: eight ranks on CPUs, and doubles of engines.

::

    python -m benchmarks.weight_fan_out --out FILE      # about five minutes

Eight processes share a random model (FSDP2 over gloo). Rank 0 sends it to doubles of vLLM's engines
(``tests/support/nccl_endpoint.py``) over a link that is a model: copies of all groups follow one another at
``LINK_BYTES_PER_SECOND``, and each engine of a group has a weight ``HOP_SECONDS`` after the one before it. Passes,
copies and memory are thus those of the real code, and time is that of real gathers and threads over a link that is
made up. ``one by one``: a pass for each engine, one after another. ``dies`` and ``hangs``: one of the engines does so
with its first weight, and ``equal`` is of the others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from learner.distributed.collectives import ProcessRank, RankGroup, join, leave
from learner.distributed.ranks import Interrupt
from learner.process.build import make_trainer
from learner.process.rank_processes import execute_commands
from learner.weights import nccl_transfer, vllm_transfer, weight_pass
from learner.weights.device_weights import DeviceWeights
from learner.weights.engine_keeper import Attendance, Target
from learner.weights.vllm_transfer import VllmTransferLoader
from pipeline.config import RunConfig
from pipeline.config.explain import free_ports
from pipeline.errors import EngineError
from tests.support import nccl_endpoint
from tests.support.nccl_endpoint import BroadcastEndpoint, NcclPeer

RANKS = 8
ENGINES = (1, 2, 4, 8, 16, 32, 64)
ONE_BY_ONE = (1, 4, 8)
WITH_FAULTS = (4, 8)
FAULTS = ("dies", "hangs")
REPEATS = 3
LINK_BYTES_PER_SECOND = 4e6
HOP_SECONDS = 0.001


class Link:
    """The network card of rank 0: one copy after another."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._lock = threading.Lock()
        self._free_at = 0.0

    def send(self, n_bytes: int, hops: int) -> float:
        """Time at which the last of ``hops`` engines has it."""
        with self._lock:
            self.n_bytes += n_bytes
            self._free_at = max(time.monotonic(), self._free_at) + n_bytes / LINK_BYTES_PER_SECOND
            return self._free_at + (hops - 1) * HOP_SECONDS


class Control:
    """The control routes of an engine that a transfer uses."""

    starts = 0

    def __init__(self, url: str) -> None:
        self.url = url

    async def world_size(self) -> int:
        return 2

    async def abandon_update(self) -> None:
        pass


class Engine(NcclPeer):
    """Keeps a digest of what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.n_bytes, self.digest = 0, 0

    def start_weight_update(self) -> None:
        super().start_weight_update()
        self.digest = 0

    def broadcast(self, tensor: Tensor, src: int, stream: Any = None) -> None:
        self.n_bytes = tensor.nbytes
        self.digest = digest(tensor, self.digest)
        super().broadcast(torch.empty_like(tensor, device="meta"), src)


def digest(tensor: Tensor, before: int) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy(), before)


class Bench:
    """Rank 0: sends versions, and counts."""

    def __init__(self, policy: Any) -> None:
        self.link, self.policy = Link(), policy
        self.engines: dict[str, Engine] = {}
        self.passes = self.alive = self.alive_max = 0
        nccl_transfer.nccl_endpoint = lambda client, source, urls, workers: BroadcastEndpoint(
            client, source, [self.engines[url] for url in urls]
        )
        vllm_transfer._client = lambda url, *_: self.engines[url]
        weight_pass.work_of = self.work_of

    def work_of(self, device: torch.device) -> Any:
        work = nccl_endpoint.work_of(device)
        if work is None:
            return None
        until = self.link.send(work.peers[0].n_bytes, len(work.peers))
        return SimpleNamespace(query=lambda: work.query() and time.monotonic() >= until)

    def read(self) -> Iterator[tuple[str, Tensor]]:
        self.passes += 1
        for name, tensor in self.policy.weights("bfloat16"):
            self.alive += tensor.nbytes
            self.alive_max = max(self.alive, self.alive_max)
            weakref.finalize(tensor, self.freed, tensor.nbytes)
            yield name, tensor
            del tensor

    def freed(self, n_bytes: int) -> None:
        self.alive -= n_bytes

    async def measure(self, n: int, form: str) -> dict[str, Any]:
        self.engines = {f"http://127.0.0.1:{9000 + i}": Engine() for i in range(n)}
        bad = next(iter(self.engines.values()))
        loader = VllmTransferLoader("nccl", 600.0, lambda folder, tensors: 0, device=torch.device("cpu"))
        weights = DeviceWeights(self.policy, "bfloat16")
        weights.read = self.read  # type: ignore[method-assign]
        controls = [Control(url) for url in self.engines]
        seconds, lost = [], 0

        async def load(control: Any, target: Target) -> None:
            nonlocal lost
            try:
                await loader.load(control, target)
            except EngineError:
                lost += 1

        for version in range(1 + (1 if form in FAULTS else REPEATS)):  # engines join with the first
            bad.fault = form if version and form in FAULTS else ""
            target = Target(version, Path(), Path(), weights=weights, attendance=Attendance(self.engines))
            self.passes = self.link.n_bytes = self.alive_max = 0
            began = time.perf_counter()
            if form == "one by one":
                for control in controls:
                    await load(control, replace(target, attendance=Attendance()))
            else:
                async with anyio.create_task_group() as tasks:
                    for control in controls:
                        tasks.start_soon(load, control, target)
            seconds.append(time.perf_counter() - began)
        others = [engine for engine in self.engines.values() if not engine.fault]
        return {
            "engines": n, "form": form, "passes": self.passes, "lost": lost,
            "copies": round(self.link.n_bytes / weights.n_bytes, 3), "seconds": seconds[1:],
            "median_seconds": statistics.median(seconds[1:]), "bytes_max": self.alive_max, "bytes": weights.n_bytes,
            "equal": {engine.digest for engine in others} == {self.expected},
        }  # fmt: skip

    @property
    def expected(self) -> int:
        found = 0
        for tensor in self.policy.snapshot("bfloat16").values():
            found = digest(tensor, found)
        return found


def rank_main(rank: int, folder: Path, engines: Sequence[int], out: Path) -> None:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {"run": {"total_steps": 1}, "learner": {"device": "cpu", "compute_dtype": "float32", "threads": 1,
                                                "ranks_timeout_seconds": 300}}
    )  # fmt: skip
    device = join(ProcessRank(rank, RANKS, rank), config.learner)
    group = RankGroup(device, Interrupt(), 300.0)
    trainer = make_trainer(config, folder, None, group)
    if rank:
        execute_commands(trainer, group, lambda updates: None)
    else:
        bench, rows = Bench(trainer.policy), []
        cases = [(n, "together") for n in engines] + [(n, "one by one") for n in ONE_BY_ONE if n in engines]
        cases += [(n, fault) for n in WITH_FAULTS if n in engines for fault in FAULTS]
        for n, form in cases:
            rows.append(anyio.run(bench.measure, n, form))
            print(orjson.dumps(rows[-1]).decode(), flush=True)
        group.end()
        facts = {"ranks": RANKS, "link_bytes_per_second": LINK_BYTES_PER_SECOND, "hop_seconds": HOP_SECONDS,
                 "cores": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}  # fmt: skip
        out.write_bytes(orjson.dumps(facts, option=orjson.OPT_INDENT_2))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engines", type=int, nargs="+", default=ENGINES)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports("127.0.0.1", 1))}
    with tempfile.TemporaryDirectory() as scratch:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=2048, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)
        )  # fmt: skip
        model.save_pretrained(scratch)
        (Path(scratch) / "tokenizer.json").write_text("{}")
        fork = multiprocessing.get_context("fork")
        ranks = [
            fork.Process(target=rank_main, args=(rank, Path(scratch), args.engines, args.out)) for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"exit codes of the ranks: {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main()
