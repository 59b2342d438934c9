"""Numbers about a batch that know how they reduce: parts from micro-batches or ranks are added, not averaged.

Everything here is numpy in float64, without gradient. Dimensions: S sampled tokens, N weights.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

LOG_RATIO_MAX = 20.0
"""Log-ratios are clamped to ± this, in nats, before ``exp``, so that no ratio overflows."""

FloatArray = npt.NDArray[np.floating]
BoolArray = npt.NDArray[np.bool_]
Ages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean as sum and count."""

    total: float = 0.0
    count: int = 0

    @classmethod
    def of(cls, values: npt.ArrayLike) -> Mean:
        array = np.asarray(values, dtype=np.float64)
        return cls(float(array.sum()), int(array.size))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float | None:
        """None where nothing was counted."""
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Weights:
    """Importance weights by their moments and extremes."""

    count: int = 0
    total: float = 0.0
    total_squared: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    @classmethod
    def of(cls, weights_N: npt.ArrayLike) -> Weights:
        w = np.asarray(weights_N, dtype=np.float64)
        if not w.size:
            return cls()
        return cls(int(w.size), float(w.sum()), float(np.square(w).sum()), float(w.min()), float(w.max()))

    def __add__(self, other: Weights) -> Weights:
        return Weights(
            self.count + other.count,
            self.total + other.total,
            self.total_squared + other.total_squared,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    @property
    def ess_ratio(self) -> float | None:
        """Effective sample size over N, ``(Σw)² / (N Σw²)``, within [1/N, 1] (Kish 1965). None without weights."""
        if not self.count or self.total_squared <= 0:
            return None
        return min(1.0, self.total**2 / (self.count * self.total_squared))

    @property
    def carried_ratio(self) -> float | None:
        """:attr:`ess_ratio` times ``min(1, mean)``: how much of N really carries weight. Kish's ESS does not see a
        common factor and calls N weights of 0.01 perfect; but E[w] = 1 under the policy that sampled, so a mean far
        below 1 says that the two policies hardly overlap. None without weights."""
        if not self.count:
            return None
        return (self.ess_ratio or 0.0) * min(1.0, self.total / self.count)


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of a training pass at each sampled token, arrays ``[S]`` in one order."""

    logprobs: FloatArray
    """log π before the optimizer step of the token."""
    behaviour: FloatArray
    """log μ."""
    entropy: FloatArray
    losses: FloatArray
    """Weighted loss of each token: the sum is the batch's policy loss."""
    trained: BoolArray
    """False where the token was rejected from the loss."""
    clipped_low: BoolArray
    clipped_high: BoolArray
    versions: npt.NDArray[np.int32]
    trajectory_indices: npt.NDArray[np.int32]
    replayed: BoolArray
    recorded: BoolArray
    """log μ is known."""
    discarded: BoolArray
    """Trained under another prompt than it was sampled under: lessons discarded."""
    off_policy: BoolArray
    """Had the off-policy loss."""
    masked: BoolArray
    """Rejected by the second-moment mask."""
    reasons: npt.NDArray[np.int8]
    """Code of the mask of ``importance.masks`` that rejected the token; 0: none did."""
    truncated: BoolArray
    """The correction's weight was cut at its maximum."""
    reference_kl: FloatArray
    """Estimate of KL(π‖π_ref) at the token; NaN where there is none."""
    moved: BoolArray
    """log π is of weights that an earlier optimizer step of the update had changed."""
    advantages: FloatArray
    numbers: npt.NDArray[np.int64]
    """Number of the token among all sampled tokens of the update (``MicroBatch.token_index_S``)."""

    @classmethod
    def join(cls, parts: list[TokenValues]) -> TokenValues:
        """Values of all parts; without parts there are no tokens."""
        if not parts:
            kinds = {"FloatArray": np.float64, "BoolArray": np.bool_}
            return cls(*(np.zeros(0, kinds.get(str(f.type), np.int32)) for f in fields(cls)))
        return cls(*(np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(cls)))

    def __len__(self) -> int:
        return len(self.logprobs)

    def where(self, chosen: BoolArray) -> TokenValues:
        return TokenValues(*(getattr(self, f.name)[chosen] for f in fields(self)))


@dataclass(frozen=True, slots=True)
class SourceStatistics:
    """One source of tokens (fresh, replay, or all)."""

    tokens: int = 0
    """Trained tokens. Ratios and KL are over those of them whose log μ is known."""
    ratio: Weights = field(default_factory=Weights)
    """π/μ of tokens, before clipping."""
    sequence_ratio: Weights = field(default_factory=Weights)
    """Product of π/μ over the tokens of a trajectory, each clamped in log to ± LOG_RATIO_MAX."""
    kl_k1: Mean = field(default_factory=Mean)
    """KL(μ‖π): mean of log μ - log π over tokens of μ."""
    kl_k3: Mean = field(default_factory=Mean)
    """KL(μ‖π): mean of π/μ - 1 - log(π/μ), never negative (Schulman 2020)."""
    entropy: Mean = field(default_factory=Mean)
    clipped_low: Mean = field(default_factory=Mean)
    clipped_high: Mean = field(default_factory=Mean)
    loss: float = 0.0
    rejected: int = 0
    """Tokens with a log-probability that is not finite."""
    masked: int = 0
    """Tokens rejected by the second-moment mask."""
    reasons: Counter[int] = field(default_factory=Counter)
    """Tokens that a mask of ``importance.masks`` rejected, by its code."""
    seen: int = 0
    """Tokens, rejected ones included: what shares of them are taken of."""
    truncated: Mean = field(default_factory=Mean)
    reference_kl: Mean = field(default_factory=Mean)
    """Mean estimate of KL(π‖π_ref), nats per token."""
    ratios_S: FloatArray = field(default_factory=lambda: np.zeros(0))
    """For histograms."""
    sequence_ratios: FloatArray = field(default_factory=lambda: np.zeros(0))

    def __add__(self, other: SourceStatistics) -> SourceStatistics:
        pairs = [(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return SourceStatistics(*(np.concatenate((a, b)) if isinstance(a, np.ndarray) else a + b for a, b in pairs))


def log_ratios_of(values: TokenValues) -> npt.NDArray[np.float64]:
    """log π/μ, clamped as in the loss, float64 ``[S]``."""
    d = np.asarray(values.logprobs, np.float64) - np.asarray(values.behaviour, np.float64)
    return np.clip(d, -LOG_RATIO_MAX, LOG_RATIO_MAX)


def source_statistics(values: TokenValues) -> SourceStatistics:
    """Statistics of the trained tokens of ``values``; rejected ones are only counted."""
    masked, seen = int(values.masked.sum()), len(values)
    reasons = Counter(values.reasons[(values.reasons > 0) & ~values.masked].tolist())
    rejected = int((~values.trained).sum()) - masked - reasons.total()
    values = values.where(values.trained)
    known = values.where(values.recorded)
    d = log_ratios_of(known)
    ratios = np.exp(d)
    _, place = np.unique(known.trajectory_indices, return_inverse=True)
    sequence_ratios = np.exp(np.clip(np.bincount(place, weights=d), -LOG_RATIO_MAX, LOG_RATIO_MAX))
    return SourceStatistics(
        tokens=len(values),
        ratio=Weights.of(ratios),
        sequence_ratio=Weights.of(sequence_ratios),
        kl_k1=Mean.of(-d),
        kl_k3=Mean.of(ratios - 1.0 - d),
        entropy=Mean.of(values.entropy),
        clipped_low=Mean.of(values.clipped_low),
        clipped_high=Mean.of(values.clipped_high),
        loss=float(values.losses.sum()),
        rejected=rejected,
        masked=masked,
        reasons=reasons,
        seen=seen,
        truncated=Mean.of(values.truncated),
        reference_kl=Mean.of(values.reference_kl[np.isfinite(values.reference_kl)]),
        ratios_S=ratios,
        sequence_ratios=sequence_ratios,
    )


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """All sources together and apart, and what does not depend on the source."""

    all: SourceStatistics
    by_source: dict[str, SourceStatistics]
    """``fresh`` and ``replay``."""
    staleness: npt.NDArray[np.int64]
    """Learner version minus the oldest behaviour version, one entry per fresh trajectory."""
    replay_ages: npt.NDArray[np.int64]
    """The same, of replayed trajectories that a policy of the run sampled."""
    logprob_differences: FloatArray
    """|log π - log μ| of the tokens that the learner's own version sampled, before any optimizer step of the update:
    what engine and learner disagree on."""
    on_loss: float = 0.0
    off_loss: float = 0.0
    """Policy loss of tokens with the fresh, and with the off-policy loss."""
    off_share: float = 0.0
    """Tokens with the off-policy loss among all response tokens, rejected ones included."""
    entropy_by_trajectory: dict[int, float] = field(default_factory=dict)
    """Exact entropy, mean over the trajectory's tokens in the batch, by ``Row.trajectory_index``."""
    values: TokenValues | None = None
    """The tokens that all of it was counted from."""

    @property
    def replay_share(self) -> float:
        """Replayed tokens among trained ones."""
        return self.by_source["replay"].tokens / self.all.tokens if self.all.tokens else 0.0


def batch_statistics(values: TokenValues, policy_version: int) -> BatchStatistics:
    """``policy_version`` is the learner's, before the step."""
    fresh, replay = (source_statistics(values.where(values.replayed == r)) for r in (False, True))
    lag = policy_version - values.versions.astype(np.int64)
    same = (lag == 0) & values.trained & values.recorded & ~values.discarded & ~values.moved
    difference = np.abs(np.asarray(values.logprobs[same], np.float64) - np.asarray(values.behaviour[same], np.float64))
    losses = np.asarray(values.losses, np.float64)
    return BatchStatistics(
        all=fresh + replay,
        by_source={"fresh": fresh, "replay": replay},
        staleness=_oldest(lag, values.trajectory_indices, ~values.replayed),
        replay_ages=_oldest(lag, values.trajectory_indices, values.replayed & values.recorded),
        logprob_differences=difference,
        on_loss=float(losses[~values.off_policy].sum()),
        off_loss=float(losses[values.off_policy].sum()),
        off_share=float(values.off_policy.mean()) if len(values) else 0.0,
        entropy_by_trajectory=_means(values.entropy, values.trajectory_indices),
        values=values,
    )


def _oldest(lag_S: npt.NDArray[np.int64], trajectory_index_S: npt.NDArray[np.int32], chosen_S: BoolArray) -> Ages:
    """Largest lag of each trajectory with a chosen token."""
    names, place = np.unique(trajectory_index_S[chosen_S], return_inverse=True)
    oldest = np.full(len(names), np.iinfo(np.int64).min)
    np.maximum.at(oldest, place, lag_S[chosen_S])
    return oldest


def _means(values_S: FloatArray, trajectory_index_S: npt.NDArray[np.int32]) -> dict[int, float]:
    """Mean of the finite values of each trajectory that has any."""
    finite = np.isfinite(values_S)
    names, place = np.unique(trajectory_index_S[finite], return_inverse=True)
    totals = np.bincount(place, weights=np.asarray(values_S, np.float64)[finite], minlength=len(names))
    counts = np.bincount(place, minlength=len(names))
    return {int(name): float(total / n) for name, total, n in zip(names, totals, counts, strict=True)}
