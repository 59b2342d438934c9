"""Helpers of the adapters' tests. A test whose package is missing skips and says what to install."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from actors.adapters.catalogue import ADAPTERS
from actors.environments import Environment, Episode, Reply, Step
from actors.environments import plugins as discovery
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.schema import Task


def build(name: str, **options: Any) -> Any:
    """The environment as a run file builds it; skips where its package is missing."""
    missing = ADAPTERS[name].missing
    if missing is not None:
        pytest.skip(f"{name}: {missing}")
    return discovery.build("game", EnvironmentConfig(name=name, options=options))


def task(seed: int) -> Task:
    return Task(f"game/{seed}", "game", seed)


def play(environment: Environment, seed: int, replies: Iterable[str]) -> tuple[float, Step]:
    """(sum of rewards, last step) of one play by fixed replies; the episode is closed."""
    episode = environment.start(task(seed))
    assert isinstance(episode, Episode)
    total, step = 0.0, Step()
    try:
        for reply in replies:
            step = episode.step(Reply(reply))  # type: ignore[assignment]
            total += step.reward
            if step.done:
                break
    finally:
        episode.close()
    return total, step


@pytest.fixture(scope="session")
def kit() -> Any:
    """The helpers, for tests that cannot import each other."""

    class Kit:
        build = staticmethod(build)
        task = staticmethod(task)
        play = staticmethod(play)

    return Kit
