"""Section ``advantage`` of the run file: rewards to advantages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from pipeline.config.base import Choice, Function, Given, Kind, Section, expect_kind

HINT_TEMPLATE = "{prompt}\n\nHint: {hint}"
HINTED = ("cpo", "self_distill")
"""Built-in estimators that need the prompt with a hint."""


class AdvantageConfig(Section):
    """From rewards to advantages: the estimator, and the changes that are made to rewards before it runs."""

    estimator: Annotated[Function, Choice("grpo")] = Given(name="grpo")
    """Advantage estimator, by name or with its options: ``rloo`` or ``{name: cpo, failed_weight: 0.5}``. Built in:
    ``grpo``, ``rloo`` (also called ``leave_one_out``), ``opo``, ``maxrl``, ``gpg``, ``pass_at_k``, ``remax``,
    ``reinforce_pp``, ``reinforce_pp_baseline``, ``gae``, ``cpo``, ``distill``, ``self_distill``. Your own:
    ``module:function`` or ``file.py:function``, with ``greedy_rollouts: true`` to add one rollout at temperature 0 to
    each group, whose reward is the ``baseline`` that estimators see; ``remax`` always does this. Options and sources:
    docs/ALGORITHMS.md."""
    hint_template: str | None = None
    """First user message as the learner scores it with a hint, for ``cpo``, ``self_distill`` and your own estimators.
    ``{prompt}`` is the original message, ``{hint}`` the hint that the environment gives (``Episode.hint``). None: the
    hint as a last paragraph, ``Hint: ...``."""
    rewards: Literal["outcome", "turns", "both"] = "outcome"
    """Rewards that the estimator sees. ``outcome``: the scorer's reward, placed at the last token. ``turns``: the
    environment's reward for each turn, times ``scorer.environment_weight``, placed at the last token of that turn.
    ``both``: the turn rewards, plus the remainder of the outcome at the last token, so that they sum to the outcome. A
    trajectory without turn rewards always has its outcome at the last token."""
    turn_gamma: float = Field(1.0, gt=0, le=1)
    """Discount per turn. Used by estimators that compare the trajectories of a group, unless ``rewards`` is
    ``outcome``. 1: no discount."""
    shaping: str | None = None
    """Your own reward shaping, as ``module:function`` or ``file.py:function``. It runs before the estimator. It gets
    the trajectories as the estimator sees them (a list of ``ScoredTrajectory``) and as they are stored, and returns the
    first list with new rewards. None: no shaping."""
    overlong_tokens: int | None = Field(None, ge=1)
    """Length at which the penalty for long trajectories reaches ``overlong_penalty`` (DAPO, arXiv:2503.14476, eq. 13),
    in sampled tokens of the whole trajectory. None: no penalty."""
    overlong_buffer: int = Field(0, ge=0)
    """Tokens below ``overlong_tokens`` over which the penalty rises linearly from 0. 0: the full penalty starts at
    once."""
    overlong_penalty: float = Field(1.0, ge=0)
    """Largest penalty, in units of reward."""
    reward_norm: Literal["none", "group", "batch"] = "none"
    """Normalization of outcomes before the estimator runs: subtract the mean and divide by the standard deviation, both
    taken over the group or over the update (``batch``). Turn rewards are only divided: subtracting a mean from every
    turn would reward or punish the number of turns."""

    @property
    def prompt_with_hint(self) -> str | None:
        """Template of the prompt with a hint, which actors record beside the prompt that they use; None if the
        estimator uses no hints."""
        name = self.estimator.name
        return (self.hint_template or HINT_TEMPLATE) if name in HINTED or ":" in name else None

    @property
    def orders_greedy(self) -> bool:
        """True if a greedy rollout belongs to each group. It is never trained."""
        return self.estimator.name == "remax" or getattr(self.estimator, "greedy_rollouts", False) is True

    def options_of(self, kind: type[Kind]) -> Kind:
        """Options of the chosen estimator, which must be of ``kind``."""
        return expect_kind(self.estimator, kind, "advantage.estimator")

    def check(self) -> None:
        if self.hint_template is not None and self.prompt_with_hint is None:
            raise ValueError(
                f"advantage.hint_template is for cpo, self_distill and estimators of your own, got the estimator "
                f"{self.estimator.name}: omit it"
            )
        if not all(part in (self.prompt_with_hint or HINT_TEMPLATE) for part in ("{prompt}", "{hint}")):
            raise ValueError(f"advantage.hint_template: expected {{prompt}} and {{hint}}, got {self.hint_template!r}")
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ValueError(
                f"advantage.overlong_buffer ({self.overlong_buffer}) must not be more than overlong_tokens "
                f"({self.overlong_tokens})"
            )
