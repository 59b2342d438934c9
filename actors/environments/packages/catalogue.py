"""Which adapters there are, and whether what they stand on is installed."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import ConfigurationError

_HERE = "actors.environments.packages"


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter and the package behind it."""

    path: str
    """``module:Class`` of the environment."""
    module: str | None
    """What has to be importable. None: nothing, it talks to a server."""
    install: str
    """What installs it."""
    program: str | None = None
    """A program that has to be on the PATH too."""
    server: str | None = None
    """What has to run elsewhere while it is played."""

    @property
    def missing(self) -> str | None:
        """What to do before it can be used; None when nothing is missing."""
        try:
            found = self.module is None or importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return self.install
        if self.program is not None and shutil.which(self.program) is None:
            return f"install {self.program} and put it on the PATH"
        return None


ADAPTERS: Mapping[str, Adapter] = {
    "alfworld": Adapter(
        f"{_HERE}.alfworld:AlfWorld", "alfworld", "pip install 'afterplay[alfworld]' && alfworld-download"
    ),
    "appworld": Adapter(
        f"{_HERE}.appworld:AppWorldTasks",
        None,
        "pip install appworld && appworld install && appworld download data (in an environment of its own)",
        server="needs its servers: appworld serve environment",
    ),
    "babyai": Adapter(f"{_HERE}.babyai:BabyAI", "minigrid", "pip install 'afterplay[minigrid]'"),
    "bfcl": Adapter(
        f"{_HERE}.bfcl:BFCL", "bfcl_eval", "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"
    ),
    "gymnasium": Adapter(f"{_HERE}.gymnasium_text:Gymnasium", "gymnasium", "pip install 'afterplay[gymnasium]'"),
    "openenv": Adapter(
        f"{_HERE}.openenv:OpenEnv", "websockets", "pip install 'afterplay[openenv]'", server="needs a server"
    ),
    "reasoning_gym": Adapter(
        f"{_HERE}.reasoning:ReasoningGym", "reasoning_gym", "pip install 'afterplay[reasoning-gym]'"
    ),
    "textarena": Adapter(f"{_HERE}.text_arena:TextArena", "textarena", "pip install 'afterplay[textarena]'"),
    "textworld_express": Adapter(
        f"{_HERE}.text_world:TextWorldExpress",
        "textworld_express",
        "pip install 'afterplay[textworld-express]'",
        program="java",
    ),
}
"""By the name that run files use."""


def package(name: str, *modules: str) -> Any:
    """The package behind the adapter ``name``, after importing ``modules`` of it too.

    Raises :class:`ConfigurationError` that says what to install."""
    adapter = ADAPTERS[name]
    if adapter.module is None:
        raise ConfigurationError(f"the environment {name} has no package that could be imported here")
    if adapter.missing is not None:
        raise ConfigurationError(f"the environment {name} needs something that is not installed: {adapter.missing}")
    try:
        for module in modules:
            importlib.import_module(module)
        return importlib.import_module(adapter.module)
    except Exception as error:
        raise ConfigurationError(
            f"the environment {name}: importing {adapter.module} failed with {type(error).__name__}: {error}. "
            f"It is installed by: {adapter.install}"
        ) from error
