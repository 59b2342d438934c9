"""From the name in the run file to a constructed agent loop."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from actors.environments.host import EnvironmentHost
from actors.loop.base import AgentLoop
from actors.loop.dialogue import MultiTurn
from actors.plugins import construct, find
from actors.rendering import Renderer
from pipeline.errors import ConfigurationError
from pipeline.metrics.actor import ActorMetrics

GROUP = "afterplay.loops"
BUILT_IN = {
    "single_turn": "actors.loop.dialogue:SingleTurn",
    "multi_turn": "actors.loop.dialogue:MultiTurn",
    "tool_agent": "actors.loop.tool_agent:ToolAgent",
    "program": "actors.door.loop:ProgramLoop",
}


def build_loops(
    environments: Mapping[str, EnvironmentHost], renderer: Renderer, metrics: ActorMetrics
) -> dict[str, AgentLoop]:
    """One loop for each environment section. Raises :class:`ConfigurationError`."""
    return {section: build_loop(host, renderer, metrics) for section, host in environments.items()}


def build_loop(host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> AgentLoop:
    """The loop of ``environments.<section>.loop``. Raises :class:`ConfigurationError`."""
    where = f"environments.{host.section}.loop"
    name = host.config.loop.name or host.loop
    if name is None and not host.config.loop.options:
        return MultiTurn()
    cls = find(name or "multi_turn", where, GROUP, BUILT_IN, "agent loop")
    if not (inspect.isclass(cls) and issubclass(cls, AgentLoop)):
        raise ConfigurationError(f"{where}: expected {name} to be an AgentLoop class, got {cls!r}")
    loop: AgentLoop = construct(cls, host.config.loop.options, where)
    loop.bind(host, renderer, metrics)
    return loop
