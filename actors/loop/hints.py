"""The first prompt with a hint in it: never played, only scored by the learner (``advantage.estimator: cpo``)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from actors.rendering.renderer import Renderer
from actors.rendering.shadow import Shadow
from actors.rendering.tooling import ToolSchema
from pipeline.lessons.records import first_user
from pipeline.schema import Message

_PLACE = re.compile(r"\{(hint|prompt)\}")


def hinted(
    renderer: Renderer, messages: Sequence[Message], hint: str, template: str, tools: Sequence[ToolSchema] = ()
) -> Shadow | None:
    """The conversation with ``hint`` in the first message of the user; None without such a message.

    Nothing in the hint is read as a special token; braces in hint and prompt stay as they are.
    """
    user = first_user(tuple(messages))
    if user is None:
        return None
    values = {"hint": renderer.without_special(hint), "prompt": messages[user].content}
    content = _PLACE.sub(lambda match: values[match[1]], template)
    changed = [*messages[:user], replace(messages[user], content=content), *messages[user + 1 :]]
    return Shadow.of(renderer.start(changed, tools))
