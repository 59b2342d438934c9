"""Afterplay from Python: start runs, follow them, and write environments, tools and rewards.

::

    import afterplay

    run = afterplay.train("@tiny", run={"name": "first"})
    for step in run:
        print(step["step"], step["reward_mean"])
    rows = run.rollouts()

A run is an ``afterplay run`` in processes of its own. Names are imported when they are used, so that ``import
afterplay`` loads nothing else.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.environments.base import Environment, Episode, Reply, Step, tool
    from actors.tools.base import ToolError, ToolResult
    from afterplay.commands import evaluate, load, retrain, train
    from afterplay.run import Run
    from pipeline.errors import AfterplayError, ConfigurationError, RunFailed
    from pipeline.schema import Message, Task, Trajectory
    from pipeline.scorer.conversation import reply

__all__ = [
    "AfterplayError",
    "ConfigurationError",
    "Environment",
    "Episode",
    "Message",
    "Reply",
    "Run",
    "RunFailed",
    "Step",
    "Task",
    "ToolError",
    "ToolResult",
    "Trajectory",
    "evaluate",
    "load",
    "reply",
    "retrain",
    "tool",
    "train",
]

_HOMES = {
    "actors.environments.base": ("Environment", "Episode", "Reply", "Step", "tool"),
    "actors.tools.base": ("ToolError", "ToolResult"),
    "afterplay.commands": ("evaluate", "load", "retrain", "train"),
    "afterplay.run": ("Run",),
    "pipeline.errors": ("AfterplayError", "ConfigurationError", "RunFailed"),
    "pipeline.schema": ("Message", "Task", "Trajectory"),
    "pipeline.scorer.conversation": ("reply",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def _import_beside() -> None:
    """Import the packages ``actors`` and ``pipeline`` that stand beside this one: a script or notebook may lie in a
    folder whose names are the same, which Python would search first."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for name in ("actors", "pipeline"):
        module = sys.modules.get(name)
        if module is None:
            spec = importlib.machinery.PathFinder.find_spec(name, [root])
            if spec is None or spec.loader is None:
                raise ImportError(f"expected the package {name} in {root}, beside afterplay: install afterplay again")
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        elif (place := os.path.dirname(os.path.abspath(module.__file__ or ""))) != os.path.join(root, name):
            raise ImportError(
                f"Afterplay has a package {name}, and another one was imported from {place}: import afterplay first, "
                "or rename that folder"
            )


_import_beside()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib import metadata

        return metadata.version("afterplay")
    if name not in _HOME:
        raise AttributeError(f"module 'afterplay' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in globals() if name.startswith("__"))})
