"""Trained tokens per second of the learner against a bare Hugging Face step on the same rows, in one process.

The bare step is what a short script would do: autocast forward with labels, backward, gradient clipping, AdamW, on the
same micro-batches. Run: ``python benchmarks/learner_step_basic.py MODEL_FOLDER [--threads 2] [--rows 64]``.
"""

from __future__ import annotations

import argparse
import statistics as stats
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from learner.batching import plan_microbatches
from learner.policy import Policy
from learner.rows import Batch, Row
from learner.trainer import Trainer
from pipeline.config import RunConfig


def make_rows(count: int, vocabulary: int, seed: int, shortest: int = 70, longest: int = 200) -> tuple[Row, ...]:
    """Random rows: a context, and 12-40 sampled tokens at the end. Every row has an advantage."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        length = int(rng.integers(shortest, longest + 1))
        mask = np.zeros(length, dtype=bool)
        mask[-int(rng.integers(12, 41)) :] = True
        rows.append(
            Row(
                trajectory_id=f"t{i}",
                sequence=i,
                environment="none",
                token_ids=rng.integers(0, vocabulary, length).astype(np.int32),
                loss_mask=mask,
                behaviour_logprobs=np.where(mask, -8.0, 0.0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                temperatures=np.ones(length, dtype=np.float32),
                turns=np.zeros(len(mask), dtype=np.int32),
                advantages=np.full(int(mask.sum()), 1.0 if i % 2 else -1.0, dtype=np.float32),
            )
        )
    return tuple(rows)


def bare_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: tuple[Row, ...], config: RunConfig, select: bool
) -> None:
    """Forward with labels on the sampled tokens, backward, clip, AdamW; micro-batches as the learner makes them.

    ``select``: only positions with a label pass the output layer, the best a bare script could do.
    """
    plan = plan_microbatches([len(row) for row in rows], config.learner.tokens_per_microbatch)
    enabled = config.learner.compute_dtype == "bfloat16"
    for chosen in plan:
        width = max(len(rows[i]) for i in chosen)
        ids = torch.zeros((len(chosen), width), dtype=torch.int64)
        labels = torch.full((len(chosen), width), -100, dtype=torch.int64)
        attention = torch.zeros((len(chosen), width), dtype=torch.int64)
        for b, i in enumerate(chosen):
            tokens = torch.from_numpy(rows[i].token_ids.astype(np.int64))
            ids[b, : len(tokens)] = tokens
            attention[b, : len(tokens)] = 1
            labels[b, : len(tokens)] = torch.where(torch.from_numpy(rows[i].loss_mask), tokens, -100)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            if select:
                hidden = model.model(input_ids=ids, attention_mask=attention, use_cache=False).last_hidden_state
                labelled = labels[:, 1:] != -100
                logits = model.lm_head(hidden[:, :-1][labelled])
                loss = torch.nn.functional.cross_entropy(logits.float(), labels[:, 1:][labelled])
            else:
                loss = model(input_ids=ids, attention_mask=attention, labels=labels, use_cache=False).loss
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--compute-dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens-per-microbatch", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = RunConfig.model_validate(
        {
            "run": {"total_steps": 1000},
            "learner": {
                "device": "cpu",
                "compute_dtype": arguments.compute_dtype,
                "learning_rate": 1e-6,
                "tokens_per_microbatch": arguments.tokens_per_microbatch,
            },
        }
    )
    bare = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    bare.train()
    optimizer = torch.optim.AdamW(bare.parameters(), lr=1e-6, weight_decay=0.0)
    trainer = Trainer(Policy.load(arguments.model, config.learner), config)
    rows = make_rows(arguments.rows, bare.config.vocab_size, seed=0)
    tokens = sum(len(row) for row in rows)
    seconds: dict[str, list[float]] = {"bare": [], "selecting": [], "learner": []}
    stages: dict[str, float] = {}
    for _ in range(arguments.repeat + 1):
        for name in seconds:
            start = time.perf_counter()
            if name == "learner":
                stages = trainer.step(Batch(trainer.updates, (), rows), policy_version=0).seconds
            else:
                bare_step(bare, optimizer, rows, config, select=name == "selecting")
            seconds[name].append(time.perf_counter() - start)
            print(f"{name:9s} {seconds[name][-1]:7.2f} s", flush=True)
    times = {name: stats.median(values[1:]) for name, values in seconds.items()}
    for name, value in times.items():
        print(f"{name:9s} {value:7.2f} s/step {tokens / value:8.0f} tokens/s ({tokens} tokens, {arguments.rows} rows)")
    print("learner stages", {name: round(value, 2) for name, value in stages.items()})
    for name in ("bare", "selecting"):
        print(f"ratio learner/{name} tokens/s {times[name] / times['learner']:.3f}")


if __name__ == "__main__":
    main()
