"""Sections ``replay`` (experience replay) and ``lessons`` (lessons in the prompt)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Choice, Function, Given, Section


class PriorityConfig(Section):
    """Options of ``task_sampling: priority``: ``P = (v + 0.01)^alpha * exp(-age / tau)``, normalized over tasks.

    v is the variance p(1-p) of a success, its mean under the posterior of the task's success rate p; tasks that always
    or never succeed keep a small probability. age is the mean age of the task's recorded trajectories, in versions.
    (Prioritized replay: arXiv:1511.05952.)
    """

    alpha: float = Field(1.0, ge=0)
    """Exponent of the variance. 0: only the age counts."""
    tau: float = Field(32.0, gt=0)
    """Age in versions at which a task's priority has fallen to 1/e."""
    beta: float = Field(0.4, ge=0, le=1)
    """Exponent of the importance correction ``min(1, (M P)^-beta)`` at the start of the run; it grows to 1 until the
    end. ``1 / M`` is the mean probability of a drawn task."""


class EssGuardConfig(Section):
    """Reaction to a low effective sample size (ESS, Kish) of the importance ratios: the learning rate of the step is
    reduced at once, and the share of replay for some updates."""

    enabled: bool = False
    """Switches the guard on."""
    level: Literal["token", "sequence"] = "token"
    """Ratios that the ESS is taken of. ``token``: π/μ of each token. ``sequence``: the product of π/μ over each
    trajectory; use it with a ``correction`` over trajectories."""
    target: float = Field(0.5, gt=0, le=1)
    """ESS0: the learning rate of a step is multiplied by ``sqrt(min(1, ESS / ESS0))``, with the ESS over all its tokens
    (trajectories) as a share of their number."""
    floor: float = Field(0.3, ge=0, le=1)
    """The replay share is halved if the ESS of an update's replayed tokens (trajectories) times ``min(1, mean ratio)``
    is below this, and grows by 0.05 after each other update, until it is whole. (Kish's ESS alone would be 1 if every
    ratio were 0.01.)"""


class StoredGroupsConfig(Section):
    """Options of ``mode: groups``: groups of fresh rollouts that come back whole, failures included.

    A group is stored when all its rollouts are fresh and their rewards differ. Its members have the rewards, and so the
    advantages, that they had when it was fresh; their tokens are weighted as those of every replay.
    """

    capacity: int = Field(512, ge=1)
    """Stored groups. Above this, the oldest are evicted."""
    uses_max: int = Field(2, ge=1)
    """Times that a stored group is replayed. After the last one it leaves."""
    select: Literal["priority", "uniform", "newest"] = "priority"
    """Stored group that is replayed next. ``priority``: drawn in proportion to ``Σ|A| exp(-age / tau)``, the sum over
    its members, A being reward minus mean reward of the group. ``uniform``: all with the same probability. ``newest``:
    the latest one, which is plain reuse."""
    tau: float = Field(8.0, gt=0)
    """With ``priority``: age in versions at which a group's priority has fallen to 1/e."""


class ReplayConfig(Section):
    """Experience replay (docs/REPLAY.md)."""

    enabled: bool = False
    """Train replayed trajectories beside fresh ones. False: only trajectories in flight are stored."""
    mode: Literal["groups", "mix"] = "groups"
    """Form in which experience comes back. ``groups``: recent groups come back whole, failures included, beside fresh
    groups. ``mix``: stored successes replace some rollouts of new groups of their task (ExGRPO); the
    keys of the pool of successes, and of the choice of tasks and successes, are for these."""
    groups: StoredGroupsConfig = StoredGroupsConfig()
    start_ratio: float = Field(0.0, ge=0, le=1)
    """Replay begins after this share of ``run.total_steps`` (ExGRPO: 0.35). Trajectories are collected from the
    start."""
    start_solve_rate: float | None = Field(None, ge=0, lt=1)
    """Alternative to ``start_ratio``: replay begins once the solve rate of an update exceeds this, and never stops
    again (ExGRPO). None: ``start_ratio`` decides."""
    task_ratio: float = Field(0.5, ge=0, le=1)
    """Share of groups that are replay groups, or fewer if fewer tasks have stored trajectories that may be replayed.
    Fractions of a group add up over updates: of one group an update, 0.5 replays every other one."""
    trajectories_per_task: int = Field(1, ge=1)
    """k: stored trajectories in a replay group, ``1 <= k < n_rollout``. The rest of the group is fresh."""
    max_trajectories_per_task: int = Field(5, ge=1)
    """Stored trajectories of one task. Above this, ``select`` decides which is evicted (the oldest with ``random``)."""
    capacity: int = Field(50_000, ge=1)
    """Stored trajectories of all tasks. Above this, the oldest are evicted."""
    capacity_bytes: int = Field(16 * 1024**3, ge=1)
    """Payload bytes of all stored trajectories (``mode: mix``) or groups (``mode: groups``), on disk. Above this, the
    oldest are evicted. Also the bound of ``keep_trained``."""
    keep_trained: int = Field(10, ge=0)
    """Updates before the newest checkpoint whose rollouts at least stay in the store after use, with ``enabled`` or
    without: ``afterplay retrain`` repeats them from the checkpoint before them, and a learner that goes back to it
    trains the same groups. As many more stay as there are back to that checkpoint (``checkpoint.keep``). Above
    ``capacity_bytes`` the oldest go, beyond ``run.disk_bytes_max`` all. 0: none, and the learner does not record what
    its updates computed."""
    success_threshold: float = Field(1.0)
    """A reward of at least this is a success. Decides about difficulty, retirement and storing. The
    successes of a group are stored unless all its fresh rollouts succeed."""
    select: Literal["argmin", "argmax", "random"] = "argmin"
    """Order in which a task's stored trajectories are replayed, and kept longest: smallest mean entropy first, largest
    first, or random."""
    entropy: Literal["current", "stored"] = "current"
    """Entropy that ``select`` compares. ``current``: that of the current policy, which the learner measures while it
    waits for rollouts, and in the update within ``scoring_share``. ``stored``: that which was measured last, or
    estimated at collection; nothing is measured for the choice."""
    scoring_share: float | None = Field(0.05, ge=0)
    """Share of an update's time that the learner may spend in it on measuring entropies of candidates, estimated by
    tokens. Those that were measured longest ago go first; what remains is ranked by its stored entropy. None: no bound,
    all candidates are measured."""
    task_sampling: Literal["uniform", "normal", "priority"] = "normal"
    """Distribution of replay tasks. ``uniform``: all with the same probability. ``normal``: tasks with s successes of n
    have weight ``exp(-(s - n/2)^2 / 2)``, which prefers intermediate difficulty (ExGRPO); n is ``groups.n_rollout``, s
    their success rate times n, rounded. ``priority``: by variance and age; see ``priority``."""
    priority: PriorityConfig = PriorityConfig()
    difficulty_half_life: float = Field(1.0, ge=0)
    """Fresh rollouts, in groups of ``groups.n_rollout``, after which older ones count half in a task's success rate.
    0: only the latest group counts (ExGRPO)."""
    correction: Annotated[Function, Choice("token")] = Given(name="token")
    """Importance weight of replayed trajectories, by name or with its options: ``soft`` or ``{name: sequence, max:
    4}``. ``token``: of each token. ``sequence`` and ``geometric``: truncated, over the trajectory. ``soft``: a kernel
    over the trajectory (VESPO). Over the trajectory means over all its sampled tokens, in all turns and branches,
    before the first optimizer step of the update; the clip then holds π against the policy at that moment.
    docs/REPLAY_STUDY.md has the bias of each."""
    max_age: int | None = Field(None, ge=1)
    """Oldest trajectory that may be replayed, in versions at the time of training. None: no limit."""
    retire_after: int | None = Field(1, ge=1, le=16)
    """A task retires when all fresh rollouts of this many consecutive groups succeeded. A replay group counts by its
    fresh rollouts: one with half of ``groups.n_rollout`` is half a group. Retired tasks are only drawn
    for retests. None: tasks never retire. Retirement saves rollouts if there are many tasks. With few tasks, the
    unsolvable ones soon dominate the updates and the solved ones are forgotten."""
    retest_ratio: float = Field(0.1, ge=0, le=1)
    """Share of groups spent on retired tasks, which detects forgetting. With few tasks less is too little
    (docs/REPLAY_STUDY.md)."""
    bias_correction: bool = False
    """Multiply the weight of replayed trajectories by the success rate of the policy that sampled them on their task.
    Corrects the over-weighting by 1/P(success) that comes from replaying only successes. The rate is that of all fresh
    rollouts of the task until then, given that the source group was selected: it had successes and failures. A single
    success, which the selection makes sure of, shows no rate above 0 and has weight 0."""
    ess_guard: EssGuardConfig = EssGuardConfig()

    def check(self) -> None:
        if self.trajectories_per_task > self.max_trajectories_per_task:
            raise ValueError(
                f"replay.trajectories_per_task ({self.trajectories_per_task}) is more than "
                f"max_trajectories_per_task ({self.max_trajectories_per_task}), so there are never enough"
            )
        if self.enabled and self.mode == "groups" and self.task_ratio >= 1:
            raise ValueError(
                "replay.mode: groups needs fresh groups to replay, but replay.task_ratio is "
                f"{self.task_ratio:g}: set it below 1, or replay.mode: mix"
            )
