"""verl's ``ToolAgentLoop`` under the load of :mod:`benchmarks.actor_scale`, in an interpreter that has verl (0.9.1).

Not started by hand: ``python -m benchmarks.actor_scale --peer verl`` gives it the texts on standard input and reads a
line of JSON for each size from standard output. Measured is verl's own class, created for each episode as verl
does, in one event loop, with a client of the engine that answers after the fixed latency; its function tool is async
and answers at once. Left out in verl's favour: Ray (a call to the load balancer and one to the engine for each turn),
hydra's making of the loop, and the padding of each result to tensors. Afterplay's rows have their own counterparts of
all three: the routing, the checked answer of the engine and the encoding for the wire.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from actors.process.role import gc_policy
from benchmarks.episode_load import measure, settle

NOT_IMPORTABLE = 3

try:
    from omegaconf import OmegaConf
    from transformers import AutoTokenizer
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.tools.function_tool import FunctionTool
    from verl.tools.schemas import OpenAIFunctionToolSchema
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.replica import TokenOutput
except ImportError as failure:
    print(f"{type(failure).__name__}: {failure}")
    sys.exit(NOT_IMPORTABLE)


class Engine:
    """In the place of ``LLMServerClient``: calls the tool in every turn but the last."""

    def __init__(self, tokenizer: Any, asked: dict[str, Any], latency_seconds: float) -> None:
        end = tokenizer.eos_token_id
        self._call = [*tokenizer(asked["call"], add_special_tokens=False).input_ids, end]
        self._answer = [*tokenizer(asked["answer"], add_special_tokens=False).input_ids, end]
        self._end = end
        self._ends_with_answers = len(asked["messages"]) + 2 * (asked["turns"] - 1)
        self._latency_seconds = latency_seconds

    async def generate(self, request_id: str, *, prompt_ids: list[int], **rest: Any) -> TokenOutput:
        await asyncio.sleep(self._latency_seconds)
        ids = self._call if prompt_ids.count(self._end) < self._ends_with_answers else self._answer
        logprobs = [-0.5] * len(ids)
        return TokenOutput(token_ids=list(ids), log_probs=logprobs, extra_fields={"max_global_steps": 0})


def configuration() -> Any:
    """The part of verl's trainer configuration that the loop reads."""
    turns = {
        "max_user_turns": None,
        "max_assistant_turns": None,
        "max_parallel_calls": 8,
        "max_tool_response_length": 4096,
        "tool_response_truncate_side": "middle",
        "format": "hermes",
    }
    rollout = {"prompt_length": 8192, "response_length": 8192, "full_determinism": False, "multi_turn": turns}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})


async def main(asked: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    config = configuration()

    async def calculator(expression: str) -> str:
        return str(asked["result"])

    schema = OpenAIFunctionToolSchema.model_validate(asked["schema"])
    tools = [FunctionTool("calculator", calculator, schema, is_async=True)]

    def player(latency_seconds: float) -> Any:
        engine = Engine(tokenizer, asked, latency_seconds)

        async def play(number: int) -> tuple[int, int]:
            loop = ToolAgentLoop(
                trainer_config=DictConfigWrap(config),
                server_manager=engine,
                tokenizer=tokenizer,
                processor=None,
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(config.data),
                hf_model_type="qwen2",  # SmolLM2's turns are written as Qwen's are
                tools=ToolListWrap(tools),
            )
            output = await loop.run({"temperature": 1.0, "logprobs": True}, raw_prompt=asked["messages"])
            turns = output.num_turns // 2
            assert turns == asked["turns"], f"expected {asked['turns']} replies, got {turns}"
            return turns, len(output.prompt_ids) + len(output.response_ids)

        return play

    for concurrency, episodes, latency_seconds in asked["rows"]:
        await settle(player(0.0))
        with nullcontext() if asked["plain_gc"] else gc_policy():
            load = await measure(player(latency_seconds), concurrency, episodes, latency_seconds)
        print(json.dumps(asdict(load)), flush=True)


if __name__ == "__main__":
    request = json.load(sys.stdin)
    try:
        import uvloop
    except ImportError:
        asyncio.run(main(request))
    else:
        uvloop.run(main(request))
