"""Puts lessons into the first message of the user, and keeps the contexts that the episode would have had without
them.

With ``train_mode: discard`` the training row is the same episode under the prompt without lessons. That row is followed
turn by turn: *plain* is the conversation that the renderer builds from the plain messages and the very same sampled
ids. Its context replaces the played one where they differ: in the first turn, and in a turn that begins a new branch.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import anyio

from actors.lessons.recall import Search
from actors.lessons.slots import guided, kept
from actors.rendering.renderer import Conversation, Renderer
from actors.rendering.shadow import Shadow
from actors.rendering.tooling import ToolSchema
from pipeline.config.replay import LessonsConfig
from pipeline.errors import AfterplayError, PlugInTimeout, boundary
from pipeline.lessons.records import QUERY_CHARACTERS_MAX, Lesson, first_user
from pipeline.lessons.source import NAME
from pipeline.metrics.actor import ActorMetrics
from pipeline.schema import Guidance, Message, Order

logger = logging.getLogger(__name__)

ROOM_SHARE_MAX = 0.5
"""Of the tokens that the plain prompt leaves of the context, lessons take so large a share at most: the episode needs
the rest."""
_PLACE = re.compile(r"\{(lessons|prompt)\}")


@dataclass(slots=True)
class Guided:
    """An episode with lessons in its prompt."""

    conversation: Conversation
    """The start, with lessons."""
    lessons: tuple[Lesson, ...]
    keep: bool
    query: str
    plain: Shadow
    """The conversation without lessons, as far as it was played."""

    def guidance(self, n_turns: int) -> Guidance:
        """What the trajectory says of it, of the turns that were kept."""
        contexts = {} if self.keep else self.plain.first(max(1, n_turns))
        return Guidance(tuple(lesson.lesson_id for lesson in self.lessons), self.keep, contexts, self.query)


class Guide:
    """``lessons:`` of the run file, for the rollouts of one actor. ``source`` None: the replay stage is asked."""

    def __init__(
        self, config: LessonsConfig, renderer: Renderer, metrics: ActorMetrics, source: Search | None = None
    ) -> None:
        self._config = config
        self._renderer = renderer
        self._metrics = metrics
        self._source = source

    async def guide(
        self,
        order: Order,
        messages: Sequence[Message],
        context_max: int,
        stage: Search | None,
        tools: Sequence[ToolSchema] = (),
    ) -> Guided | None:
        """Lessons for ``order``, or None: it is not to be guided, nothing was found, or it took too long."""
        user = first_user(tuple(messages))
        source = self._source or stage
        if not guided(self._config, order.group_id, order.slot) or user is None or source is None:
            return None
        query = messages[user].content
        started = time.perf_counter()
        outcome, found = await self._search(source, order.order_id, query[:QUERY_CHARACTERS_MAX])
        self._metrics.lesson_search_duration_seconds.observe(time.perf_counter() - started)
        result = self._placed(order, messages, user, found, context_max, tools) if found else None
        if found and result is None:
            outcome = "no_room"
        self._metrics.lesson_searches_total.labels(outcome=outcome).inc()
        return result

    async def _search(self, source: Search, order_id: str, query: str) -> tuple[str, list[Lesson]]:
        try:
            with anyio.fail_after(self._config.timeout_seconds), boundary(f"{NAME} search"):
                found = await source.search(order_id, query, self._config.top_k)
                if not isinstance(found, list) or not all(isinstance(lesson, Lesson) for lesson in found):
                    raise TypeError(f"expected a list of Lesson, got {repr(found)[:200]}")
        except (TimeoutError, PlugInTimeout):
            return "timeout", []
        except AfterplayError as error:
            logger.warning("order %s is played without lessons: %s", order_id, error)
            return "error", []
        return ("found" if found else "none"), found

    def _placed(
        self,
        order: Order,
        messages: Sequence[Message],
        user: int,
        found: Sequence[Lesson],
        context_max: int,
        tools: Sequence[ToolSchema],
    ) -> Guided | None:
        """As many of the lessons as there is room for, best first; None where not even one fits."""
        renderer = self._renderer
        plain = renderer.start(messages, tools)
        room = int((context_max - len(plain.prompt_ids)) * ROOM_SHARE_MAX)
        original = messages[user]
        keep = kept(self._config, order.group_id, order.slot)
        lessons = [
            Lesson(lesson.lesson_id, text) for lesson in found[: self._config.top_k] if (text := self._text(lesson))
        ]
        for count in range(len(lessons), 0, -1):
            chosen = tuple(lessons[:count])
            content = fill(self._config.template, [lesson.text for lesson in chosen], original.content)
            guided_messages = [*messages[:user], replace(original, content=content), *messages[user + 1 :]]
            conversation = renderer.start(guided_messages, tools)
            if len(conversation.prompt_ids) - len(plain.prompt_ids) <= room:
                return Guided(conversation, chosen, keep, original.content, Shadow.of(plain))
        return None

    def _text(self, lesson: Lesson) -> str:
        """One line without anything that the tokenizer would take for a special token."""
        text = " ".join(self._renderer.without_special(lesson.text).split())
        return text[: self._config.lesson_characters_max]


def fill(template: str, lessons: Sequence[str], prompt: str) -> str:
    """The template with one line for each lesson. Braces in lessons and prompt stay as they are."""
    values = {"lessons": "\n".join(lessons), "prompt": prompt}
    return _PLACE.sub(lambda match: values[match[1]], template)
