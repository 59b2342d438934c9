"""Options of the policy losses, of the losses of off-policy tokens, and of the corrections of replayed tokens.

The functions are in ``learner.losses``; these classes stand apart from them because ``afterplay config check`` reads
them without PyTorch. Default clips are those of the cited publication.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Options, by_name

Low = Annotated[float, Field(ge=0, le=1)]
High = Annotated[float, Field(ge=0)]
DualClip = Annotated[float | None, Field(gt=1)]


class Ppo(Options):
    """PPO's clipped surrogate (arXiv:1707.06347) with the asymmetric clip of DAPO (arXiv:2503.14476)."""

    name: Literal["ppo"] = "ppo"
    clip_low: Low = 0.2
    """The ratio of a token is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    clip_high: High = 0.28
    """Upper clip; see ``clip_low``. Larger than ``clip_low`` so that unlikely tokens can become more likely (DAPO)."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gspo(Options):
    """GSPO: the ratio of a row is the geometric mean of its tokens' ratios (arXiv:2507.18071)."""

    name: Literal["gspo", "gspo_token"] = "gspo"
    clip_low: Low = 3e-4
    """The ratio of a row is clipped to ``[1 - clip_low, 1 + clip_high]``. Small, because a row's mean ratio varies
    little."""
    clip_high: High = 4e-4
    """Upper clip; see ``clip_low``."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gmpo(Options):
    """GMPO: token ratios are clipped inside a geometric mean (arXiv:2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Low = 0.4
    """The log-ratio of a token is clipped to ``[-clip_low, clip_high]``."""
    clip_high: High = 0.4
    """Upper clip; see ``clip_low``."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Cispo(Options):
    """CISPO: log π weighted by a clipped ratio without gradient (arXiv:2506.13585). Clips of ScaleRL
    (arXiv:2510.13786)."""

    name: Literal["cispo"] = "cispo"
    clip_low: Low = 1.0
    """The weight of a token is clipped to ``[1 - clip_low, 1 + clip_high]``. 1: no lower clip."""
    clip_high: High = 4.0
    """Upper clip; see ``clip_low``."""


class Sapo(Options):
    """SAPO: a smooth gate replaces the clip (arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    positive: float = Field(1.0, gt=0)
    """Temperature of the gate for tokens with positive advantage. Larger closes it sooner."""
    negative: float = Field(1.05, gt=0)
    """Temperature of the gate for tokens with negative advantage. Slightly larger than ``positive``: gradients of
    negative tokens spread over the whole vocabulary and are less stable."""


class DppoTv(Options):
    """DPPO: tokens are masked by a bound on the total variation (arXiv:2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    clip_low: Low = 0.15
    """Bound on the divergence where π is below π_old."""
    clip_high: High = 0.15
    """Bound on the divergence where π is above π_old."""
    ratio_max: float = Field(20.0, gt=1)
    """Upper bound of the ratio. Needed because the divergence bounds the ratio of rare tokens hardly at all."""


class DppoKl(Options):
    """DPPO: tokens are masked by a bound on the KL divergence (arXiv:2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"
    clip_low: Low = 0.05
    """Bound on the divergence where π is below π_old."""
    clip_high: High = 0.05
    """Bound on the divergence where π is above π_old."""
    ratio_max: float = Field(20.0, gt=1)
    """Upper bound of the ratio. Needed because the divergence bounds the ratio of rare tokens hardly at all."""


class OwnLoss(Options, extra="allow"):
    """A user's function by its import path. It reads its options as ``rules.options.NAME``. A subclass of
    ``pipeline.config.base.Options`` as the function's attribute ``options`` gives them types and defaults."""

    name: str
    """``module:function`` or ``file.py:function``."""
    clip_low: Low | None = None
    """Lower clip, passed to the function as ``tokens.low``. None: the default of its ``PolicyLoss``, else 0.2."""
    clip_high: High | None = None
    """Upper clip, passed to the function as ``tokens.high``. None: the default of its ``PolicyLoss``, else 0.28."""


class Clip(Options):
    """The loss of fresh tokens, with the off-policy clip."""

    name: Literal["clip"] = "clip"


class Shaped(Options):
    """The shaped ratio of LUFFY (arXiv:2504.14945) and ExGRPO (arXiv:2510.02245)."""

    name: Literal["shaped"] = "shaped"
    beta: float = Field(0.1, gt=0)
    """β of ``f(x) = x / (x + beta)``. Smaller gives unlikely tokens a larger gradient."""


class SecondMoment(Options):
    """M2PO: masks by the second moment of the log-ratios (arXiv:2510.01161)."""

    name: Literal["second_moment"] = "second_moment"
    max: float = Field(0.04, gt=0)
    """Upper bound on the mean squared log-ratio of the tokens that remain."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A|. None: no bound."""


class TokenCorrection(Options):
    """Each replayed token is weighted by its own π/μ, which the off-policy loss clips. The prefixes before the token
    keep the distribution of μ."""

    name: Literal["token"] = "token"


class TruncatedCorrection(Options):
    """``min(W, max)``, with W the product of π/μ over the trajectory's sampled tokens (truncated importance sampling,
    Ionides 2008); ``geometric``: ``min(W^(1/n), max)``, n their number."""

    name: Literal["sequence", "geometric"] = "sequence"
    max: float | None = Field(2.0, gt=0)
    """Upper bound of the weight. None: no bound, so that ``sequence`` is unbiased and its variance unbounded."""


class SoftCorrection(Options):
    """``W^k exp(lambda (1 - W))``, with W as for ``sequence`` (VESPO, arXiv:2602.10693): 1 at W = 1, near 0 for very
    small and very large W. Defaults of the published code."""

    name: Literal["soft"] = "soft"
    k_positive: float = Field(2.0, ge=0)
    """k for tokens with positive advantage. The kernel is largest at ``W = k / lambda``."""
    lambda_positive: float = Field(3.0, gt=0)
    """lambda for tokens with positive advantage. Larger fades large W sooner."""
    k_negative: float = Field(3.0, ge=0)
    """k for tokens with negative advantage."""
    lambda_negative: float = Field(2.0, gt=0)
    """lambda for tokens with negative advantage."""


POLICIES = by_name(Ppo, Gspo, Gmpo, Cispo, Sapo, DppoTv, DppoKl, OwnLoss)
"""``loss.policy``."""
OFF_POLICIES = by_name(Clip, Shaped, SecondMoment)
"""``loss.off_policy``."""
CORRECTIONS = by_name(TokenCorrection, TruncatedCorrection, SoftCorrection)
"""``replay.correction``."""
