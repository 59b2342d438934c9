"""The replay stage as a process. Only it binds a socket; all others connect, so that each can be restarted."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.streams.memory import MemoryObjectSendStream

from pipeline.config.evaluation import TracesConfig
from pipeline.config.stage import CACHE_BYTES
from pipeline.config.tasks import TRAIN
from pipeline.errors import TransportClosed
from pipeline.lessons.service import LessonService, open_lesson_service
from pipeline.runtime.disk import LOOK_SECONDS, DiskBudget, disk_fault, left_out, when_room
from pipeline.runtime.garbage_collection import gc_paused, gc_policy
from pipeline.runtime.plugin_limits import interrupting_blocks
from pipeline.runtime.process import RoleContext
from pipeline.runtime.progress import RoleState
from pipeline.schema.codec import Limits
from pipeline.scorer.scorer import Scorer
from pipeline.stage.core import StageCore
from pipeline.stage.ingest import Scoring, Verdicts
from pipeline.stage.loop import COMMIT_BATCH_MAX, Item, PeerSender, StageLoop
from pipeline.stage.metrics import Observer, ReplayMetrics
from pipeline.store.effects import UntrainedRollout
from pipeline.store.evaluation_results import read_results, write_results
from pipeline.store.store import PayloadCache, ReplayStore, store_path
from pipeline.store.traces import TraceWriter
from pipeline.tasks.open import open_sources
from pipeline.tasks.source import TaskSource
from pipeline.transport.hub import Hub
from pipeline.transport.messages import EventKind, Kind
from pipeline.transport.zeromq import open_hub

log = logging.getLogger(__name__)

FAILED, EVALUATED = "failed", "evaluated"
"""Kinds of traces that the stage writes."""


class UntrainedTraces:
    """Traces of rollouts that are not trained, for ``afterplay show``: failed ones, and a sample of the evaluated.

    Writes those of each kind that has a writer. What the file system does not take is left out, any other error ends
    it, both with a warning."""

    def __init__(self, writers: Mapping[str, TraceWriter] | None = None) -> None:
        self._writers = dict(writers or {})
        self._left_out = False
        """The newest trace was."""

    def keep(self, rollouts: Sequence[UntrainedRollout]) -> None:
        """Blocks for the disk's page cache. Called by one thread at a time."""
        for one in rollouts:
            kind = EVALUATED if one.evaluated else FAILED
            if (writer := self._writers.get(kind)) is None:
                continue
            try:
                writer.append({"trajectory_id": one.trajectory_id, "time": one.received_at}, one.frames, None)
                self._left_out = False
            except OSError as error:
                if disk_fault(error, Path()):
                    if not self._left_out:
                        log.warning("traces of rollouts are left out until they can be written: %s", error)
                    self._left_out = True
                    continue
                log.warning("stopped writing traces of %s rollouts: %s", kind, error)
                self._writers.pop(kind).close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


@contextmanager
def untrained_traces(config: TracesConfig, directory: Path, *, evaluates: bool = False) -> Iterator[UntrainedTraces]:
    """Traces of failed rollouts, and those of evaluations where the run file asks for them. ``evaluates``: the stage
    has evaluations."""
    writers = {}
    for kind in (FAILED, EVALUATED) if evaluates and config.evaluated else (FAILED,):
        try:
            writers[kind] = TraceWriter(directory, kind, config.bytes_max)
        except OSError as error:
            log.warning("no traces of %s rollouts are written: %s", kind, error)
    with closing(UntrainedTraces(writers)) as traces:
        yield traces


DRAIN_SECONDS_MAX = 1.0
"""For the last acknowledgements to leave."""


async def main(ctx: RoleContext) -> None:
    """Serve until ``ctx.stopping``. Raises :class:`ConfigurationError` for a bad score function or address,
    :class:`StoreError` for a store that cannot be used."""
    with gc_policy():
        await serve(ctx, open_hub(ctx.config))


async def serve(ctx: RoleContext, hub: Hub) -> None:
    """The stage on a given hub (tests use one in memory)."""
    config = ctx.config
    metrics: ReplayMetrics
    scorer = Scorer(
        config.scorer,
        lambda name, seconds, failure: _observe_score(metrics, name, seconds, failure),
        lambda name: _observe_retry(metrics, name),
    )
    sources = await _open_sources(ctx)
    path = store_path(config, ctx.directory)
    ctx.report(RoleState.STARTING, f"the store {path}")
    store = await when_room(partial(ReplayStore, path, config.stage.synchronous), path, "the replay store")
    ctx.watch(path)
    try:
        evaluations = ctx.directory.evaluations_file
        snapshot, evaluated = await anyio.to_thread.run_sync(lambda: (store.load(), read_results(evaluations)))
        with gc_paused():
            core = StageCore(
                config,
                snapshot,
                now=anyio.current_time(),
                wall=time.time(),
                score_now=scorer.score_now if scorer.immediate else None,
                sources={n: source.splits[TRAIN] for n, source in sources.items() if n in config.trained_environments},
                held_out={
                    name: source.splits[config.evaluation.split]
                    for name, source in sources.items()
                    if config.evaluation.split in source.splits
                },
            )
        metrics = ReplayMetrics(
            ctx.registry,
            environments=tuple(config.environments),
            score_functions=config.scorer.names,
            pass_at=config.evaluation.pass_at,
            split=config.evaluation.split,
        )
        observer = Observer(metrics)
        observer.update(core)
        _count_rows(sources, metrics)
        if core.evaluations.last is not None:
            # a kill may have come between the transaction and the line
            write = partial(write_results, evaluations, [core.evaluations.last])
            await when_room(write, ctx.directory.path, "the results of an evaluation")
        core.evaluations.number_after(evaluated)
        log.info("%s: %d updates, %d groups open", path, core.staleness.consumed, core.staleness.open)
        traces = untrained_traces(config.traces, ctx.directory.traces, evaluates=config.evaluation.on)
        with traces as untrained, interrupting_blocks():
            await _serve(ctx, hub, store, core, scorer, observer, untrained)
    finally:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(store.close)
            await scorer.close()
        for source in sources.values():
            source.close()


async def _open_sources(ctx: RoleContext) -> dict[str, TaskSource]:
    """The data of the environments, read once in a thread: minutes where it is large."""
    config = ctx.config
    if all(section.tasks_from is None for section in config.environments.values()):
        return {}
    ctx.report(RoleState.LOADING, "the tasks (reading tasks_from)")
    return await anyio.to_thread.run_sync(open_sources, config)


def _count_rows(sources: Mapping[str, TaskSource], metrics: ReplayMetrics) -> None:
    for name, source in sources.items():
        for kind, n in source.counts.items():
            metrics.task_rows.labels(env=name, kind=kind).set(n)


async def _serve(
    ctx: RoleContext,
    hub: Hub,
    store: ReplayStore,
    core: StageCore,
    scorer: Scorer,
    observer: Observer,
    untrained: UntrainedTraces,
) -> None:
    config, cache, metrics = ctx.config, PayloadCache(CACHE_BYTES), observer.metrics
    inbox_send, inbox_receive = anyio.create_memory_object_stream[Item](COMMIT_BATCH_MAX)

    async def deliver(verdicts: Verdicts) -> None:
        for _, verdict in verdicts:
            for name, value in verdict.rewards.items():
                if name in scorer.names and value is not None:
                    metrics.score_value.labels(function=name).observe(value)
        await inbox_send.send(verdicts)

    async with hub, anyio.create_task_group() as sending:
        log.info("bound to %s", hub.address)
        outgoing = PeerSender(hub, store, cache, sending)
        scoring = Scoring(scorer, store, Limits.of(config), config.scorer.concurrency, deliver)
        hub.refuse(core.control.refuses)
        lessons = await open_lesson_service(config, ctx.directory, store, cache, outgoing.post, metrics)
        loop = StageLoop(ctx, core, store, outgoing, cache, scoring, observer, lessons, untrained.keep)
        async with inbox_receive, anyio.create_task_group() as working:
            working.start_soon(loop.run, inbox_receive, name="loop")
            async with inbox_send, anyio.create_task_group() as feeding:
                feeding.start_soon(scoring.run, name="scoring")
                feeding.start_soon(_watch_disk, ctx, core, store, metrics, name="disk")
                feeding.start_soon(_listen, hub, inbox_send, outgoing, lessons, metrics, name="listen")
                if lessons is not None:
                    feeding.start_soon(lessons.run, name="lessons")
                await ctx.stopping.wait()
                ctx.report(RoleState.STOPPING)
                # scores that are still being computed are dropped here and made again by the next process
                feeding.cancel_scope.cancel()
        with anyio.move_on_after(DRAIN_SECONDS_MAX):
            await outgoing.drain()
        sending.cancel_scope.cancel()


async def _watch_disk(ctx: RoleContext, core: StageCore, store: ReplayStore, metrics: ReplayMetrics) -> None:
    """Pause admission while the run directory is larger than ``run.disk_bytes_max``, and tell of readers that keep the
    store's ``-wal`` from being emptied."""
    held_back = ""
    budget = DiskBudget(ctx.directory, ctx.config.run.disk_bytes_max)
    metrics.disk_budget_bytes.set(budget.bytes_max or 0)
    while True:
        if reason := await anyio.to_thread.run_sync(left_out, budget.look, ctx.directory.path):
            log.warning("the size of the run directory is not known: %s", reason)
        before, held_back = held_back, await anyio.to_thread.run_sync(store.held_back)
        if held_back and not before:
            log.warning("%s", held_back)
            ctx.notices.append(held_back)
        metrics.disk_used_bytes.set(budget.used)
        if budget.exceeded and not core.groups.paused:
            log.error("no group is admitted until there is %s", budget.exceeded)
        core.groups.paused = budget.exceeded
        await anyio.sleep(LOOK_SECONDS)


async def _listen(
    hub: Hub,
    inbox: MemoryObjectSendStream[Item],
    outgoing: PeerSender,
    lessons: LessonService | None,
    metrics: ReplayMetrics,
) -> None:
    while True:
        try:
            event = await hub.receive()
        except TransportClosed:
            return
        if event.kind in (EventKind.PEER_UP, EventKind.PEER_DOWN):
            outgoing.shut(event.peer)
        elif event.fault is not None:
            metrics.invalid_messages_total.labels(fault=event.fault.value).inc()
        if lessons is not None and event.message is not None and event.message.kind is Kind.LESSONS_QUERY:
            lessons.query(event.peer, event.message.header)
            continue
        await inbox.send(event)


def _observe_score(metrics: ReplayMetrics, name: str, seconds: float, failure: str) -> None:
    metrics.score_duration_seconds.labels(function=name).observe(seconds)
    if failure:
        metrics.score_failures_total.labels(function=name, reason=failure).inc()


def _observe_retry(metrics: ReplayMetrics, name: str) -> None:
    metrics.score_retries_total.labels(function=name).inc()
