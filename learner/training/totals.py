"""What the optimizer steps of an update add up to, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from learner.data.evidence import TokenScores
from learner.data.rows import Row
from learner.distributed.ranks import Ranks
from learner.losses.base import LossRules
from learner.observability.report import CriticReport, NonFinite, SkippedBatch, SkippedStep, StepReport, Stopwatch
from learner.observability.statistics import TokenValues, Weights, batch_statistics


@dataclass(frozen=True, slots=True)
class Conditions:
    """What holds for all optimizer steps of an update."""

    update: int
    policy_version: int
    """Of the weights before the update."""
    rate: float
    """Learning rate, before the ESS guard."""
    rules: LossRules
    evidence: TokenScores = field(default_factory=TokenScores)
    policy_waits: bool = False
    """The critic warms up: the policy is scored for the statistics alone."""


@dataclass(slots=True)
class StepSums:
    """Of one optimizer step, over its micro-batches."""

    loss: float = 0.0
    policy_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    supervised: float = 0.0
    """Mean cross-entropy."""
    supervised_tokens: int = 0
    grad_norm: float = 0.0
    ratios: Weights = field(default_factory=Weights)
    """For the ESS guard."""

    def add_ranks(self, ranks: Ranks) -> None:
        """Bring together what the ranks have of the losses."""
        sums = [self.loss, self.policy_loss, self.entropy, self.kl, self.supervised]
        self.loss, self.policy_loss, self.entropy, self.kl, self.supervised = ranks.summed(sums)


@dataclass(slots=True)
class StepTotals:
    """Of one update."""

    watch: Stopwatch
    started_at: float = field(default_factory=time.time)
    last: StepSums = field(default_factory=StepSums)
    """Of the present optimizer step, or of the last one."""
    values: list[TokenValues] = field(default_factory=list)
    """Of the micro-batches of the first epoch."""
    begun: int = 0
    """Optimizer steps, skipped ones too: each takes other demonstrations."""
    optimizer_steps: int = 0
    """Those applied."""
    microbatches: int = 0
    padding: int = 0
    shared: int = 0
    factors: list[float] = field(default_factory=list)
    """What the guard did to each optimizer step."""
    skipped: list[SkippedStep] = field(default_factory=list)
    critic: CriticReport | None = None

    def add_ranks(self, ranks: Ranks) -> None:
        """Bring together what the ranks have seen of the update."""
        self.values = ranks.values(self.values)
        counts = ranks.summed([self.microbatches, self.padding, self.shared])
        self.microbatches, self.padding, self.shared = (int(n) for n in counts)

    def report(self, rows: Sequence[Row], conditions: Conditions) -> StepReport:
        """The update that trained ``rows``, finished now."""
        rules, last = conditions.rules, self.last
        nonfinite: dict[NonFinite, int] = {"loss": 0, "gradient": 0, "ratio": 0, "value": 0}
        for step in self.skipped:
            nonfinite[step.where] += 1
        statistics = batch_statistics(TokenValues.join(self.values), conditions.policy_version, rules.log_ratio_max)
        trained = statistics.all.tokens
        return StepReport(
            update=conditions.update,
            policy_version=conditions.policy_version,
            statistics=statistics,
            loss=last.loss,
            policy_loss=last.policy_loss,
            entropy_loss=-rules.entropy_bonus * last.entropy,
            kl_loss=rules.kl_coef * last.kl if rules.kl_in_loss else 0.0,
            kl_coefficient=rules.kl_coef,
            supervised_loss=last.supervised,
            supervised_tokens=last.supervised_tokens,
            grad_norm=last.grad_norm,
            learning_rate=conditions.rate * (self.factors[-1] if self.factors else 1.0),
            guard_lr_factor=float(np.mean(self.factors)) if self.factors else 1.0,
            optimizer_steps=self.optimizer_steps,
            nonfinite=nonfinite,
            skipped=self._skipped_batch(rows, conditions),
            n_rows=len(rows),
            n_microbatches=self.microbatches,
            tokens_trained=trained,
            tokens_masked=_tokens_of(rows) - trained,
            tokens_padding=self.padding,
            tokens_shared=self.shared,
            tokens_without_signal=sum(row.n_sampled for row in rows if not row.has_signal),
            critic=self.critic,
            seconds=self.watch.seconds,
            started_at=self.started_at,
            finished_at=time.time(),
        )

    def _skipped_batch(self, rows: Sequence[Row], conditions: Conditions) -> SkippedBatch | None:
        if not self.skipped:
            return None
        return SkippedBatch(
            conditions.update,
            conditions.policy_version,
            conditions.rules.kl_coef,
            tuple(self.skipped),
            tuple(rows),
            conditions.evidence,
        )


def _tokens_of(rows: Sequence[Row]) -> int:
    """All of them, context included."""
    return sum(len(row) for row in rows)
