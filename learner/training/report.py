"""Report of one update, and the sums over its optimizer steps that it is made of."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.data.microbatch import Form
from learner.data.rows import Row, TokenArray, TokenScores
from learner.distributed.ranks import Ranks
from learner.losses.base import LossRules
from learner.observability.statistics import (
    LOG_RATIO_MAX,
    BatchStatistics,
    TokenValues,
    Weights,
    batch_statistics,
    log_ratios_of,
)
from learner.observability.timing import Stopwatch

NonFinite = Literal["loss", "gradient", "ratio", "value"]
"""Value that was not finite; ``value``: the critic's step, loss or gradient."""
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class CriticReport:
    """One optimizer step of the critic; of the last one where an update has several."""

    loss: float
    clip_ratio: float
    """Share of tokens whose value left the clip range."""
    grad_norm: float
    """Norm before clipping; not finite where the step was skipped."""
    explained_variance: float | None
    """``1 - Var(R - V) / Var(R)`` with the values before the update; None where all returns are equal."""
    skipped: bool = False
    """Loss or gradient was not finite."""


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """An optimizer step that was taken, as a repetition of it must be."""

    model: Literal["policy", "critic"]
    loss: float
    grad_norm: float
    """Before clipping."""
    learning_rate: float
    fresh_optimizer: bool
    """True where it had no state: in the first step of a run, or of a policy that resumed without it."""
    sums: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros((2, 0), np.uint64))
    """``[2, P]``: sum of bits of each parameter's gradient after clipping, and of the parameter after the step
    (:func:`learner.training.optimizer.bit_sums`), of all ranks, modulo 2⁶⁴."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update. Times are Unix seconds, durations seconds, log-probs nats."""

    update: int
    policy_version: int
    """The learner's version before the step: what staleness is counted from."""
    statistics: BatchStatistics
    loss: float
    """Policy loss (and entropy bonus) over the batch, before the optimizer step; of the last optimizer step where
    there are several."""
    policy_loss: float
    entropy_loss: float
    grad_norm: float
    """Global norm before clipping, of the last optimizer step; 0 where no token had an advantage."""
    learning_rate: float
    """Learning rate of the last optimizer step, including the guard's factor."""
    optimizer_steps: int
    """Steps really applied: fewer than epochs × minibatches where one was skipped."""
    nonfinite: dict[NonFinite, int]
    """Skipped optimizer steps by what was not finite."""
    n_microbatches: int
    tokens_trained: int
    """Sampled tokens in the loss."""
    tokens_masked: int
    """Tokens seen by the forward pass that are not in the loss."""
    tokens_padding: int
    tokens_without_signal: int
    """Sampled tokens whose advantage is exactly 0: scored for the statistics, without a backward pass."""
    tokens_shared: int = 0
    """Tokens of rows that another row of the same forward pass computed: beginnings in common."""
    kl_loss: float = 0.0
    """The KL term of the loss, as ``entropy_loss``; 0 where the KL is not in the loss."""
    supervised_loss: float = 0.0
    """Mean cross-entropy over supervised tokens before the step, nats, without its weight; 0 without any."""
    supervised_tokens: int = 0
    """Supervised tokens of all optimizer steps."""
    tokens_by_trajectory: Sequence[int] = ()
    """Sampled tokens that passed through the loss in the first epoch, by ``Row.trajectory_index``; none behind the last
    trajectory that has some."""
    overlong: int = 0
    """Trajectories whose reward lost the overlong penalty."""
    guard_lr_factor: float = 1.0
    """Factor of the ESS guard on the learning rate: mean over optimizer steps; 1 where it is off."""
    critic: CriticReport | None = None
    """None: there is none."""
    scores: TokenScores = field(default_factory=TokenScores)
    """Scores that the update was made with; ``logprobs`` also where only the loss needs π_old."""
    steps: tuple[AppliedStep, ...] = ()
    """In the order in which they were taken; empty with ``replay.keep_trained: 0``."""
    microbatch_sizes: tuple[int, ...] = ()
    """Sampled tokens of each micro-batch of the first epoch, in the order of ``statistics.values``; with several ranks
    those of each rank together."""
    mfu: float | None = None
    """Model FLOP utilisation: operations of the update's passes over what the chips of all ranks could have done in its
    forward, backward and optimize stages. Padding is no operation. None where the chip's peak is unknown."""
    router_entropy: float | None = None
    """Mean entropy of a router's scores, nats; None for a model without experts."""
    expert_imbalance: float | None = None
    """Tokens of the expert with most over those of an even load, mean over layers; None as above."""
    peak_memory_bytes: int = 0
    """Largest since the start, of the rank with most: of the device, on CPUs resident."""
    form: Form = field(default_factory=Form)
    """Form of the rows in the policy's passes."""
    seconds: dict[str, float] = field(default_factory=dict)
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the rows (context and shared beginnings included, padding not) over the time of the step."""
        return (self.tokens_trained + self.tokens_masked) / max(1e-9, self.finished_at - self.started_at)


@dataclass(slots=True)
class StepSums:
    """Sums over the micro-batches of one optimizer step."""

    loss: float = 0.0
    policy_loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    supervised: float = 0.0
    """Mean cross-entropy."""
    supervised_tokens: int = 0
    operations: float = 0.0
    nonfinite_logprobs: float = 0.0
    """Log-probabilities that are not finite."""
    grad_norm: float = 0.0
    ratios: Weights = field(default_factory=Weights)
    """Token ratios π/μ, for the ESS guard."""
    log_ratios: dict[int, float] = field(default_factory=dict)
    """Sum of log π/μ over the tokens of a trajectory, by ``Row.trajectory_index``, for the ESS guard."""

    def add_ratios(self, values: TokenValues) -> None:
        """Count the trained tokens of a micro-batch whose log μ is known."""
        known = values.where(values.trained & values.recorded)
        d = log_ratios_of(known)
        self.ratios += Weights.of(np.exp(d))
        names, place = np.unique(known.trajectory_indices, return_inverse=True)
        for name, total in zip(names.tolist(), np.bincount(place, weights=d).tolist(), strict=True):
            self.log_ratios[name] = self.log_ratios.get(name, 0.0) + total

    def ess_ratio(self, level: Literal["token", "sequence"], rows: Sequence[Row], ranks: Ranks) -> float | None:
        """Kish's effective sample size of the ratios of all ranks over their number. ``rows``: those of the optimizer
        step. Collective."""
        if level == "token":
            return ranks.ratios(self.ratios).ess_ratio
        names = sorted({row.trajectory_index for row in rows})
        parts = [self.log_ratios.get(i, 0.0) for i in names] + [float(i in self.log_ratios) for i in names]
        totals, held = np.split(np.asarray(ranks.summed(parts)), 2)
        return Weights.of(np.exp(np.clip(totals[held > 0], -LOG_RATIO_MAX, LOG_RATIO_MAX))).ess_ratio

    def add(self, numbers: Sequence[float]) -> None:
        """Add a micro-batch: loss, policy loss, entropy, KL, cross-entropy, log-probabilities that are not finite."""
        for name, number in zip(_SUMMED, numbers, strict=True):
            setattr(self, name, getattr(self, name) + number)

    def add_ranks(self, ranks: Ranks) -> None:
        """Sum over ranks."""
        names = (*_SUMMED, "operations")
        for name, total in zip(names, ranks.summed([getattr(self, name) for name in names]), strict=True):
            setattr(self, name, total)

    def nonfinite(self, norm: float | None) -> NonFinite | None:
        """The value that is not finite and must be; ``norm`` of the gradient, where there is one."""
        if self.nonfinite_logprobs:
            return "ratio"
        if not math.isfinite(self.loss):
            return "loss"
        return None if norm is None or math.isfinite(norm) else "gradient"


_SUMMED = ("loss", "policy_loss", "entropy", "kl", "supervised", "nonfinite_logprobs")


@dataclass(slots=True)
class StepTotals:
    """Constants and totals of one update."""

    watch: Stopwatch
    update: int
    policy_version: int
    """Version of the weights before the update."""
    learning_rate: float
    """Before the ESS guard."""
    rules: LossRules
    scores: TokenScores
    critic_only: bool
    """The critic warms up: the policy is scored for the statistics alone."""
    n_sampled: int
    """Sampled tokens of all rows."""
    old_logprobs: TokenArray | None = None
    """log π_old, of the weights before the first optimizer step; NaN where the loss does not read it. None: those are
    the current weights."""
    started_at: float = field(default_factory=time.time)
    last_step: StepSums = field(default_factory=StepSums)
    """Sums of the optimizer step under way, else of the last one."""
    values: list[TokenValues] = field(default_factory=list)
    """Values of the micro-batches of the first epoch."""
    steps_begun: int = 0
    """Optimizer steps, skipped ones too: each draws other demonstrations."""
    optimizer_steps: int = 0
    """Optimizer steps applied."""
    supervised_tokens: int = 0
    """Supervised tokens of these."""
    microbatches: int = 0
    tokens_padding: int = 0
    tokens_shared: int = 0
    lr_factors: list[float] = field(default_factory=list)
    """Factor of the ESS guard in each optimizer step."""
    nonfinite: dict[NonFinite, int] = field(default_factory=lambda: dict.fromkeys(get_args(NonFinite), 0))
    """Optimizer steps that were skipped, by what was not finite."""
    recorded: bool = False
    """Optimizer steps get sums of bits."""
    applied: list[tuple[AppliedStep, Tensor]] = field(default_factory=list)
    """Optimizer steps that were taken, if ``recorded``, with the sums of this rank, ``[2, P]``, on the device."""
    steps: tuple[AppliedStep, ...] = ()
    critic: CriticReport | None = None
    routing: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    """Sums of :class:`learner.policy.routers.Routing` over the passes of the first epoch; empty without experts."""
    peak_memory_bytes: int = 0

    def add_ranks(self, ranks: Ranks) -> None:
        """Merge the totals of all ranks."""
        peaks = [float(self.peak_memory_bytes) if rank == ranks.rank else 0.0 for rank in range(ranks.size)]
        self.peak_memory_bytes = int(max(ranks.summed(peaks)))
        self.values = ranks.values(self.values)
        counts = ranks.summed([self.microbatches, self.tokens_padding, self.tokens_shared])
        self.microbatches, self.tokens_padding, self.tokens_shared = (int(n) for n in counts)
        for step, sums in self.applied:
            halves = torch.stack([sums & _LOW, sums >> 32 & _LOW]).flatten().tolist()  # exact in float64
            own = halves if ranks.replica == 0 else [0.0] * len(halves)
            low, high = np.asarray(ranks.summed(own)).astype(np.uint64).reshape(2, 2, -1)
            self.steps += (replace(step, sums=low + (high << np.uint64(32))),)
        if self.routing.size:
            self.routing = np.asarray(ranks.summed(self.routing.tolist()))

    def report(self, rows: Sequence[Row], form: Form, mfu: float | None) -> StepReport:
        """Report of the update that trained ``rows``, finished now."""
        rules, last = self.rules, self.last_step
        values = TokenValues.join(self.values)
        statistics = batch_statistics(values, self.policy_version)
        trained = statistics.all.tokens
        return StepReport(
            update=self.update,
            policy_version=self.policy_version,
            statistics=statistics,
            loss=last.loss,
            policy_loss=last.policy_loss,
            entropy_loss=-rules.entropy_bonus * last.entropy,
            kl_loss=rules.kl_coef * last.kl if rules.kl_in_loss else 0.0,
            supervised_loss=last.supervised,
            supervised_tokens=self.supervised_tokens,
            tokens_by_trajectory=np.bincount(values.trajectory_indices).tolist(),
            grad_norm=last.grad_norm,
            learning_rate=self.learning_rate * (self.lr_factors[-1] if self.lr_factors else 1.0),
            guard_lr_factor=float(np.mean(self.lr_factors)) if self.lr_factors else 1.0,
            optimizer_steps=self.optimizer_steps,
            nonfinite=self.nonfinite,
            n_microbatches=self.microbatches,
            tokens_trained=trained,
            tokens_masked=sum(len(row) for row in rows) - trained,
            tokens_padding=self.tokens_padding,
            tokens_shared=self.tokens_shared,
            tokens_without_signal=sum(row.n_sampled for row in rows if not row.has_signal),
            critic=self.critic,
            scores=replace(self.scores, logprobs=self.old_logprobs),
            steps=self.steps,
            microbatch_sizes=tuple(map(len, self.values)),
            mfu=mfu,
            form=form,
            peak_memory_bytes=self.peak_memory_bytes,
            seconds=self.watch.seconds,
            started_at=self.started_at,
            finished_at=time.time(),
        )
