"""One optimizer step of the policy: gradients of a mini-batch, micro-batch by micro-batch, then the step.

Gradients of the cross-entropy on demonstrations, beside those of RL.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.data.demonstrations import Demonstrations
from learner.data.microbatch import MicroBatch, token_numbers, token_weights
from learner.data.rows import Row
from learner.losses.corrections import step_factor, token_weights_of
from learner.losses.supervised import cross_entropy, imported_share, is_imported
from learner.losses.total import policy_loss
from learner.observability.report import Stopwatch
from learner.policy.passes import microbatches
from learner.policy.policy import Policy
from learner.training.agreement import NonFiniteStep, agree, idle
from learner.training.loss_inputs import LossInputs, loss_tokens, values_of
from learner.training.optimizer import WeightAverage, clip_gradients, set_rate
from learner.training.totals import Conditions, StepSums, StepTotals
from pipeline.config import RunConfig


def add_gradients(policy: Policy, rows: Sequence[Row], weight: float, tokens_max: int, watch: Stopwatch) -> float:
    """Add the gradient of ``weight`` times the mean cross-entropy over the sampled tokens of ``rows``; returns the
    mean, nats. Raises as :func:`learner.training.agreement.agree`."""
    n_tokens = sum(row.n_sampled for row in rows)
    with watch.stage("prepare"):
        parts = microbatches(rows, [0.0] * len(rows), token_numbers(rows), tokens_max, policy.form, policy.ranks)
    total = 0.0
    for part in parts:
        if part is None:
            idle(policy, learn=True)
            continue
        with watch.stage("forward"), torch.enable_grad():
            logprobs, _ = policy.score(part)
            loss = cross_entropy(logprobs, torch.ones_like(logprobs, dtype=torch.bool), 1.0 / n_tokens)
            value = float(loss.detach())
            agree(policy.ranks, None if np.isfinite(value) else "loss")
        with watch.stage("backward"):
            (weight * loss).backward()  # type: ignore[no-untyped-call]
        total += value
    return float(policy.ranks.summed([total])[0])


class OptimizerSteps:
    """Changes the policy's weights, by ``optimizer``; ``average`` follows them. The caller drops the gradients.

    Every method raises :class:`NonFiniteStep` before the weights are changed,
    :class:`pipeline.errors.Interrupted` when asked to stop.
    """

    def __init__(
        self,
        policy: Policy,
        config: RunConfig,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        demonstrations: Demonstrations | None,
    ) -> None:
        self._policy = policy
        self._config = config
        self._optimizer = optimizer
        self._average = average
        self._demonstrations = demonstrations

    def take(
        self,
        rows: Sequence[Row],
        first: Sequence[int],
        known: LossInputs,
        conditions: Conditions,
        tally: StepTotals,
        *,
        record: bool,
    ) -> None:
        """Train ``rows``, whose tokens have the numbers from ``first`` on. Rows without advantage have gradient
        exactly 0: they are scored without a backward pass, and only for the statistics, where ``record`` asks for
        them."""
        tally.begun += 1
        tally.last = sums = StepSums()
        weights = token_weights(rows, self._config.loss.aggregation, self._config.loss.aggregation_length)
        supervised, waits = self._config.loss.supervised, conditions.policy_waits
        of_replayed = supervised.weight if supervised.source == "replayed" and not waits else 0.0
        if of_replayed:
            sums.supervised_tokens = sum(row.n_sampled for row in rows if is_imported(row))
        share = imported_share(rows, of_replayed)
        with_signal = [
            not waits and (row.has_signal or not conditions.rules.needs_signal or (share > 0 and is_imported(row)))
            for row in rows
        ]
        guard = self._config.replay.ess_guard
        for learn in (True, False):
            chosen = [i for i, signal in enumerate(with_signal) if signal is learn]
            if not chosen or not (learn or record or guard.enabled):
                continue
            with tally.watch.stage("prepare"):
                parts = microbatches(
                    [rows[i] for i in chosen],
                    [weights[i] for i in chosen],
                    [first[i] for i in chosen],
                    self._config.learner.tokens_per_microbatch,
                    self._policy.form,
                    self._policy.ranks,
                )
            for part in parts:
                if part is None:
                    idle(self._policy, learn=learn)
                else:
                    self._microbatch(part, known, share, conditions, tally, learn=learn, record=record)
        sums.add_ranks(self._policy.ranks)
        if guard.enabled:
            sums.ratios = self._policy.ranks.ratios(sums.ratios)
        drawn = not waits and self._supervise(conditions.update, tally)
        if any(with_signal) or drawn:
            factor = step_factor(sums.ratios.ess_ratio, guard.target) if guard.enabled else 1.0
            self._apply(conditions.rate * factor, tally)
            tally.factors.append(factor)

    def _apply(self, rate: float, tally: StepTotals) -> None:
        """Step by the gradients that are there."""
        set_rate(self._optimizer, rate)
        with tally.watch.stage("optimize"):
            norm = clip_gradients(self._policy.parameters, self._config.learner.grad_clip)
            if not np.isfinite(norm):
                raise NonFiniteStep("gradient")
            self._optimizer.step()
            if self._average is not None:
                self._average.update()
        tally.last.grad_norm = norm
        tally.optimizer_steps += 1

    def _supervise(self, update: int, tally: StepTotals) -> bool:
        """Add the gradient of the demonstrations that this optimizer step draws; whether there are any."""
        if self._demonstrations is None:
            return False
        learner, supervised = self._config.learner, self._config.loss.supervised
        step = update * learner.epochs * learner.minibatches + tally.begun - 1
        rows = self._demonstrations.draw((self._config.run.seed, 1), step, supervised.batch)
        budget = learner.tokens_per_microbatch
        tally.last.supervised = add_gradients(self._policy, rows, supervised.weight, budget, tally.watch)
        tally.last.supervised_tokens = sum(row.n_sampled for row in rows)
        tally.last.loss += supervised.weight * tally.last.supervised
        return True

    def _microbatch(
        self,
        part: MicroBatch,
        known: LossInputs,
        supervised_share: float,
        conditions: Conditions,
        tally: StepTotals,
        *,
        learn: bool,
        record: bool,
    ) -> None:
        """``supervised_share``: weight of a token of an imported demonstration; 0: there are none."""
        rules, sums = conditions.rules, tally.last
        with tally.watch.stage("forward"), torch.set_grad_enabled(learn):
            logprobs, entropy = self._policy.score(part)
            tokens = loss_tokens(part, logprobs, entropy, known, self._config.loss)
            terms = policy_loss(tokens, rules)
            values = values_of(part, tokens, terms, known)
            if record:
                tally.values.append(values)
            if self._config.replay.ess_guard.enabled:
                chosen = values.trained & values.recorded
                sums.ratios += token_weights_of(values.logprobs, values.behaviour, chosen, rules.log_ratio_max)
            loss = terms.loss
            if supervised_share:
                imported = torch.from_numpy(part.replayed_S & ~part.recorded_S).to(loss.device)
                extra = cross_entropy(logprobs, imported, supervised_share)
                sums.supervised += float(extra.detach()) / self._config.loss.supervised.weight
                loss = loss + extra
            value = float(loss.detach())
            finite = bool(torch.isfinite(tokens.logprobs.detach()).all())
            agree(self._policy.ranks, "ratio" if not finite else "loss" if not np.isfinite(value) else None)
        if learn:
            with tally.watch.stage("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        tally.microbatches += 1
        tally.padding += part.n_padded - part.n_real
        tally.shared += part.n_shared
        sums.loss += value
        sums.policy_loss += float(terms.policy)
        sums.entropy += float(terms.entropy)
        sums.kl += float(terms.kl)
