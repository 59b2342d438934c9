"""Prompts with lessons: searches for lessons and adds them to the first user message.

With ``keep_ratio`` below 1 a share of the training rows are the same rollouts under the prompt without lessons, which
is followed as a :class:`CounterfactualPrompt`. Group and slot alone decide which rollouts get lessons and which of
these are trained on the prompt that the engine saw.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import Any, Protocol

import anyio

from actors.metrics import ActorMetrics
from actors.rendering.renderer import Conversation, Renderer
from actors.rollout.counterfactual import CounterfactualPrompt, with_text
from actors.tools.parsing.base import ToolSchema
from pipeline.config.lessons import LessonsConfig
from pipeline.errors import AfterplayError, PeerGone, PlugInTimeout, WireError, boundary
from pipeline.lessons.store import LESSON_CHARACTERS_MAX, NAME, QUERY_CHARACTERS_MAX, Lesson, decode_lessons, first_user
from pipeline.schema import Message, Order, PromptLessons
from pipeline.transport.link import Link
from pipeline.transport.messages import Kind, WireMessage

log = logging.getLogger(__name__)

SEARCH_SECONDS_MAX = 5.0
"""Longer searches count as timed out, and their episodes run without lessons."""
ROOM_SHARE_MAX = 0.5
"""Largest share that lessons take of the tokens that the plain prompt leaves of the context: the episode needs the
rest."""


class LessonClient(Protocol):
    """A source of lessons. It may hang or raise any error; the caller limits its time."""

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]: ...


class MemoryClient:
    """LESSONS_QUERY and LESSONS of one link. The actor passes it answers and the loss of the connection."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: dict[str, _Answer] = {}
        self._connected = False

    async def search(self, order_id: str, query: str, top_k: int) -> list[Lesson]:
        """Raises :class:`PeerGone` when the stage is not there, :class:`WireError` for an answer that is none. Whoever
        gives up cancels."""
        if not self._connected:
            raise PeerGone("the replay stage is not connected")
        answer = self._waiting[order_id] = _Answer()
        try:
            header = {"order_id": order_id, "query": query, "top_k": top_k}
            await self._link.send(WireMessage(Kind.LESSONS_QUERY, header))
            await answer.came.wait()
        finally:
            if self._waiting.get(order_id) is answer:
                del self._waiting[order_id]
        if answer.header is None:
            raise PeerGone("the connection to the replay stage was lost before its answer")
        return decode_lessons(answer.header)

    def connected(self) -> None:
        self._connected = True

    def lost(self) -> None:
        """The connection is lost: pending searches get no answer."""
        self._connected = False
        for answer in self._waiting.values():
            answer.came.set()

    def answered(self, header: Mapping[str, Any]) -> None:
        """LESSONS came; too late for one who gave up."""
        order_id = header.get("order_id")
        if not isinstance(order_id, str):
            raise WireError(f"invalid LESSONS header: expected order_id as text, got {order_id!r}")
        answer = self._waiting.get(order_id)
        if answer is not None:
            answer.header = header
            answer.came.set()


class _Answer:
    def __init__(self) -> None:
        self.came = anyio.Event()
        self.header: Mapping[str, Any] | None = None


def gets_lessons(config: LessonsConfig, group_id: str, slot: int) -> bool:
    """True if the rollout gets lessons: ``rollout_ratio`` of every group's slots do, evenly spread: ``n * ratio`` of
    the first n, rounded up or down by the group, so both kinds are in a group that has room for both."""
    return config.enabled and _chosen(slot, config.rollout_ratio, _offset("guided", group_id))


def trains_with_lessons(config: LessonsConfig, group_id: str, slot: int) -> bool:
    """True if a rollout with lessons is trained on the prompt with them: ``keep_ratio`` of the group's slots with
    lessons are, evenly spread among them."""
    rank = _count(slot, config.rollout_ratio, _offset("guided", group_id))
    return _chosen(rank, config.keep_ratio, _offset("kept", group_id))


def _chosen(index: int, ratio: float, offset: float) -> bool:
    return _count(index + 1, ratio, offset) > _count(index, ratio, offset)


def _count(n: int, ratio: float, offset: float) -> int:
    """Number of chosen slots among the first n."""
    return floor(n * ratio + offset)


def _offset(purpose: str, group_id: str) -> float:
    """A number in [0, 1), the same in every process."""
    return zlib.crc32(f"{purpose}/{group_id}".encode()) / 2**32


@dataclass(slots=True)
class LessonPrompt:
    """An episode with lessons in its prompt."""

    conversation: Conversation
    """The start, with lessons."""
    lessons: tuple[Lesson, ...]
    keep: bool
    query: str
    plain: CounterfactualPrompt
    """The conversation without lessons, as far as the rollout has come."""

    def prompt_lessons(self, n_turns: int) -> PromptLessons:
        """The trajectory's record of its lessons, for its first ``n_turns`` turns."""
        contexts = {} if self.keep else self.plain.first(max(1, n_turns))
        return PromptLessons(tuple(lesson.lesson_id for lesson in self.lessons), self.keep, contexts, self.query)


class LessonPrompter:
    """``lessons:`` of the run file, for the rollouts of one actor. ``source`` None: the replay stage."""

    def __init__(
        self, config: LessonsConfig, renderer: Renderer, metrics: ActorMetrics, source: LessonClient | None = None
    ) -> None:
        self._config = config
        self._renderer = renderer
        self._metrics = metrics
        self._source = source

    async def prompt_for(
        self,
        order: Order,
        messages: Sequence[Message],
        context_max: int,
        stage: LessonClient | None,
        tools: Sequence[ToolSchema] = (),
    ) -> LessonPrompt | None:
        """Lessons for ``order``, or None: it gets none, nothing was found, or the search took too long."""
        user = first_user(tuple(messages))
        source = self._source or stage
        if not gets_lessons(self._config, order.group_id, order.slot) or user is None or source is None:
            return None
        query = messages[user].content
        started = time.perf_counter()
        outcome, found = await self._search(source, order.order_id, query[:QUERY_CHARACTERS_MAX])
        self._metrics.lesson_search_duration_seconds.observe(time.perf_counter() - started)
        result = self._with_lessons(order, messages, user, found, context_max, tools) if found else None
        if found and result is None:
            outcome = "no_room"
        self._metrics.lesson_searches_total.labels(outcome=outcome).inc()
        return result

    async def _search(self, source: LessonClient, order_id: str, query: str) -> tuple[str, list[Lesson]]:
        try:
            with anyio.fail_after(SEARCH_SECONDS_MAX), boundary(f"{NAME} search"):
                found = await source.search(order_id, query, self._config.top_k)
                if not isinstance(found, list) or not all(isinstance(lesson, Lesson) for lesson in found):
                    raise TypeError(f"expected a list of Lesson, got {repr(found)[:200]}")
        except (TimeoutError, PlugInTimeout):
            return "timeout", []
        except AfterplayError as error:
            log.warning("order %s continues without lessons: %s", order_id, error)
            return "error", []
        return ("found" if found else "none"), found

    def _with_lessons(
        self,
        order: Order,
        messages: Sequence[Message],
        user: int,
        found: Sequence[Lesson],
        context_max: int,
        tools: Sequence[ToolSchema],
    ) -> LessonPrompt | None:
        """The prompt with as many of the lessons as there is room for, best first: one that does not fit beside better
        ones is left out. None where not even one fits."""
        renderer = self._renderer
        plain = renderer.start(messages, tools)
        room = int((context_max - len(plain.prompt_ids)) * ROOM_SHARE_MAX)
        keep = trains_with_lessons(self._config, order.group_id, order.slot)
        lines = ((lesson.lesson_id, " ".join(lesson.text.split())) for lesson in found[: self._config.top_k])
        lessons = [Lesson(number, line[:LESSON_CHARACTERS_MAX]) for number, line in lines if line]

        def start(chosen: Sequence[Lesson]) -> Conversation | None:
            text = "\n".join(lesson.text for lesson in chosen)
            made = renderer.start(with_text(messages, user, self._config.template, lessons=text), tools)
            return made if len(made.prompt_ids) - len(plain.prompt_ids) <= room else None

        chosen = tuple(lessons)
        conversation = start(chosen) if chosen else None
        if conversation is None:
            chosen = ()
            for lesson in lessons:
                if (made := start((*chosen, lesson))) is not None:
                    chosen, conversation = (*chosen, lesson), made
        if conversation is None:
            return None
        return LessonPrompt(conversation, chosen, keep, messages[user].content, CounterfactualPrompt.of(plain))
