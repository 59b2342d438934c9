"""One optimizer step of the policy: inputs of the loss, gradients by micro-batch, ranks in agreement, the step.

Dimensions: B rows, T padded length, S sampled tokens of a micro-batch, H hidden size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.data.demonstrations import Demonstrations
from learner.data.microbatch import MicroBatch, token_weights
from learner.data.rows import Row, TokenArray
from learner.distributed.ranks import on_device
from learner.losses.auxiliary import cross_entropy, imported_share, is_imported
from learner.losses.base import LossRules
from learner.losses.loss import LossTokens, OtherRows, policy_loss, second_moment_mask, step_factor
from learner.losses.options import SecondMoment
from learner.observability.statistics import LOG_RATIO_MAX, TokenValues
from learner.observability.timing import Stopwatch
from learner.policy.policy import Policy
from learner.training.optimizer import clip_and_step, gradient_norm
from learner.training.report import AppliedStep, NonFinite, StepSums, StepTotals
from pipeline.config import RunConfig
from pipeline.config.losses import LossConfig

BoolArray = npt.NDArray[np.bool_]
Score = Callable[[Sequence[Row]], TokenArray]
"""log π of all sampled tokens of rows with the current weights, rows in order."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Inputs of the policy loss beside a micro-batch, of all tokens of an update: by ``MicroBatch.token_index_S``."""

    old_logprobs: TokenArray | None = None
    """See :class:`StepTotals`."""
    loss_mask: BoolArray | None = None
    """False where the second-moment mask rejects the token. None: nothing is rejected."""
    reference_logprobs: TokenArray | None = None
    """log π of the reference policy."""
    other_rows: npt.NDArray[np.float64] | None = None
    """``[2, tokens]``, see :func:`other_rows_of`."""


def old_logprobs_of(rows: Sequence[Row], rules: LossRules, score: Score) -> TokenArray | None:
    """log π_old, taken with the current weights, of the rows whose loss reads it, NaN elsewhere; None where no row's
    does."""
    anchored = [rules.needs_proximal(replayed=row.replayed, recorded=row.recorded) for row in rows]
    if not any(anchored):
        return None
    anchored_S = np.repeat(anchored, [row.n_sampled for row in rows])
    old_logprobs = np.full(len(anchored_S), np.nan, dtype=np.float32)
    old_logprobs[anchored_S] = score([row for row, wanted in zip(rows, anchored, strict=True) if wanted])
    return old_logprobs


class NonFiniteStep(Exception):
    """A value that must be finite is not: ``where``. The optimizer step is skipped and counted."""

    def __init__(self, where: NonFinite) -> None:
        super().__init__(where)
        self.where = where


@dataclass(frozen=True, slots=True)
class Pass:
    """Results of one micro-batch, on the device until the optimizer step reads those of all at once."""

    part: MicroBatch
    sums: Tensor
    """float64 ``[6]``: what :meth:`StepSums.add` takes."""
    tokens: Tensor | None
    """float32 ``[9, S]``: what :func:`token_values` takes; None where nobody reads it."""
    routing: Tensor | None
    """Sums of the routers (:class:`learner.policy.routers.Routing`); None without."""


@dataclass(frozen=True, slots=True)
class OptimizerSteps:
    """Optimizer steps of the policy. The caller drops the gradients.

    :meth:`take` raises :class:`NonFiniteStep` before the weights are changed, :class:`pipeline.errors.Interrupted` when
    asked to stop. It waits for the device once, after all backward passes.
    """

    policy: Policy
    config: RunConfig
    optimizer: torch.optim.Optimizer
    demonstrations: Demonstrations | None

    def _inputs(self, rows: Sequence[Row], offsets: Sequence[int], totals: StepTotals) -> LossInputs:
        def score(rows: Sequence[Row]) -> TokenArray:
            return self.policy.score_rows(rows, totals.watch)[0]

        rules, old = totals.rules, totals.old_logprobs
        mask = second_moment_loss_mask(rows, offsets, totals.n_sampled, rules, self.config.loss, score)
        others = other_rows_of(rows, offsets, totals.n_sampled, old, mask, rules, score)
        return LossInputs(old, mask, totals.scores.reference, others)

    def _apply(self, norm: float, learning_rate: float, totals: StepTotals) -> None:
        """Clip the gradients, of global ``norm``, and step."""
        with totals.watch.phase("optimize"):
            fresh, limit = not self.optimizer.state, self.config.learner.grad_clip
            sums = clip_and_step(
                self.optimizer, self.policy.parameters, norm, learning_rate, limit, summed=totals.recorded
            )
            if sums is not None:
                step = AppliedStep("policy", totals.last_step.loss, norm, learning_rate, fresh)
                totals.applied.append((step, sums))
        totals.last_step.grad_norm = norm
        totals.optimizer_steps += 1
        totals.supervised_tokens += totals.last_step.supervised_tokens

    def _supervise(self, totals: StepTotals) -> Tensor | None:
        """Add the gradient of the demonstrations that this optimizer step draws; this rank's part of their mean
        cross-entropy. None: there are no demonstrations."""
        if self.demonstrations is None:
            return None
        learner, supervised, sums = self.config.learner, self.config.loss.supervised, totals.last_step
        step = totals.update * learner.epochs * learner.minibatches + totals.steps_begun - 1
        rows = self.demonstrations.draw((self.config.run.seed, 1), step, supervised.batch)
        sums.supervised_tokens = sum(row.n_sampled for row in rows)
        return add_supervised_gradients(self.policy, rows, supervised.weight, totals.watch, sums)

    def take(self, rows: Sequence[Row], offsets: Sequence[int], totals: StepTotals, *, record: bool) -> None:
        """Train ``rows``, whose tokens have the indices from ``offsets`` on. Rows without advantage have gradient
        exactly 0: they are scored without a backward pass, and only for the statistics, where ``record`` asks for
        them."""
        inputs = self._inputs(rows, offsets, totals)
        totals.steps_begun += 1
        totals.last_step = sums = StepSums()
        weights = token_weights(rows, self.config.loss.aggregation, self.config.loss.aggregation_length)
        supervised, frozen = self.config.loss.supervised, totals.critic_only
        replayed_weight = supervised.weight if supervised.demonstrations is None and not frozen else 0.0
        if replayed_weight:
            sums.supervised_tokens = sum(row.n_sampled for row in rows if is_imported(row))
        share = imported_share(rows, replayed_weight)
        with_signal = [
            not frozen and (row.has_signal or not totals.rules.needs_signal or (share > 0 and is_imported(row)))
            for row in rows
        ]
        guard = self.config.replay.ess_guard
        passes: list[Pass] = []
        for learn in (True, False):
            chosen = [i for i, signal in enumerate(with_signal) if signal is learn]
            if not chosen or not (learn or record or guard.enabled):
                continue
            ours, at = [rows[i] for i in chosen], [offsets[i] for i in chosen]
            parts = self.policy.microbatches(ours, totals.watch, [weights[i] for i in chosen], at)
            balance = self._balance_share(parts) if learn else 0.0
            for part in parts:
                self.policy.ranks.agree()
                if part is None:
                    idle_microbatch(self.policy, learn=learn)
                else:
                    keep = record or guard.enabled
                    passes.append(self._microbatch(part, inputs, share, balance, totals, learn=learn, keep=keep))
                    if record:
                        totals.tokens_padding += part.n_padded - part.n_real
                        totals.tokens_shared += part.n_shared
        demonstrated = None if frozen else self._supervise(totals)
        norm = None
        if any(with_signal) or demonstrated is not None:
            with totals.watch.phase("optimize"):
                self.policy.ranks.sum_replicas(self.policy.parameters)
                norm = gradient_norm(self.policy.parameters, self.policy.ranks)
        found = self._read(passes, inputs, demonstrated, norm, totals, record=record)
        sums.add_ranks(self.policy.ranks)
        totals.watch.operations += sums.operations
        if (where := sums.nonfinite(found)) is not None:
            raise NonFiniteStep(where)
        if found is None:
            return
        factor = 1.0
        if guard.enabled:
            factor = step_factor(sums.ess_ratio(guard.level, rows, self.policy.ranks), guard.target)
        self._apply(found, totals.learning_rate * factor, totals)
        totals.lr_factors.append(factor)

    def _microbatch(
        self,
        part: MicroBatch,
        inputs: LossInputs,
        supervised_share: float,
        balance_share: float,
        totals: StepTotals,
        *,
        learn: bool,
        keep: bool,
    ) -> Pass:
        """``supervised_share``: weight of a token of an imported demonstration; 0: there are none. ``balance_share``:
        weight of a token in the load-balancing loss. ``keep`` the values of tokens."""
        with totals.watch.phase("forward"), torch.set_grad_enabled(learn):
            logprobs, entropy = self.policy.score(part)
            tokens = loss_tokens(part, logprobs, entropy, inputs, self.config.loss)
            terms = policy_loss(tokens, totals.rules)
            loss, extra = terms.loss, logprobs.new_zeros(())
            if supervised_share:
                imported = on_device(part.replayed_S & ~part.recorded_S, loss.device)
                extra = cross_entropy(logprobs, imported, supervised_share)
                loss = loss + extra
                extra = extra.detach() / self.config.loss.supervised.weight
            finite = torch.isfinite(tokens.logprobs.detach())
            sums = [loss.detach(), terms.policy, terms.entropy, terms.kl, extra, (~finite).sum()]
            values = None
            if not part.counted:
                sums = [torch.zeros_like(value) for value in sums]
            elif keep:
                trained, clipped = terms.trained & finite, (terms.clipped_low, terms.clipped_high)
                values = [tokens.logprobs, tokens.entropy, terms.token_losses, trained, *clipped, terms.reasons,
                          terms.truncated, terms.reference_kl]  # fmt: skip
            routing = None if self.policy.routers is None else self.policy.routers.taken()
            if routing is not None and balance_share:
                loss = loss + balance_share * part.n_real * routing.balance
        if learn:
            with totals.watch.phase("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
        totals.microbatches += part.counted
        totals.last_step.operations += part.operations * (self.policy.form.cost.learning if learn else 1)
        return Pass(
            part,
            torch.stack([value.double() for value in sums]),
            None if values is None else torch.stack([value.detach().float() for value in values]),
            None if routing is None else routing.sums,
        )

    def _balance_share(self, parts: Sequence[MicroBatch | None]) -> float:
        """Weight of a token in the load-balancing loss: over the tokens of all ranks' passes. Collective."""
        weight = self.config.loss.load_balancing
        n_real = sum(part.n_real for part in parts if part is not None and part.counted)
        return weight / self.policy.ranks.summed([n_real])[0] if weight else 0.0

    def _read(
        self,
        passes: Sequence[Pass],
        inputs: LossInputs,
        demonstrated: Tensor | None,
        norm: Tensor | None,
        totals: StepTotals,
        *,
        record: bool,
    ) -> float | None:
        """Wait for the device, and add its results to the sums and values of the step; the gradient's norm."""
        sums, weight = totals.last_step, self.config.loss.supervised.weight
        kept = [each for each in passes if each.tokens is not None]
        if kept:
            arrays = torch.cat([each.tokens for each in kept if each.tokens is not None], dim=1).cpu().numpy()
            ends = np.cumsum([each.part.n_sampled for each in kept])[:-1]
            for each, columns in zip(kept, np.split(arrays, ends, axis=1), strict=True):
                moved = totals.optimizer_steps > 0
                values = token_values(each.part, columns, inputs, self.config.loss, moved=moved)
                if record:
                    totals.values.append(values)
                if self.config.replay.ess_guard.enabled:
                    sums.add_ratios(values)
        extras = [value.reshape(1).double() for value in (demonstrated, norm) if value is not None]
        numbers = torch.cat([*(each.sums for each in passes), *extras]).tolist() if passes or extras else []
        for i in range(len(passes)):
            sums.add(numbers[6 * i : 6 * i + 6])
        if record and (found := [each.routing for each in passes if each.routing is not None]):
            totals.routing += torch.stack(found).sum(dim=0).cpu().numpy()
        rest = numbers[6 * len(passes) :]
        if demonstrated is not None:
            sums.supervised += rest[0]
            sums.loss += weight * rest[0]
        return None if norm is None else rest[-1]


def loss_tokens(
    part: MicroBatch, logprobs: Tensor, entropy: Tensor, inputs: LossInputs, loss: LossConfig
) -> LossTokens:
    """Inputs of the loss of one micro-batch, on the device of ``logprobs`` and ``entropy`` (float ``[S]``, with
    gradient). Tokens whose μ is not finite, or that the second-moment mask rejects, are masked."""

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return on_device(array, logprobs.device)

    def of_update(array: npt.NDArray[np.generic] | None) -> Tensor | None:
        return None if array is None else tensor(array[part.token_index_S])

    loss_mask = np.isfinite(part.behaviour_logprobs_S)
    if inputs.loss_mask is not None:
        loss_mask &= inputs.loss_mask[part.token_index_S]
    off = off_policy(part.replayed_S, part.with_lessons_S, part.discarded_S, loss)
    return LossTokens(
        logprobs=logprobs,
        entropy=entropy,
        behaviour=tensor(part.behaviour_logprobs_S),
        proximal=of_update(inputs.old_logprobs),
        advantages=tensor(part.advantages_S),
        weights=tensor(part.loss_weights_S),
        loss_mask=tensor(loss_mask),
        replay_mask=tensor(part.replayed_S),
        off_policy=tensor(off),
        rows=tensor(part.row_index_S),
        reference=of_update(inputs.reference_logprobs),
        recorded=tensor(part.recorded_S),
        factors=tensor(part.replay_weights_S),
        others=(
            None if inputs.other_rows is None else OtherRows(*map(tensor, inputs.other_rows[:, part.token_index_S]))
        ),
    )


def off_policy(
    replayed: npt.ArrayLike, with_lessons: npt.ArrayLike, discarded: npt.ArrayLike, loss: LossConfig
) -> npt.NDArray[np.bool_]:
    """Mask of tokens, or rows, with the off-policy loss: replayed, and those that ``off_clip_lessons`` selects."""
    off = np.asarray(replayed, dtype=np.bool_)
    if loss.off_clip_lessons == "none":
        return off
    return np.asarray(off | np.asarray(with_lessons if loss.off_clip_lessons == "all" else discarded, dtype=np.bool_))


def token_values(
    part: MicroBatch, columns: npt.NDArray[np.float32], inputs: LossInputs, loss: LossConfig, *, moved: bool
) -> TokenValues:
    """Inputs of the statistics from one micro-batch. ``columns``, ``[9, S]``: log π, entropy, loss, trained, clipped
    low and high, reason, truncated, reference KL. ``moved``: see :attr:`TokenValues.moved`."""
    logprobs, entropy, losses, trained, low, high, reasons, truncated, reference_kl = columns
    return TokenValues(
        logprobs=logprobs,
        behaviour=part.behaviour_logprobs_S,
        entropy=entropy,
        losses=losses,
        trained=trained.astype(np.bool_),
        clipped_low=low.astype(np.bool_),
        clipped_high=high.astype(np.bool_),
        versions=part.policy_versions_S,
        trajectory_indices=part.trajectory_index_S,
        replayed=part.replayed_S,
        recorded=part.recorded_S,
        discarded=part.discarded_S,
        off_policy=off_policy(part.replayed_S, part.with_lessons_S, part.discarded_S, loss),
        masked=(
            np.zeros(part.n_sampled, np.bool_) if inputs.loss_mask is None else ~inputs.loss_mask[part.token_index_S]
        ),
        reasons=reasons.astype(np.int8),
        truncated=truncated.astype(np.bool_),
        reference_kl=reference_kl,
        moved=np.full(part.n_sampled, moved),
        advantages=part.advantages_S,
        numbers=part.token_index_S,
    )


def add_supervised_gradients(
    policy: Policy, rows: Sequence[Row], weight: float, watch: Stopwatch, sums: StepSums
) -> Tensor:
    """Add the gradient of ``weight`` times the mean cross-entropy over the sampled tokens of ``rows``; returns this
    rank's part of the mean, nats, on the device. Raises :class:`pipeline.errors.Interrupted` when asked to stop."""
    n_tokens = sum(row.n_sampled for row in rows)
    total = torch.zeros((), dtype=torch.float64, device=policy.device)
    for part in policy.microbatches(rows, watch):
        policy.ranks.agree()
        if part is None:
            idle_microbatch(policy, learn=True)
            continue
        with watch.phase("forward"), torch.enable_grad():
            logprobs, _ = policy.score(part)
            loss = cross_entropy(logprobs, torch.ones_like(logprobs, dtype=torch.bool), 1.0 / n_tokens)
        with watch.phase("backward"):
            (weight * loss).backward()  # type: ignore[no-untyped-call]
        if part.counted:
            total += loss.detach()
        sums.operations += policy.form.cost.learning * part.operations
    return total


def idle_microbatch(policy: Policy, *, learn: bool) -> None:
    """Take part in the collectives of another rank's micro-batch, with a gradient of 0."""
    with torch.set_grad_enabled(learn):
        logprobs, entropy = policy.score(policy.idle_part())
    if learn:
        nothing = torch.zeros_like(logprobs)
        torch.where(nothing > 0, logprobs + entropy, nothing).sum().backward()  # type: ignore[no-untyped-call]


def second_moment_loss_mask(
    rows: Sequence[Row], offsets: Sequence[int], n_tokens: int, rules: LossRules, loss: LossConfig, score: Score
) -> BoolArray | None:
    """Second-moment mask over the off-policy tokens with recorded μ of one optimizer step; None without such tokens.

    Mean and mask are of the tokens whose loss moves π further from μ: ``A > 0`` with ``π > μ``, and ``A < 0`` with
    ``π < μ``. PPO's clip stops the same ones; so does the published code of M2PO, where the paper takes all tokens.
    """
    if not isinstance(rules.off_policy, SecondMoment):
        return None
    chosen = [
        (row, offset)
        for row, offset in zip(rows, offsets, strict=True)
        if row.recorded and bool(off_policy(row.replayed, row.with_lessons, row.discarded, loss))
    ]
    if not chosen:
        return None
    behaviour_logprobs = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row, _ in chosen])
    indices = np.concatenate([np.arange(row.n_sampled) + offset for row, offset in chosen])
    log_ratios = score([row for row, _ in chosen]).astype(np.float64) - behaviour_logprobs
    advantages = np.concatenate([row.advantages for row, _ in chosen])
    leaving = np.isfinite(log_ratios) & (np.sign(advantages) * np.sign(log_ratios) > 0)
    loss_mask = np.ones(n_tokens, dtype=np.bool_)
    loss_mask[indices[leaving]] = second_moment_mask(log_ratios[leaving], rules.off_policy.max)
    return loss_mask


def other_rows_of(
    rows: Sequence[Row],
    offsets: Sequence[int],
    n_tokens: int,
    old_logprobs: TokenArray | None,
    loss_mask: BoolArray | None,
    rules: LossRules,
    score: Score,
) -> npt.NDArray[np.float64] | None:
    """Sum of log π_prox/μ and number of tokens in the other rows of a token's trajectory, ``[2, n_tokens]``, for
    weights over trajectories; 0 where a trajectory has one row. None where all have, or no weight is over trajectories.

    ``rows`` hold whole trajectories; only those of several rows are scored, and only without ``old_logprobs``.
    """
    counts = Counter(row.trajectory_index for row in rows)
    chosen = [
        (row, offset)
        for row, offset in zip(rows, offsets, strict=True)
        if counts[row.trajectory_index] > 1 and rules.weighs_trajectory(replayed=row.replayed, recorded=row.recorded)
    ]
    if not chosen:
        return None
    indices = [np.arange(row.n_sampled) + offset for row, offset in chosen]
    at = np.concatenate(indices)
    logprobs = old_logprobs[at] if old_logprobs is not None else score([row for row, _ in chosen])
    behaviour = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row, _ in chosen]).astype(np.float64)
    counted = np.isfinite(behaviour) if loss_mask is None else np.isfinite(behaviour) & loss_mask[at]
    d = np.clip(logprobs - np.where(counted, behaviour, 0.0), -LOG_RATIO_MAX, LOG_RATIO_MAX)
    row_of_token = np.repeat(np.arange(len(chosen)), [len(places) for places in indices])
    sums = np.stack([np.bincount(row_of_token, weights=np.where(counted, x, 0.0)) for x in (d, np.ones_like(d))])
    trajectories = np.unique([row.trajectory_index for row, _ in chosen], return_inverse=True)[1]
    whole = np.stack([np.bincount(trajectories, weights=x)[trajectories] for x in sums])
    found = np.zeros((2, n_tokens))
    found[:, at] = (whole - sums)[:, row_of_token]
    return found
