"""One update: score, weigh, clip, accumulate over micro-batches, step.

The trainer owns policy and optimizer and knows nothing of sockets or files. ``step`` runs in a worker thread; setting
``policy.interrupt`` makes it raise :class:`Interrupted` within a layer's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.advantages import needed_evidence as needed_by_estimator
from learner.advantages.shaping import overlong_count
from learner.batching import MicroBatch, collate, plan_microbatches, token_numbers, token_weights
from learner.critic import Critic
from learner.ema import WeightAverage
from learner.estimation import with_advantages
from learner.evidence import Evidence
from learner.hints import hinted_logprobs
from learner.known import Known, kept_tokens, logprobs_today, off_policy, values_of
from learner.losses.kl import KLController, kl_penalty
from learner.losses.policy import LossRules, LossTokens, policy_loss
from learner.losses.registry import needed_evidence as needed_by_loss
from learner.offpolicy import step_factor, token_weights_of
from learner.optimizer import clip_gradients, make_optimizer, set_rate
from learner.passes import token_pass
from learner.policy import Interrupted, Policy
from learner.reference import Reference
from learner.report import CriticReport, NonFinite, StepReport, Stopwatch
from learner.rows import Batch, Row
from learner.schedule import learning_rate
from learner.statistics import TokenValues, Weights, batch_statistics
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, TrainingError

FloatArray = npt.NDArray[np.float32]


class NonFiniteStep(Exception):
    """A value that must be finite is not; ``where`` says which. The optimizer step is skipped and counted."""

    def __init__(self, where: NonFinite) -> None:
        super().__init__(where)
        self.where = where


@dataclass(slots=True)
class _Tally:
    """What the optimizer steps of one update add up to."""

    watch: Stopwatch
    evidence: Evidence
    values: list[TokenValues] = field(default_factory=list)
    loss: float = 0.0
    policy_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    grad_norm: float = 0.0
    optimizer_steps: int = 0
    microbatches: int = 0
    padding: int = 0
    ratios: Weights = field(default_factory=Weights)
    """Of the present optimizer step, for the ESS guard."""
    factors: list[float] = field(default_factory=list)
    """What the guard did to each optimizer step."""
    nonfinite: dict[NonFinite, int] = field(default_factory=lambda: {"loss": 0, "gradient": 0, "ratio": 0, "value": 0})
    critic: CriticReport | None = None


class Trainer:
    """Updates a policy from batches.

    ``updates`` counts finished updates. ``torn`` is True while the weights hold a part of an update (an interrupted
    update of several optimizer steps): such weights must not be saved.
    """

    def __init__(
        self, policy: Policy, config: RunConfig, reference: Reference | None = None, critic: Critic | None = None
    ) -> None:
        self.policy = policy
        self.reference = reference
        self.critic = critic
        self.updates = 0
        self.torn = False
        self._config = config
        self._rules = LossRules.of(config.loss, config.importance, config.replay.use_recorded_logprobs)
        self.kl = KLController.of(config.loss)
        learner = config.learner
        self.optimizer = make_optimizer(policy.parameters, learner, learner.learning_rate)
        self.average = None if learner.ema_decay is None else WeightAverage(policy.named_parameters, learner.ema_decay)

    def train(self, batch: Batch, policy_version: int) -> StepReport:
        """Gather what the estimator needs, estimate advantages, and make the update. Raises as :meth:`step`."""
        watch = Stopwatch(self.policy.device)
        evidence = self.gather(batch.rows, watch)
        if "hinted" in needed_by(self._config):
            evidence = replace(evidence, hinted=hinted_logprobs(batch, partial(self.score, watch=watch)))
        with watch.stage("prepare"):
            penalties = self._penalties(evidence)
            batch, evidence = with_advantages(batch, evidence, self._config.advantage, penalties)
        report = self.step(batch, policy_version, evidence, watch)
        return replace(
            report, overlong=overlong_count([t.n_sampled for t in batch.trajectories], self._config.advantage)
        )

    def _penalties(self, evidence: Evidence) -> FloatArray | None:
        """What ``loss.kl: reward`` takes off the rewards, float32 ``[S]``."""
        loss = self._config.loss
        if loss.kl != "reward" or evidence.logprobs is None or evidence.reference is None:
            return None
        maximum = self._config.importance.log_ratio_max
        estimator = loss.kl_estimator or "k1"
        penalties = kl_penalty(evidence.logprobs, evidence.reference, self.kl.coefficient, estimator, maximum)
        return penalties.astype(np.float32)

    def gather(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> Evidence:
        """The passes over ``rows`` that the configured estimator and loss need before the first optimizer step; those
        that nothing asks for are not made. log π and entropy come out of the same pass, and values too where the critic
        reads the policy's hidden states.

        Raises :class:`ConfigurationError` where a reference policy or a critic is asked for and there is none.
        """
        watch = watch or Stopwatch(self.policy.device)
        needed = needed_by(self._config)
        logprobs = entropies = reference = values = None
        if "values" in needed and self.critic is None:
            raise ConfigurationError("the estimator needs values, and the trainer was given no critic")
        if needed & {"logprobs", "entropies"}:
            if self.critic is not None and not self.critic.owns and "values" in needed:
                logprobs, entropies, values = self._scores_and_values(rows, self.critic, watch)
            else:
                logprobs, entropies = self._scores(rows, watch)
        if "reference" in needed:
            if self.reference is None:
                raise ConfigurationError("estimator or loss need a reference policy, and the trainer was given none")
            reference = self.reference.logprobs(rows, watch)
        if "values" in needed and values is None and self.critic is not None:
            values = self.critic.values(rows, watch)
        return Evidence(logprobs, entropies, reference, values)

    def step(
        self, batch: Batch, policy_version: int, evidence: Evidence | None = None, watch: Stopwatch | None = None
    ) -> StepReport:
        """Train ``batch`` with the advantages on its rows; ``policy_version`` is the version of the weights before it.

        Raises :class:`TrainingError` when the batch is not that of the next update or has no rows,
        :class:`Interrupted` when asked to stop.
        """
        if batch.update != self.updates or not batch.rows:
            raise TrainingError(
                f"expected rows for update {self.updates}, got {len(batch.rows)} for update {batch.update}"
            )
        started = time.time()
        tally = _Tally(watch or Stopwatch(self.policy.device), evidence or Evidence())
        self._rules = replace(self._rules, kl_coef=self.kl.coefficient)
        rate = learning_rate(self.updates, self._config.learner, self._config.run.total_steps)
        try:
            self._train(batch, tally, rate)
        except Interrupted:
            self.optimizer.zero_grad(set_to_none=True)
            self.torn = tally.optimizer_steps > 0 or tally.critic is not None
            raise
        self.updates += 1
        if self.reference is not None:
            self.reference.updated(self.updates)
        return self._report(batch, policy_version, rate, tally, started)

    def _train(self, batch: Batch, tally: _Tally, rate: float) -> None:
        learner = self._config.learner
        numbers = token_numbers(batch.rows)
        several = learner.epochs * learner.minibatches > 1
        today = tally.evidence.logprobs
        if today is None and several:
            today = logprobs_today(batch.rows, self._rules, partial(self.score, watch=tally.watch))
        for epoch in range(learner.epochs):
            for chosen in self._minibatches(batch.rows, epoch):
                rows, first = [batch.rows[i] for i in chosen], [int(numbers[i]) for i in chosen]
                try:
                    kept = self._kept(rows, first, batch.n_sampled, tally.watch)
                    known = Known(today, kept, tally.evidence.reference)
                    self._optimizer_step(rows, first, known, tally, rate, record=epoch == 0)
                except NonFiniteStep as error:
                    tally.nonfinite[error.where] += 1
                finally:
                    self.optimizer.zero_grad(set_to_none=True)
                self._critic_step(rows, first, tally, rate)

    def score(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> FloatArray:
        """log π of all sampled tokens of ``rows`` with today's weights, float32 ``[S]``, rows in order."""
        return self._scores(rows, watch)[0]

    def mean_entropies(self, rows: Sequence[Row]) -> dict[int, float]:
        """Exact entropy with today's weights, nats, mean over the sampled tokens of each ``Row.sequence``; not finite
        where a token's is not."""
        entropies = self._scores(rows)[1].astype(np.float64)
        sequences = np.repeat([row.sequence for row in rows], [row.n_sampled for row in rows])
        return {int(s): float(entropies[sequences == s].mean()) for s in np.unique(sequences)}

    def _scores(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> tuple[FloatArray, FloatArray]:
        """log π and entropy of all sampled tokens of ``rows``, float32 ``[S]`` each, without gradient."""
        watch = watch or Stopwatch(self.policy.device)
        logprobs, entropies = token_pass(rows, self.policy.score, 2, self._config.learner.tokens_per_microbatch, watch)
        return logprobs, entropies

    def _scores_and_values(
        self, rows: Sequence[Row], critic: Critic, watch: Stopwatch
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """log π, entropy and value of all sampled tokens from one pass of the policy, float32 ``[S]`` each."""

        def score(part: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
            hidden_SH = self.policy.hidden(part)
            return *self.policy.score(part, hidden_SH), critic.of_hidden(hidden_SH)

        logprobs, entropies, values = token_pass(rows, score, 3, self._config.learner.tokens_per_microbatch, watch)
        return logprobs, entropies, values

    def _kept(
        self, rows: Sequence[Row], first: Sequence[int], n_tokens: int, watch: Stopwatch
    ) -> npt.NDArray[np.bool_] | None:
        """The second-moment mask of one optimizer step, with the weights of now."""
        if self._rules.off_policy != "second_moment" or not self._rules.use_recorded:
            return None
        return kept_tokens(rows, first, n_tokens, self._config.loss, partial(self.score, watch=watch))

    def _minibatches(self, rows: Sequence[Row], epoch: int) -> list[list[int]]:
        """Row numbers of each optimizer step: whole trajectories, shuffled by (seed, update, epoch) where there are
        several."""
        count = self._config.learner.minibatches
        if count == 1:
            return [list(range(len(rows)))]
        sequences = np.unique([row.sequence for row in rows])
        np.random.default_rng([self._config.run.seed, self.updates, epoch]).shuffle(sequences)
        parts = [set(part.tolist()) for part in np.array_split(sequences, count) if len(part)]
        return [[i for i, row in enumerate(rows) if row.sequence in part] for part in parts]

    def _microbatches(
        self, rows: Sequence[Row], first: Sequence[int], weights: Sequence[float], watch: Stopwatch
    ) -> list[MicroBatch]:
        with watch.stage("prepare"):
            plan = plan_microbatches([len(row) for row in rows], self._config.learner.tokens_per_microbatch)
            return [
                collate([rows[i] for i in chosen], [weights[i] for i in chosen], [first[i] for i in chosen])
                for chosen in plan
            ]

    def _optimizer_step(
        self, rows: Sequence[Row], first: Sequence[int], known: Known, tally: _Tally, rate: float, *, record: bool
    ) -> None:
        """Gradients of the whole mini-batch, then one optimizer step. Rows without advantage have gradient exactly 0:
        they are scored without a backward pass, and only for the statistics."""
        weights = token_weights(rows, self._config.loss.aggregation, self._config.loss.aggregation_length)
        waits = self.critic is not None and self.critic.only_critic(self.updates)
        with_signal = [not waits and (row.has_signal or not self._rules.needs_signal) for row in rows]
        guard = self._config.replay.ess_guard
        tally.ratios = Weights()
        tally.loss = tally.policy_loss = tally.entropy = tally.kl = tally.grad_norm = 0.0
        for learn in (True, False):
            chosen = [i for i, signal in enumerate(with_signal) if signal is learn]
            if not chosen or not (learn or record or guard.enabled):
                continue
            parts = self._microbatches(
                [rows[i] for i in chosen], [first[i] for i in chosen], [weights[i] for i in chosen], tally.watch
            )
            for part in parts:
                self._microbatch(part, known, tally, learn=learn, record=record)
        if any(with_signal):
            factor = step_factor(tally.ratios.ess_ratio, guard.target) if guard.enabled else 1.0
            set_rate(self.optimizer, rate * factor)
            with tally.watch.stage("optimize"):
                self._apply(tally)
            tally.factors.append(factor)

    def _microbatch(self, part: MicroBatch, known: Known, tally: _Tally, *, learn: bool, record: bool) -> None:
        with tally.watch.stage("forward"), torch.set_grad_enabled(learn):
            logprobs, entropy = self.policy.score(part)
            tokens = self._loss_tokens(part, logprobs, entropy, known)
            terms = policy_loss(tokens, self._rules)
            values = values_of(part, tokens, terms, known)
            if record:
                tally.values.append(values)
            if self._config.replay.ess_guard.enabled:
                tally.ratios += token_weights_of(
                    values.logprobs, values.behaviour, values.trained & values.recorded, self._rules.log_ratio_max
                )
            if not bool(torch.isfinite(tokens.logprobs.detach()).all()):
                raise NonFiniteStep("ratio")
            value = float(terms.loss.detach())
            if not np.isfinite(value):
                raise NonFiniteStep("loss")
        if learn:
            with tally.watch.stage("backward"):
                terms.loss.backward()  # type: ignore[no-untyped-call]
        tally.microbatches += 1
        tally.padding += part.n_padded - part.n_real
        tally.loss += value
        tally.policy_loss += float(terms.policy)
        tally.entropy += float(terms.entropy)
        tally.kl += float(terms.kl)

    def _loss_tokens(self, part: MicroBatch, logprobs: Tensor, entropy: Tensor, known: Known) -> LossTokens:
        def tensor(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(self.policy.device)

        usable = np.isfinite(part.behaviour_logprobs_S)
        off = off_policy(part.replayed_S, part.guided_S, part.discarded_S, self._config.loss)
        return LossTokens(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=tensor(part.behaviour_logprobs_S),
            proximal=None if known.today is None else tensor(known.today[part.tokens_S]),
            advantages=tensor(part.advantages_S),
            weights=tensor(part.weights_S),
            loss_mask=tensor(usable if known.kept is None else usable & known.kept[part.tokens_S]),
            replay_mask=tensor(part.replayed_S),
            off_policy=tensor(off),
            rows=tensor(part.rows_S),
            reference=None if known.reference is None else tensor(known.reference[part.tokens_S]),
            recorded=tensor(part.recorded_S),
            factors=tensor(part.factors_S),
        )

    def _apply(self, tally: _Tally) -> None:
        norm = clip_gradients(self.policy.parameters, self._config.learner.grad_clip)
        if not np.isfinite(norm):
            raise NonFiniteStep("gradient")
        self.optimizer.step()
        if self.average is not None:
            self.average.update()
        tally.grad_norm = norm
        tally.optimizer_steps += 1

    def _critic_step(self, rows: Sequence[Row], first: Sequence[int], tally: _Tally, rate: float) -> None:
        """The critic learns from the same mini-batch as the policy, where the estimator gave returns."""
        values, returns = tally.evidence.values, tally.evidence.returns
        if self.critic is None or values is None or returns is None:
            return
        learner = self._config.learner
        parts = self._microbatches(rows, first, [0.0] * len(rows), tally.watch)
        tally.critic = self.critic.learn(
            parts, values, returns, learner.critic.learning_rate * rate / learner.learning_rate, tally.watch
        )
        tally.nonfinite["value"] += tally.critic.skipped

    def _report(self, batch: Batch, policy_version: int, rate: float, tally: _Tally, started: float) -> StepReport:
        values = TokenValues.join(tally.values)
        statistics = batch_statistics(values, policy_version, self._rules.log_ratio_max)
        trained = statistics.all.tokens
        self.kl.update(statistics.all.reference_kl.value, len({row.sequence for row in batch.rows}))
        return StepReport(
            update=batch.update,
            policy_version=policy_version,
            statistics=statistics,
            loss=tally.loss,
            policy_loss=tally.policy_loss,
            entropy_loss=-self._rules.entropy_bonus * tally.entropy,
            kl_loss=self._rules.kl_coef * tally.kl if self._rules.kl_in_loss else 0.0,
            kl_coefficient=self._rules.kl_coef,
            grad_norm=tally.grad_norm,
            learning_rate=rate * (tally.factors[-1] if tally.factors else 1.0),
            guard_lr_factor=float(np.mean(tally.factors)) if tally.factors else 1.0,
            optimizer_steps=tally.optimizer_steps,
            nonfinite=tally.nonfinite,
            n_rows=len(batch.rows),
            n_microbatches=tally.microbatches,
            tokens_trained=trained,
            tokens_masked=sum(len(row) for row in batch.rows) - trained,
            tokens_padding=tally.padding,
            tokens_without_signal=sum(row.n_sampled for row in batch.rows if not row.has_signal),
            critic=tally.critic,
            seconds=tally.watch.seconds,
            started_at=started,
            finished_at=time.time(),
        )


def needed_by(config: RunConfig) -> frozenset[str]:
    """Passes before an update that estimator and loss ask for: names of fields of :class:`Evidence`."""
    return needed_by_estimator(config.advantage) | needed_by_loss(config.loss, config.importance)
