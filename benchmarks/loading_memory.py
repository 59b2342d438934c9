"""Memory of each rank of a learner while it loads its model and makes a checkpoint, against its shard and one layer.

::

    python -m benchmarks.loading_memory                     # 8 ranks on the CPU, about 1.3 GB of float32 weights
    python -m benchmarks.loading_memory --ranks 2 --layers 4 --hidden 512
    python -m benchmarks.loading_memory --ranks 1 --lora    # adapters over frozen weights in bfloat16, one rank

Each rank is a process of its own (gloo). It is measured from before the model is made until its shard is filled:
anonymous memory, which is what loading needs, and all resident pages, those of the files among them. The same of a
checkpoint without moments: anonymous memory of its image, for which training waits, and beside that of its files.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from pipeline.config.explain import free_ports

ROOT = Path(__file__).resolve().parents[1]
SAMPLE_SECONDS = 0.002
SMALL = "small"
"""Folder of a model that ranks load before they are measured."""


def write_model(folder: Path, layers: int, hidden: int, vocabulary: int, experts: int = 0) -> None:
    """A decoder of random weights in bfloat16, Llama-style, or with ``experts`` as Qwen3's mixtures."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = {
        "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers, "tie_word_embeddings": True,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
    }  # fmt: skip
    model: Any
    if experts:
        mixture = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": hidden // 4}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **mixture, head_dim=64))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=4 * hidden))
    model.to(torch.bfloat16)
    model.save_pretrained(folder)


def resident() -> tuple[int, int]:
    """Bytes of anonymous memory, and of all resident pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    facts = {line.split(":")[0]: line.split() for line in lines}
    return int(facts["RssAnon"][1]) * 1024, int(facts["VmRSS"][1]) * 1024


class Peak:
    """Largest :func:`resident` values since the begin, by a thread that samples them."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self.start = self.largest = resident()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            now = resident()
            self.largest = max(self.largest[0], now[0]), max(self.largest[1], now[1])

    def stop(self) -> tuple[int, int]:
        """Bytes above those at the begin."""
        self._end.set()
        self._thread.join()
        return self.largest[0] - self.start[0], self.largest[1] - self.start[1]


def run_rank(folder: Path, work: Path, *, lora: bool) -> None:
    """Load the policy and save it as a rank of a learner does, and write what it took into ``work``."""
    import torch
    from torch.distributed.tensor import DTensor

    from learner.checkpoints.checkpoint import CheckpointState, take_image, write_image
    from learner.distributed.collectives import RankGroup, join, leave, process_rank
    from learner.distributed.ranks import Interrupt
    from learner.process.build import make_policy
    from learner.training.trainer import Trainer
    from pipeline.config import RunConfig

    torch.set_num_threads(1)
    adapters = {"lora": {"rank": 8, "frozen_dtype": "bfloat16"}} if lora else {}
    config = RunConfig.model_validate({"learner": {"device": "cpu", **adapters}})
    process = process_rank(config.learner)
    device = join(process, config.learner)
    group = RankGroup(device, Interrupt(), 600.0) if process.world_size > 1 else None
    make_policy(config, work / SMALL, None, group)  # imports and buffers of the first time
    if group is not None:
        group.everyones({}, {})
    peak = Peak()
    policy = make_policy(config, folder, None, group)
    if group is not None:
        group.everyones({}, {})
    anonymous, pages = peak.stop()
    weights = list(policy.model.parameters())
    trainer = Trainer(policy, config)
    if group is not None and group.rank:
        group.receive()  # rank 0 sends the command to make an image
    peak, start = Peak(), time.perf_counter()
    image = take_image(trainer, CheckpointState(0, 0, {}))
    waited = time.perf_counter() - start
    copied, peak = peak.stop()[0], Peak()
    if process.rank == 0:
        write_image(work / "checkpoints", image, folder, 1)
    elif image.shards is not None:
        image.shards.follow()
    found = {
        "image": copied,
        "files": peak.stop()[0],
        "milliseconds": round(1000 * waited),
        "anonymous": anonymous,
        "resident": pages,
        "shard": sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in weights),
        "layer": sum(p.nbytes for p in policy.layers[0].parameters()),
        "model": sum(p.nbytes for p in weights),
    }
    (work / f"rank{process.rank}.json").write_text(json.dumps(found))
    leave()


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    return {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}  # fmt: skip


def table(found: list[dict[str, int]]) -> list[str]:
    columns = "shard", "layer", "anonymous", "resident", "image", "files"
    lines = [f"MiB; the model has {found[0]['model'] / 2**20:.0f}, training waited {found[0]['milliseconds']} ms",
             f"{'rank':>4}" + "".join(f"{column:>11}" for column in columns)]  # fmt: skip
    for rank, one in enumerate(found):
        lines.append(f"{rank:4}" + "".join(f"{one[column] / 2**20:11.0f}" for column in columns))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a model folder; default: random weights")
    parser.add_argument("work", type=Path, nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--lora", action="store_true", help="adapters of rank 8 over frozen weights in bfloat16")
    parser.add_argument("--experts", type=int, default=0, help="of each layer; 0: a dense model")
    a = parser.parse_args()
    if a.work is not None:
        return run_rank(a.folder, a.work, lora=a.lora)
    with tempfile.TemporaryDirectory() as temporary:
        work, folder = Path(temporary), a.folder or Path(temporary) / "model"
        if a.folder is None:
            write_model(folder, a.layers, a.hidden, a.vocabulary, a.experts)
        write_model(work / SMALL, layers=2, hidden=64, vocabulary=32, experts=min(a.experts, 4))
        port = free_ports("127.0.0.1", 1)
        command = [sys.executable, __file__, str(folder), str(work), *(["--lora"] if a.lora else [])]
        ranks = [subprocess.Popen(command, env=environment(rank, a.ranks, port)) for rank in range(a.ranks)]
        if any([rank.wait() for rank in ranks]):
            sys.exit("a rank failed")
        found = [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(a.ranks)]
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
