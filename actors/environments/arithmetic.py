"""``arithmetic``: small sums, with feedback and another attempt after a wrong answer."""

from __future__ import annotations

import random
import re

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.options import STRICT_OPTIONS
from pipeline.schema import Message, Task

_INTEGER = re.compile(r"-?\d+")


@dataclass(config=STRICT_OPTIONS)
class Arithmetic(Environment):
    """ "What is a + b?" The last integer of the reply is the answer: 1.0 if right at once, less on later attempts."""

    low: int = Field(default=1, ge=0, le=10**9)
    high: int = Field(default=9, ge=0, le=10**9)
    """a and b are drawn from ``low`` to ``high``, both included."""
    attempts: int = Field(default=2, ge=1, le=100)
    later_reward: float = Field(default=0.5, ge=0, le=1)
    """Attempt k (from 0) pays ``later_reward ** k`` when it is right: 1.0, 0.5, 0.25 ..."""

    @model_validator(mode="after")
    def _range_not_empty(self) -> Arithmetic:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) must not be below low ({self.low})")
        return self

    def start(self, task: Task) -> ArithmeticEpisode:
        draw = random.Random(task.seed)
        return ArithmeticEpisode(self, draw.randint(self.low, self.high), draw.randint(self.low, self.high))


class ArithmeticEpisode(Episode):
    def __init__(self, options: Arithmetic, a: int, b: int) -> None:
        self.messages = (Message("user", f"What is {a} + {b}? Reply with only the number."),)
        self._options = options
        self._answer = a + b
        self.hint = f"The answer is {a + b}."
        self._attempt = 0

    def step(self, reply: Reply) -> Step:
        found = _INTEGER.findall(reply)
        right = bool(found) and len(found[-1]) < 20 and int(found[-1]) == self._answer
        first = self._attempt == 0
        self._attempt += 1
        return Step(
            messages=(Message("user", "That is not right. Try again. Reply with only the number."),),
            reward=self._options.later_reward ** (self._attempt - 1) if right else 0.0,
            done=right or self._attempt >= self._options.attempts,
            signals={"first_right": float(right)} if first else {},
        )
