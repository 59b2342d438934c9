"""A taskset of verifiers and a harness that runs in its process: two turns of a chat, one reward. Imported by a Python
that has verifiers and nothing of Afterplay."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Words", "WordsHarness"]


class WordsTask(vf.Task):
    @vf.reward(weight=2.0)
    async def said_four(self, trace: vf.Trace) -> float:
        return float("4" in trace.last_reply)


class Words(vf.Taskset[WordsTask, vf.TasksetConfig]):
    def load(self) -> Iterator[WordsTask]:
        for word in ("guess", "say hello"):
            yield WordsTask(vf.TaskData(prompt=word), self.config.task)


class WordsHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any):
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            for _ in range(2):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                said = answer.choices[0].message.content
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "try again"}]
        return vf.ProgramResult(0, "", "")
