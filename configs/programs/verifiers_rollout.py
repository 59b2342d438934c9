"""Plays one task of a verifiers environment (0.4) against the model at OPENAI_BASE_URL and prints its reward.

verifiers owns the loop, the tools and the scoring; Afterplay records the calls. It needs a Python of its own (its
dependencies exclude others of Afterplay's), with verifiers and the environment's package installed, and nothing of
Afterplay::

    loop:
      name: program
      options: {command: [/path/to/venv/bin/python, configs/programs/verifiers_rollout.py, --taskset, gsm8k-v1]}

Task ``seed`` modulo the size of the taskset is played, or ``payload["idx"]``. ``--env`` is the environment's block of
a verifiers run as JSON, for everything else: ``--env '{"agent": {"max_turns": 4}}'``.
"""

import argparse
import asyncio
import itertools
import json
import os
from typing import Any

from verifiers.v1 import ClientConfig, EvalClientConfig, ModelContext, TrainClientConfig
from verifiers.v1.utils.loaders import load_environment, resolve_env_config


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--taskset", required=True, help="id of the taskset")
    parser.add_argument("--harness", help="id of the agent's harness; none: the taskset's own")
    parser.add_argument("--env", type=json.loads, default={}, help="more of the environment's configuration, as JSON")
    parser.add_argument("--tokenizer", help="folder or hub id: verifiers renders prompts itself and sends token ids")
    parser.add_argument("--tasks", type=int, default=1000, help="of an infinite taskset, how many are played")
    return parser.parse_args()


def environment(options: argparse.Namespace) -> Any:
    block: dict[str, Any] = dict(options.env)
    block["taskset"] = {**block.get("taskset", {}), "id": options.taskset}
    agent = {"runtime": {"type": "subprocess"}, **block.get("agent", {})}
    if options.harness is not None:
        agent["harness"] = {**agent.get("harness", {}), "id": options.harness}
    return load_environment(resolve_env_config({**block, "agent": agent}))


def chosen(tasks: Any, row: dict[str, Any], tasks_max: int) -> Any:
    if "idx" in row["payload"]:
        return next(itertools.islice(tasks, int(row["payload"]["idx"]), None))
    if not tasks.bounded:
        return next(itertools.islice(tasks, row["seed"] % tasks_max, None))
    tasks = list(tasks)
    return tasks[row["seed"] % len(tasks)]


async def main() -> None:
    options = arguments()
    row = json.loads(os.environ["AFTERPLAY_TASK"])
    env = environment(options)
    task = chosen(env.taskset, row, options.tasks)
    gateway = {"base_url": os.environ["OPENAI_BASE_URL"], "api_key_var": "OPENAI_API_KEY"}
    client: ClientConfig = EvalClientConfig(**gateway)
    if options.tokenizer is not None:
        client = TrainClientConfig(**gateway, renderer_model_name=options.tokenizer)
    async with env.serving():
        episode = await env.run_episode(task, ModelContext(model=os.environ["AFTERPLAY_MODEL"], client=client))
    unscored = any(reward is None for trace in episode.traces for reward in trace.rewards.values())
    if not episode.ok or unscored:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        print(json.dumps({"error": "; ".join(f"{e.type}: {e.message}" for e in errors) or "no score"}))
        return
    reward = sum(trace.reward for trace in episode.traces) / len(episode.traces)
    print(json.dumps({"reward": reward, "signals": {"agents": len(episode.traces)}}))


asyncio.run(main())
