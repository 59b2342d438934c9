"""Sections ``evaluation`` (held-out tasks, docs/EVALUATION.md) and ``traces`` (rollouts for ``afterplay show``)."""

from __future__ import annotations

from pydantic import Field

from pipeline.config.base import Section


class EvaluationConfig(Section):
    """Evaluation on held-out tasks, by the same actors, during training."""

    every: int | None = Field(None, ge=1)
    """Updates between evaluations. The weights after each multiple are evaluated. If the previous evaluation is still
    running, the next one is skipped, so a short period does not slow training down. None: no evaluation."""
    start: bool = True
    """Also evaluate the initial weights, the baseline that training is compared with. The first update waits for this
    evaluation, so that it measures exactly these weights."""
    end: bool = True
    """Also evaluate the final weights. The run ends after that."""
    split: str = Field("eval", pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Split to evaluate on: one of ``tasks_from.splits``, of the environment's own splits, or of ``held_out``."""
    environments: tuple[str, ...] = ()
    """Sections of ``environments`` to evaluate. Empty: all that have the split."""
    tasks: int = Field(64, ge=1, le=1_048_576)
    """Tasks of each environment, spread evenly over its split; fewer if the split is smaller. They are the same in
    every evaluation and every run, so that results can be compared."""
    samples: int = Field(1, ge=1, le=1024)
    """Rollouts of each task."""
    temperature: float | None = Field(0.0, ge=0, le=10)
    """Temperature of the rollouts. 0: greedy, with one rollout per task. pass@k needs one above 0. None:
    ``sampling.temperature``."""
    pass_at: tuple[int, ...] = (1,)
    """Values of k for pass@k, the probability that at least one of k rollouts succeeds. It is an unbiased estimate from
    ``samples`` rollouts. A reward of at least ``replay.success_threshold`` is a success."""
    strict: bool = False
    """Pause training so that every rollout of every evaluation comes from exactly the weights that are evaluated.
    False: only the evaluations at the start and at the end are exact; the others run beside training, and their results
    list the versions that sampled them."""
    seconds_max: float = Field(3600.0, gt=0)
    """Time limit of one evaluation, in seconds; after a restart of the replay stage it starts again. Rollouts that are
    not finished by then, or that failed ``groups.attempts_max`` times, are missing from the result; they never count
    as 0."""
    keep_best: str | None = None
    """Keep the checkpoint with the best value of this metric as ``checkpoints/best``: ``score``, or ``pass@K`` with K
    from ``pass_at``. The learner then also writes a checkpoint of all weights that are evaluated. None: no best
    checkpoint is kept."""

    def check(self) -> None:
        if self.greedy and self.samples > 1:
            raise ValueError(
                f"evaluation.samples is {self.samples}, but all greedy rollouts of a task are the same: set "
                "temperature: 1, or samples: 1"
            )
        if wrong := [k for k in self.pass_at if not 1 <= k <= self.samples]:
            raise ValueError(f"evaluation.pass_at: expected numbers from 1 to samples ({self.samples}), got {wrong}")
        if len(set(self.pass_at)) < len(self.pass_at):
            raise ValueError(f"evaluation.pass_at names a number twice: {list(self.pass_at)}")
        metrics = ["score", *(f"pass@{k}" for k in self.pass_at)]
        if self.keep_best is not None and self.keep_best not in metrics:
            raise ValueError(f"evaluation.keep_best: expected one of {', '.join(metrics)}, got {self.keep_best!r}")

    @property
    def on(self) -> bool:
        """True if evaluation is switched on."""
        return self.every is not None

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0

    @property
    def metric(self) -> str:
        """Metric that selects the best checkpoint."""
        return self.keep_best or "score"

    def is_due(self, updates: int, total_steps: int) -> bool:
        """True if weights that contain ``updates`` updates are evaluated."""
        updates = min(updates, total_steps)
        return self.next_due(updates, total_steps) == updates

    def next_due(self, updates: int, total_steps: int) -> int | None:
        """Number of updates of the next evaluation, counted from ``updates``; None if there is none left."""
        if self.every is None:
            return None
        if updates <= 0 and self.start:
            return 0
        following = -(-max(updates, 1) // self.every) * self.every
        if following < total_steps:
            return following
        return total_steps if self.end and updates <= total_steps else None


class TracesConfig(Section):
    """Trajectories kept for ``afterplay show``, in ``runs/NAME/traces``. Without traces, trained trajectories are
    deleted once a checkpoint covers them, failed and evaluated ones immediately."""

    trained: int = Field(4, ge=0, le=65_536)
    """Trajectories of each update, drawn at random, that are kept with the learner's values for each token:
    log-probability, entropy, advantage, clipping. Each costs about 8 bytes per token. 0: none."""
    evaluated: int = Field(16, ge=0, le=65_536)
    """Rollouts of each evaluation that are kept, spread evenly over its tasks. The tasks are the same each time, so
    that rollouts of one task can be compared over training. 0: none."""
    bytes_max: int = Field(256 * 1024 * 1024, ge=1024 * 1024)
    """Upper bound in bytes for each of three sets of traces: trained, evaluated, and failed rollouts with the turns up
    to the failure. When a set is full, its oldest eighth is deleted."""
