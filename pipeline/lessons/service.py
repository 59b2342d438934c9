"""Serves lessons outside the loop of the stage; nothing here delays ingest.

*consumes* LESSONS_QUERY messages and :class:`Finished` effects from bounded queues; *produces* LESSONS messages and
rows of the lesson store; *waits for* the store and for the writer, in threads. What does not fit into a queue is
counted and dropped: an actor that gets no answer runs its rollout without lessons.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream

from pipeline.config import RunConfig
from pipeline.config.lessons import LessonsConfig
from pipeline.errors import AfterplayError, PlugInTimeout, SchemaError, WireError, boundary
from pipeline.lessons.store import NAME, Lesson, LessonSource, LessonStore, close_source, encode_lessons, task_text
from pipeline.lessons.writer import LessonWriter
from pipeline.runtime.metrics import LAT, MetricSet, counter, gauge, histogram
from pipeline.runtime.plugins import load_main
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import Trajectory
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.schema.orders import whole
from pipeline.schema.record_file import Frames
from pipeline.schema.trajectory import require_id
from pipeline.store.effects import Finished, Send
from pipeline.store.store import PayloadCache, ReplayStore
from pipeline.transport.messages import Kind

log = logging.getLogger(__name__)

TOP_K_MAX = 64
"""As ``lessons.top_k`` may be at most."""
QUERIES_MAX = 4096
"""Questions of actors that may wait."""
GROUPS_MAX = 256
"""Finished groups that may wait for the writer."""
WRITERS = 4
"""Groups that lessons are written from at once."""

LESSON_SEARCHES = ("found", "none", "error", "dropped")
LESSON_GROUPS = ("written", "nothing", "timeout", "error", "dropped")

Payloads = Callable[[Sequence[int]], Awaitable[Mapping[int, Frames]]]
"""Frames of stored trajectories by ``row_id``; those that were forgotten are left out."""


class LessonMetrics(MetricSet):
    """Contents and service of the lessons."""

    prefix = "afterplay_replay_"

    lessons = gauge("Lessons in the memory.")
    lessons_written_total = counter("New lessons, without repetitions.")
    lesson_groups_total = counter(
        "Finished groups handed to the lesson writer; outcome = written, nothing, timeout, error or dropped.",
        outcome=LESSON_GROUPS,
    )
    lesson_searches_total = counter(
        "Searches of actors; outcome = found, none, error or dropped (queue full).", outcome=LESSON_SEARCHES
    )
    lesson_search_duration_seconds = histogram("Time from the question of an actor to its answer.", LAT)


@dataclass(frozen=True, slots=True)
class LessonQuery:
    """A search request from an actor."""

    peer: str
    order_id: str
    query: str
    top_k: int
    asked_at: float
    """Clock of ``time.perf_counter``."""


class LessonService:
    """One memory, or one user-defined source instead, with its tasks."""

    def __init__(
        self,
        config: LessonsConfig,
        *,
        memory: LessonStore | None,
        source: LessonSource | None,
        writer: LessonWriter,
        payloads: Payloads,
        post: Callable[[Send], None],
        limits: Limits,
        metrics: LessonMetrics,
    ) -> None:
        self._config = config
        self._memory, self._source, self._writer = memory, source, writer
        self._payloads, self._post, self._limits, self._metrics = payloads, post, limits, metrics
        self._queries: deque[LessonQuery] = deque()
        self._asked = anyio.Event()
        self._groups_send, self._groups = anyio.create_memory_object_stream[Finished](GROUPS_MAX)

    def query(self, peer: str, header: Mapping[str, Any]) -> None:
        """A LESSONS_QUERY came. Never waits."""
        try:
            require_id("order_id", order_id := header.get("order_id"))
            query, top_k = str(header["query"]), whole(header, "top_k", 1, TOP_K_MAX)
            question = LessonQuery(peer, str(order_id), query, top_k, time.perf_counter())
        except (KeyError, WireError, SchemaError) as error:  # counted: a line for each would fill the log
            log.debug("invalid LESSONS_QUERY from %s: %s: %s", peer, type(error).__name__, error)
            self._metrics.lesson_searches_total.labels(outcome="error").inc()
            return
        if self._memory is None:
            self._answer(question, [], "none")
        elif len(self._queries) >= QUERIES_MAX:
            self._metrics.lesson_searches_total.labels(outcome="dropped").inc()
        else:
            self._queries.append(question)
            self._asked.set()

    def finished(self, group: Finished) -> None:
        """A group is complete and scored. Never waits."""
        if self._source is None and not self._writer.wants([m.reward for m in group.members if m.reward is not None]):
            return
        try:
            self._groups_send.send_nowait(group)
        except (anyio.WouldBlock, anyio.ClosedResourceError):  # closed: the stage writes its last rounds
            self._metrics.lesson_groups_total.labels(outcome="dropped").inc()

    async def run(self) -> None:
        """Until cancelled; what waits then is dropped. Closes memory and source."""
        if self._memory is not None:
            self._metrics.lessons.set(await anyio.to_thread.run_sync(self._memory.__len__))
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._search, name="lesson searches")
                for _ in range(WRITERS):
                    group.start_soon(self._write, self._groups.clone(), name="lesson writer")
        finally:
            self._groups_send.close()
            self._groups.close()
            with anyio.CancelScope(shield=True):
                if self._source is not None:
                    await close_source(self._source)
                if self._memory is not None:
                    await anyio.to_thread.run_sync(self._memory.close)

    async def _search(self) -> None:
        while True:
            if not self._queries:
                self._asked = anyio.Event()
                await self._asked.wait()
            batch = [self._queries.popleft() for _ in range(len(self._queries))]
            for question, found in await anyio.to_thread.run_sync(partial(self._look_up, batch)):
                if found is None:
                    self._answer(question, [], "error")
                else:
                    self._answer(question, found, "found" if found else "none")

    def _look_up(self, batch: list[LessonQuery]) -> list[tuple[LessonQuery, list[Lesson] | None]]:
        """The rollouts of one group ask the same: it is searched once."""
        assert self._memory is not None
        found: dict[tuple[str, int], list[Lesson] | None] = {}
        for question in batch:
            key = question.query, question.top_k
            if key not in found:
                try:
                    found[key] = self._memory.search(*key)
                except AfterplayError as error:
                    log.error("%s", error)
                    found[key] = None
        return [(question, found[question.query, question.top_k]) for question in batch]

    def _answer(self, question: LessonQuery, found: list[Lesson], outcome: str) -> None:
        self._metrics.lesson_searches_total.labels(outcome=outcome).inc()
        self._metrics.lesson_search_duration_seconds.observe(time.perf_counter() - question.asked_at)
        self._post(Send(question.peer, Kind.LESSONS, encode_lessons(question.order_id, found)))

    async def _write(self, groups: MemoryObjectReceiveStream[Finished]) -> None:
        async with groups:
            async for group in groups:
                try:
                    outcome = await self._write_one(group)
                except PlugInTimeout as error:
                    log.warning("group %s gave no lesson: %s", group.group_id, error)
                    outcome = "timeout"
                except AfterplayError as error:
                    log.warning("group %s gave no lesson: %s\n%s", group.group_id, error, getattr(error, "details", ""))
                    outcome = "error"
                except Exception:
                    log.exception("group %s gave no lesson", group.group_id)
                    outcome = "error"
                self._metrics.lesson_groups_total.labels(outcome=outcome).inc()

    async def _write_one(self, group: Finished) -> str:
        frames = await self._payloads([member.row_id for member in group.members])
        trajectories = await anyio.to_thread.run_sync(partial(self._decode, group, frames))
        if not trajectories:
            return "dropped"
        if self._source is not None:
            try:
                with anyio.fail_after(self._config.writer_seconds_max), boundary(NAME):
                    added = await self._source.summarise(trajectories)
            except TimeoutError as error:
                limit = f"no answer within {self._config.writer_seconds_max:g} s"
                raise PlugInTimeout(NAME, "TimeoutError", limit) from error
        else:
            assert self._memory is not None
            task = task_text(trajectories[0])
            texts = await self._writer(task, trajectories)
            added = await anyio.to_thread.run_sync(partial(self._memory.add, task, texts))
            self._metrics.lessons.set(await anyio.to_thread.run_sync(self._memory.__len__))
        self._metrics.lessons_written_total.inc(added)
        return "written" if added else "nothing"

    def _decode(self, group: Finished, frames: Mapping[int, Frames]) -> list[Trajectory]:
        """Members that are still stored, with the scorer's verdict."""
        return [
            decode_trajectory(frames[member.row_id], self._limits).scored(member.reward, member.rewards)
            for member in group.members
            if member.row_id in frames
        ]


MAKE_SOURCE = "actors.environments.plugins:make_source"
"""Loaded by path, because the stage imports no actor."""


async def open_lesson_service(
    config: RunConfig,
    directory: RunDirectory,
    store: ReplayStore,
    cache: PayloadCache,
    post: Callable[[Send], None],
    metrics: LessonMetrics,
) -> LessonService | None:
    """None where lessons are off. Raises :class:`ConfigurationError` for a writer or source that does not exist,
    :class:`StoreError` for a memory that cannot be used."""
    section = config.lessons
    if not section.enabled:
        return None
    memory: LessonStore | None = None
    source: LessonSource | None = None
    writer = LessonWriter(section, config.replay.success_threshold)
    if section.source != "stage":
        source = load_main(MAKE_SOURCE)(section)
    else:
        memory = await anyio.to_thread.run_sync(LessonStore, directory.lessons_file)

    async def payloads(row_ids: Sequence[int]) -> Mapping[int, Frames]:
        found = {row_id: frames for row_id in row_ids if (frames := cache.get(row_id)) is not None}
        missing = [row_id for row_id in row_ids if row_id not in found]
        return {**found, **await anyio.to_thread.run_sync(store.payloads, missing)} if missing else found

    return LessonService(
        section,
        memory=memory,
        source=source,
        writer=writer,
        payloads=payloads,
        post=post,
        limits=Limits.of(config),
        metrics=metrics,
    )
