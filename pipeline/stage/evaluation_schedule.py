"""Schedule and results of evaluations: at most one at a time, and the best results so far.

*consumes* versions, answers and scores of its rollouts; *produces* slots to order, results. Its groups
(:mod:`pipeline.stage.evaluation_rollouts`) are in no batch, pool, difficulty or admission. Everything is derived from
rows that are written anyway: after a restart, tasks without a group are planned and the others continue.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.config import RunConfig
from pipeline.schema.counters import Count
from pipeline.stage.evaluation_rollouts import EvaluationRollouts, HeldOut
from pipeline.stage.group_records import SharedState, StagePart
from pipeline.store.effects import Evaluated
from pipeline.store.evaluation_results import Result
from pipeline.store.records import GroupRecord, OrderRecord
from pipeline.tasks.source import TaskSplit
from pipeline.tasks.splits import Splits

log = logging.getLogger(__name__)


class BestResults:
    """The best evaluations so far by ``metric`` (``score`` or ``pass@K``), each better than the one before.

    ``kept``: the :attr:`bests` of an earlier process; dropped where its metric is another one. Those before the best
    are kept for a learner that goes back to an older checkpoint.
    """

    def __init__(self, metric: str, kept: Sequence[dict[str, Any]]) -> None:
        self._metric = metric
        self.bests = list(kept) if kept and kept[-1]["metric"] == metric else []
        """JSON; the best last."""

    @property
    def best(self) -> dict[str, Any] | None:
        return self.bests[-1] if self.bests else None

    def offer(self, result: Result, shape: dict[str, Any]) -> None:
        """Add a complete evaluation. One with other tasks, sampling or terms (``shape``) starts over, because their
        values cannot be compared. Of equal values the first stays."""
        if self.best is not None and self.best["of"] != shape:
            self.bests = []
        value = result.value(self._metric)
        if value is not None and (self.best is None or value > self.best["value"]):
            self.bests.append(
                {
                    "evaluation": result.number, "updates": result.updates, "policy_version": result.policy_version,
                    "metric": self._metric, "value": value, "of": shape,
                }
            )  # fmt: skip

    def go_back(self, updates: int) -> None:
        """The learner has ``updates`` updates: had the checkpoint of a later best been durable, it would not have gone
        back behind it."""
        while self.bests and self.bests[-1]["updates"] > updates:
            self.bests.pop()


def _terms(config: RunConfig) -> str:
    """Changes with all that a score depends on beside the weights and the tasks, and where evaluated weights begin to
    be kept: the best evaluation of before has no checkpoint."""
    other = {"weight", "tasks", "tasks_from", "seed", "held_out", "step_seconds_max", "blocking"}
    names = sorted(config.evaluation.environments or config.environments)
    environments = [(name, config.environments[name].model_dump_json(exclude=other)) for name in names]
    sampling = config.sampling.model_dump_json(exclude={"temperature"})
    facts = (config.model.max_length, config.replay.success_threshold, config.evaluation.keep_best is None)
    return repr((sampling, config.scorer.model_dump_json(), environments, facts))


Active = dict[str, Any]

SLOTS_SHARE = 0.25
"""Share of the actors' slots that an evaluation may use during training; at least one slot."""


class Evaluations(StagePart):
    """``meta``: what an earlier process has written; ``sources``: held-out rows of environments with data."""

    def __init__(
        self,
        shared: SharedState,
        rollouts: EvaluationRollouts,
        meta: Mapping[str, Any],
        sources: Mapping[str, TaskSplit],
    ) -> None:
        super().__init__(shared)
        self._section = self._config.evaluation
        self._terms = hashlib.blake2b(_terms(self._config).encode(), digest_size=16).hexdigest()
        self.only = not self._config.trained_environments
        """Nothing is trained in this run."""
        self._sources = sources
        kept = meta.get("evaluation") or {}
        self._next: int = kept.get("next", 0)
        self._begun: int = kept.get("begun", -1)
        self.active: Active | None = kept.get("active")
        self._ends_at = 0.0
        """Clock of this process by which the active one, which it began or continued, must be complete."""
        self.last: dict[str, Any] | None = kept.get("last")
        """The newest result."""
        self._bests = BestResults(self._section.metric, kept.get("bests", []))
        self.tasks: HeldOut | None = None
        self.rollouts = rollouts
        """The rollouts of the active one."""
        self._last_header: object = None

    @property
    def best(self) -> dict[str, Any] | None:
        """Number, updates, version and value of the best complete one, by ``evaluation.metric``."""
        return self._bests.best

    def learn(self, own: Mapping[str, Splits]) -> None:
        """Find the tasks, given the splits of environments, and resume the evaluation of an earlier process, if the run
        file still describes the same one. Raises :class:`ConfigurationError`."""
        if not self._section.on or self.tasks is not None:
            return
        self.tasks = HeldOut(self._config, self._sources, own)
        if self.active is not None and self.active["shape"] != self._shape(self.tasks):
            log.warning("tasks, sampling or rewards of the evaluation have changed: the unfinished one is cancelled")
            self._end("abandoned")
        elif self.active is not None:
            self._ends_at = self._clock.now + self._section.seconds_max
            self.rollouts.resume(self.tasks, self.active["updates"])

    def number_after(self, results: Sequence[Mapping[str, Any]]) -> None:
        """``results``: what ``evaluations.jsonl`` has. A store that went back, or an empty one in its place, does not
        know of them, and a line with the number of another would not be written."""
        self._next = max([self._next, *(int(result["evaluation"]) + 1 for result in results)])

    def capacity(self, slots: int) -> int:
        """Orders that evaluation may have now, of all the actors' ``slots``."""
        if self._staleness.finished or self.only or self._section.strict:
            return slots
        return max(1, int(SLOTS_SHARE * slots))

    def holds_back(self, update: int) -> bool:
        """True if ``update`` must wait for an evaluation of the weights before it: the first update for that of the
        start, every one with ``evaluation.strict``."""
        if not self._section.on:
            return False
        if self.active is not None:
            due: int | None = self.active["updates"]
        else:
            # what was due before the weights of now is not made up for
            reached = max(self._begun + 1, self._staleness.live or 0)
            due = self._section.next_due(reached, self._config.run.total_steps)
        return due is not None and update >= due and (self._section.strict or due == 0)

    def take(self) -> tuple[GroupRecord, int] | None:
        """The next slot to order; the caller checks :meth:`capacity`."""
        return None if self.active is None or self.tasks is None else self.rollouts.take()

    def policy_version(self) -> int:
        """Oldest policy version that may sample it."""
        assert self.active is not None
        return int(self.active["policy_version"])

    def plan(self, announced: bool) -> None:
        """Begin and end what is due. ``announced``: the live weights are those of the learner of now, not newer ones of
        a process before it."""
        section = self._section
        if not section.on:
            if self.active is not None:
                self._end("abandoned")
            return
        live = self._staleness.live
        if live is not None and live < self._begun:
            # the learner went back to a checkpoint: those weights are gone
            if self.active is not None:
                self._end("abandoned")
            self._begun = live
            self._bests.go_back(live)
            self._write()
        if self.active is not None and self.tasks is not None:
            if self.rollouts.done:
                self._end("complete")
            elif self._clock.now >= self._ends_at:
                self._end("timed_out")
        free = announced and self.active is None and self.tasks is not None
        if free and live is not None and live > self._begun and section.is_due(live, self._config.run.total_steps):
            self._begin(live)

    def take_stopped(self) -> list[OrderRecord]:
        """Orders that ended here since the last call, and that actors must stop."""
        stopped, self.rollouts.stopped = self.rollouts.stopped, []
        return stopped

    def next_deadline(self) -> float | None:
        """On the clock of ``now``."""
        return None if self.active is None or self.tasks is None else self._ends_at

    def header(self) -> dict[str, Any]:
        """Header of an EVALUATION message to the learner."""
        brief = None
        if self.last is not None:
            brief = {key: self.last[key] for key in ("evaluation", "updates", "policy_version", "status", "score")}
            brief["environments"] = {name: e["score"] for name, e in self.last["environments"].items()}
        return {
            "evaluating": None if self.active is None else self.active["updates"],
            "begun": self._begun,
            "last": brief,
            "best": self.best,
        }

    def news(self) -> dict[str, Any] | None:
        """:meth:`header` if it has changed since the last call."""
        header = self.header()
        if not self._section.on or header == self._last_header:
            return None
        self._last_header = header
        return header

    @property
    def progress(self) -> str:
        """For people: ``12 of 64 tasks``; empty when no evaluation runs."""
        if self.active is None:
            return ""
        ended, total = self.rollouts.ended, self.active["total"]
        return f"{ended} of {total} held-out tasks, weights of {self.active['updates']} updates"

    def _begin(self, live: int) -> None:
        section, tasks = self._section, self.tasks
        assert tasks is not None
        total = self._config.run.total_steps
        reason = "command" if self.only else "start" if live == 0 else "end" if live >= total else "schedule"
        step = section.every or 1
        passed = [u for u in range(max(0, self._begun + 1), live) if u % step == 0 and section.is_due(u, total)]
        self.active = {
            "number": self._next, "updates": live, "policy_version": self._staleness.policy_version, "reason": reason,
            "started_at": self._clock.wall, "total": len(tasks), "skipped": len(passed) if self._begun >= 0 else 0,
            "shape": self._shape(tasks),
        }  # fmt: skip
        self._ends_at = self._clock.now + section.seconds_max
        self._next += 1
        self._begun = live
        self.rollouts.begin(tasks, live)
        self._journal.count(Count.EVALUATIONS_BEGUN)
        self._journal.count(Count.EVALUATIONS_SKIPPED, self.active["skipped"])
        self._write()
        log.info("evaluation %d: %d tasks with the weights of %d updates (version %d)", self._next - 1, len(tasks),
                 live, self._staleness.policy_version)  # fmt: skip

    def _shape(self, tasks: HeldOut) -> dict[str, Any]:
        section, sampling = self._section, self._config.sampling
        return {
            "tasks": tasks.fingerprint,
            "split": section.split,
            "samples": section.samples,
            "greedy": section.greedy,
            "temperature": sampling.temperature if section.temperature is None else section.temperature,
            "terms": self._terms,
        }

    def _end(self, status: str) -> None:
        active = self.active
        assert active is not None
        result = self._result(active, status)
        self.rollouts.end(status)
        self.active = None
        self.last = result.as_json()
        if status == "complete":
            self._bests.offer(result, active["shape"])
        self._journal.count(Count(f"evaluations.{status}"))
        self._journal.effect(Evaluated(self.last))
        self._write()
        log.info("evaluation %d %s: score %s", result.number, status, result.score)

    def _result(self, active: Active, status: str) -> Result:
        threshold = self._config.replay.success_threshold
        return Result(
            active["number"],
            active["updates"],
            active["policy_version"],
            active["reason"],
            status,
            self.rollouts.summaries(self._section.pass_at, threshold),
            self.rollouts.versions,
            active["started_at"],
            self._clock.wall,
            active["skipped"],
            {
                "success_threshold": threshold,
                **{k: v for k, v in active["shape"].items() if k not in ("tasks", "terms")},
            },
        )

    def _write(self) -> None:
        state = {
            "next": self._next, "begun": self._begun, "active": self.active, "last": self.last,
            "bests": self._bests.bests,
        }  # fmt: skip
        self._journal.meta("evaluation", state)
