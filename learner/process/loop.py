"""The learner's main loop: wait, train, report, publish, save.

*consumes* complete groups from the session; *produces* updates, versions and checkpoints; *waits for* the groups of
the next update, and for the publication of the version before the last; *unblocked by* deliveries, engines that
answer, or the end of the run.

With ``engine.colocate: sleep`` engines and learner take turns on their devices: the learner acquires them before each
update, once the version before is published, and releases them before it publishes the next.

Training runs in a worker thread, so messages continue; each layer of a pass is progress
(:mod:`pipeline.runtime.progress`). Publication of a version overlaps with the training of the next update, but for
weights that engines get straight from the device; at most one publication is under way. The next batch is prefetched
during training too (:mod:`learner.process.batches`). A checkpoint is copied in memory and written by
:class:`learner.checkpoints.writer.CheckpointWriter`: the loop waits for the disk only when the previous write is not
done.

When the process is asked to stop, :meth:`LearnerLoop.run` is cancelled, and :meth:`LearnerLoop.save` makes a checkpoint
of the last update. An update that has not changed the weights yet is given up: it is made from the same groups later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import numpy as np
from torch import Tensor

from learner.checkpoints.best import is_evaluated
from learner.checkpoints.checkpoint import CheckpointState, take_image
from learner.checkpoints.writer import CheckpointWriter
from learner.data.rows import Batch, Group, TokenArray
from learner.metrics import LearnerMetrics
from learner.observability.timing import LoopClock
from learner.process.batches import CandidateScorer, PrefetchedBatch, Prefetcher, ReplayChoice, make_batch
from learner.process.device_turn import DeviceTurn
from learner.process.recorder import MetricsLog, Update, record_step, step_line, trained_facts
from learner.process.session import LearnerSession
from learner.process.traces import Tracer
from learner.process.update_record import UpdateRecord, write_record
from learner.process.witness import trained_line
from learner.training.report import StepReport
from learner.training.trainer import Trainer
from learner.weights.device_weights import DeviceWeights
from learner.weights.publisher import Publisher, published_dtype, sent_from_device, weights_to_publish
from pipeline.runtime.disk import when_room
from pipeline.runtime.process import RoleContext
from pipeline.runtime.progress import AdaptiveLimit, RoleState
from pipeline.runtime.witness import open_witness

log = logging.getLogger(__name__)
EVALUATION_MARGIN_SECONDS = 60.0
"""Added to twice ``evaluation.seconds_max`` to bound the wait for the last evaluation: another may run before it."""
LOOK_SECONDS = 5.0
"""Interval at which a wait for rollouts is reported again."""
CHECKPOINT_SECONDS_MAX = 1800.0
"""Shortest age of the newest checkpoint that is worth an alert; more where the run saves more rarely."""
ACKNOWLEDGE_SECONDS_MAX = 5.0
"""Bound on the wait for the replay stage to record the last update."""


@dataclass
class LearnerLoop:
    ctx: RoleContext
    trainer: Trainer
    session: LearnerSession
    publisher: Publisher
    writer: CheckpointWriter
    metrics: LearnerMetrics
    lines: MetricsLog
    tracer: Tracer
    version: int
    """Policy version of the trainer's weights."""

    def __post_init__(self) -> None:
        config, trainer, session = self.ctx.config, self.trainer, self.session
        self._config = config
        self._device: DeviceTurn | None = None
        """Set where engines and learner take turns on one device."""
        if self.publisher.device is not None:
            self._device = DeviceTurn(self.publisher.device, trainer, offload=config.learner.offload)
        self._witness = open_witness("learner")
        self._first_update = self._saved_updates = trainer.updates
        self._last_publication: dict[str, Any] = {}
        self._prefetcher = Prefetcher(session, config.replay)
        tokens = config.learner.tokens_per_microbatch * trainer.policy.ranks.size
        self._scorer = CandidateScorer(session, config.replay, trainer.mean_entropies, tokens, self._may_score)
        self._from_device = sent_from_device(config)
        ranks_transfer = config.engine.weight_transfer == "ipc" and trainer.policy.ranks.size > 1
        self._transfers = self._from_device or ranks_transfer
        """An update begins only after the publication: it would change the weights that are sent, or needs the ranks
        that send them."""
        self._weights: DeviceWeights | None = None
        """Weights of the current version, where engines get them from the device."""
        self._clock = LoopClock()
        self._publication_done = anyio.Event()
        self._publication_done.set()
        self._unserved: int | None = None
        """Version that is written and that no engine serves yet."""
        self._checkpointed_at = time.monotonic()
        self._checkpoint_limit = AdaptiveLimit(CHECKPOINT_SECONDS_MAX, 0.0, factor=2.0)
        self.metrics.checkpoint_limit_seconds.set(self._checkpoint_limit.seconds)

    async def run(self, initial: bool) -> None:
        """Until ``run.total_steps`` updates are made. ``initial``: the weights are those the engines were started
        with."""
        total = self._config.run.total_steps
        if self._witness is not None:
            self._witness.write("resumed", updates=self.trainer.updates, version=self.version)
        async with anyio.create_task_group() as tasks:
            served = initial and self._config.publish.lora == "merged"
            self._clock.lap()
            with self._clock.phase("publish"):
                await self._acquire_device()
                await self._start_publication(tasks, await self._snapshot(), served)
            if self._keeps_best(0) and self.trainer.updates == 0:
                with self._clock.phase("save"):
                    await self._checkpoint()
            while self.trainer.updates < total:
                await self._step(tasks)
            self.ctx.report(RoleState.PUBLISHING, "the engines to take the last version")
            await self._until_published()
        await self._finish()

    async def _step(self, tasks: anyio.abc.TaskGroup) -> None:
        update = self.trainer.updates
        async with anyio.create_task_group() as scoring:
            scoring.start_soon(self._scorer.run, update)
            with self._clock.phase("wait"):
                groups = await self._wait_for_groups(update)
            scoring.cancel_scope.cancel()
            complete = time.perf_counter()
        scored = time.perf_counter()
        with self._clock.phase("publish"):
            await self._acquire_device()
        self.ctx.report(RoleState.TRAINING, "", step=update + 1, groups=len(groups))
        prefetched = self._prefetcher.take(update, groups)
        trained = None
        try:
            async with anyio.create_task_group() as prefetching:
                if update + 1 < self._config.run.total_steps:
                    prefetching.start_soon(self._prefetcher.prefetch, update + 1)
                with anyio.CancelScope(shield=True):  # what is trained is reported, also while the process stops
                    trained = await anyio.to_thread.run_sync(self._train, update, groups, prefetched)
                    batch, report, choice = trained
                    report.seconds["choose"] += scored - complete
                    facts = trained_facts(batch, report, choice, self._config.replay.ess_guard.level)
                    await self.session.consumed(update, facts)
                    self.version += 1
                prefetching.cancel_scope.cancel()
            with self._clock.phase("publish"):
                await self._start_publication(tasks, await self._snapshot())
        finally:
            if trained is not None:
                times = self._clock.lap()
                left_out = self._config.groups.groups_per_step - len(batch.groups)
                done = Update(batch, report, times, self._last_publication, choice, self.writer.saved, left_out)
                record_step(self.metrics, done)
                write = partial(self.lines.write, step_line(done))
                what = f"the line of step {update + 1} in metrics.jsonl"
                await when_room(write, self.ctx.directory.metrics_file, what)
        self._log_step(batch, report)
        updates = self.trainer.updates
        if updates % self._config.checkpoint.every == 0 or self._keeps_best(updates):
            with self._clock.phase("save"):
                await self._checkpoint()

    async def save(self) -> None:
        """Make a checkpoint of the last update, unless there is one, and wait until it is durable. Unbounded: the
        caller sets the bound."""
        updates = self.trainer.updates
        if self._saved_updates < updates and not self.trainer.policy.interrupt.mid_update:
            await self._checkpoint()
        self.ctx.report(RoleState.SAVING, f"the disk to take the checkpoint of step {updates}", step=updates)
        await self.writer.idle()

    @property
    def unsaved(self) -> int:
        """Updates that no durable checkpoint has."""
        return self.trainer.updates - int(self.writer.saved.get("updates", self._first_update))

    def _train(
        self, update: int, groups: tuple[Group, ...], prefetched: PrefetchedBatch | None
    ) -> tuple[Batch, StepReport, ReplayChoice]:
        replay, trainer = self._config.replay, self.trainer
        made = prefetched or make_batch(update, groups, replay, trainer.mean_entropies, self._scorer.scores(update))
        report = self.trainer.train(made.batch, self.version)
        if self._witness is not None:
            self._witness.write("trained", **trained_line(made.batch, report))
        if skipped := {where: n for where, n in report.nonfinite.items() if n}:
            log.warning("optimizer steps of step %d are skipped, a value is not finite: %s", update + 1, skipped)
        if replay.keep_trained:
            kept = replay.keep_trained + 2 * self._config.checkpoint.every  # as long as the stage keeps the groups
            record = UpdateRecord.of(made.batch, report, trainer.policy.compute_dtype)
            write_record(self.ctx.directory.updates, record, kept)
        report.seconds["choose"] += made.choose_seconds
        report.seconds["prepare"] += made.build_seconds
        self.tracer.record(made.batch, report)
        return made.batch, report, made.choice

    def _may_score(self) -> bool:
        """False where a pass would need the device of the engines, or ranks that take part in a transfer."""
        return self._device is None and (self._publication_done.is_set() or not self._transfers)

    async def _wait_for_groups(self, update: int) -> tuple[Group, ...]:
        """The groups of the update; reports what is missing meanwhile."""
        session = self.session
        found: tuple[Group, ...] = ()

        async def take(scope: anyio.CancelScope) -> None:
            nonlocal found
            found = await session.ready(update)
            scope.cancel()

        async with anyio.create_task_group() as waiting:
            waiting.start_soon(take, waiting.cancel_scope)
            while True:
                p = session.assembler.progress(update)
                missing = f"{p.complete} of {p.needed} groups of step {update + 1}"
                self._report_wait(
                    missing, step=update + 1, groups=p.complete, trajectories=p.trajectories,
                    engines=self.publisher.reason(),
                )  # fmt: skip
                with anyio.move_on_after(LOOK_SECONDS):
                    await session.changed()
        return found

    def _report_wait(self, missing: str, **details: Any) -> None:
        """The state while there is nothing to train. Waiting is progress, unless it is for a publication that does not
        end: then no rollout comes."""
        ctx = self.ctx
        if not self.session.connected:
            ctx.report(RoleState.WAITING_FOR_REPLAY, missing, **details)
        elif self._publication_done.is_set():
            ctx.report(RoleState.WAITING_FOR_ROLLOUTS, missing, **details)
        elif self._unserved is not None:
            ctx.report(RoleState.WAITING_FOR_ENGINES, f"one that serves version {self._unserved}", **details)
        else:
            ctx.report(RoleState.PUBLISHING, f"the engines to take version {self.version}", **details)
            return
        ctx.beat()

    async def _until_published(self) -> None:
        """Wait for the publication under way."""
        while not self._publication_done.is_set():
            with anyio.move_on_after(5.0):
                await self._publication_done.wait()
            if self._unserved is not None:
                self.ctx.report(RoleState.WAITING_FOR_ENGINES, f"one that serves version {self._unserved}")
                self.ctx.beat()

    async def _snapshot(self) -> dict[str, Tensor] | DeviceWeights:
        if self._from_device:
            policy = self.trainer.policy
            self._weights = DeviceWeights(policy, published_dtype(policy, self._config.publish))
            return self._weights
        return await anyio.to_thread.run_sync(weights_to_publish, self.trainer.policy, self._config.publish)

    async def _acquire_device(self) -> None:
        """Acquire a shared device, once the engines serve the version before. So do ranks that take part in a
        transfer: an engine that waits for them is paused. Weights that are sent from the device are retired then."""
        if self._device is None and not self._transfers:
            return
        self.ctx.report(RoleState.PUBLISHING, "the engines to take the version before")
        await self._until_published()
        if self._weights is not None:
            await self._weights.retire()
        if self._device is None:
            return
        async with self.ctx.waiting(RoleState.WAITING_FOR_ENGINES, "the device"):
            await self._device.acquire(lambda reason: self.ctx.report(RoleState.WAITING_FOR_ENGINES, reason))

    async def _start_publication(
        self, tasks: anyio.abc.TaskGroup, tensors: Mapping[str, Tensor] | DeviceWeights, initial: bool = False
    ) -> None:
        """Begin to publish the current version, once the publication before is done. ``initial``: the engines have its
        weights."""
        expected = await self._expected()
        if not self._publication_done.is_set():
            self.ctx.report(RoleState.PUBLISHING, "the engines to take the version before")
            await self._until_published()
        if self._device is not None:
            await self._device.release()
        self._publication_done = anyio.Event()
        facts = (self.version, self.trainer.updates, tensors, expected, initial)
        tasks.start_soon(self._publish, *facts, self._publication_done)

    async def _expected(self) -> TokenArray | None:
        """log π of the probe under the current weights, which the engines must give it too; None without a probe, or
        where it is not finite."""
        probe = self.publisher.probe
        if probe is None:
            return None
        expected = await anyio.to_thread.run_sync(self.trainer.score, [probe.row])
        return expected if bool(np.isfinite(expected).all()) else None

    async def _publish(
        self,
        version: int,
        updates: int,
        tensors: Mapping[str, Tensor] | DeviceWeights,
        expected: TokenArray | None,
        initial: bool,
        done: anyio.Event,
    ) -> None:
        began = time.perf_counter()
        try:
            publication = await self.publisher.publish(version, tensors, expected, initial)
            if not publication.live:
                log.warning("no engine serves version %d yet: %s", version, dict(publication.lagging))
                self._unserved = version
                await self.publisher.until_live(version)
            live, seconds = self.publisher.live(version), time.perf_counter() - began
            loads = {} if initial else {url: self.publisher.keepers[url].state.load_seconds for url in live}
            await self.session.announce(version, updates)
            if self._witness is not None:
                self._witness.write("published", version=version, updates=updates)
        finally:
            self._unserved = None
            done.set()
        self._last_publication = {"policy_version": version, "seconds": seconds, "live": len(live),
                           "lagging": len(self.publisher.reason()), "finished": time.time()}  # fmt: skip
        if loads:
            slowest = max(loads, key=loads.__getitem__)
            self._last_publication |= {"slowest": slowest, "slowest_seconds": loads[slowest]}
        self.metrics.policy_version.set(version)
        self.metrics.weight_publish_duration_seconds.observe(seconds)
        self.metrics.weight_publish_bytes_total.inc(publication.n_bytes)
        for load_seconds in loads.values():
            self.metrics.weight_load_duration_seconds.observe(load_seconds)
        log.info("version %d is live in %d engines after %.1f s", version, len(live), seconds)

    async def _checkpoint(self) -> None:
        """Copy everything and hand it to the writer, which tells the stage once it is durable."""
        updates = self.trainer.updates
        writing = self.writer.writing
        self.ctx.report(RoleState.SAVING, "" if writing is None else f"the checkpoint of step {writing}", step=updates)
        async with self.writer.slot(updates) as submit:
            unacknowledged, trained = self.session.unacknowledged()
            state = CheckpointState(updates, self.version, unacknowledged, trained=trained)
            if self._witness is not None:
                self._witness.write("saving", updates=updates, version=self.version)
            submit(await anyio.to_thread.run_sync(take_image, self.trainer, state))
        self._saved_updates = updates
        now = time.monotonic()
        self._checkpoint_limit.record(now - self._checkpointed_at)
        self._checkpointed_at = now
        self.metrics.checkpoint_limit_seconds.set(self._checkpoint_limit.seconds)

    def _keeps_best(self, updates: int) -> bool:
        """True where these weights are evaluated and may turn out to be the best."""
        section = self._config.evaluation
        return section.keep_best is not None and section.is_due(updates, self._config.run.total_steps)

    async def _until_evaluated(self) -> None:
        """Wait until the replay stage has evaluated the last weights, if it does."""
        section, session = self._config.evaluation, self.session
        if not (section.on and section.end):
            return
        with anyio.move_on_after(2 * section.seconds_max + EVALUATION_MARGIN_SECONDS) as waiting:
            async with self.ctx.waiting(RoleState.EVALUATING, "rollouts of held-out tasks", step=self.trainer.updates):
                while not is_evaluated(session.evaluation, self.trainer.updates):
                    with anyio.move_on_after(LOOK_SECONDS):
                        await session.changed()
        if waiting.cancelled_caught:
            log.warning("the last weights were not evaluated in time: the run ends without their evaluation")

    async def _finish(self) -> None:
        updates = self.trainer.updates
        if (self._config.checkpoint.at_end or self._keeps_best(updates)) and self._saved_updates < updates:
            await self._checkpoint()
        await self._until_evaluated()
        self.ctx.report(RoleState.SAVING, "the disk to take the last checkpoint", step=self.trainer.updates)
        await self.writer.idle()
        self.ctx.report(RoleState.FINISHING, "the replay stage to record the last update")
        with anyio.move_on_after(ACKNOWLEDGE_SECONDS_MAX):
            await self.session.acknowledged()
        self.ctx.finished()
        await self.ctx.until_scraped()
        await self.session.bye("finished")
        self.ctx.report(RoleState.FINISHED, "", step=self.trainer.updates)

    def _log_step(self, batch: Batch, report: StepReport) -> None:
        s, rewards = report.statistics, [t.reward or 0.0 for t in batch.fresh]
        log.info(
            "step %d: reward %.3f, ratio %.3f, ESS %.2f, staleness %d, loss %.4f, grad norm %.3f, %.0f tokens/s",
            report.update + 1,
            sum(rewards) / len(rewards) if rewards else float("nan"),
            s.all.ratio.mean or float("nan"),
            s.all.ratio.ess_ratio or float("nan"),
            int(s.staleness.max()) if len(s.staleness) else 0,
            report.loss,
            report.grad_norm,
            report.tokens_per_second,
        )
