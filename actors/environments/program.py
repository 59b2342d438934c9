"""``program``: tasks for agent programs that judge themselves (docs/DOOR.md). It has no rules of its own."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.options import STRICT_OPTIONS
from pipeline.schema import Message, Task


@dataclass(config=STRICT_OPTIONS)
class Program(Environment):
    """The task's payload goes to the program as it is; its ``prompt``, where it has one, is also the first message."""

    loop = "program"

    def start(self, task: Task) -> Episode:
        prompt = task.payload.get("prompt")
        return _Played(prompt if isinstance(prompt, str) and prompt else f"Task {task.task_id}, seed {task.seed}.")


class _Played(Episode):
    def __init__(self, prompt: str) -> None:
        self.messages = (Message("user", prompt),)

    def step(self, reply: Reply) -> Step:
        return Step(done=True)
