"""Fixtures: the tiny word tokenizer, SmolLM2's own, and services around stub engines."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.engine.pool import EnginePool
from actors.environments.base import Environment
from actors.environments.host import EnvironmentHost
from actors.gateway.program_loop import ProgramLoop
from actors.metrics import ActorMetrics
from actors.rendering.renderer import Renderer
from actors.rollout.lessons import LessonClient
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.config import RunConfig
from pipeline.config.rollouts import EnvironmentConfig, LoopConfig
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Order, Task, Trajectory
from tests.support.agent_programs import SECONDS, Program, Serve, caller
from tests.support.stub_engine import StubEngine
from tests.support.word_tokenizer import word_tokenizer

SECONDS_MAX = 20.0
"""A guard against hanging, on a machine that does other things too."""


@pytest.fixture(scope="session")
def words() -> Any:
    return word_tokenizer()


@pytest.fixture(scope="session")
def smollm2(smollm2_folder: Path) -> Any:
    """The real ChatML tokenizer of SmolLM2."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(smollm2_folder))  # without torch, which AutoTokenizer imports


THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('9')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Forks the conversation after each reply that holds a 9."""


@pytest.fixture(params=["words", "smollm2", "forking"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    """The tiny tokenizer, a real one, and one whose template forks after each reply that holds a 9."""
    if request.param == "forking":
        other = copy.deepcopy(request.getfixturevalue("smollm2"))
        other.chat_template = THINKING
        return other
    return request.getfixturevalue(request.param)


def script(tokenizer: Any) -> Callable[..., list[int]]:
    """For a stub engine: three replies over and over, one of which makes :data:`THINKING` fork."""
    replies = [tokenizer(text, add_special_tokens=False).input_ids for text in ("4 5", "9 7 8", "1")]
    completed: list[int] = []

    def reply(ids: Any, sampling: Any) -> list[int]:
        completed.append(1)
        return [*replies[(len(completed) - 1) % 3], tokenizer.eos_token_id][: sampling.max_tokens]

    return reply


def rows(trajectory: Trajectory, contexts: Mapping[int, Sequence[int]] | None = None) -> list[list[int]]:
    """The token ids of each branch, with other ``contexts`` of these turns."""
    found: dict[int, list[int]] = {}
    for index, turn in enumerate(trajectory.turns):
        context = (contexts or {}).get(index, turn.context.token_ids.tolist())
        found.setdefault(turn.branch, []).extend([*context, *turn.completion.token_ids.tolist()])
    return list(found.values())


async def run_order(services: Services, order: Order, source: LessonClient | None = None) -> Trajectory:
    """Run the order to its end."""
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        with anyio.fail_after(SECONDS_MAX):
            trajectory = await Rollout(order, services, source).run()
        group.cancel_scope.cancel()
    return trajectory


@pytest.fixture
def metrics() -> ActorMetrics:
    return ActorMetrics(CollectorRegistry(), environments=("game",))


@pytest.fixture
def make_services(words: Any, metrics: ActorMetrics) -> Callable[..., Services]:
    """Services over stub engines and one environment, section ``game``."""

    def make(
        engines: Sequence[StubEngine],
        environment: Environment | str = "arithmetic",
        *,
        options: dict[str, Any] | None = None,
        wait_seconds_max: float = 5.0,
        probe_seconds: float = 0.01,
        sampling: dict[str, Any] | None = None,
        max_length: int = 1024,
        retries: int = 3,
        tokenizer: Any = None,
        **section: Any,
    ) -> Services:
        name = environment if isinstance(environment, str) else "arithmetic"
        section_config = EnvironmentConfig(name=name, options=options or {}, **section)
        config = RunConfig.model_validate(
            {
                "model": {"max_length": max_length},
                "sampling": {"max_tokens": 4, **(sampling or {})},
                "environments": {"game": section_config.model_dump()},
                "actor": {"retries": retries},
            }
        )
        pool = EnginePool(engines, wait_seconds_max=wait_seconds_max, metrics=metrics, probe_seconds=probe_seconds)
        host = EnvironmentHost(
            "game", section_config, environment=environment if isinstance(environment, Environment) else None
        )
        return Services.of(config, "actor-0", Renderer(tokenizer or words), pool, {"game": host}, metrics)

    return make


def order(seed: int = 1, *, environment: str = "game", policy_version: int = 0, seconds_max: float = 30.0) -> Order:
    return Order(
        order_id=f"g000001.0.{seed}",
        group_id="g000001",
        task=Task(f"{environment}/{seed}", environment, seed),
        slot=0,
        attempt=0,
        policy_version=policy_version,
        seconds_max=seconds_max,
    )


@pytest.fixture
def make_order() -> Callable[..., Order]:
    return order


@pytest.fixture
def serve(make_services: Callable[..., Services]) -> Iterator[Serve]:
    """Services whose section ``game`` is run by a program. What a program asserts is asserted."""
    wrong: list[AssertionError] = []

    def build(
        engine: StubEngine, program: Program | None = None, environment: str = "program", **more: Any
    ) -> Services:
        options = more.pop("loop_options", {})
        if program is not None:
            options = {"function": "builtins:print", **options}
        section = {"max_seconds": SECONDS, "loop": LoopConfig(name="program", options=options), **more}
        services = make_services([engine], environment, **section)
        if program is not None:
            loop = services.loops["game"]
            assert isinstance(loop, ProgramLoop)

            async def function(task: Any, base_url: str, api_key: str) -> Any:
                try:
                    async with caller(base_url) as client:
                        return await program(task, client)
                except AssertionError as error:
                    wrong.append(error)
                    raise

            loop._function = function
        return services

    yield build
    if wrong:
        raise wrong[0]


@pytest.fixture
def long_order(make_order: Callable[..., Order]) -> Order:
    return make_order(seconds_max=SECONDS)
