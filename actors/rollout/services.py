"""Parts that all rollouts of an actor share: engines, environments, renderer, and the agent loops of the run file."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio

from actors.engine.base import Sampling
from actors.engine.pool import EnginePool
from actors.environments.host import EnvironmentHost
from actors.environments.plugins import construct, find_plugin
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.agent_loop import AgentLoop
from actors.rollout.lessons import LessonClient, LessonPrompter
from actors.rollout.sampling import Policy
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, ConfigurationError, PlugInError, boundary, explained
from pipeline.runtime.plugin_limits import watch_tasks
from pipeline.schema import Order

log = logging.getLogger(__name__)

CLOSE_SECONDS_MAX = 5.0
SERVE_AGAIN_SECONDS = 0.5
SERVE_AGAIN_SECONDS_MAX = 30.0
"""Before the ``serve`` of an agent loop that failed is begun again."""
GROUP = "afterplay.loops"
BUILT_IN = {
    "single_turn": "actors.rollout.agent_loop:SingleTurn",
    "multi_turn": "actors.rollout.agent_loop:MultiTurn",
    "tool_agent": "actors.rollout.tool_agent:ToolAgent",
    "program": "actors.gateway.program_loop:ProgramLoop",
}


def build_loop(host: EnvironmentHost, renderer: Renderer, metrics: ActorMetrics) -> AgentLoop:
    """The loop of ``environments.<section>.loop``. Raises :class:`ConfigurationError`."""
    where = f"environments.{host.section}.loop"
    name = host.config.loop.name or host.loop or "multi_turn"
    cls = find_plugin(name, where, GROUP, BUILT_IN, "agent loop")
    if not (inspect.isclass(cls) and issubclass(cls, AgentLoop)):
        raise ConfigurationError(f"{where}: expected {name} to be an AgentLoop class, got {cls!r}")
    loop: AgentLoop = construct(cls, host.config.loop.options, where)
    with explained(f"{where}: bind raised"):
        loop.bind(host, renderer, metrics)
    return loop


@dataclass(frozen=True, slots=True)
class Services:
    """Built once per actor; holds no state of any rollout."""

    actor_id: str
    backend: str
    """``vllm`` or ``embedded``."""
    model: str
    model_length_max: int
    """Tokens of prompt and completion together that the engine accepts."""
    sampling: Sampling
    """``max_tokens`` of one turn; lowered where a limit leaves less room."""
    retries: int
    renderer: Renderer
    pool: EnginePool
    environments: Mapping[str, EnvironmentHost]
    metrics: ActorMetrics
    part_tokens: int | None = None
    """Tokens of one request at most; None: those of the turn."""
    lesson_prompter: LessonPrompter | None = None
    """None: lessons are off."""
    hint_template: str | None = None
    """Template of the hint in a prompt that the learner scores; None: no estimator asks for hints."""
    loops: Mapping[str, AgentLoop] = field(default_factory=dict)
    """Agent loops by environment section."""
    splits: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Seeds of the splits that environments have of their own, by section, as HELLO tells them."""
    now: Callable[[], float] = time.time
    """Unix seconds."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        actor_id: str,
        renderer: Renderer,
        pool: EnginePool,
        environments: Mapping[str, EnvironmentHost],
        metrics: ActorMetrics,
        lessons: LessonClient | None = None,
    ) -> Services:
        """Build from the run file. An external engine speaks vLLM's routes and is called ``vllm``.

        ``lessons``: the source of lessons, other than the replay stage.
        """
        sampling = config.sampling
        return cls(
            actor_id=actor_id,
            backend="embedded" if config.engine.kind == "embedded" else "vllm",
            model=config.model.source,
            model_length_max=config.context_max,
            sampling=Sampling(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                stop=sampling.stop,
                stop_token_ids=renderer.end_ids,
                experts_from=0 if config.learner.routing_replay else None,
            ),
            retries=config.actor.retries,
            renderer=renderer,
            pool=pool,
            environments=environments,
            metrics=metrics,
            part_tokens=config.engine.part_tokens,
            lesson_prompter=LessonPrompter(config.lessons, renderer, metrics, lessons)
            if config.lessons.enabled
            else None,
            hint_template=config.advantage.prompt_with_hint,
            loops={name: build_loop(host, renderer, metrics) for name, host in environments.items()},
            splits={name: splits for name, host in environments.items() if (splits := host.splits())},
        )

    def policy(self, order: Order) -> Policy:
        """The policy that completes the prompts of ``order``."""
        return Policy(
            order,
            self.pool,
            self.sampling,
            self.metrics,
            model=self.model,
            backend=self.backend,
            context_max=self.model_length_max,
            retries=self.retries,
            part_tokens=self.part_tokens,
        )

    async def serve(self) -> None:
        """Runs beside the episodes for as long as the actor lives: what agent loops keep connected."""
        watch_tasks()
        async with anyio.create_task_group() as group:
            for section, loop in self.loops.items():
                group.start_soon(_keep_serving, section, loop)

    async def close(self) -> None:
        """Close the agent loops. What a loop raises is logged: the actor stops anyway."""
        for section, loop in self.loops.items():
            try:
                with anyio.move_on_after(CLOSE_SECONDS_MAX), boundary(f"environments.{section}.loop: close"):
                    await loop.close()
            except AfterplayError as error:
                log.exception("%s", error)


async def _keep_serving(section: str, loop: AgentLoop) -> None:
    """Until it returns: what it raises is logged, and it is begun again after a while."""
    wait = SERVE_AGAIN_SECONDS
    while True:
        started = anyio.current_time()
        try:
            with boundary("agent loop serve"):
                return await loop.serve()
        except PlugInError as error:
            log.error("environments.%s.loop: %s\n%s", section, error, error.details)
        wait = SERVE_AGAIN_SECONDS if anyio.current_time() - started > SERVE_AGAIN_SECONDS_MAX else 2 * wait
        await anyio.sleep(min(wait, SERVE_AGAIN_SECONDS_MAX))
