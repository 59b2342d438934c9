"""Sections about experience: the replay stage, mixing old experience in, lessons in the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Section


class PriorityConfig(Section):
    """``replay.task_sampling: priority``: ``P = (p(1-p) + epsilon)^alpha * exp(-age / tau)``, normalised over tasks.

    p is the success rate of the task's latest fresh group, age the mean age in versions of what is stored for it.
    (Prioritised replay: arXiv:1511.05952; by p(1-p), the variance of a success, and freshness.)
    """

    alpha: float = Field(1.0, ge=0)
    epsilon: float = Field(0.01, gt=0)
    tau: float = Field(32.0, gt=0)
    """Versions after which a task's priority has fallen to 1/e."""
    beta: float = Field(0.4, ge=0, le=1)
    """Exponent of the importance correction ``min(1, (M P)^-beta)``, where ``1 / M`` is the mean probability of a drawn
    task; grows to 1 at the end of the run."""


class EssGuardConfig(Section):
    """Reacts to the effective sample size (Kish) of token ratios: a smaller step at once, less replay for a while."""

    enabled: bool = False
    target: float = Field(0.5, gt=0, le=1)
    """ESS0: the learning rate of a step is multiplied by ``sqrt(min(1, ESS / ESS0))``, ESS over all its tokens."""
    floor: float = Field(0.3, ge=0, le=1)
    """Lower bound of the ESS of an update's replayed tokens times ``min(1, mean ratio)``; below it the replay share is
    multiplied by ``shrink``. (Kish's ESS alone is 1 where every ratio is 0.01.)"""
    shrink: float = Field(0.5, gt=0, lt=1)
    recover: float = Field(0.05, gt=0, le=1)
    """Added to the share's factor after each update above the floor, up to 1."""
    share_min: float = Field(0.0, ge=0, le=1)
    """The share's factor never goes below this."""


class ReplayConfig(Section):
    """The replay stage: its store, and what of the past is trained again (REPLAY.md)."""

    address: str = "tcp://127.0.0.1:0"
    """Address to which the stage binds. Port 0 takes a free one, which ``afterplay run`` passes on. Other than loopback
    needs ``transport.curve``."""
    store: str | None = None
    """Path of the SQLite file; None: ``replay.sqlite`` in the run directory."""
    commit_batch_max: int = Field(256, ge=1)
    """Events committed in one transaction."""
    synchronous: Literal["FULL", "NORMAL"] = "FULL"
    """SQLite durability: FULL survives power loss, NORMAL survives a killed process."""
    cache_bytes: int = Field(64 * 1024 * 1024, ge=0)
    """Newest payloads kept in memory; the oldest go first."""

    enabled: bool = False
    """Mix stored experience into the batches. Off: nothing is stored beyond what is in flight."""
    start_ratio: float = Field(0.35, ge=0, le=1)
    """Mixing begins when this share of ``run.total_steps`` is done. Collection runs from step 0."""
    start_solve_rate: float | None = Field(None, ge=0, lt=1)
    """Instead of ``start_ratio``: mixing begins, for good, once a batch's solve rate exceeds this (ExGRPO)."""
    task_ratio: float = Field(0.5, ge=0, le=1)
    """Of each batch's B tasks, ``floor(B * task_ratio)`` are replay tasks, or as many as are valid."""
    trajectories_per_task: int = Field(1, ge=1)
    """k: replayed trajectories of a replay task, ``1 <= k < n_rollout``; the rest of the group is fresh."""
    max_trajectories_per_task: int = Field(5, ge=1)
    """Stored trajectories of one task; over it, one is evicted as ``select`` says (first in, first out for random)."""
    capacity: int = Field(50_000, ge=1)
    """Stored trajectories in all; over it the oldest go."""
    success_threshold: float = 1.0
    """A reward of at least this is a success: for difficulty, retirement and saving."""
    success_lower: int = Field(0, ge=0)
    """A task's successes are saved when ``lower < s < upper``, s of its fresh rollouts."""
    success_upper: int | None = Field(None, ge=1)
    """None: ``groups.n_rollout``."""
    select: Literal["argmin", "argmax", "random"] = "argmin"
    """Order in which a task's stored trajectories are replayed and kept: smallest or largest mean entropy, or any."""
    entropy: Literal["current", "stored"] = "current"
    """``current``: the learner scores the candidates with the current policy and picks; ``stored``: the entropy at
    collection decides."""
    task_sampling: Literal["uniform", "normal", "priority"] = "normal"
    """``normal``: a difficulty bucket of s successes has weight ``exp(-(s - n/2)^2 / 2)`` (ExGRPO)."""
    priority: PriorityConfig = PriorityConfig()
    difficulty: int | None = Field(None, ge=0)
    """Replay only tasks with exactly so many successes in their latest fresh group. None: all."""
    use_recorded_logprobs: bool = True
    """Replayed tokens are weighed against the log-probabilities recorded when they were sampled. False: against
    the current policy (ratio 1 in the first pass), which is biased."""
    max_age: int | None = Field(None, ge=1)
    """Trajectories older than this many versions when they are trained are not replayed."""
    window: int = Field(0, ge=0)
    """Replay only from the latest so many stored trajectories. 0: all."""
    unit: Literal["trajectory", "turn"] = "trajectory"
    """``turn``: one turn is trained, drawn uniformly over the turns of the candidates, with what came before as
    context."""
    retire_after: int | None = Field(1, ge=1, le=16)
    """A task retires when all fresh rollouts of so many of its groups in a row succeeded, and is then drawn for
    retests only. None: never. Retirement saves rollouts where tasks are many; with few tasks it leaves the hopeless
    ones alone in the batch, and what is not practised is forgotten."""
    retest_ratio: float = Field(0.02, ge=0, le=1)
    """Share of groups spent on retired tasks, so that forgetting is noticed."""
    inject: Literal["ratio", "rescue"] = "ratio"
    """``ratio``: planned replay groups, as above; ``rescue``: only where all fresh rollouts of a group failed, one of
    them is replaced by a stored success of the task (ARPO, arXiv:2505.16282)."""
    bias_correction: bool = False
    """Multiply replayed weight by the source group's success rate: replaying only successes over-weights them by
    1/P(success)."""
    ess_guard: EssGuardConfig = EssGuardConfig()

    @model_validator(mode="after")
    def _bounds_leave_something(self) -> ReplayConfig:
        if self.success_upper is not None and self.success_upper <= self.success_lower + 1:
            raise ValueError(
                f"replay.success_lower ({self.success_lower}) and success_upper ({self.success_upper}) are both "
                "exclusive and leave nothing between them: set upper to at least lower + 2"
            )
        if self.trajectories_per_task > self.max_trajectories_per_task:
            raise ValueError(
                f"replay.trajectories_per_task ({self.trajectories_per_task}) is more than "
                f"max_trajectories_per_task ({self.max_trajectories_per_task}): so many are never stored"
            )
        return self


class LessonsConfig(Section):
    """Experience in the prompt: short lessons from finished groups, found again by text search."""

    enabled: bool = False
    source: str = "stage"
    """Memory that stores and finds lessons. ``stage``: the replay stage's own memory (SQLite full text), or your own as
    ``module:Class`` or ``path/file.py:Class`` with the methods of ``pipeline.experience.memory.LessonSource``."""
    source_options: dict[str, Any] = Field(default_factory=dict)
    """Of the class's constructor."""
    timeout_seconds: float = Field(5.0, gt=0)
    """A search that takes longer is given up: the episode runs without lessons, and is counted."""
    top_k: int = Field(2, ge=1, le=64)
    """Lessons put into one prompt, at most."""
    template: str = "Lessons from earlier attempts:\n{lessons}\n\n{prompt}"
    """Template of the first user message of a guided episode; ``{lessons}`` is one line for each."""
    rollout_mode: Literal["mixed", "all", "without"] = "mixed"
    rollout_ratio: float = Field(0.5, ge=0, le=1)
    """mixed: the share of each group's rollouts that are guided."""
    train_mode: Literal["keep", "discard", "hybrid"] = "keep"
    """``keep``: train on the rollout's own prompt; ``discard``: on it without the lessons (off-policy, guided);
    ``hybrid``: keep for a share of ``keep_ratio``."""
    keep_ratio: float = Field(0.5, ge=0, le=1)
    writer: str = "contrast"
    """``contrast`` (a template that sets a success beside a failure), or the import path of a function that gets the
    task text and the scored trajectories of a finished group and returns texts (it may be async, and call an LLM)."""
    writer_seconds_max: float = Field(30.0, gt=0)
    lesson_characters_max: int = Field(600, ge=16)
    capacity: int = Field(10_000, ge=1)
    """Lessons kept; over it the oldest go."""
    store: Path | None = None
    """File of the memory; None: ``lessons.sqlite`` in the run directory."""

    @model_validator(mode="after")
    def _complete(self) -> LessonsConfig:
        if self.source != "stage" and not all(self.source.rpartition(":")):
            raise ValueError(
                "lessons.source: expected stage, or your own as module:Class or path/file.py:Class, got "
                f"{self.source!r}"
            )
        if self.source == "stage" and self.source_options:
            raise ValueError(
                "lessons.source_options are for a source of your own, but lessons.source is stage: leave them out"
            )
        if "{lessons}" not in self.template or "{prompt}" not in self.template:
            raise ValueError("lessons.template needs {lessons} and {prompt}")
        return self
