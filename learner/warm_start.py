"""Supervised warm start: the model that RL begins from, made from demonstrations before anything is published.

*consumes* a file of demonstrations and the prepared model; *produces* ``checkpoints/warm_start/uNNNNNN``, whose
``model`` folder is the initial model of RL (so the reference policy, the critic's backbone, adapters and the average
of the weights all begin from it), and lines of ``metrics.jsonl`` with ``phase: warm_start``; *waits for* nothing.

The checkpoints are those of any training, under a folder of their own and counted in warm-start steps: a learner that
was stopped goes on from the newest, and one that finds the last has nothing to do.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
from transformers.utils import logging as transformers_logging

from learner.checkpoint import CheckpointState, find_checkpoints, restore_training, save_checkpoint
from learner.demonstrations import Demonstrations, load_demonstrations
from learner.folder import remove_leftovers
from learner.making import make_policy
from learner.metrics_log import MetricsLog
from learner.models.prepare import prepare_model
from learner.policy import Interrupted
from learner.ranks.joining import place_of
from learner.report import StepReport
from learner.skipped import write_skipped
from learner.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TrainingError
from pipeline.role import RoleContext
from pipeline.rundir import RunDirectory, read_json, write_json_atomically

log = logging.getLogger(__name__)
PHASE = "warm_start"
SKIPPED_MAX = 10
"""Warm-start steps in a row that may be skipped because a value was not finite."""
DONE = "done.json"
"""Beside the last checkpoint: the warm start is over."""


def warm_folder(directory: RunDirectory) -> Path:
    """Where the checkpoints of the warm start are."""
    return directory.checkpoints / PHASE


def initial_model(directory: RunDirectory) -> Path:
    """The model that RL begins from: that of a finished warm start, else the prepared one."""
    found = find_checkpoints(warm_folder(directory))
    return found[0] / "model" if found and _is_over(directory) else directory.model


def is_due(config: RunConfig, directory: RunDirectory) -> bool:
    """Whether there is a warm start to begin or to go on with: none once RL has a checkpoint, or when it is done."""
    if config.learner.warm_start.demonstrations is None or find_checkpoints(directory.checkpoints):
        return False
    return not _is_over(directory)


class WarmStart:
    """Trainer, data and place of one warm start; ``step`` and ``save`` block. Goes on from its newest checkpoint."""

    def __init__(
        self, config: RunConfig, directory: RunDirectory, demonstrations: Demonstrations | None = None
    ) -> None:
        section = config.learner.warm_start
        assert section.demonstrations is not None
        self._config, self._directory = _for_warm_start(config), directory
        self.demonstrations = demonstrations or load_demonstrations(section.demonstrations, config, directory.model)
        self.steps = section.length(len(self.demonstrations))
        self._skipped = 0
        found = find_checkpoints(warm_folder(directory))
        checkpoint = found[0] if found else None
        self.trainer = Trainer(make_policy(self._config, directory.model, checkpoint), self._config)
        if checkpoint is not None:
            restore_training(checkpoint, self.trainer)
            log.info("the warm start goes on after %d of %d steps", self.trainer.updates, self.steps)

    @property
    def done(self) -> bool:
        """Whether all steps are made."""
        return self.trainer.updates >= self.steps

    def step(self) -> StepReport:
        """One optimizer step; one where a value is not finite is skipped, and its batch is written out. Raises
        :class:`Interrupted` when asked to stop, :class:`TrainingError` when :data:`SKIPPED_MAX` steps in a row were
        skipped."""
        section = self._config.learner.warm_start
        rows = self.demonstrations.draw((self._config.run.seed, 0), self.trainer.updates, section.batch)
        report = self.trainer.imitate(rows, section.learning_rate)
        self._skipped = 0 if report.optimizer_steps else self._skipped + 1
        if report.skipped is not None:
            write_skipped(self._directory.skipped / "warm_start", report.skipped)
        if self._skipped >= SKIPPED_MAX:
            raise TrainingError(
                f"{SKIPPED_MAX} warm-start steps in a row were not finite, up to step {report.update + 1}: lower "
                "learner.warm_start.learning_rate, or look at the model and the demonstrations"
            )
        return report

    @property
    def due(self) -> bool:
        """Whether a checkpoint is."""
        return self.done or self.trainer.updates % self._config.checkpoint.every == 0

    def save(self) -> Path:
        """A checkpoint; of the last step it is what RL begins from."""
        root, updates = warm_folder(self._directory), self.trainer.updates
        path = save_checkpoint(root, self.trainer, CheckpointState(updates, 0, {}), self._directory.model, keep=1)
        self.finish()
        return path

    def finish(self) -> None:
        """Write down that the last checkpoint is what RL begins from, where all steps are made."""
        if self.done:
            facts = {"steps": self.steps, "demonstrations": len(self.demonstrations)}
            write_json_atomically(warm_folder(self._directory) / DONE, facts, durable=True)


async def warm_up(ctx: RoleContext) -> None:
    """Make the warm start of a run, or the rest of it. Returns early when ``ctx.stopping`` is set: what was saved
    stays."""
    ctx.report("loading", "the demonstrations")
    warm = await anyio.to_thread.run_sync(_prepare, ctx)
    async with anyio.create_task_group() as tasks:

        async def stop_on_signal() -> None:
            await ctx.stopping.wait()
            warm.trainer.policy.interrupt.set()

        async def show_life() -> None:
            while True:
                ctx.beat()
                await anyio.sleep(1.0)

        tasks.start_soon(stop_on_signal)
        tasks.start_soon(show_life)
        with MetricsLog(ctx.directory.metrics_file, 0, warm.trainer.updates) as lines:
            while not warm.done and not ctx.stopping.is_set():
                ctx.report(
                    "warm start", "", warm_step=warm.trainer.updates + 1, warm_steps=warm.steps,
                    demonstrations=len(warm.demonstrations),
                )  # fmt: skip
                try:
                    report = await anyio.to_thread.run_sync(warm.step)
                except Interrupted:
                    log.info("gave up the warm-start step that was under way: the process is stopping")
                    break
                lines.write(step_line(report, warm.steps))
                log.info("warm start %d/%d: loss %.4f, grad norm %.3f, %.0f tokens/s", report.update + 1, warm.steps,
                         report.loss, report.grad_norm, report.tokens_per_second)  # fmt: skip
                if warm.due:
                    await anyio.to_thread.run_sync(warm.save)
        tasks.cancel_scope.cancel()


def step_line(report: StepReport, steps: int) -> dict[str, Any]:
    """The JSON object of one warm-start step; it has no ``step``, which counts updates of RL."""
    return {
        "phase": PHASE,
        "warm_step": report.update + 1,
        "warm_steps": steps,
        "time": time.time(),
        "loss": report.loss if report.optimizer_steps else None,
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "optimizer_steps": report.optimizer_steps,
        "nonfinite": dict(report.nonfinite),
        "tokens_trained": report.tokens_trained,
        "tokens_masked": report.tokens_masked,
        "tokens_per_second": report.tokens_per_second,
        "seconds": dict(report.seconds),
    }


def _is_over(directory: RunDirectory) -> bool:
    return read_json(warm_folder(directory) / DONE) is not None


def _prepare(ctx: RoleContext) -> WarmStart:
    config, directory = ctx.config, ctx.directory
    if place_of(config.learner).size > 1:
        raise ConfigurationError(
            "learner.warm_start is for one rank, but this learner has several: warm-start with one process, then start "
            "it again by torchrun"
        )
    transformers_logging.disable_progress_bar()
    if config.learner.threads is not None:
        torch.set_num_threads(config.learner.threads)
    torch.manual_seed(config.run.seed)
    prepare_model(config, directory.model)
    remove_leftovers(warm_folder(directory))
    warm = WarmStart(config, directory)
    warm.finish()
    return warm


def _for_warm_start(config: RunConfig) -> RunConfig:
    """Without what belongs to RL: the loss's own demonstrations and the average of the weights."""
    learner = config.learner.model_copy(update={"ema_decay": None})
    loss = config.loss.model_copy(update={"supervised": type(config.loss.supervised)()})
    return config.model_copy(update={"learner": learner, "loss": loss})
