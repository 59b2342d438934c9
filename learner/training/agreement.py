"""What the ranks agree on between micro-batches: to go on, to give the optimizer step up, or to stop."""

from __future__ import annotations

import torch

from learner.distributed.ranks import Ranks
from learner.observability.report import NonFinite
from learner.policy.passes import idle_part
from learner.policy.policy import Policy

_CODES: tuple[NonFinite, ...] = ("ratio", "loss")
"""What a rank says of its micro-batch: 0 where all is finite, else one more than the place here."""


class NonFiniteStep(Exception):
    """A value that must be finite is not; ``where`` says which. The optimizer step is skipped and counted."""

    def __init__(self, where: NonFinite) -> None:
        super().__init__(where)
        self.where = where


def agree(ranks: Ranks, found: NonFinite | None = None) -> None:
    """Raise :class:`NonFiniteStep` on every rank where one has ``found`` something (``ratio`` or ``loss``),
    :class:`pipeline.errors.Interrupted` where one is asked to stop. Collective."""
    worst = ranks.agree(0 if found is None else _CODES.index(found) + 1)
    if worst:
        raise NonFiniteStep(_CODES[worst - 1])


def idle(policy: Policy, *, learn: bool) -> None:
    """Take part in the collectives of another rank's micro-batch, with a gradient of 0. Raises as :func:`agree`."""
    with torch.set_grad_enabled(learn):
        logprobs, entropy = policy.score(idle_part(policy.form))
        agree(policy.ranks)
    if learn:
        nothing = torch.zeros_like(logprobs)
        torch.where(nothing > 0, logprobs + entropy, nothing).sum().backward()  # type: ignore[no-untyped-call]
