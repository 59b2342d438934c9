"""The loop and the tool of docs/AGENTS.md, as files of their own, run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import yaml

from actors.environments.host import EnvironmentHost
from actors.rollout.services import Services, build_loop
from actors.tools.base import build_tool
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.schema import Order, TrajectoryStatus
from tests.support.stub_engine import StubEngine
from tests.unit.actors.conftest import run_order, script

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "AGENTS.md").read_text()


def written(folder: Path, name: str) -> Path:
    """The block of the page that begins with this file's name."""
    (code,) = re.findall(rf"```python\n(# {name}\n.*?)```", PAGE, re.DOTALL)
    (folder / name).write_text(code)
    return folder / name


async def test_the_loop_of_the_page_asks_once_more(
    make_services: Callable[..., Services], make_order: Callable[..., Order], words: object, tmp_path: Path
) -> None:
    (section,) = [y for y in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "reconsider.py" in y]
    config = yaml.safe_load(section)["environments"]["sums"]
    config["loop"]["name"] = config["loop"]["name"].replace("reconsider.py", str(written(tmp_path, "reconsider.py")))
    services = make_services([StubEngine(script=script(words))])
    host = EnvironmentHost("game", EnvironmentConfig.model_validate(config))
    services.loops["game"] = build_loop(host, services.renderer, services.metrics)  # type: ignore[index]
    trajectory = await run_order(services, make_order())
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.turns[1].context_messages[0].content == "Are you sure? Answer again."


async def test_the_tool_of_the_page_answers(tmp_path: Path) -> None:
    tool = build_tool(f"{written(tmp_path, 'capital.py')}:Capital", {}, "here")
    result = await tool.execute("e", {"country": "Italy"})  # type: ignore[union-attr]
    assert result.text == "Rome"
