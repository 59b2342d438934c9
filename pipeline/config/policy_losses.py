"""Options of each policy loss (``loss.policy``) and of each loss of off-policy tokens (``loss.off_policy``).

The functions are in ``learner.losses.policy_losses``. Default clips are those of the cited publication.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.base import Choice, Section

Low = Annotated[float, Field(ge=0, le=1)]
High = Annotated[float, Field(ge=0)]
DualClip = Annotated[float | None, Field(gt=1)]


class Ppo(Section):
    """PPO's clipped surrogate (arXiv:1707.06347) with the asymmetric clip of DAPO (arXiv:2503.14476)."""

    name: Literal["ppo"] = "ppo"
    clip_low: Low = 0.2
    """The ratio of a token is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    clip_high: High = 0.28
    """Upper clip; see ``clip_low``. Larger than ``clip_low`` so that unlikely tokens can become more likely (DAPO)."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gspo(Section):
    """GSPO: the ratio of a row is the geometric mean of its tokens' ratios (arXiv:2507.18071)."""

    name: Literal["gspo", "gspo_token"] = "gspo"
    clip_low: Low = 3e-4
    """The ratio of a row is clipped to ``[1 - clip_low, 1 + clip_high]``. Small, because a row's mean ratio varies
    little."""
    clip_high: High = 4e-4
    """Upper clip; see ``clip_low``."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gmpo(Section):
    """GMPO: token ratios are clipped inside a geometric mean (arXiv:2507.20673)."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Low = 0.4
    """The log-ratio of a token is clipped to ``[-clip_low, clip_high]``."""
    clip_high: High = 0.4
    """Upper clip; see ``clip_low``."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Cispo(Section):
    """CISPO: log π weighted by a clipped ratio without gradient (arXiv:2506.13585). Clips of ScaleRL
    (arXiv:2510.13786)."""

    name: Literal["cispo"] = "cispo"
    clip_low: Low = 1.0
    """The weight of a token is clipped to ``[1 - clip_low, 1 + clip_high]``. 1: no lower clip."""
    clip_high: High = 4.0
    """Upper clip; see ``clip_low``."""


class Sapo(Section):
    """SAPO: a smooth gate replaces the clip (arXiv:2511.20347)."""

    name: Literal["sapo"] = "sapo"
    positive: float = Field(1.0, gt=0)
    """Temperature of the gate for tokens with positive advantage. Larger closes it sooner."""
    negative: float = Field(1.05, gt=0)
    """Temperature of the gate for tokens with negative advantage. Slightly larger than ``positive``: gradients of
    negative tokens spread over the whole vocabulary and are less stable."""


class DppoTv(Section):
    """DPPO: tokens are masked by a bound on the total variation (arXiv:2602.04879)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    clip_low: Low = 0.15
    """Bound on the divergence where π is below π_old."""
    clip_high: High = 0.15
    """Bound on the divergence where π is above π_old."""
    ratio_max: float = Field(20.0, gt=1)
    """Upper bound of the ratio. Needed because the divergence bounds the ratio of rare tokens hardly at all."""


class DppoKl(Section):
    """DPPO: tokens are masked by a bound on the KL divergence (arXiv:2602.04879)."""

    name: Literal["dppo_kl"] = "dppo_kl"
    clip_low: Low = 0.05
    """Bound on the divergence where π is below π_old."""
    clip_high: High = 0.05
    """Bound on the divergence where π is above π_old."""
    ratio_max: float = Field(20.0, gt=1)
    """Upper bound of the ratio. Needed because the divergence bounds the ratio of rare tokens hardly at all."""


class OwnLoss(Section):
    """A user's function by its import path."""

    name: str
    """``module:function`` or ``file.py:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the function, which reads them as ``rules.options``."""
    clip_low: Low | None = None
    """Lower clip, passed to the function as ``tokens.low``. None: the default of its ``PolicyLoss``, else 0.2."""
    clip_high: High | None = None
    """Upper clip, passed to the function as ``tokens.high``. None: the default of its ``PolicyLoss``, else 0.28."""


PolicyOptions = Annotated[
    Ppo | Gspo | Gmpo | Cispo | Sapo | DppoTv | DppoKl | OwnLoss,
    Choice("ppo"),
]


class Clip(Section):
    """The loss of fresh tokens, with the off-policy clip."""

    name: Literal["clip"] = "clip"


class Shaped(Section):
    """The shaped ratio of LUFFY (arXiv:2504.14945) and ExGRPO (arXiv:2510.02245)."""

    name: Literal["shaped"] = "shaped"
    beta: float = Field(0.1, gt=0)
    """β of ``f(x) = x / (x + beta)``. Smaller gives unlikely tokens a larger gradient."""


class SecondMoment(Section):
    """M2PO: masks by the second moment of the log-ratios (arXiv:2510.01161)."""

    name: Literal["second_moment"] = "second_moment"
    max: float = Field(0.04, gt=0)
    """Upper bound on the mean squared log-ratio of the tokens that remain."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A|. None: no bound."""


OffPolicyOptions = Annotated[Clip | Shaped | SecondMoment, Choice("clip")]
