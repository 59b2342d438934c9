"""Small updates for the estimators' tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import hypothesis.strategies as st
import numpy as np
import pytest

from learner.advantages import base, estimators
from learner.advantages import estimate as registry
from learner.advantages.base import ScoredTrajectory
from learner.advantages.estimate import estimate
from pipeline.config.advantages import AdvantageConfig
from tests.unit.advantages import slow

OPTIONS = {"normalize_std", "k", "gamma", "gae_lambda", "whiten", "failed_mean", "failed_weight", "solved_weight",
           "reward_weight"}  # fmt: skip
REWARD = st.floats(-3, 3, allow_nan=False, width=32)


def make_scored(reward, turns=(0, 0, 1), group=0, **facts) -> ScoredTrajectory:
    arrays = ("logprobs", "behaviour", "reference", "entropies", "values", "hinted", "penalties")
    facts = {k: np.asarray(v, dtype=np.float64) if k in arrays and v is not None else v for k, v in facts.items()}
    return ScoredTrajectory(group=group, reward=float(reward), turns=np.asarray(turns, dtype=np.int32), **facts)


@st.composite
def updates(draw, rewards=REWARD, groups_max=3, size_max=5, size_min=1):
    """Groups of trajectories with everything an estimator may ask for; trajectories of a group need not stand
    together."""
    scored = []
    for group in range(draw(st.integers(1, groups_max))):
        baseline = draw(REWARD)
        for _ in range(draw(st.integers(size_min, size_max))):
            turns = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
            n = len(turns)

            def array(low, high, n=n):
                values = st.floats(low, high, allow_nan=False, width=32)
                return draw(st.lists(values, min_size=n, max_size=n))

            scored.append(
                make_scored(
                    draw(rewards),
                    turns,
                    group,
                    turn_rewards=tuple(draw(st.lists(REWARD, min_size=turns[-1] + 1, max_size=turns[-1] + 1))),
                    baseline=baseline,
                    logprobs=array(-6, 0),
                    hinted=array(-6, 0),
                    reference=array(-30, 0),
                    entropies=array(0, 4),
                    values=array(-2, 2),
                    replayed=draw(st.booleans()),
                )
            )
    return draw(st.permutations(scored))


def config_of(estimator="grpo", **given):
    """The section with ``given``, of which an estimator's own options go to it and those of other estimators go."""
    options = {key: given.pop(key) for key in OPTIONS & given.keys()}
    has = registry.OPTIONS[estimator if ":" not in estimator else "own"].model_fields
    own = {key: value for key, value in options.items() if key in has}
    config = AdvantageConfig(estimator={"name": estimator, **own}, **given)
    return config if ":" in estimator else registry.entry_of(config).with_options(config)


@contextmanager
def epsilon(value: float) -> Iterator[None]:
    """Estimators and slow references add ``value`` to standard deviations."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (base, estimators, slow):
            patch.setattr(module, "EPSILON", value)
        yield


def advantages_of(scored, **options):
    return estimate(scored, config_of(**options)).advantages


def options_of(name):
    return {"estimator": name, "k": 2}
