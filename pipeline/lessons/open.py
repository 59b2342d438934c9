"""From a run file to the stage's lessons."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio.to_thread

from pipeline.config import RunConfig
from pipeline.lessons.memory import Memory
from pipeline.lessons.service import Lessons
from pipeline.lessons.source import LessonSource
from pipeline.lessons.writer import Writer
from pipeline.metrics.replay import ReplayMetrics
from pipeline.replay.journal import Send
from pipeline.replay.outgoing import PayloadCache
from pipeline.replay.store import ReplayStore
from pipeline.role import load_main
from pipeline.rundir import RunDirectory
from pipeline.transport.base import Frames
from pipeline.transport.open import limits_of

MAKE_SOURCE = "actors.lessons.source:make_source"
"""Loaded by path, because the stage imports no actor."""


async def open_lessons(
    config: RunConfig,
    directory: RunDirectory,
    store: ReplayStore,
    cache: PayloadCache,
    post: Callable[[Send], None],
    metrics: ReplayMetrics,
) -> Lessons | None:
    """None where lessons are off. Raises :class:`ConfigurationError` for a writer or source that does not exist,
    :class:`StoreError` for a memory that cannot be used."""
    section = config.lessons
    if not section.enabled:
        return None
    memory: Memory | None = None
    source: LessonSource | None = None
    writer = Writer(section, config.replay.success_threshold)
    if section.source != "stage":
        source = load_main(MAKE_SOURCE)(section)
    else:
        memory = await anyio.to_thread.run_sync(
            partial(
                Memory,
                section.store or directory.lessons_file,
                capacity=section.capacity,
                characters_max=section.lesson_characters_max,
            )
        )

    async def payloads(seqs: Sequence[int]) -> Mapping[int, Frames]:
        found = {seq: frames for seq in seqs if (frames := cache.get(seq)) is not None}
        missing = [seq for seq in seqs if seq not in found]
        return {**found, **await anyio.to_thread.run_sync(store.payloads, missing)} if missing else found

    return Lessons(
        section,
        memory=memory,
        source=source,
        writer=writer,
        payloads=payloads,
        post=post,
        limits=limits_of(config),
        metrics=metrics,
    )
