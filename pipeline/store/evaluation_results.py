"""Scores and pass@k of an evaluation, and the log of evaluations (``evaluations.jsonl``).

Legend: ``n`` rollouts of a task that have a reward, ``c`` of them successes, ``T`` tasks. The score of an environment
is the mean over tasks of the mean reward of a task. Its standard error is that of a mean over ``T`` tasks,
``sd / sqrt(T)``, because tasks are what was drawn and rollouts of one task are not independent. pass@k is the unbiased
estimator of Chen et al. 2021 (arXiv:2107.03374, eq. 1), ``1 - C(n-c, k) / C(n, k)``, averaged over the tasks with
``n >= k``. A rollout without a reward is in none of these: it is counted as missing. The log has one line for each
evaluation that ended, also when the process was killed in between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

from pipeline.runtime.disk import whole_or_nothing
from pipeline.runtime.run_directory import sync
from pipeline.schema import record_file as frames


@dataclass(frozen=True, slots=True)
class TaskResult:
    """One task of an evaluation."""

    environment: str
    rewards: Sequence[float]
    """Rewards of the rollouts that have one."""
    truncated: int = 0
    """Rollouts that a limit ended; they have a reward and are in ``rewards``."""
    failed: int = 0
    """Rollouts that failed, those that were tried again with success included."""
    missing: int = 0
    """Rollouts that were wanted and have no reward."""
    tokens: int = 0
    """Sampled in those with a reward."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of one environment."""

    tasks: int
    scored_tasks: int
    """Tasks with at least one reward."""
    score: float | None
    """None: nothing was scored."""
    se: float | None
    """None with fewer than two tasks."""
    pass_at: Mapping[int, float | None]
    pass_at_tasks: Mapping[int, int]
    """Tasks with enough rollouts for that k."""
    rollouts: int
    truncated: int
    failed: int
    missing: int
    tokens_mean: float | None

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "pass_at": {str(k): v for k, v in self.pass_at.items()},
            "pass_at_tasks": {str(k): v for k, v in self.pass_at_tasks.items()},
        }


@dataclass(slots=True)
class Result:
    """Result of one evaluation, as in ``evaluations.jsonl`` and in messages to the learner."""

    number: int
    """Counts from 0 in a run."""
    updates: int
    """Updates that the weights contain."""
    policy_version: int
    """Version that was to be evaluated."""
    reason: str
    """``start``, ``schedule``, ``end`` or ``command``."""
    status: str
    """``complete``; ``timed_out`` (evaluation.seconds_max); ``abandoned`` (the weights were rolled back, or the run
    file changed what is evaluated)."""
    environments: dict[str, Summary] = field(default_factory=dict)
    versions: tuple[int, int] | None = None
    """Oldest and newest policy version that sampled a token of it; None: nothing was scored."""
    started_at: float = 0.0
    """Unix seconds."""
    ended_at: float = 0.0
    skipped: int = 0
    """Evaluations before it that were skipped because one was still running."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """Mean over environments, each counting the same; None unless each has one."""
        return _mean_of([s.score for s in self.environments.values()])

    @property
    def se(self) -> float | None:
        errors = [s.se for s in self.environments.values()]
        if not errors or any(e is None for e in errors):
            return None
        return math.sqrt(math.fsum(e * e for e in errors if e is not None)) / len(errors)

    def pass_at(self, k: int) -> float | None:
        return _mean_of([s.pass_at.get(k) for s in self.environments.values()])

    def value(self, metric: str) -> float | None:
        """Value of ``score`` or ``pass@K``."""
        return self.score if metric == "score" else self.pass_at(int(metric.removeprefix("pass@")))

    def as_json(self) -> dict[str, Any]:
        """A line of ``evaluations.jsonl``."""
        ks = sorted({k for s in self.environments.values() for k in s.pass_at})
        return {
            "evaluation": self.number,
            "updates": self.updates,
            "policy_version": self.policy_version,
            "versions": None if self.versions is None else list(self.versions),
            "reason": self.reason,
            "status": self.status,
            "score": self.score,
            "se": self.se,
            "pass_at": {str(k): self.pass_at(k) for k in ks},
            "environments": {name: s.as_json() for name, s in self.environments.items()},
            "started_at": self.started_at,
            "seconds": self.ended_at - self.started_at,
            "skipped": self.skipped,
            **self.settings,
        }


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that at least one of ``k`` of the ``n`` rollouts, drawn without putting back, is one of the ``c``
    successes. A product, so that nothing overflows.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 0, 2)
    (0.25, 1.0, 0.0)
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"expected 1 <= k <= n and 0 <= c <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def summarise(tasks: Sequence[TaskResult], pass_at: Sequence[int], threshold: float) -> dict[str, Summary]:
    """Summaries by environment, in order of appearance."""
    by_name: dict[str, list[TaskResult]] = {}
    for task in tasks:
        by_name.setdefault(task.environment, []).append(task)
    return {name: _summary(members, pass_at, threshold) for name, members in by_name.items()}


def _summary(tasks: Sequence[TaskResult], pass_at: Sequence[int], threshold: float) -> Summary:
    means = [math.fsum(t.rewards) / len(t.rewards) for t in tasks if t.rewards]
    score = math.fsum(means) / len(means) if means else None
    se = None
    if score is not None and len(means) > 1:
        se = math.sqrt(math.fsum((m - score) ** 2 for m in means) / (len(means) - 1) / len(means))
    estimates = {
        k: [pass_at_k(len(t.rewards), sum(r >= threshold for r in t.rewards), k) for t in tasks if len(t.rewards) >= k]
        for k in pass_at
    }
    rollouts = sum(len(t.rewards) for t in tasks)
    return Summary(
        tasks=len(tasks),
        scored_tasks=len(means),
        score=score,
        se=se,
        pass_at={k: math.fsum(v) / len(v) if v else None for k, v in estimates.items()},
        pass_at_tasks={k: len(v) for k, v in estimates.items()},
        rollouts=rollouts,
        truncated=sum(t.truncated for t in tasks),
        failed=sum(t.failed for t in tasks),
        missing=sum(t.missing for t in tasks),
        tokens_mean=sum(t.tokens for t in tasks) / rollouts if rollouts else None,
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    if not values or any(v is None for v in values):
        return None
    return math.fsum(v for v in values if v is not None) / len(values)


def write_results(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Append those whose ``evaluation`` is not in the file yet. A line that a kill cut off is ended first."""
    known = {line.get("evaluation") for line in read_results(path)}
    new = [result for result in results if result.get("evaluation") not in known]
    if not new:
        return
    data = b"".join(orjson.dumps(result) + b"\n" for result in new)
    with path.open("ab+", buffering=0) as file, whole_or_nothing(file.fileno()):
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        frames.write(file.fileno(), [data])
    sync(path)


def read_results(path: Path) -> list[dict[str, Any]]:
    """All whole lines, by number; none where there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found = {}
    for line in data.splitlines():
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict) and isinstance(value.get("evaluation"), int):
            found[value["evaluation"]] = value
    return [found[number] for number in sorted(found)]


def results_by_updates(path: Path) -> dict[int, dict[str, Any]]:
    """Results by the updates of their weights, the newest of each where a learner made updates again. Abandoned ones
    are left out: most are of weights that are gone."""
    found = {result["updates"]: result for result in read_results(path) if result.get("status") != "abandoned"}
    return dict(sorted(found.items()))
