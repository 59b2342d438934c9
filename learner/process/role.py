"""The learner process: load or resume, connect, agree on versions, train, publish, save, leave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from learner.checkpoints.best import BestKeeper
from learner.checkpoints.checkpoint import find_resumption
from learner.checkpoints.writer import CheckpointWriter
from learner.metrics import LearnerMetrics
from learner.models.prepare import prepare_model
from learner.policy.reference import ATTEMPTS_MAX, TIMEOUT_SECONDS
from learner.process.build import load_trainer
from learner.process.device_turn import limit_memory
from learner.process.loop import LearnerLoop
from learner.process.preflight import with_options
from learner.process.rank_processes import RankZero
from learner.process.recorder import MetricsLog
from learner.process.session import LearnerProgress, LearnerSession
from learner.process.traces import tracing
from learner.training.trainer import Trainer
from learner.weights.colocated import await_engines
from learner.weights.publisher import make_publisher, published_versions
from pipeline.config import RunConfig
from pipeline.errors import Interrupted, StoreError
from pipeline.runtime.disk import when_room
from pipeline.runtime.folders import damaged_folders, remove_leftovers
from pipeline.runtime.process import RoleContext, working_seconds
from pipeline.runtime.progress import RoleState
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema.codec import Limits
from pipeline.supervisor.history import rewind
from pipeline.transport.link import Link
from pipeline.transport.zeromq import open_link

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """Trainer, progress and ranks that a learner starts with."""

    trainer: Trainer
    progress: LearnerProgress
    checkpoint: Path | None
    rank_zero: RankZero | None = None
    """Starts and watches the other ranks; None: there is one."""
    damaged: tuple[str, ...] = ()
    """A sentence for each damaged checkpoint that was passed over."""


async def main(ctx: RoleContext) -> None:
    """Entry point of the role. Returns when the run is finished or ``ctx.stopping`` is set."""
    await serve(ctx, open_link(ctx.config, "learner"))


async def serve(ctx: RoleContext, link: Link) -> None:
    """The learner over a given link (tests use one in memory)."""
    if ctx.config.engine.colocate != "none":
        await await_engines(ctx)
        if ctx.stopping.is_set():
            return
    limit_memory(ctx.config)
    ctx.report(RoleState.LOADING, "the model")
    try:
        start = await anyio.to_thread.run_sync(load, ctx.config, ctx.directory, ctx.stopping.is_set)
    except Interrupted:
        return
    unsaved = 0
    try:
        if not ctx.stopping.is_set():
            unsaved = await _serve(ctx, start, link)
    finally:
        if start.rank_zero is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(partial(start.rank_zero.end, at_once=unsaved > 0))


async def _serve(ctx: RoleContext, start: Start, link: Link) -> int:
    """Work until the run is finished or the process stops, which makes a checkpoint of the last update. Returns the
    updates that no durable checkpoint has."""
    metrics = LearnerMetrics(ctx.registry, environments=tuple(ctx.config.environments))
    metrics.damaged_checkpoints.set(len(damaged_folders(ctx.directory.checkpoints)))
    ctx.notices += start.damaged
    config, directory, interrupt = ctx.config, ctx.directory, start.trainer.policy.interrupt
    credit = 2 * config.groups.groups_per_step  # groups in training, and a decoded batch that waits
    session = LearnerSession(link, config.groups, credit, start.progress, Limits.of(config))
    writer = CheckpointWriter(
        directory.checkpoints, directory.model, config.checkpoint.keep, session.checkpointed, metrics
    )
    best = BestKeeper(config.evaluation, writer, lambda: session.evaluation, session.changed)
    loop: LearnerLoop | None = None
    try:
        async with (
            link,
            make_publisher(config, directory, start.trainer.policy, metrics) as publisher,
            anyio.create_task_group() as tasks,
        ):
            with anyio.CancelScope() as training:

                async def stop_on_signal() -> None:
                    await ctx.stopping.wait()
                    interrupt.set()
                    training.cancel()
                    await anyio.sleep(working_seconds(config.checkpoint.drain_seconds_max))
                    interrupt.force()
                    tasks.cancel_scope.cancel()

                for task in (stop_on_signal, session.run, publisher.run, writer.run, best.run):
                    tasks.start_soon(task)
                if start.rank_zero is not None:
                    tasks.start_soon(start.rank_zero.watch)
                start.trainer.on_layer(ctx.beat)
                allow_time_limits(ctx, several_ranks=start.rank_zero is not None)
                async with ctx.waiting(RoleState.WAITING_FOR_REPLAY, f"an answer from {config.stage.address}"):
                    recorded = await session.welcome()
                publisher.identify(session.epoch)
                version = choose_version(start.progress, recorded, published_versions(directory))
                updates = start.trainer.updates
                log.info("starting with %d updates as version %d", updates, version)
                await when_room(partial(rewind, directory, updates), directory.history_file, "the history")
                with (
                    await when_room(
                        partial(MetricsLog, directory.metrics_file, updates), directory.metrics_file, "metrics.jsonl"
                    ) as lines,
                    tracing(config.traces, directory.traces, config.run.seed, updates) as tracer,
                ):
                    parts = (ctx, start.trainer, session, publisher, writer, metrics, lines, tracer)
                    loop = LearnerLoop(*parts, version)
                    try:
                        await loop.run(initial=start.checkpoint is None)
                        await best.settle()
                    except* Interrupted:
                        log.info("cancelled the unfinished step: the process is stopping")
            if loop is not None and loop.unsaved and ctx.stopping.is_set():
                await loop.save()
            tasks.cancel_scope.cancel()
    except* (OSError, StoreError):
        if not ctx.stopping.is_set() or writer.failure is None:
            raise
        log.error("the checkpoint could not be written: %s", writer.failure)
    unsaved = loop.unsaved if loop is not None else 0
    if ctx.stopping.is_set() and unsaved:
        log.error(
            "stopped without a checkpoint of step %d, while %s %s (checkpoint.drain_seconds_max: %g). Steps to make "
            "again: %d", start.trainer.updates, ctx.status.state, ctx.status.reason,
            config.checkpoint.drain_seconds_max, unsaved,
        )  # fmt: skip
    return unsaved


def allow_time_limits(ctx: RoleContext, *, several_ranks: bool) -> None:
    """Keep the limits on progress above the time limits of what the learner waits for: engines, other ranks, and a
    server of reference log-probabilities."""
    config, progress = ctx.config, ctx.progress
    progress.allow(RoleState.PUBLISHING, 2 * config.publish.timeout_seconds)
    if several_ranks:
        for state in (RoleState.TRAINING, RoleState.SAVING, RoleState.PUBLISHING):
            progress.allow(state, config.learner.ranks_timeout_seconds)
    if config.learner.reference.url is not None:
        progress.allow(RoleState.TRAINING, 2 * TIMEOUT_SECONDS * ATTEMPTS_MAX)


def load(config: RunConfig, directory: RunDirectory, give_up: Callable[[], bool] = lambda: False) -> Start:
    """Model, optimizer and counters: of the newest intact checkpoint, else of the initial model. With several ranks
    the other ranks load the same meanwhile. Blocks for seconds, and while another process prepares the model; raises
    :class:`Interrupted` when it gives up on that, and :class:`DamagedFiles` where no checkpoint is intact."""
    config = with_options(config)
    prepare_model(config, directory.model, give_up)
    remove_leftovers(directory.checkpoints)
    found = find_resumption(directory.checkpoints)
    for sentence in found.damaged:
        log.error("%s", sentence)
    rank_zero = RankZero.begin(config)
    try:
        group = None if rank_zero is None else rank_zero.group
        trainer, state = load_trainer(config, directory, found.checkpoint, group)
    except BaseException:
        if rank_zero is not None:
            rank_zero.end()
        raise
    progress = LearnerProgress()
    if state is not None:
        before = state.updates, state.policy_version, state.updates, state.unacknowledged
        progress = LearnerProgress(*before, trained=state.trained)
    return Start(trainer, progress, found.checkpoint, rank_zero, found.damaged)


def choose_version(progress: LearnerProgress, recorded: int, written: list[int]) -> int:
    """Version under which the weights are published first (PROTOCOL.md, "Resuming").

    ``recorded`` is the newest that the replay stage has, ``written`` the versions with a weight folder: an engine may
    have served one of those although nobody announced it. A version always names the same weights, so versions
    newer than the restored one are skipped.

    >>> choose_version(LearnerProgress(), -1, [])
    0
    >>> choose_version(LearnerProgress(10, 10), 10, [9, 10])
    10
    >>> choose_version(LearnerProgress(10, 10), 11, [12])
    13
    """
    own = max(0, progress.policy_version)
    newest = max([recorded, *written])
    return own if newest <= own else newest + 1
