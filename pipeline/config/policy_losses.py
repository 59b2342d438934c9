"""Options of each policy loss (``loss.policy``) and of each loss of off-policy tokens (``loss.off_policy``).

The functions are in ``learner.losses.policy_losses``. Clips that are left out are those of the publication.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config.base import Choice, Section

Low = Annotated[float, Field(ge=0, le=1)]
High = Annotated[float, Field(ge=0)]
DualClip = Annotated[float | None, Field(gt=1)]


class Ppo(Section):
    """arXiv:1707.06347; the upper clip is that of DAPO (arXiv:2503.14476)."""

    name: Literal["ppo"] = "ppo"
    clip_low: Low = 0.2
    """The ratio of a token is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    clip_high: High = 0.28
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gspo(Section):
    """arXiv:2507.18071."""

    name: Literal["gspo", "gspo_token"] = "gspo"
    clip_low: Low = 3e-4
    """The ratio of a row is clipped to ``[1 - clip_low, 1 + clip_high]``."""
    clip_high: High = 4e-4
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Gmpo(Section):
    """arXiv:2507.20673."""

    name: Literal["gmpo"] = "gmpo"
    clip_low: Low = 0.4
    """The log-ratio of a token is clipped to ``[-clip_low, clip_high]``."""
    clip_high: High = 0.4
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A| (arXiv:1912.09729). None: no bound."""


class Cispo(Section):
    """arXiv:2506.13585; the clips are those of ScaleRL (arXiv:2510.13786)."""

    name: Literal["cispo"] = "cispo"
    clip_low: Low = 1.0
    """The weight of a token is clipped to ``[1 - clip_low, 1 + clip_high]``; 1 is no lower clip."""
    clip_high: High = 4.0


class Sapo(Section):
    """arXiv:2511.20347."""

    name: Literal["sapo"] = "sapo"
    positive: float = Field(1.0, gt=0)
    """Temperature of the gate for positive advantages."""
    negative: float = Field(1.05, gt=0)
    """For negative ones: larger closes sooner, because they spread over the whole vocabulary."""


class DppoTv(Section):
    """arXiv:2602.04879, bound on the total variation."""

    name: Literal["dppo_tv"] = "dppo_tv"
    clip_low: Low = 0.15
    """Bound of the divergence where π falls below π_old, and where it rises above."""
    clip_high: High = 0.15
    ratio_max: float = Field(20.0, gt=1)
    """Truncation of the ratio: a rare token's has no other bound."""


class DppoKl(Section):
    """arXiv:2602.04879, bound on the KL divergence."""

    name: Literal["dppo_kl"] = "dppo_kl"
    clip_low: Low = 0.05
    """Bound of the divergence where π falls below π_old, and where it rises above."""
    clip_high: High = 0.05
    ratio_max: float = Field(20.0, gt=1)
    """Truncation of the ratio: a rare token's has no other bound."""


class OwnLoss(Section):
    """A user's function by its import path."""

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    """Handed to the function as ``rules.options``."""
    clip_low: Low | None = None
    """Given to the function as ``tokens.low``. None: as its ``PolicyLoss`` says, else 0.2."""
    clip_high: High | None = None
    """Given to the function as ``tokens.high``. None: as its ``PolicyLoss`` says, else 0.28."""


PolicyOptions = Annotated[
    Ppo | Gspo | Gmpo | Cispo | Sapo | DppoTv | DppoKl | OwnLoss,
    Choice("ppo"),
]


class Clip(Section):
    """The loss of fresh tokens with the off clip."""

    name: Literal["clip"] = "clip"


class Shaped(Section):
    """LUFFY (arXiv:2504.14945), ExGRPO (arXiv:2510.02245)."""

    name: Literal["shaped"] = "shaped"
    beta: float = Field(0.1, gt=0)


class SecondMoment(Section):
    """M2PO (arXiv:2510.01161)."""

    name: Literal["second_moment"] = "second_moment"
    max: float = Field(0.04, gt=0)
    """Bound on the mean squared log-ratio of the tokens that are left."""
    dual_clip: DualClip = 3.0
    """Bound on the loss of tokens with negative advantage, as a multiple of |A|. None: no bound."""


OffPolicyOptions = Annotated[Clip | Shaped | SecondMoment, Choice("clip")]
