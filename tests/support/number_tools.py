"""A game of tools for the tiny model, whose replies are one token: a number is a call, everything else an answer."""

from __future__ import annotations

from typing import Any

from actors.environments.base import Environment, Episode, Reply, Step, tool
from actors.rollout.tool_agent import ToolAgent
from actors.tools.base import ToolResult
from actors.tools.parsing.base import Parsed, ToolCall
from pipeline.schema import Message, Task


class NumberTools(ToolAgent):
    """``tool_agent`` with a parser that the random model can write."""

    def bind(self, *args: Any) -> None:
        super().bind(*args)
        self.parse = number_call  # type: ignore[assignment]


def number_call(reply: str, _schemas: Any) -> Parsed:
    return Parsed("", (ToolCall("press", {"number": int(reply)}),)) if reply.isdigit() else Parsed(reply)


class Buttons(Environment):
    """High buttons earn a reward at once; an answer after some calls earns another."""

    def start(self, task: Task) -> Episode:
        return ButtonsEpisode()


class ButtonsEpisode(Episode):
    messages = (Message("user", "guess a number"),)

    @tool
    def press(self, number: int) -> ToolResult:
        """Press a button."""
        return ToolResult("higher" if number < 4 else "lower", reward=0.25 * (number >= 4))

    def step(self, reply: Reply) -> Step:
        return Step(reward=0.5 * bool(reply.tool_calls), done=True)
