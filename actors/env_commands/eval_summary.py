"""Schedule and summary of ``afterplay env eval``. Pure.

Legend: ``T`` tasks with ``n`` rollouts each, ``c`` of them successes (a reward of at least the threshold). pass@k of a
task is the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1); pass@k of the environment is its mean over
the tasks with ``n >= k``. A rollout that failed has no reward and is in none of these numbers: it is counted with its
reason. An advantage compares rollouts of one task, so only tasks whose rewards differ give one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.store.evaluation_results import pass_at_k

Z = 1.96
"""Standard errors of a 95 % interval."""
ENOUGH = 0.2
"""Share of tasks that give advantages from which training is not mostly wasted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One rollout of the evaluation."""

    task_id: str
    sample: int
    reward: float | None
    """None: it failed, or nobody gave a reward."""
    turns: int = 0
    tokens: int = 0
    """Sampled."""
    truncated: bool = False
    """A limit on turns, tokens or time ended it."""
    failure: str | None = None
    """Place and kind of the failure."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % interval; all None without a task."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int


@dataclass(frozen=True, slots=True)
class EvalSummary:
    """Results of one environment with one model."""

    tasks: int
    samples: int
    threshold: float
    """Least reward of a success."""
    scored: int
    """Rollouts with a reward."""
    failures: Mapping[str, int]
    """Rollouts without one, by reason."""
    left: int
    """Rollouts that have not run."""
    truncated: int
    scored_tasks: int
    compared: int
    """Tasks with at least two rewards."""
    always: int
    """Compared tasks of which every rollout was a success."""
    never: int
    """Compared tasks of which no rollout was."""
    between: int
    """Compared tasks of which some were."""
    informative: int
    """Compared tasks whose rewards differ, so that they give advantages."""
    score: float | None
    """Mean over tasks of the mean reward of a task."""
    se: float | None
    """Standard error of the score over tasks; None with fewer than two."""
    pass_at: Mapping[int, Estimate]
    turns: float | None
    """Mean over scored rollouts."""
    tokens: float | None
    """Mean of the sampled tokens over scored rollouts."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "pass_at": {str(k): asdict(v) for k, v in self.pass_at.items()}}


def wanted(tasks: Sequence[str], samples: int, done: Collection[tuple[str, int]]) -> Iterator[tuple[int, int]]:
    """(place of the task, sample) of each rollout that is not ``done``, task by task: an evaluation that is stopped has
    whole groups."""
    return ((i, sample) for i, task in enumerate(tasks) for sample in range(samples) if (task, sample) not in done)


def interval(values: Sequence[float], rollouts: int) -> tuple[float, float]:
    """95 % interval of the mean of ``values`` (in 0..1, one for each task), which are of so many ``rollouts``.

    Wilson's interval at the effective sample size ``p (1 - p) / se²``, where ``se`` is the standard error over tasks.
    It has a width also where all values are equal. The effective size is between the number of tasks and of rollouts.
    """
    n = len(values)
    p = math.fsum(values) / n
    variance = math.fsum((v - p) ** 2 for v in values) / (n - 1) / n if n > 1 else 0.0
    size = min(max(p * (1 - p) / variance, n), rollouts) if variance > 0 and 0 < p < 1 else n
    middle = (p + Z * Z / (2 * size)) / (1 + Z * Z / size)
    half = Z * math.sqrt(p * (1 - p) / size + Z * Z / (4 * size * size)) / (1 + Z * Z / size)
    return max(0.0, min(p, middle - half)), min(1.0, max(p, middle + half))


def summarise(
    outcomes: Sequence[Outcome], tasks: int, samples: int, pass_at: Sequence[int], threshold: float
) -> EvalSummary:
    """The summary of ``outcomes``, of ``tasks`` times ``samples`` that are wanted."""
    rewards: dict[str, list[float]] = {}
    for outcome in outcomes:
        if outcome.reward is not None:
            rewards.setdefault(outcome.task_id, []).append(outcome.reward)
    scored = [outcome for outcome in outcomes if outcome.reward is not None]
    means = [math.fsum(r) / len(r) for r in rewards.values()]
    score = _mean(means)
    se = None
    if score is not None and len(means) > 1:
        se = math.sqrt(math.fsum((m - score) ** 2 for m in means) / (len(means) - 1) / len(means))
    compared = [r for r in rewards.values() if len(r) > 1]
    successes = [(sum(x >= threshold for x in r), len(r)) for r in compared]
    always, never = sum(c == n for c, n in successes), sum(c == 0 for c, _ in successes)
    return EvalSummary(
        tasks=tasks,
        samples=samples,
        threshold=threshold,
        scored=len(scored),
        failures=dict(Counter(o.failure or "no reward" for o in outcomes if o.reward is None).most_common()),
        left=tasks * samples - len(outcomes),
        truncated=sum(outcome.truncated for outcome in scored),
        scored_tasks=len(means),
        compared=len(compared),
        always=always,
        never=never,
        between=len(compared) - always - never,
        informative=sum(min(r) != max(r) for r in compared),
        score=score,
        se=se,
        pass_at={k: _estimate([r for r in rewards.values() if len(r) >= k], k, threshold) for k in pass_at},
        turns=_mean([outcome.turns for outcome in scored]),
        tokens=_mean([outcome.tokens for outcome in scored]),
    )


def sentences(found: EvalSummary) -> list[str]:
    """The summary in words; the last paragraph says what it means for training."""
    said = []
    if found.left:
        said.append(f"{found.left} of {found.tasks * found.samples} rollouts have not run.")
    if failed := sum(found.failures.values()):
        reasons = ", ".join(f"{reason} ({n})" for reason, n in found.failures.items())
        said.append(f"{_rollouts(failed)} failed and {'has' if failed == 1 else 'have'} no reward: {reasons}.")
    if found.truncated:
        said.append(f"{_rollouts(found.truncated)} ended at a limit on turns, tokens or time.")
    if found.compared:
        n = found.compared
        said.append(
            f"Of {n} tasks, {_share(found.always, n)} were always solved, {_share(found.never, n)} never, and "
            f"{_share(found.between, n)} sometimes (a reward of at least {found.threshold:g} is a success). The "
            f"rewards differ within {_share(found.informative, n)}: only these tasks give advantages."
        )
    return [*said, _meaning(found)]


def _meaning(found: EvalSummary) -> str:
    """The consequence for training with this model."""
    if not found.scored:
        return "Nothing was scored, so nothing is known about training."
    if not found.compared:
        remedy = "take more --samples." if found.samples == 1 else "run the rest."
        return (
            "No task has two rewards, so nothing is known about advantages, which compare rollouts of one task: "
            + remedy
        )
    share = found.informative / found.compared
    if share >= ENOUGH:
        return (
            f"This environment is worth training on with this model: {share:.0%} of the groups of {found.samples} "
            "rollouts would give a signal."
        )
    hard = found.never >= found.always
    remedy = (
        "The tasks are too hard for this model: take easier tasks, a stronger model, demonstrations first, or a reward "
        "that pays for partial success."
        if hard
        else "The tasks are too easy for this model: take harder tasks."
    )
    if not found.informative:
        return f"No task gives an advantage: training would change nothing. {remedy}"
    return (
        f"Only {share:.0%} of the groups of {found.samples} rollouts would give a signal, so most rollouts would be "
        f"wasted. {remedy}"
    )


def _estimate(rewards: Sequence[Sequence[float]], k: int, threshold: float) -> Estimate:
    if not rewards:
        return Estimate(None, None, None, 0)
    values = [pass_at_k(len(r), sum(x >= threshold for x in r), k) for r in rewards]
    low, high = interval(values, sum(map(len, rewards)))
    return Estimate(math.fsum(values) / len(values), low, high, len(values))


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _share(part: int, whole: int) -> str:
    return f"{part} ({part / whole:.0%})"


def _rollouts(n: int) -> str:
    return "1 rollout" if n == 1 else f"{n} rollouts"
