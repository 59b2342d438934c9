"""The environment with a tool of docs/ENVIRONMENTS.md: a package, found by its entry point, run with its tool."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "ENVIRONMENTS.md"
ENTRY_POINTS = "[afterplay.environments]\ntreasure = treasure:Treasure\n"
METADATA = "Metadata-Version: 2.1\nName: afterplay-treasure\nVersion: 0.1\n"

PROGRAM = """
import anyio
from actors.engine.pool import EnginePool
from tests.support.stub_engine import StubEngine
from actors.environments.host import EnvironmentHost
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from actors.rendering.renderer import Renderer
from pipeline.config import RunConfig
from actors.metrics import ActorMetrics
from pipeline.runtime.metrics import CollectorRegistry
from pipeline.schema import Order, Task
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

letters = [*map(chr, range(32, 127)), "\\n", "<|end|>"]
backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
backend.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
tokenizer.chat_template = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
config = RunConfig.model_validate(
    {"environments": {"mine": {"name": "treasure"}}, "sampling": {"max_tokens": 2000}, "model": {"max_length": 9000}}
)
SAID = ['<tool_call>{"name": "dig", "arguments": {"place": %d}}</tool_call>' % p for p in range(9)]


async def main() -> None:
    metrics = ActorMetrics(CollectorRegistry(), environments=("mine",))
    host = EnvironmentHost("mine", config.environments["mine"])
    replies = iter(["\\n".join(SAID), "I dug everywhere."])
    engine = StubEngine(script=lambda ids, sampling: [*tokenizer.encode(next(replies)), tokenizer.eos_token_id])
    pool = EnginePool([engine], wait_seconds_max=5, metrics=metrics)
    services = Services.of(config, "actor-0", Renderer(tokenizer), pool, {"mine": host}, metrics)
    async with anyio.create_task_group() as group:
        group.start_soon(pool.watch)
        with anyio.fail_after(30):
            done = await Rollout(Order("o", "g", Task("t", "mine", 3), 0, 0, 0, 20.0), services).run()
        group.cancel_scope.cancel()
    print(done.status, done.failure, dict(done.rewards), [m.role for m in done.turns[1].context_messages])


anyio.run(main)
"""


def example() -> str:
    """The environment with a tool of the page."""
    (code,) = re.findall(r"```python\n(# treasure\.py\n.*?)```", PAGE.read_text(), re.DOTALL)
    return code


def test_the_environment_with_a_tool_is_under_thirty_lines() -> None:
    lines = [line for line in example().splitlines() if line.strip() and not line.startswith("#")]
    assert len(lines) < 30


@pytest.mark.slow
def test_the_environment_with_a_tool_is_played_from_a_package_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "treasure.py").write_text(example())
    info = tmp_path / "afterplay_treasure-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(METADATA)
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    status, failure, *rest = done.stdout.split(maxsplit=2)
    assert (status, failure) == ("complete", "None"), done.stdout
    assert "{'environment': 1.0}" in rest[0] and rest[0].count("'tool'") == 9
