"""One update: gather evidence, estimate advantages, take the optimizer steps, report.

The trainer owns policy and optimizer and knows nothing of sockets or files. Its methods run in a worker thread;
setting ``policy.interrupt`` makes them raise :class:`Interrupted` within a layer's time. What is done where: passes
before the first optimizer step in :mod:`learner.training.evidence_passes`, one optimizer step in
:mod:`learner.training.optimizer_step`, what they add up to in :mod:`learner.training.totals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from learner.advantages.apply import with_advantages
from learner.advantages.cpo import counterfactual_logprobs
from learner.advantages.rewards import overlong_count
from learner.data.demonstrations import Demonstrations
from learner.data.evidence import TokenArray, TokenScores
from learner.data.microbatch import token_numbers
from learner.data.rows import Batch, Row
from learner.losses.kl import KLController
from learner.losses.registry import loss_rules
from learner.observability.report import SkippedStep, StepReport, Stopwatch
from learner.policy.passes import microbatches
from learner.policy.policy import Policy
from learner.policy.reference import Reference
from learner.training.agreement import NonFiniteStep
from learner.training.critic import Critic
from learner.training.evidence_passes import ScoringPasses, needed_scores
from learner.training.loss_inputs import LossInputs, loss_mask_of, old_logprobs_of
from learner.training.optimizer import WeightAverage, learning_rate, make_optimizer
from learner.training.optimizer_step import OptimizerSteps
from learner.training.totals import Conditions, StepTotals
from pipeline.config import RunConfig
from pipeline.errors import Interrupted, TrainingError


class Trainer:
    """Updates a policy from batches.

    ``updates`` counts finished updates. ``torn`` is True while the weights hold a part of an update (an interrupted
    update of several optimizer steps): such weights must not be saved.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        reference: Reference | None = None,
        critic: Critic | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """``demonstrations``: what ``loss.supervised`` draws from; None: nothing."""
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.updates = 0
        self.torn = False
        self.seed = config.run.seed
        self.kl = KLController.of(config.loss)
        learner = config.learner
        self.optimizer = make_optimizer(policy.parameters, learner, learner.learning_rate)
        self.average = None if learner.ema_decay is None else WeightAverage(policy.named_parameters, learner.ema_decay)
        self._config = config
        self._rules = loss_rules(config.loss, config.importance, config.replay.use_recorded_logprobs)
        self._gathering = ScoringPasses(policy, config, reference, critic)
        self._steps = OptimizerSteps(policy, config, self.optimizer, self.average, demonstrations)

    def train(self, batch: Batch, policy_version: int) -> StepReport:
        """Gather what the estimator needs, estimate advantages, and make the update. Raises as :meth:`step`."""
        watch = Stopwatch(self.policy.device)
        if not batch.groups:
            return self.step(batch, policy_version, watch=watch)
        evidence = self.gather(batch.rows, watch)
        if "hinted" in needed_scores(self._config):
            evidence = replace(evidence, hinted=counterfactual_logprobs(batch, partial(self.score, watch=watch)))
        with watch.stage("prepare"):
            penalties = self._gathering.penalties(evidence, self.kl.coefficient)
            batch, evidence = with_advantages(batch, evidence, self._config.advantage, penalties)
        report = self.step(batch, policy_version, evidence, watch)
        overlong = overlong_count([t.n_sampled for t in batch.trajectories], self._config.advantage)
        return replace(report, overlong=overlong)

    def gather(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> TokenScores:
        """See :meth:`learner.training.evidence_passes.ScoringPasses.gather`."""
        return self._gathering.gather(rows, watch or Stopwatch(self.policy.device))

    def score(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> TokenArray:
        """log π of all sampled tokens of ``rows`` with today's weights, float32 ``[S]``, rows in order."""
        return self._gathering.scores(rows, watch or Stopwatch(self.policy.device))[0]

    def mean_entropies(self, rows: Sequence[Row]) -> dict[int, float]:
        """See :meth:`learner.training.evidence_passes.ScoringPasses.mean_entropies`."""
        return self._gathering.mean_entropies(rows, Stopwatch(self.policy.device))

    def step(
        self, batch: Batch, policy_version: int, evidence: TokenScores | None = None, watch: Stopwatch | None = None
    ) -> StepReport:
        """Train ``batch`` with the advantages on its rows; ``policy_version`` is the version of the weights before it.
        A batch without groups (all were left out) is counted and changes no weights.

        Raises :class:`TrainingError` when the batch is not that of the next update or its groups have no rows,
        :class:`Interrupted` when asked to stop.
        """
        if batch.update != self.updates or (batch.groups and not batch.rows):
            raise TrainingError(
                f"expected rows for update {self.updates}, got {len(batch.rows)} for update {batch.update}"
            )
        tally = StepTotals(watch or Stopwatch(self.policy.device))
        rate = learning_rate(self.updates, self._config.learner, self._config.run.total_steps)
        conditions = self._conditions(policy_version, rate, evidence or TokenScores())
        facts = {"update": batch.update, "policy_version": policy_version, "kl": self.kl.coefficient}
        with self.policy.ranks.together("step", batch.rows, facts, conditions.evidence):
            try:
                if batch.rows:
                    self._train(batch, conditions, tally)
            except Interrupted:
                self.optimizer.zero_grad(set_to_none=True)
                self.torn = tally.optimizer_steps > 0 or tally.critic is not None
                raise
            self.updates += 1
            if self.reference is not None:
                self.reference.updated(self.updates)
            tally.add_ranks(self.policy.ranks)
        report = tally.report(batch.rows, conditions)
        self.kl.update(report.statistics.all.reference_kl.value, len({row.sequence for row in batch.rows}))
        return report

    def _conditions(self, policy_version: int, rate: float, evidence: TokenScores) -> Conditions:
        rules = replace(self._rules, kl_coef=self.kl.coefficient)
        waits = self.critic is not None and self.critic.only_critic(self.updates)
        return Conditions(self.updates, policy_version, rate, rules, evidence, waits)

    def _train(self, batch: Batch, conditions: Conditions, tally: StepTotals) -> None:
        learner, rules, evidence = self._config.learner, conditions.rules, conditions.evidence
        score = partial(self.score, watch=tally.watch)
        numbers = token_numbers(batch.rows)
        today = evidence.logprobs
        if today is None and learner.epochs * learner.minibatches > 1:
            today = old_logprobs_of(batch.rows, rules, score)
        for epoch in range(learner.epochs):
            for chosen in self._minibatches(batch.rows, epoch):
                rows, first = [batch.rows[i] for i in chosen], [int(numbers[i]) for i in chosen]
                try:
                    kept = None
                    if rules.off_policy == "second_moment" and rules.use_recorded:
                        kept = loss_mask_of(rows, first, batch.n_sampled, self._config.loss, score)
                    known = LossInputs(today, kept, evidence.reference)
                    self._steps.take(rows, first, known, conditions, tally, record=epoch == 0)
                except NonFiniteStep as error:
                    tally.skipped.append(SkippedStep(error.where, tuple(chosen)))
                finally:
                    self.optimizer.zero_grad(set_to_none=True)
                    self.policy.rest()
                self._critic_step(rows, first, conditions, tally)
                if tally.critic is not None and tally.critic.skipped:
                    tally.skipped.append(SkippedStep("value", tuple(chosen)))

    def _minibatches(self, rows: Sequence[Row], epoch: int) -> list[list[int]]:
        """Row numbers of each optimizer step: whole trajectories, shuffled by (seed, update, epoch) where there are
        several."""
        count = self._config.learner.minibatches
        if count == 1:
            return [list(range(len(rows)))]
        sequences: npt.NDArray[np.int64] = np.unique([row.sequence for row in rows])
        np.random.default_rng([self.seed, self.updates, epoch]).shuffle(sequences)
        parts = [set(part.tolist()) for part in np.array_split(sequences, count) if len(part)]
        return [[i for i, row in enumerate(rows) if row.sequence in part] for part in parts]

    def _critic_step(
        self, rows: Sequence[Row], first: Sequence[int], conditions: Conditions, tally: StepTotals
    ) -> None:
        """The critic learns from the same mini-batch as the policy, where the estimator gave returns."""
        values, returns = conditions.evidence.values, conditions.evidence.returns
        if self.critic is None or values is None or returns is None:
            return
        learner, policy = self._config.learner, self.policy
        with tally.watch.stage("prepare"):
            parts = microbatches(
                rows, [0.0] * len(rows), first, learner.tokens_per_microbatch, policy.form, policy.ranks
            )
        rate = learner.critic.learning_rate * conditions.rate / learner.learning_rate
        tally.critic = self.critic.learn(parts, values, returns, rate, tally.watch)
