"""``big_sums``: arithmetic with large numbers, and a calculator as a tool.

As short word problems, they also require to recognise the operation.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from actors.tools.calculator import Calculator
from actors.tools.parsing.base import stated_call
from pipeline.schema import Message, Task

_STORIES: Mapping[str, Sequence[str]] = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "One hall holds {a} {things}, another holds {b}. How many {things} do both hold?",
        "A shop sold {a} {things} on Monday and {b} on Tuesday. How many {things} did it sell?",
        "{name} counted {a} {things}, then another {b}. How many {things} did {name} count?",
    ),
    "-": (
        "{name} has {a} {things} and gives {b} away. How many {things} are left?",
        "Of {a} {things} in a hall, {b} are taken out. How many {things} stay?",
        "A shop had {a} {things} and sold {b}. How many {things} does it still have?",
        "{name} wants {a} {things} and has {b}. How many {things} are missing?",
    ),
    "*": (
        "{name} buys {a} boxes with {b} {things} each. How many {things} does {name} buy?",
        "A hall has {a} rows of {b} {things}. How many {things} are in the hall?",
        "A shop sells {a} {things} a day. How many {things} does it sell in {b} days?",
        "{name} packs {b} {things} into each of {a} bags. How many {things} does {name} pack?",
    ),
}
_NAMES = ("Ada", "Ben", "Chidi", "Dana", "Emil", "Fatima", "Goran", "Hana")
_THINGS = ("apples", "books", "coins", "chairs", "eggs", "lamps", "stamps", "tickets")


def story(draw: random.Random, a: int, operation: str, b: int) -> str:
    """A question whose answer is ``a operation b``; what is taken away is not more than what is there."""
    story = draw.choice(_STORIES[operation])
    return story.format(name=draw.choice(_NAMES), things=draw.choice(_THINGS), a=a, b=b)


_INTEGER = re.compile(r"-?\d[\d,]*")


@dataclass(config=STRICT_OPTIONS)
class BigSums(Environment):
    """ "What is 48213 * 90714?" The last integer of the reply that is not a call is the answer."""

    digits: int = Field(default=5, ge=1, le=50)
    """Digits of each number."""
    operations: tuple[Literal["+", "-", "*"], ...] = Field(default=("+", "-", "*"), min_length=1)
    call_reward: float = Field(default=0.2, ge=0, le=1)
    """Share of the reward 1.0 that a call with the right result pays even if the answer is then wrong: something to
    learn from before both steps work together."""
    examples: int = Field(default=2, ge=0, le=20)
    """Solved sums that stand before the question, with their calls: a small model copies the form from them and would
    seldom find it by itself."""

    stories: bool = False
    """The sum comes as a little story ("Ada has 4821 coins and gives 907 away. How many coins are left?"), so that the
    operation has to be understood too."""

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
        return BigSumsEpisode(self, _drawn(self, draw, None))


class _Sum(NamedTuple):
    question: str
    expression: str
    answer: int


def _drawn(options: BigSums, draw: random.Random, operation: str | None) -> _Sum:
    """A sum of the operation, or of one drawn."""
    low, high = 10 ** (options.digits - 1), 10**options.digits - 1
    a, b = draw.randint(low, high), draw.randint(low, high)
    operation = operation or draw.choice(options.operations)
    if options.stories and operation == "-":
        a, b = max(a, b), min(a, b)
    expression = f"{a} {operation} {b}"
    question = story(draw, a, operation, b) if options.stories else f"What is {expression}?"
    return _Sum(question, expression, {"+": a + b, "-": a - b, "*": a * b}[operation])


def _solved(options: BigSums, index: int) -> tuple[Message, ...]:
    """Question, call, the calculator's answer, answer. The same in every episode."""
    operation = options.operations[index % len(options.operations)]
    shown = _drawn(options, random.Random(f"big_sums/{index}"), operation)
    answer, number = str(shown.answer), f"{index:09d}"
    call = stated_call(number, "calculator", {"expression": shown.expression})
    return (
        Message("user", shown.question),
        Message("assistant", "", {"tool_calls": [call]}),
        Message("tool", answer, {"name": "calculator", "tool_call_id": number}),
        Message("assistant", answer),
    )


class BigSumsEpisode(Episode):
    def __init__(self, options: BigSums, problem: _Sum) -> None:
        shown = [message for i in range(options.examples) for message in _solved(options, i)]
        self.messages = (*shown, Message("user", problem.question))
        self._options = options
        self._answer = problem.answer
        self.hint = f"The answer is {self._answer}."

    def step(self, reply: Reply) -> Step:
        called = any(use.ok and use.text == str(self._answer) for use in reply.tool_calls)
        found = _INTEGER.findall(reply)
        number = found[-1].replace(",", "") if found else ""
        right = number.removeprefix("-").isdecimal() and len(number) < 200 and int(number) == self._answer
        reward = 1.0 if right else self._options.call_reward * called
        return Step(reward=reward, done=True, signals={"called": float(called), "right": float(right)})
