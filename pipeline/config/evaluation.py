"""Sections ``evaluation`` (held-out tasks, docs/EVALUATION.md) and ``traces`` (rollouts for ``afterplay show``)."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from pipeline.config.base import Section

_METRIC = re.compile(r"score|pass@([1-9]\d*)")


class EvaluationConfig(Section):
    """Rollouts of held-out tasks by the same actors, beside training."""

    every: int | None = Field(None, ge=1)
    """Updates between evaluations: the weights after each multiple of it are evaluated. None: no evaluation. One that
    still runs when the next is due makes that one fall out, so a short period slows nothing down."""
    start: bool = True
    """Evaluate the weights that the run begins with too: what training is compared with. The first update waits for
    it, so that it is of exactly these weights."""
    end: bool = True
    """Evaluate the last weights; the run ends after that."""
    split: str = Field("eval", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Split to evaluate on: one of ``tasks_from.splits``, of the environment's own, or of ``held_out``."""
    environments: tuple[str, ...] = ()
    """Sections of ``environments`` to evaluate. Empty: every one that has the split."""
    tasks: int = Field(64, ge=1, le=1_048_576)
    """Tasks of each environment, spread evenly over its split; fewer where the split has fewer. Always the same ones,
    in every run, so that results can be compared."""
    samples: int = Field(1, ge=1, le=1024)
    """Rollouts of each task."""
    greedy: bool = True
    """Decode greedily (temperature 0), one rollout a task. False: sampled, as pass@k needs it."""
    temperature: float | None = Field(None, gt=0, le=10)
    """Temperature of sampled rollouts. None: ``sampling.temperature``."""
    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k: the chance that one of k rollouts succeeds, estimated from ``samples`` without bias."""
    success_threshold: float | None = None
    """A reward of at least this is a success. None: ``replay.success_threshold``."""
    slots: float = Field(0.25, gt=0, le=1)
    """Share of the actors' slots that evaluation may hold while training goes on, at least one slot."""
    strict: bool = False
    """Hold training back so that every rollout of every evaluation is of exactly the weights that are evaluated. False:
    only those of the start and the end are; else training goes on, and a result says which versions sampled it."""
    attempts_max: int = Field(3, ge=1)
    """A rollout that failed is ordered again up to so often in all; then it is missing in the result. It is never
    counted as 0."""
    seconds_max: float = Field(3600.0, gt=0)
    """An evaluation that takes longer ends with what it has; the rest is missing in the result."""
    only: bool = False
    """Order nothing else: no training. ``afterplay eval`` sets it."""
    keep_best: str | None = None
    """Keep the checkpoint that was best in this as ``checkpoints/best``: ``score``, or ``pass@K`` with a K of
    ``pass_at``. The learner then also writes a checkpoint of every weights that are evaluated. None: keep none."""

    @model_validator(mode="after")
    def _fits_together(self) -> EvaluationConfig:
        if self.greedy and self.samples > 1:
            raise ValueError(
                f"evaluation.samples is {self.samples}, but greedy rollouts of a task are all alike: set greedy: "
                "false, or samples: 1"
            )
        if self.greedy and self.temperature is not None:
            raise ValueError("evaluation.temperature is for sampled rollouts: set greedy: false, or leave it out")
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(f"evaluation.pass_at: expected numbers from 1 to samples ({self.samples}), got {wrong}")
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"evaluation.pass_at names a number twice: {list(self.pass_at)}")
        if self.keep_best is not None:
            found = _METRIC.fullmatch(self.keep_best)
            k = int(found.group(1)) if found and found.group(1) else None
            if not found or (k is not None and k not in self.pass_at):
                known = ", ".join(["score", *(f"pass@{k}" for k in self.pass_at)])
                raise ValueError(f"evaluation.keep_best: expected one of {known}, got {self.keep_best!r}")
        return self

    @property
    def on(self) -> bool:
        return self.every is not None

    @property
    def metric(self) -> str:
        """Number by which the best is chosen."""
        return self.keep_best or "score"

    def is_due(self, updates: int, total_steps: int) -> bool:
        """True if weights that contain ``updates`` updates are evaluated."""
        if self.every is None:
            return False
        if updates >= total_steps:
            return self.end
        return updates % self.every == 0 and (updates > 0 or self.start)

    def next_due(self, updates: int, total_steps: int) -> int | None:
        """The first number of updates from ``updates`` on that is evaluated; None: none any more."""
        if self.every is None:
            return None
        if updates <= 0 and self.start:
            return 0
        following = -(-max(updates, 1) // self.every) * self.every
        if following < total_steps:
            return following
        return total_steps if self.end and updates <= total_steps else None


class TracesConfig(Section):
    """Trained trajectories are freed once a checkpoint covers them, failed and evaluated ones at once. Some of each
    are kept in ``runs/NAME/traces``, so that people can look at them."""

    trained: int = Field(4, ge=0, le=65_536)
    """Trajectories of every update, drawn at random, that are kept with what the learner saw at each token: log-prob,
    entropy, advantage, clipping. A few show how the policy acts; each costs about 8 bytes a token. 0: none."""
    failed: bool = True
    """Keep failed rollouts with the turns until then."""
    evaluated: int = Field(16, ge=0, le=65_536)
    """Rollouts of every evaluation that are kept, spread evenly over its tasks: those of the same tasks each time, so
    that one can see how the policy's rollouts of a task changed. 0: none."""
    bytes_max: int = Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Of the traces of one process: the learner for what was trained, each replay stage for what failed, and again for
    evaluations. The oldest eighth goes when there are more."""
