"""The estimators by name or import path, and the scores that each needs.

A new estimator is one function, one entry here, and its options in ``pipeline.config.estimators``.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.advantages.base import Estimator
from learner.advantages.cpo import cpo
from learner.advantages.group import by_group, by_group_and_length, gpg, grpo, maxrl, opo, pass_at_k, rloo
from learner.advantages.returns import gae, reinforce_pp, reinforce_pp_baseline, remax
from pipeline.config.algorithm import AdvantageConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import resolve

SCORES = frozenset({"logprobs", "entropies", "reference", "values", "hinted"})
"""Fields of :class:`learner.data.rows.TokenScores` that the trainer can gather."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An estimator and the passes over the update that it needs."""

    estimate: Estimator
    needs: frozenset[str] = frozenset()
    """Names from :data:`SCORES`."""


ESTIMATORS: dict[str, Entry] = {
    "grpo": Entry(by_group(grpo)),
    "rloo": Entry(by_group(rloo)),
    "leave_one_out": Entry(by_group(rloo)),
    "opo": Entry(by_group_and_length(opo)),
    "maxrl": Entry(by_group(maxrl)),
    "gpg": Entry(gpg),
    "pass_at_k": Entry(by_group(pass_at_k)),
    "remax": Entry(remax),
    "reinforce_pp": Entry(reinforce_pp),
    "reinforce_pp_baseline": Entry(reinforce_pp_baseline),
    "gae": Entry(gae, frozenset({"values"})),
    "cpo": Entry(cpo, frozenset({"logprobs", "entropies", "hinted"})),
}


def entry_of(config: AdvantageConfig) -> Entry:
    """The configured estimator: of this registry, or the user's own.

    A user's function ``estimate(scored, config) -> Estimates`` may have an attribute ``needs``: names of
    :data:`SCORES`. Raises :class:`ConfigurationError` when its path leads to no function or it needs something else.
    """
    name = config.estimator.name
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = resolve(name, "advantage estimator")
    needs = frozenset(getattr(function, "needs", ()))
    if not needs <= SCORES:
        raise ConfigurationError(
            f"advantage estimator {name}: expected needs out of {sorted(SCORES)}, got {sorted(needs)}"
        )
    return Entry(function, needs)


def needed_scores(config: AdvantageConfig) -> frozenset[str]:
    """Scores to gather for the configured estimator, out of :data:`SCORES`. Raises as
    :func:`entry_of`."""
    return entry_of(config).needs
