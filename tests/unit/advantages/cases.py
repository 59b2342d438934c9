"""Small updates for the estimators' tests."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np

from learner.advantages.apply import estimate
from learner.advantages.base import Played
from pipeline.config.algorithm import AdvantageConfig

REWARD = st.floats(-3, 3, allow_nan=False, width=32)


def make_played(reward, turns=(0, 0, 1), group=0, **facts) -> Played:
    arrays = ("logprobs", "behaviour", "reference", "entropies", "values", "hinted", "penalties")
    facts = {k: np.asarray(v, dtype=np.float64) if k in arrays and v is not None else v for k, v in facts.items()}
    return Played(group=group, reward=float(reward), turns=np.asarray(turns, dtype=np.int32), **facts)


@st.composite
def updates(draw, rewards=REWARD, groups_max=3, size_max=5, size_min=1):
    """Groups of trajectories with everything an estimator may ask for; trajectories of a group need not stand
    together."""
    played = []
    for group in range(draw(st.integers(1, groups_max))):
        baseline = draw(REWARD)
        for _ in range(draw(st.integers(size_min, size_max))):
            turns = sorted(draw(st.lists(st.integers(0, 2), min_size=1, max_size=6)))
            n = len(turns)

            def array(low, high, n=n):
                values = st.floats(low, high, allow_nan=False, width=32)
                return draw(st.lists(values, min_size=n, max_size=n))

            played.append(
                make_played(
                    draw(rewards),
                    turns,
                    group,
                    turn_rewards=tuple(draw(st.lists(REWARD, min_size=turns[-1] + 1, max_size=turns[-1] + 1))),
                    baseline=baseline,
                    logprobs=array(-6, 0),
                    hinted=array(-6, 0),
                    entropies=array(0, 4),
                    values=array(-2, 2),
                    replayed=draw(st.booleans()),
                )
            )
    return draw(st.permutations(played))


def advantages_of(played, **options):
    return estimate(played, AdvantageConfig(**options)).advantages


def options_of(name):
    return {"estimator": name, "pass_k": 2, "epsilon": 1e-9}
