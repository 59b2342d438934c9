"""The estimators by name or import path, and the scores that each needs.

A new estimator is one function, the class of its options above it, and one entry here.
"""

from __future__ import annotations

from dataclasses import dataclass

from learner.advantages.base import Estimator
from learner.advantages.cpo import Cpo, cpo
from learner.advantages.group import (
    GroupBaseline,
    Grpo,
    PassAtK,
    by_group,
    by_group_and_length,
    gpg,
    grpo,
    maxrl,
    opo,
    pass_at_k,
    rloo,
)
from learner.advantages.returns import (
    Gae,
    ReinforcePp,
    ReinforcePpBaseline,
    Remax,
    gae,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
)
from pipeline.config.algorithm import AdvantageConfig
from pipeline.config.base import Options, by_name
from pipeline.config.load import read_options
from pipeline.errors import ConfigurationError
from pipeline.runtime.plugins import resolve

SCORES = frozenset({"logprobs", "entropies", "reference", "values", "hinted"})
"""Fields of :class:`learner.data.rows.TokenScores` that the trainer can gather."""


class OwnEstimator(Options, extra="allow"):
    """A user's function by its import path. It reads its options as ``config.estimator.NAME``. A subclass of
    ``pipeline.config.base.Options`` as the function's attribute ``options`` gives them types and defaults."""

    name: str
    """``module:function`` or ``file.py:function``."""
    greedy_rollouts: bool = False
    """Add one greedy rollout (temperature 0) to each group. It is never trained: its reward is the ``baseline`` that
    the function sees."""


OPTIONS = by_name(Grpo, GroupBaseline, PassAtK, Remax, ReinforcePp, ReinforcePpBaseline, Gae, Cpo, OwnEstimator)
"""Classes of the options by name of the estimator."""
COMPARING = frozenset({"grpo", "rloo", "leave_one_out", "opo", "maxrl", "gpg", "pass_at_k", "reinforce_pp_baseline"})
"""Estimators that only compare the trajectories of a group: a group of one has advantage 0 everywhere."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An estimator and the passes over the update that it needs."""

    estimate: Estimator
    needs: frozenset[str] = frozenset()
    """Names from :data:`SCORES`."""
    own_options: type[Options] | None = None
    """Class of the options of a user's function."""

    def with_options(self, config: AdvantageConfig) -> AdvantageConfig:
        """A copy with the estimator's options in their class. Raises :class:`ConfigurationError`."""
        kinds = OPTIONS if self.own_options is None else {"own": self.own_options}
        return config.model_copy(update={"estimator": read_options(config.estimator, kinds, "advantage.estimator")})


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

    A user's function ``estimate(scored, config) -> Estimates`` may have the attributes ``needs``, names of
    :data:`SCORES`, and ``options``, a subclass of :class:`pipeline.config.base.Options`. Raises
    :class:`ConfigurationError` when its path leads to no function or it needs something else.
    """
    name = config.estimator.name
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    read_options(config.estimator, OPTIONS, "advantage.estimator")
    function = resolve(name, "advantage estimator")
    needs = frozenset(getattr(function, "needs", ()))
    if not needs <= SCORES:
        raise ConfigurationError(
            f"advantage estimator {name}: expected needs out of {sorted(SCORES)}, got {sorted(needs)}"
        )
    return Entry(function, needs, getattr(function, "options", None))


def needed_scores(config: AdvantageConfig) -> frozenset[str]:
    """Scores to gather for the configured estimator, out of :data:`SCORES`. Raises as
    :func:`entry_of`."""
    return entry_of(config).needs
