"""Names of estimators, what each needs, and a user's own by import path."""

from __future__ import annotations

from dataclasses import dataclass

from learner.advantages.base import Estimator, by_group
from learner.advantages.group import grpo
from pipeline.config.advantage import AdvantageConfig
from pipeline.errors import ConfigurationError
from pipeline.scorer.resolve import resolve

EVIDENCE = frozenset({"logprobs", "entropies", "reference", "values", "hinted"})
"""Fields of :class:`learner.evidence.Evidence` that the trainer can gather."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An estimator and the passes over the update that it needs."""

    estimate: Estimator
    needs: frozenset[str] = frozenset()
    """Of :data:`EVIDENCE`."""


ESTIMATORS: dict[str, Entry] = {"grpo": Entry(by_group(grpo))}


def entry_of(config: AdvantageConfig) -> Entry:
    """The configured estimator: of this registry, or the user's own.

    A user's function ``estimate(played, config) -> Estimates`` may have an attribute ``needs``: names of
    :data:`EVIDENCE`. Raises :class:`ConfigurationError` when its path leads to no function or it needs something else.
    """
    known = ESTIMATORS.get(config.estimator)
    if known is not None:
        return known
    function = resolve(config.estimator, "advantage estimator")
    needs = frozenset(getattr(function, "needs", ()))
    if not needs <= EVIDENCE:
        raise ConfigurationError(
            f"advantage estimator {config.estimator}: expected needs out of {sorted(EVIDENCE)}, got {sorted(needs)}"
        )
    return Entry(function, needs)


def needed_evidence(config: AdvantageConfig) -> frozenset[str]:
    """What the trainer must gather for the configured estimator, out of :data:`EVIDENCE`. Raises as
    :func:`entry_of`."""
    return entry_of(config).needs
