"""Contributions to the gradient of an update: shares of the loss by group, source, staleness and position, and tokens.

The share of a token is that of its absolute loss among those that are trained and not clipped. For the losses whose
value is linear in the ratio π/μ (PPO and its kin) it is the size of the gradient at its log-probability; a clipped
token has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.losses.loss import REASONS
from learner.observability.statistics import TokenValues, log_ratios_of
from learner.process.retrain import Retrained
from learner.process.update_record import place

POSITIONS = ("first quarter", "second quarter", "third quarter", "last quarter")
"""Parts of a trajectory's sampled tokens."""
Labels = npt.NDArray[Any]


def contributions(made: Retrained, largest: int = 10) -> dict[str, Any]:
    """For people and as JSON. ``terms``: parts of the loss. ``shares``: by kind and label, with the tokens of each.
    ``tokens``: counts by what became of them. ``largest``: the tokens with the largest ratios π/μ."""
    report, batch = made.report, made.batch
    found: dict[str, Any] = {
        "step": made.step,
        "terms": {
            "policy": report.policy_loss, "entropy": report.entropy_loss, "kl": report.kl_loss,
            "supervised": report.supervised_loss, "value": None if report.critic is None else report.critic.loss,
        },
        "grad_norm": report.grad_norm, "shares": {}, "tokens": {}, "largest": [],
    }  # fmt: skip
    values = report.statistics.values
    if values is None or not len(values):
        return found
    carried = _carried(values)
    groups = np.asarray([group.group_id for group in batch.groups for _ in group.trajectories])
    names = np.asarray([t.trajectory_id for t in batch.trajectories])
    labels: Mapping[str, Labels] = {
        "group": groups[values.trajectory_indices],
        "trajectory": names[values.trajectory_indices],
        "source": np.where(values.replayed, "replayed", "fresh"),
        "staleness": np.where(values.recorded, report.policy_version - values.versions, -1),
        "position": np.asarray(POSITIONS)[_quarters(values)],
    }
    found["shares"] = {kind: _shares(of_kind, carried) for kind, of_kind in labels.items()}
    found["tokens"] = _fates(values, report.tokens_without_signal)
    found["largest"] = [_token(made, values, i, carried) for i in _largest_ratios(values, largest)]
    return found


def _carried(values: TokenValues) -> npt.NDArray[np.float64]:
    """Share of each token; 0 where no token has any."""
    moves = values.trained & ~values.clipped_low & ~values.clipped_high
    sizes = np.where(moves & np.isfinite(values.losses), np.abs(np.asarray(values.losses, np.float64)), 0.0)
    total = float(sizes.sum())
    return sizes / total if total else sizes


def _shares(labels: Labels, carried: npt.NDArray[np.float64]) -> list[dict[str, Any]]:
    names, at = np.unique(labels, return_inverse=True)
    sums, counts = np.bincount(at, weights=carried), np.bincount(at)
    order = np.argsort(-sums, kind="stable")
    return [{"label": names[i].item(), "share": float(sums[i]), "tokens": int(counts[i])} for i in order]


def _fates(values: TokenValues, without_signal: int) -> dict[str, int]:
    """Tokens by what became of them; a token may be clipped and trained."""
    rejected = {
        name: int(((values.reasons == code) & ~values.masked).sum()) for code, name in enumerate(REASONS) if code
    }
    masked = int(values.masked.sum())
    return {
        "trained": int(values.trained.sum()),
        "without advantage": without_signal,
        "clipped low": int(values.clipped_low.sum()),
        "clipped high": int(values.clipped_high.sum()),
        "weight truncated": int(values.truncated.sum()),
        "rejected: second_moment": masked,
        **{f"rejected: {name}": n for name, n in rejected.items()},
        "rejected: nonfinite": int((~values.trained).sum()) - masked - sum(rejected.values()),
    }


def _quarters(values: TokenValues) -> npt.NDArray[np.int64]:
    """The quarter of its trajectory that each token is in."""
    order = np.lexsort((values.numbers, values.trajectory_indices))
    counts = np.bincount(values.trajectory_indices)[values.trajectory_indices[order]]
    begins = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(values.trajectory_indices))])
    quarters = np.zeros(len(values), np.int64)
    at = np.arange(len(values)) - begins[values.trajectory_indices[order]]
    quarters[order] = 4 * at // counts
    return quarters


def _largest_ratios(values: TokenValues, count: int) -> Sequence[int]:
    known = np.flatnonzero(values.recorded & values.trained)
    order = np.argsort(-np.abs(log_ratios_of(values))[known], kind="stable")
    found: list[int] = known[order[:count]].tolist()
    return found


def _token(made: Retrained, values: TokenValues, i: int, carried: npt.NDArray[np.float64]) -> dict[str, Any]:
    row, token = place(made.batch.rows, int(values.numbers[i]))
    of_row = made.batch.rows[row]
    return {
        "trajectory": of_row.trajectory_id,
        "row": row,
        "token": token,
        "turn": int(of_row.turns[token]),
        "ratio": float(np.exp(log_ratios_of(values)[i])),
        "advantage": float(values.advantages[i]),
        "share": float(carried[i]),
        "ids": of_row.token_ids[max(0, token - 8) : token + 1].tolist(),
    }
