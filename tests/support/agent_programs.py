"""Programs of the tests at the gateway, and what plays them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import orjson
import pytest
import yaml

from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.schema import Order, Trajectory
from tests.support.routing import in_flight
from tests.support.stub_engine import StubEngine

LIBRARY_AGENTS = Path(__file__).parent / "library_agents"
"""Documentation examples of agent libraries, unmodified, with the versions of the libraries."""
LIBRARY_PROGRAMS = sorted(file.name for file in LIBRARY_AGENTS.iterdir() if file.suffix in (".py", ".mjs"))
SECONDS = 200.0
"""For one program on a loaded machine."""
Serve = Callable[..., Services]


async def run_order(services: Services, order: Order) -> Trajectory:
    """One order, with the gateway open; nothing is left behind."""
    async with anyio.create_task_group() as group:
        group.start_soon(services.pool.watch)
        group.start_soon(services.serve)
        with anyio.fail_after(SECONDS):
            trajectory = await Rollout(order, services).run()
        gateway = services.loops["game"].gateway  # type: ignore[attr-defined]
        assert not gateway._sessions and not gateway._offers
        group.cancel_scope.cancel()
    await services.close()
    assert in_flight(services.pool.router) == 0 == len(services.pool.router.sessions)
    return trajectory


def hear_outcomes(services: Services, heard: Callable[[str], None]) -> None:
    """``heard`` gets the outcome of each call at the gateway."""
    gateway = services.loops["game"].gateway  # type: ignore[attr-defined]
    count = gateway._count

    def both(route: str, outcome: str) -> None:
        count(route, outcome)
        heard(outcome)

    gateway._count = both


class Caller:
    """An agent program with a plain HTTP client."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self.base_url = base_url

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any, Mapping[str, str]]:
        url = path if path.startswith("http") else f"{self.base_url}{path}"
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self._session.post(url, data=data, **options) as response:
            text = await response.read()
            return response.status, orjson.loads(text) if text else None, response.headers

    async def chat(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        status, answer, _ = await self.post("/chat/completions", {"model": "m", "messages": messages, **more})
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]


@asynccontextmanager
async def caller(base_url: str) -> Any:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SECONDS)) as session:
        yield Caller(session, base_url)


Program = Callable[[Mapping[str, Any], Caller], Awaitable[Any]]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def echoing(words: Any) -> StubEngine:
    return StubEngine(script=lambda ids, s: [10, 11, words.eos_token_id][: s.max_tokens])


def assert_exact(trajectory: Trajectory, engine: StubEngine) -> None:
    """Each branch is one that the engine saw, with what it sampled at its end."""
    prompts = {prompt for _, prompt in engine.requests}
    for branch in trajectory.branches():
        ids = tuple(branch.token_ids.tolist())
        sampled = int(branch.loss_mask[::-1].argmin()) if not branch.loss_mask.all() else len(ids)
        assert ids[: len(ids) - sampled] in prompts
    assert trajectory.n_sampled == sum(len(t.completion) for t in trajectory.turns)


def library_command(program: str) -> list[str]:
    """The command of an example; skips where its libraries are missing."""
    if program.endswith(".mjs"):
        node, folder = shutil.which("node"), os.environ.get("AFTERPLAY_AGENTS_NODE")
        if node is None or folder is None:
            pytest.skip(
                "set AFTERPLAY_AGENTS_NODE to a folder with tests/support/library_agents/package.json in which "
                "`npm install` ran, and install node"
            )
        source = Path(folder) / program
        source.write_text((LIBRARY_AGENTS / program).read_text())  # node looks for packages beside the program
        return [node, str(source)]
    return [agents_python(), str(LIBRARY_AGENTS / program)]


def agents_python() -> str:
    """The Python of the libraries; skips where there is none."""
    python = os.environ.get("AFTERPLAY_AGENTS_PYTHON")
    if python is None:
        pytest.skip(
            "set AFTERPLAY_AGENTS_PYTHON to the Python of a virtual environment with the agent libraries "
            "(python -m venv DIR; DIR/bin/pip install --no-deps -r tests/support/library_agents/requirements.txt)"
        )
    return python


def page_options(folder: Path) -> dict[str, Any]:
    """The options of the ``program`` loop with which docs/GATEWAY.md runs mini-swe-agent, which is in ``folder``."""
    page = (Path(__file__).parents[2] / "docs" / "GATEWAY.md").read_text()
    (block,) = (text for text in page.split("```") if text.startswith("\noptions:") and "mini_textbased" in text)
    options: dict[str, Any] = yaml.safe_load(block.replace("/opt/mini", str(folder)))["options"]
    return options
