"""One update: score tokens, estimate advantages, take the optimizer steps, report.

The trainer owns policy and optimizer and knows nothing of sockets or files. Its methods run in a worker thread;
``policy.interrupt`` makes them raise :class:`Interrupted` within a layer's time. One optimizer step is in
:mod:`learner.training.optimizer_step`, sums and report in :mod:`learner.training.report`.
Dimensions: S sampled tokens of the update, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from learner.advantages.base import overlong_count
from learner.advantages.cpo import counterfactual_logprobs
from learner.advantages.estimate import needed_scores as needed_by_estimator
from learner.advantages.estimate import with_advantages
from learner.data.demonstrations import Demonstrations
from learner.data.microbatch import MicroBatch, token_offsets
from learner.data.rows import Batch, Row, TokenArray, TokenScores
from learner.losses.kl import kl_penalty
from learner.losses.policy_losses import loss_rules
from learner.losses.policy_losses import needed_scores as needed_by_loss
from learner.observability.timing import Stopwatch, peak_memory_bytes, utilisation
from learner.policy.policy import Policy
from learner.policy.reference import FrozenCopy, Reference, ServerReference
from learner.policy.routers import require_routers
from learner.training.critic import Critic
from learner.training.optimizer import learning_rate, make_optimizer
from learner.training.optimizer_step import NonFiniteStep, OptimizerSteps, old_logprobs_of
from learner.training.report import StepReport, StepTotals
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, Interrupted, TrainingError
from pipeline.runtime.garbage_collection import trim_heaps


def needed_scores(config: RunConfig) -> frozenset[str]:
    """Scores that estimator and loss read: names of fields of :class:`TokenScores`."""
    return needed_by_estimator(config.advantage) | needed_by_loss(config.loss)


class Trainer:
    """Updates a policy from batches.

    ``updates`` counts finished updates. An update of several optimizer steps that has made the first is finished though
    asked to stop, unless it is forced: then the weights hold a part of it and must not be saved.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        reference: Reference | None = None,
        critic: Critic | None = None,
        demonstrations: Demonstrations | None = None,
    ) -> None:
        """``demonstrations``: ``loss.supervised`` draws from them."""
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.updates = 0
        self.seed = config.run.seed
        self.saves_optimizer = config.checkpoint.optimizer
        learner = config.learner
        self.optimizer = make_optimizer(policy.parameters, learner, learner.learning_rate)
        require_routers(policy.routers, config)
        if policy.routers is not None:
            policy.routers.balances = config.loss.load_balancing > 0
        self._config = config
        self._needed = needed_scores(config)
        self._resident = 0
        """Bytes of resident memory after heaps were trimmed; on a CPU."""
        self._rules = loss_rules(config.loss, config.importance, config.replay)
        self._steps = OptimizerSteps(policy, config, self.optimizer, demonstrations)

    def on_layer(self, call: Callable[[], None]) -> None:
        """Call ``call`` after each layer of a pass of any of its models, and each answer of a reference server, in the
        thread of the pass."""
        self.policy.on_layer = call
        if self.critic is not None:
            self.critic.backbone.on_layer = call
        if isinstance(self.reference, FrozenCopy):
            self.reference.backbone.on_layer = call
        if isinstance(self.reference, ServerReference):
            self.reference.on_answer = call

    def forget_moments(self) -> None:
        """Clear the state of the policy's optimizer on all ranks, as where a learner resumes without it."""
        with self.policy.ranks.together("forget"):
            self.optimizer.state.clear()

    def train(self, batch: Batch, policy_version: int) -> StepReport:
        """Score the tokens, estimate advantages, and make the update. Raises as :meth:`step`."""
        watch = Stopwatch(self.policy.device)
        if not batch.groups:
            return self.step(batch, policy_version, watch=watch)
        scores = self.token_scores(batch.rows, watch)
        if "hinted" in self._needed:
            scores = replace(scores, hinted=counterfactual_logprobs(batch, partial(self.score, watch=watch)))
        with watch.phase("prepare"):
            advantage, turn_weight = self._config.advantage, self._config.scorer.environment_weight
            batch, scores = with_advantages(batch, scores, advantage, self._kl_penalties(scores), turn_weight)
        report = self.step(batch, policy_version, scores, watch)
        overlong = overlong_count([t.n_sampled for t in batch.trajectories], self._config.advantage)
        return replace(report, overlong=overlong)

    def token_scores(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> TokenScores:
        """Scores that the configured estimator and loss need: none for ``grpo`` with ``ppo``. log π and entropy come
        from the same pass, values too where the critic reads the policy's hidden states.

        Raises :class:`ConfigurationError` where a reference policy or a critic is asked for and there is none.
        """
        if not self._needed:
            return TokenScores()
        watch, needed, critic = watch or Stopwatch(self.policy.device), self._needed, self.critic
        logprobs = entropies = reference = values = None
        if "reference" in needed and isinstance(self.reference, ServerReference):
            reference = self.reference.logprobs(rows, watch)  # before the command: heartbeats reach the other ranks
        with self.policy.ranks.together("gather", rows):
            if "values" in needed and critic is None:
                raise ConfigurationError("the estimator needs values, and the trainer was given no critic")
            if needed & {"logprobs", "entropies"}:
                if critic is not None and not critic.owns and "values" in needed:
                    logprobs, entropies, values = self._scores_and_values(rows, critic, watch)
                else:
                    logprobs, entropies = self.policy.score_rows(rows, watch)
            if "reference" in needed and reference is None:
                if self.reference is None:
                    raise ConfigurationError(
                        "estimator or loss need a reference policy, and the trainer was given none"
                    )
                reference = self.reference.logprobs(rows, watch)
            if "values" in needed and values is None and critic is not None:
                values = critic.values(rows, watch)
        return TokenScores(logprobs, entropies, reference, values)

    def step(
        self, batch: Batch, policy_version: int, scores: TokenScores | None = None, watch: Stopwatch | None = None
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
        policy, config = self.policy, self._config
        totals = StepTotals(
            watch=watch or Stopwatch(policy.device),
            update=self.updates,
            policy_version=policy_version,
            learning_rate=learning_rate(self.updates, config.learner, config.run.total_steps),
            rules=self._rules,
            scores=scores or TokenScores(),
            critic_only=self.critic is not None
            and self.updates - self.critic.began < config.learner.critic.warmup_updates,
            n_sampled=batch.n_sampled,
            recorded=config.replay.keep_trained > 0,
            routing=np.zeros(0 if policy.routers is None else policy.routers.n_sums),
        )
        facts = {"update": batch.update, "policy_version": policy_version}
        with policy.ranks.together("step", batch.rows, facts, totals.scores):
            try:
                if batch.rows:
                    self._train(batch.rows, totals)
            except Interrupted:
                self.optimizer.zero_grad(set_to_none=True)
                raise
            self.updates += 1
            policy.interrupt.mid_update = False
            totals.peak_memory_bytes = peak_memory_bytes(policy.device)
            if policy.device.type == "cpu":
                self._resident = trim_heaps(self._resident)
            totals.add_ranks(policy.ranks)
        report = totals.report(batch.rows, policy.form, utilisation(totals.watch, policy.ranks.size, policy.peak_flops))
        if policy.routers is not None:
            entropy, imbalance = policy.routers.measured(totals.routing)
            report = replace(report, router_entropy=entropy, expert_imbalance=imbalance)
        return report

    def _train(self, rows: Sequence[Row], totals: StepTotals) -> None:
        learner, offsets = self._config.learner, token_offsets(rows).tolist()
        totals.old_logprobs = totals.scores.logprobs
        if totals.old_logprobs is None and learner.epochs * learner.minibatches > 1:
            totals.old_logprobs = old_logprobs_of(rows, totals.rules, partial(self.score, watch=totals.watch))
        for epoch in range(learner.epochs):
            for chosen in self._minibatches(rows, epoch):
                part, first_tokens = [rows[i] for i in chosen], [offsets[i] for i in chosen]
                try:
                    self._steps.take(part, first_tokens, totals, record=epoch == 0)
                except NonFiniteStep as error:
                    totals.nonfinite[error.where] += 1
                finally:
                    self.optimizer.zero_grad(set_to_none=True)
                    self.policy.eval_mode()
                    self.policy.interrupt.mid_update |= totals.optimizer_steps > 0
                self._critic_step(part, first_tokens, totals)
                self.policy.interrupt.mid_update |= totals.critic is not None
                if totals.critic is not None and totals.critic.skipped:
                    totals.nonfinite["value"] += 1

    def _minibatches(self, rows: Sequence[Row], epoch: int) -> list[list[int]]:
        """Indices of the rows of each optimizer step: whole trajectories, shuffled by (seed, update, epoch) where
        there are several steps."""
        count = self._config.learner.minibatches
        if count == 1:
            return [list(range(len(rows)))]
        trajectories: npt.NDArray[np.int64] = np.unique([row.trajectory_index for row in rows])
        np.random.default_rng([self.seed, self.updates, epoch]).shuffle(trajectories)
        parts = [set(part.tolist()) for part in np.array_split(trajectories, count) if len(part)]
        return [[i for i, row in enumerate(rows) if row.trajectory_index in part] for part in parts]

    def _critic_step(self, rows: Sequence[Row], offsets: Sequence[int], totals: StepTotals) -> None:
        """The critic learns from the same mini-batch as the policy, where the estimator gave returns."""
        values, returns, learner = totals.scores.values, totals.scores.returns, self._config.learner
        if self.critic is None or values is None or returns is None:
            return
        parts = self.policy.microbatches(rows, totals.watch, offsets=offsets)
        rate = learner.critic.learning_rate * totals.learning_rate / learner.learning_rate
        applied = totals.applied if totals.recorded else None
        totals.critic = self.critic.learn(parts, values, returns, rate, totals.watch, applied)

    def _scores_and_values(self, rows: Sequence[Row], critic: Critic, watch: Stopwatch) -> tuple[TokenArray, ...]:
        """log π, entropy and value of all sampled tokens from one pass of the policy, float32 ``[S]`` each."""
        policy = self.policy

        def score(part: MicroBatch) -> tuple[Tensor, ...]:
            hidden_SH = policy.hidden(part)
            return *policy.score(part, hidden_SH), critic.of_hidden(part, hidden_SH)

        return policy.token_pass(rows, score, 3, watch)

    def _kl_penalties(self, scores: TokenScores) -> TokenArray | None:
        """Penalties that ``loss.kl: reward`` takes off the rewards, float32 ``[S]``; None without."""
        loss = self._config.loss
        if loss.kl != "reward" or scores.logprobs is None or scores.reference is None:
            return None
        penalties = kl_penalty(scores.logprobs, scores.reference, loss.kl_coef, loss.kl_estimator or "k1")
        return penalties.astype(np.float32)

    def score(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> TokenArray:
        """log π of all sampled tokens of ``rows`` with the current weights, float32 ``[S]``, rows in order."""
        return self.policy.score_rows(rows, watch)[0]

    def mean_entropies(self, rows: Sequence[Row]) -> dict[int, float]:
        """Exact entropy with the current weights, nats, mean over the sampled tokens of each ``Row.trajectory_index``;
        not finite where a token's is not."""
        entropies = self.policy.score_rows(rows)[1].astype(np.float64)
        indices = np.repeat([row.trajectory_index for row in rows], [row.n_sampled for row in rows])
        return {int(i): float(entropies[indices == i].mean()) for i in np.unique(indices)}
