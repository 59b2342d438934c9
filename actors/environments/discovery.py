"""Constructs the environment that the run file names.

A name is ``arithmetic`` (built in), ``babyai`` (an adapter to a package), an entry point of the group
``afterplay.environments``, ``module:Class``, or ``path/file.py:Class``. One that cannot be found or built is a
:class:`ConfigurationError` that names the section and the valid choices.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

from actors.environments.base import Environment
from actors.environments.plugins import construct, find_plugin, names_of
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError

GROUP = "afterplay.environments"
BUILT_IN = {
    "arithmetic": "actors.adapters.games:Arithmetic",
    "big_sums": "actors.adapters.big_sums:BigSums",
    "number_guess": "actors.adapters.games:NumberGuess",
    "passcode": "actors.adapters.games:Passcode",
    "program": "actors.adapters.games:Program",
    "question": "actors.adapters.question:Question",
    "alfworld": "actors.adapters.alfworld:AlfWorld",
    "appworld": "actors.adapters.appworld:AppWorldTasks",
    "babyai": "actors.adapters.babyai:BabyAI",
    "bfcl": "actors.adapters.bfcl:BFCL",
    "gymnasium": "actors.adapters.gymnasium_text:Gymnasium",
    "openenv": "actors.adapters.openenv:OpenEnv",
    "reasoning_gym": "actors.adapters.reasoning:ReasoningGym",
    "textarena": "actors.adapters.text_arena:TextArena",
    "textworld_express": "actors.adapters.text_world:TextWorldExpress",
}


def build(section: str, config: EnvironmentConfig) -> Environment:
    """The environment of the section ``environments.<section>``. Raises :class:`ConfigurationError`."""
    where = f"environments.{section}"
    cls = find(config.name, where)
    return cast("Environment", _startable(construct(cls, config.options, where), config.name, where))


def names() -> list[str]:
    """Every name that can be given without a colon."""
    return names_of(GROUP, BUILT_IN)


def find(name: str, where: str = "environments") -> type[Environment]:
    """The class behind ``name``. Raises :class:`ConfigurationError`."""
    found = find_plugin(name, where, GROUP, BUILT_IN, "environment")
    if not inspect.isclass(found):
        raise ConfigurationError(f"{where}: expected {name} to be a class with a method start(task), got {found!r}")
    return cast("type[Environment]", _startable(found, name, where))


def _startable(found: Any, name: str, where: str) -> Any:
    if not callable(getattr(found, "start", None)):
        raise ConfigurationError(f"{where}: expected {name} to be a class with a method start(task), got {found!r}")
    return found
