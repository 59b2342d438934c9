"""What is known of an update's tokens before an optimizer step, and what a pass over them yields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learner.data.microbatch import MicroBatch
from learner.data.rows import Row
from learner.losses.base import LossRules
from learner.losses.corrections import second_moment_mask
from learner.losses.total import LossTerms, LossTokens
from learner.observability.statistics import TokenValues
from pipeline.config.algorithm import LossConfig

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Score = Callable[[Sequence[Row]], FloatArray]
"""log π of all sampled tokens of rows with the weights of now, rows in order."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """By ``MicroBatch.tokens_S``, the number of a token in its update."""

    today: FloatArray | None = None
    """log π before the first optimizer step; NaN where no token is anchored there. None: these are the weights."""
    kept: BoolArray | None = None
    """False where the second-moment mask rejects. None: nothing is."""
    reference: FloatArray | None = None
    """log π of the reference policy."""


def old_logprobs_of(rows: Sequence[Row], rules: LossRules, score: Score) -> FloatArray | None:
    """log π of the tokens that are anchored at today's policy, NaN elsewhere; None where no token is."""
    anchored = [rules.anchored_today(replayed=row.replayed, recorded=row.recorded) for row in rows]
    if not any(anchored):
        return None
    places = np.repeat(anchored, [row.n_sampled for row in rows])
    out = np.full(len(places), np.nan, dtype=np.float32)
    out[places] = score([row for row, wanted in zip(rows, anchored, strict=True) if wanted])
    return out


def loss_mask_of(
    rows: Sequence[Row], first: Sequence[int], n_tokens: int, loss: LossConfig, score: Score
) -> BoolArray | None:
    """The second-moment mask over the off-policy tokens with known μ of one optimizer step; None without such tokens.

    Rows without advantage count too: the mask is a property of the data, not of the rewards.
    """
    chosen = [
        (row, at)
        for row, at in zip(rows, first, strict=True)
        if row.recorded and bool(off_policy(row.replayed, row.guided, row.discarded, loss))
    ]
    if not chosen:
        return None
    behaviour = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row, _ in chosen])
    places = np.concatenate([np.arange(row.n_sampled) + at for row, at in chosen])
    d = score([row for row, _ in chosen]).astype(np.float64) - behaviour
    finite = np.isfinite(d)
    kept = np.ones(n_tokens, dtype=np.bool_)
    kept[places[finite]] = second_moment_mask(d[finite], loss.second_moment_max)
    return kept


def loss_tokens(part: MicroBatch, logprobs: Tensor, entropy: Tensor, known: LossInputs, loss: LossConfig) -> LossTokens:
    """What the loss gets of one micro-batch; ``logprobs`` and ``entropy`` float ``[S]``, with gradient, name the
    device. Tokens whose μ is not finite, or that the second-moment mask rejects, are masked."""

    def tensor(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(logprobs.device)

    usable = np.isfinite(part.behaviour_logprobs_S)
    off = off_policy(part.replayed_S, part.guided_S, part.discarded_S, loss)
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


def off_policy(
    replayed: npt.ArrayLike, guided: npt.ArrayLike, discarded: npt.ArrayLike, loss: LossConfig
) -> npt.NDArray[np.bool_]:
    """Which tokens, or rows, have the off-policy loss: replayed ones, and guided ones as ``off_clip_guided`` says."""
    off = np.asarray(replayed, dtype=np.bool_)
    if loss.off_clip_guided == "none":
        return off
    return np.asarray(off | np.asarray(guided if loss.off_clip_guided == "all" else discarded, dtype=np.bool_))


def values_of(part: MicroBatch, tokens: LossTokens, terms: LossTerms, known: LossInputs) -> TokenValues:
    """What the statistics need of one micro-batch."""

    def array(tensor: Tensor) -> npt.NDArray[np.float32]:
        return tensor.detach().float().cpu().numpy()

    return TokenValues(
        logprobs=array(tokens.logprobs),
        behaviour=part.behaviour_logprobs_S,
        entropy=array(tokens.entropy),
        losses=array(terms.token_losses),
        trained=(terms.trained & torch.isfinite(tokens.logprobs.detach())).cpu().numpy(),
        clipped_low=terms.clipped_low.cpu().numpy(),
        clipped_high=terms.clipped_high.cpu().numpy(),
        versions=part.policy_versions_S,
        sequences=part.sequences_S,
        replayed=part.replayed_S,
        recorded=part.recorded_S,
        discarded=part.discarded_S,
        off_policy=tokens.off_policy.cpu().numpy(),
        masked=np.zeros(part.n_sampled, np.bool_) if known.kept is None else ~known.kept[part.tokens_S],
        reasons=terms.reasons.cpu().numpy(),
        truncated=terms.truncated.cpu().numpy(),
        reference_kl=array(terms.reference_kl),
        advantages=part.advantages_S,
        numbers=part.tokens_S,
    )
