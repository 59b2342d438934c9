"""One update: score, weigh, clip, accumulate over micro-batches, step.

The trainer owns policy and optimizer and knows nothing of sockets or files. ``step`` runs in a worker thread; setting
``policy.interrupt`` makes it raise :class:`Interrupted` within a layer's time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.batching import MicroBatch, collate, plan_microbatches, token_numbers, token_weights
from learner.loss import LossRules, LossTerms, LossTokens, policy_loss
from learner.policy import Interrupted, Policy
from learner.report import NonFinite, StepReport, Stopwatch
from learner.rows import Batch, Row
from learner.schedule import learning_rate
from learner.statistics import TokenValues, batch_statistics
from pipeline.config import RunConfig
from pipeline.errors import TrainingError

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
    values: list[TokenValues] = field(default_factory=list)
    loss: float = 0.0
    policy_loss: float = 0.0
    entropy: float = 0.0
    grad_norm: float = 0.0
    optimizer_steps: int = 0
    microbatches: int = 0
    padding: int = 0
    nonfinite: dict[NonFinite, int] = field(default_factory=lambda: {"loss": 0, "gradient": 0, "ratio": 0})


class Trainer:
    """Updates a policy from batches.

    ``updates`` counts finished updates. ``torn`` is True while the weights hold a part of an update (an interrupted
    update of several optimizer steps): such weights must not be saved.
    """

    def __init__(self, policy: Policy, config: RunConfig) -> None:
        self.policy = policy
        self.updates = 0
        self.torn = False
        self._config = config
        self._rules = LossRules.of(config.loss, config.importance)
        learner = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters,
            lr=learner.learning_rate,
            betas=learner.betas,
            weight_decay=learner.weight_decay,
            fused=True,
        )

    def step(self, batch: Batch, policy_version: int) -> StepReport:
        """Train ``batch``; ``policy_version`` is the version of the weights before it.

        Raises :class:`TrainingError` when the batch is not that of the next update or has no rows,
        :class:`Interrupted` when asked to stop.
        """
        if batch.update != self.updates or not batch.rows:
            raise TrainingError(
                f"expected rows for update {self.updates}, got {len(batch.rows)} for update {batch.update}"
            )
        started = time.time()
        tally = _Tally(Stopwatch(self.policy.device))
        rate = learning_rate(self.updates, self._config.learner, self._config.run.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        try:
            self._train(batch, tally)
        except Interrupted:
            self.optimizer.zero_grad(set_to_none=True)
            self.torn = tally.optimizer_steps > 0
            raise
        self.updates += 1
        return self._report(batch, policy_version, rate, tally, started)

    def _train(self, batch: Batch, tally: _Tally) -> None:
        learner = self._config.learner
        numbers = token_numbers(batch.rows)
        several = learner.epochs * learner.minibatches > 1
        proximal = self.score(batch.rows, tally.watch) if self._rules.decoupled and several else None
        for epoch in range(learner.epochs):
            for chosen in self._minibatches(batch.rows, epoch):
                rows, first = [batch.rows[i] for i in chosen], [int(numbers[i]) for i in chosen]
                try:
                    self._optimizer_step(rows, first, proximal, tally, record=epoch == 0)
                except NonFiniteStep as error:
                    tally.nonfinite[error.where] += 1
                finally:
                    self.optimizer.zero_grad(set_to_none=True)

    def score(self, rows: Sequence[Row], watch: Stopwatch | None = None) -> FloatArray:
        """log π of all sampled tokens of ``rows`` with today's weights, float32 ``[S]``, rows in order."""
        watch = watch or Stopwatch(self.policy.device)
        numbers = token_numbers(rows)
        out = np.zeros(sum(row.n_sampled for row in rows), dtype=np.float32)
        with torch.no_grad():
            for part in self._microbatches(rows, [int(n) for n in numbers], [0.0] * len(rows), watch):
                with watch.stage("forward"):
                    out[part.tokens_S] = self.policy.score(part)[0].float().cpu().numpy()
        return out

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
        self, rows: Sequence[Row], first: Sequence[int], proximal: FloatArray | None, tally: _Tally, *, record: bool
    ) -> None:
        """Gradients of the whole mini-batch, then one optimizer step. Rows without advantage have gradient exactly 0:
        they are scored without a backward pass, and only for the statistics."""
        weights = token_weights(rows, self._config.loss.aggregation)
        with_signal = [row.advantage != 0 or self._rules.entropy_bonus > 0 for row in rows]
        tally.loss = tally.policy_loss = tally.entropy = tally.grad_norm = 0.0
        for learn in (True, False):
            chosen = [i for i, signal in enumerate(with_signal) if signal is learn]
            if not chosen or not (learn or record):
                continue
            parts = self._microbatches(
                [rows[i] for i in chosen], [first[i] for i in chosen], [weights[i] for i in chosen], tally.watch
            )
            for part in parts:
                self._microbatch(part, proximal, tally, learn=learn, record=record)
        if any(with_signal):
            with tally.watch.stage("optimize"):
                self._apply(tally)

    def _microbatch(
        self, part: MicroBatch, proximal: FloatArray | None, tally: _Tally, *, learn: bool, record: bool
    ) -> None:
        with tally.watch.stage("forward"), torch.set_grad_enabled(learn):
            logprobs, entropy = self.policy.score(part)
            tokens = self._loss_tokens(part, logprobs, entropy, proximal)
            terms = policy_loss(tokens, self._rules)
            if record:
                tally.values.append(_values(part, tokens, terms))
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

    def _loss_tokens(
        self, part: MicroBatch, logprobs: Tensor, entropy: Tensor, proximal: FloatArray | None
    ) -> LossTokens:
        def tensor(array: npt.NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(array).to(self.policy.device)

        behaviour = tensor(part.behaviour_logprobs_S)
        replayed = tensor(part.replayed_S)
        return LossTokens(
            logprobs=logprobs,
            entropy=entropy,
            behaviour=behaviour,
            proximal=None if proximal is None else tensor(proximal[part.tokens_S]),
            advantages=tensor(part.advantages_S),
            weights=tensor(part.weights_S),
            loss_mask=torch.isfinite(behaviour),
            replay_mask=replayed,
            off_policy=replayed,
        )

    def _apply(self, tally: _Tally) -> None:
        parameters = [p for p in self.policy.parameters if p.grad is not None]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if not np.isfinite(norm):
            raise NonFiniteStep("gradient")
        limit = self._config.learner.grad_clip
        if norm > limit:
            torch._foreach_mul_(gradients, limit / norm)
        self.optimizer.step()
        tally.grad_norm = norm
        tally.optimizer_steps += 1

    def _report(self, batch: Batch, policy_version: int, rate: float, tally: _Tally, started: float) -> StepReport:
        values = TokenValues.join(tally.values)
        statistics = batch_statistics(values, policy_version, self._rules.log_ratio_max)
        trained = statistics.all.tokens
        return StepReport(
            update=batch.update,
            policy_version=policy_version,
            statistics=statistics,
            loss=tally.loss,
            policy_loss=tally.policy_loss,
            entropy_loss=-self._rules.entropy_bonus * tally.entropy,
            grad_norm=tally.grad_norm,
            learning_rate=rate,
            optimizer_steps=tally.optimizer_steps,
            nonfinite=tally.nonfinite,
            n_rows=len(batch.rows),
            n_microbatches=tally.microbatches,
            tokens_trained=trained,
            tokens_masked=sum(len(row) for row in batch.rows) - trained,
            tokens_padding=tally.padding,
            tokens_without_signal=sum(row.n_sampled for row in batch.rows if row.advantage == 0),
            seconds=tally.watch.seconds,
            started_at=started,
            finished_at=time.time(),
        )


def _values(part: MicroBatch, tokens: LossTokens, terms: LossTerms) -> TokenValues:
    def array(tensor: Tensor) -> npt.NDArray[np.float32]:
        return tensor.detach().float().cpu().numpy()

    return TokenValues(
        logprobs=array(tokens.logprobs),
        behaviour=part.behaviour_logprobs_S,
        entropy=array(tokens.entropy),
        losses=array(terms.token_losses),
        trained=(tokens.loss_mask & torch.isfinite(tokens.logprobs.detach())).cpu().numpy(),
        clipped_low=terms.clipped_low.cpu().numpy(),
        clipped_high=terms.clipped_high.cpu().numpy(),
        versions=part.policy_versions_S,
        sequences=part.sequences_S,
        replayed=part.replayed_S,
    )
