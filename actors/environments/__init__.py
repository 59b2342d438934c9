"""What agents play. A new environment is one class; see :mod:`actors.environments.base` for an example of the whole
of it."""

from actors.environments.base import Environment, Episode, Reply, Step, ToolUse
from pipeline.runtime.plugin_guard import kept_running

__all__ = ["Environment", "Episode", "Reply", "Step", "ToolUse", "kept_running"]
