"""``big_sums``: arithmetic with numbers that are too long for the head, and a calculator to do it with."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.options import STRICT_OPTIONS
from actors.tools.calculator import Calculator
from pipeline.schema import Message, Task

_INTEGER = re.compile(r"-?\d[\d,]*")


@dataclass(config=STRICT_OPTIONS)
class BigSums(Environment):
    """ "What is 48213 * 9071? Use the calculator." The last integer of the reply that is not a call is the answer."""

    digits: int = Field(default=5, ge=1, le=50)
    """Of each number."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-", "*"), min_length=1)
    call_reward: float = Field(default=0.2, ge=0, le=1)
    """Of the reward 1.0, what a call with the right result pays even if the answer is then wrong: something to learn
    from before both steps work together."""
    example: bool = True
    """Show one call in the prompt; a model that never saw a tool seldom finds the form by itself."""

    loop = "tool_agent"

    @model_validator(mode="after")
    def _operations_once(self) -> BigSums:
        if len(set(self.operations)) != len(self.operations):
            raise ValueError(f"operations: expected each once, got {list(self.operations)}")
        return self

    def tools(self) -> Sequence[Any]:
        return (Calculator(),)

    def start(self, task: Task) -> BigSumsEpisode:
        draw = random.Random(task.seed)
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        a, b = draw.randint(low, high), draw.randint(low, high)
        return BigSumsEpisode(self, a, draw.choice(self.operations), b)


class BigSumsEpisode(Episode):
    def __init__(self, options: BigSums, a: int, operation: str, b: int) -> None:
        text = f"What is {a} {operation} {b}? Call the calculator, then reply with only the number."
        if options.example:
            text += (
                "\nA call looks like this:\n<tool_call>\n"
                '{"name": "calculator", "arguments": {"expression": "12 + 34"}}\n</tool_call>'
            )
        self.messages = (Message("user", text),)
        self._options = options
        self._answer = {"+": a + b, "-": a - b, "*": a * b}[operation]
        self.hint = f"The answer is {self._answer}."

    def step(self, reply: Reply) -> Step:
        called = any(use.ok and use.text == str(self._answer) for use in reply.tool_calls)
        found = _INTEGER.findall(reply)
        number = found[-1].replace(",", "") if found else ""
        right = number.removeprefix("-").isdigit() and len(number) < 200 and int(number) == self._answer
        reward = 1.0 if right else self._options.call_reward * called
        return Step(reward=reward, done=True, signals={"called": float(called), "right": float(right)})
