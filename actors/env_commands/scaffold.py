"""``afterplay init`` and ``afterplay env new``: write a working run file, or a plug-in package, to edit."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from actors.environments.plugins import BUILT_IN, GROUP, names_of
from pipeline.errors import ConfigurationError

_PYPROJECT = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "afterplay-{dashed}"
version = "0.1.0"
description = "The environment {name} for Afterplay"
requires-python = ">=3.11"
dependencies = ["afterplay"]

[project.optional-dependencies]
test = ["pytest>=8"]

# Run files say `name: {name}` once this package is installed.
[project.entry-points."afterplay.environments"]
{name} = "afterplay_{name}:{cls}"

[tool.hatch.build.targets.wheel]
packages = ["afterplay_{name}"]

[tool.pytest.ini_options]
pythonpath = ["."]
"""

_ENVIRONMENT = '''"""The environment `{name}`: mix a colour from drops of red, green and blue."""

from __future__ import annotations

import random

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from afterplay import Environment, Episode, Message, Reply, Step, Task

COLOURS = ("red", "green", "blue")


@dataclass(config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class {cls}(Environment):
    """Mix a colour from drops. The right mixture has reward 1.0."""

    splits = {{"train": range(10**9), "eval": range(10**9, 2 * 10**9)}}

    drops: int = Field(default=3, ge=1, le=20)
    """Drops in a mixture, which is also the number of turns."""

    def start(self, task: Task) -> {cls}Episode:
        # Everything random comes from the seed of the task: a group must start from the same state.
        return {cls}Episode(random.Random(task.seed).choices(COLOURS, k=self.drops))


class {cls}Episode(Episode):
    """One episode and all its state."""

    def __init__(self, mixture: list[str]) -> None:
        self.left = sorted(mixture)
        self.messages = (Message("user", f"Mix {{' '.join(self.left)}}. Reply with one colour a turn."),)

    def step(self, reply: Reply) -> Step:
        colour = reply.strip().lower().rstrip(".")
        if colour not in self.left:
            return Step(reward=0.0, done=True, signals={{"solved": 0.0}})
        self.left.remove(colour)
        if not self.left:
            return Step(reward=1.0, done=True, signals={{"solved": 1.0}})
        return Step(messages=(Message("user", f"Add {{' '.join(self.left)}}."),))
'''

_INIT = '''"""An environment for Afterplay."""

from afterplay_{name}.environment import {cls}, {cls}Episode

__all__ = ["{cls}", "{cls}Episode"]
'''

_TEST = '''"""Right replies pay, wrong ones do not, and a task always starts the same."""

from {module} import {cls}

from afterplay import Reply, Task


def play(game, seed, choose):
    episode = game.start(Task(f"{name}/{{seed}}", "{name}", seed))
    total = 0.0
    for _ in range(100):
        step = episode.step(Reply(choose(episode)))
        total += step.reward
        if step.done:
            break
    return total


def test_right_replies_pay_and_wrong_ones_do_not():
    game = {cls}()
    for seed in range(50):
        assert play(game, seed, lambda episode: episode.left[0]) == 1.0
        assert play(game, seed, lambda episode: "mauve") == 0.0


def test_same_task_starts_the_same():
    game = {cls}(drops=8)
    starts = [game.start(Task(f"{name}/{{seed}}", "{name}", seed)).messages for seed in (*range(20), *range(20))]
    assert starts[:20] == starts[20:]
    assert len({{messages[0].content for messages in starts}}) > 5
'''

_README = """# afterplay-{dashed}

The environment `{name}` for Afterplay.

```
pip install -e '.[test]' && pytest
afterplay env show {name}
afterplay env play {name}
```

In a run file:

```yaml
environments:
  {name}:
    name: {name}
    options: {{drops: 3}}
    max_turns: 8
```

Edit `afterplay_{name}/environment.py`. `start` makes one episode of a task, `step` answers one reply. `afterplay env
show` prints the docstrings under options.
"""


_RUN_FILE = """# A random model with 0.1 million parameters learns to mix colours, in two minutes on a laptop.
#
#   pytest                      # the environment alone
#   afterplay run run.yaml      # rerun to resume; --fresh starts over
#   afterplay show runs/{name}
#
# `afterplay config show run.yaml` prints every key with its meaning.
run: {{name: {name}, total_steps: 60}}

model:                        # for a pretrained model: source: Qwen/Qwen2.5-0.5B-Instruct, without the key tiny
  source: tiny
  max_length: 128
  tiny: {{numbers: 0, words: [red, green, blue, Mix, Add]}}

engine:                       # for a pretrained model: kind: vllm
  kind: embedded
  port: 0
  dtype: float32
  threads: 1
  max_sequences: 128

sampling: {{temperature: 1.0, max_tokens: 1}}    # one word a turn; a pretrained model needs some more tokens

environments:
  {name}: {{name: "environment.py:{cls}", options: {{drops: 2}}, max_turns: 2}}

groups: {{n_rollout: 8, groups_per_step: 16}}
staleness: {{max: 1}}
actor: {{concurrency: 128}}
learner: {{learning_rate: 3.0e-3, threads: 1, compute_dtype: float32}}    # for a pretrained model: 1.0e-6 to 1.0e-5
publish: {{dtype: float32}}
checkpoint: {{every: 20}}
"""


def write_project(folder: Path) -> list[Path]:
    """Write a run file, its environment and a test into ``folder``, which must be empty or missing, and return them.

    Raises :class:`ConfigurationError`.
    """
    words = {"name": "colours", "cls": "Colours", "module": "environment"}
    files = {"run.yaml": _RUN_FILE, "environment.py": _ENVIRONMENT, "test_environment.py": _TEST}
    return _write(folder, files, words, "choose another folder")


def write_package(name: str, folder: Path) -> list[Path]:
    """Write a plug-in package into ``folder``, which must be empty or missing, and return its files.

    Raises :class:`ConfigurationError`.
    """
    if len(name) > 40 or not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ConfigurationError(
            "expected a name of at most 40 lower-case letters, digits and single underscores that begins with a "
            f"letter, got {name!r}"
        )
    if name in names_of(GROUP, BUILT_IN):
        raise ConfigurationError(f"there is already an environment {name!r} (afterplay env list): choose another name")
    cls = "".join(w.capitalize() for w in name.split("_"))
    if keyword.iskeyword(cls) or re.search(rf"import .*\b{cls}\b", _ENVIRONMENT):
        raise ConfigurationError(f"the class {cls} would take a name that its file needs: choose another name")
    words = {"name": name, "dashed": name.replace("_", "-"), "cls": cls, "module": f"afterplay_{name}"}
    files = {
        "pyproject.toml": _PYPROJECT,
        "README.md": _README,
        f"afterplay_{name}/__init__.py": _INIT,
        f"afterplay_{name}/environment.py": _ENVIRONMENT,
        f"tests/test_{name}.py": _TEST,
    }
    return _write(folder, files, words, "choose another --folder")


def _write(folder: Path, files: dict[str, str], words: dict[str, str], remedy: str) -> list[Path]:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigurationError(f"expected an empty or missing folder, got {folder}: {remedy}")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.format(**words))
    return [folder / path for path in files]
