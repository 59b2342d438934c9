"""The built-in environment for rows of a data set."""

from __future__ import annotations

import pytest

from actors.environments.base import Reply
from actors.environments.plugins import build
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import PlugInError
from pipeline.schema import Message, Task


def episode(payload, **options):
    environment = build("q", EnvironmentConfig(name="question", options=options))
    return environment.start(Task("q/0", "q", 0, payload))


def test_a_prompt_is_asked_as_it_is_and_one_reply_ends_it():
    question = episode({"prompt": "1 + {x}?", "answer": "2"})
    assert question.messages == (Message("user", "1 + {x}?"),)
    step = question.step(Reply("2"))
    assert step.done and step.reward == 0.0


def test_a_template_is_filled_once_with_what_the_row_has():
    question = episode(
        {"prompt": "What is {answer}?", "unit": "cm"},
        template="{prompt} In {unit}. {",
        system="Be brief.",
        hint="{unit}",
    )
    assert question.messages == (Message("system", "Be brief."), Message("user", "What is {answer}? In cm. {"))
    assert question.hint == "cm"


def test_messages_are_asked_as_they_are():
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}]
    for name in ("messages", "prompt"):
        assert episode({name: asked}).messages == (Message("system", "s"), Message("user", "u", {"name": "n"}))


@pytest.mark.parametrize("payload", [{}, {"prompt": 3}, {"messages": []}, {"messages": [{"role": "user"}]}])
def test_a_row_that_asks_nothing_says_what_to_give(payload):
    with pytest.raises(PlugInError, match=r"tasks_from with columns"):
        episode(payload)


def test_a_name_that_the_row_lacks_is_named():
    with pytest.raises(PlugInError, match=r"expected \{unit\} of the template"):
        episode({"prompt": "a"}, template="{prompt} {unit}")
