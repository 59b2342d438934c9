"""``question``: one question, one reply. The question is a row of a data set; graders of the scorer give the reward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.errors import PlugInError
from pipeline.schema import Message, Task

_FIELD = re.compile(r"\{(\w+)\}")


@dataclass(config=STRICT_OPTIONS)
class Question(Environment):
    """Asks ``messages`` or ``prompt`` of the row (``tasks_from``) and ends with the reply. Its own score is 0: the
    reward comes from ``scorer.functions``, which find ``answer`` in the payload."""

    template: str | None = None
    """Template for a ``prompt`` that is text: ``{prompt}`` and other names of the payload are replaced, for example
    ``"{prompt} End with the number alone."``. None: the prompt as it is. Messages are never changed."""
    system: str | None = None
    """A system message before the question. None: none."""
    hint: str | None = Field(default=None)
    """A hint for ``advantage.estimator: cpo`` and ``self_distill``, a template like ``template``, for example
    ``"The answer is {answer}."``."""

    def start(self, task: Task) -> QuestionEpisode:
        messages = _messages(task, self.template)
        if self.system is not None:
            messages = (Message("system", self.system), *messages)
        return QuestionEpisode(messages, None if self.hint is None else _filled(self.hint, task))


class QuestionEpisode(Episode):
    def __init__(self, messages: tuple[Message, ...], hint: str | None) -> None:
        self.messages = messages
        self.hint = hint

    def step(self, reply: Reply) -> Step:
        return Step(done=True)


def _messages(task: Task, template: str | None) -> tuple[Message, ...]:
    prompt = task.payload.get("messages", task.payload.get("prompt"))
    if isinstance(prompt, str):
        return (Message("user", prompt if template is None else _filled(template, task)),)
    if isinstance(prompt, list) and prompt:
        return tuple(_message(value, task) for value in prompt)
    raise _wrong(task, "prompt (text) or messages (a list) in the payload", sorted(task.payload))


def _message(value: Any, task: Task) -> Message:
    if not (
        isinstance(value, Mapping) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
    ):
        raise _wrong(task, "messages with role and content as text", value)
    # Arrow gives every message the keys that any of them has: a null says nothing, and templates look for keys
    return Message(
        value["role"],
        value["content"],
        {k: v for k, v in value.items() if k not in ("role", "content") and v is not None},
    )


def _filled(template: str, task: Task) -> str:
    """One pass: braces inside what is filled in stay as they are."""

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in task.payload:
            raise _wrong(task, f"{{{name}}} of the template in the payload", sorted(task.payload))
        return str(task.payload[name])

    return _FIELD.sub(value, template)


def _wrong(task: Task, expected: str, came: Any) -> PlugInError:
    return PlugInError(
        "environment start",
        "WrongTask",
        f"environment {task.environment}, task {task.task_id}: expected {expected}, got {str(came)[:200]}: give "
        f"environments.{task.environment}.tasks_from with columns {{prompt: ...}}",
    )
