"""``repair``: a small function has a fault; the policy repairs it, in a reply or as a coding agent in a sandbox.

Hidden calls decide. The repaired function runs in a sandbox of its own, which knows the arguments of the calls and
never the right results: those are compared outside, so no program inside can forge them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from actors.adapters import repair_tasks
from actors.adapters.repair_tasks import Example, RepairTask, tasks
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from actors.sandboxes.base import SandboxOptions
from actors.sandboxes.registry import Sandboxes, given_as_word
from pipeline.runtime.children import OrphanReaper
from pipeline.schema import Message, Task

SOLUTION, TEXT = "solution.py", "TASK.md"
SOURCE_CHARACTERS_MAX = 100_000
RESULTS, RESULTS_BYTES_MAX = "results.json", 2**20
GRADE_SECONDS_MAX = 20.0
"""Longest time of the hidden calls, start of Python included."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)

_CALLS = """
import json, os
calls = json.load(open("calls.json"))
space = {"__name__": "solution"}
results = []
try:
    exec(compile(open("solution.py").read(), "solution.py", "exec"), space)
    function = space[calls["name"]]
    for arguments in calls["arguments"]:
        try:
            results.append(json.dumps(function(*arguments)))
        except Exception as error:
            results.append("error")
except BaseException:
    pass
with open("results.json", "w") as file:
    json.dump(results, file)
    file.flush()
    os._exit(0)
"""


@dataclass(config=STRICT_OPTIONS)
class Repair(Environment):
    """Repair a broken function of a dozen lines. Reward 1.0 if all hidden calls give the right results. The tasks of
    eight functions are held out."""

    sandbox: Annotated[SandboxOptions, BeforeValidator(given_as_word)] = Field(default_factory=SandboxOptions)
    """Sandbox in which a repaired function runs."""

    def __post_init__(self) -> None:
        self._sandboxes = Sandboxes(
            self.sandbox, "the sandbox of repair", OrphanReaper(grace_seconds=0), lambda _: None
        )
        source = Path(repair_tasks.__file__)
        self.hidden = (source, *source.parent.glob(f"__pycache__/{source.stem}.*"))
        made = tasks()
        first = len(made["train"])
        self.splits = {"train": range(first), "eval": range(first, first + len(made["eval"]))}
        self._tasks = (*made["train"], *made["eval"])

    def start(self, task: Task) -> RepairEpisode:
        return RepairEpisode(self._tasks[task.seed % len(self._tasks)], self._sandboxes, self.hidden)


class RepairEpisode(Episode):
    def __init__(self, repair: RepairTask, sandboxes: Sandboxes, hidden: Sequence[Path]) -> None:
        """``hidden``: the files with the right functions."""
        self._repair = repair
        self._sandboxes = sandboxes
        self._hidden = hidden
        text = task_text(repair)
        self.messages = (
            Message("user", f"{text}\n\n```python\n{repair.broken}\n```\n\nReply with the whole function."),
        )
        self.files = {
            TEXT: f"{text}\n\nThe function is in {SOLUTION}. Repair it there.\n",
            SOLUTION: f"{repair.broken}\n",
        }

    async def step(self, reply: Reply) -> Step:
        source = reply.files.get(SOLUTION, "") if reply.files is not None else code_of(reply)
        right = await self._right(source) if len(source) <= SOURCE_CHARACTERS_MAX else 0
        hidden = len(self._repair.hidden)
        return Step(
            reward=float(right == hidden),
            done=True,
            signals={"right_calls": right / hidden, "changed": float(source.strip() != self._repair.broken)},
        )

    async def _right(self, source: str) -> int:
        """Number of hidden calls with the right result."""
        hidden = self._repair.hidden
        calls = {"name": self._repair.name, "arguments": [example.arguments for example in hidden]}
        files = {SOLUTION: source, "calls.json": json.dumps(calls), "call.py": _CALLS}
        readable = tuple(Path(path).expanduser().absolute() for path in self._sandboxes.options.readable)
        async with self._sandboxes.one(readable, tuple(self._hidden)) as sandbox:
            await sandbox.put({name: text.encode(errors="replace") for name, text in files.items()})
            await sandbox.run(
                (sandbox.python, "call.py"), environment={}, seconds_max=GRADE_SECONDS_MAX, output_bytes_max=1024
            )
            try:
                found = (await sandbox.take([RESULTS], RESULTS_BYTES_MAX))[RESULTS]
            except (FileNotFoundError, ValueError):  # it never came to the end of the calls
                return 0
        return right_results(hidden, found)


def task_text(repair: RepairTask) -> str:
    """Text of the task with examples, the first of which fails."""
    calls = "\n".join(
        f"- `{call(repair.name, example)}` should give `{example.expected!r}`" for example in repair.shown
    )
    return f"The Python function `{repair.name}` has one fault. It should do what its docstring says:\n\n{calls}"


def call(name: str, example: Example) -> str:
    """A call as source.

    >>> call("clamp", Example((5, 0, 3), 3))
    'clamp(5, 0, 3)'
    """
    return f"{name}({', '.join(map(repr, example.arguments))})"


def code_of(reply: str) -> str:
    """The last block of code of a reply; the whole reply where it has none."""
    blocks = _BLOCK.findall(reply)
    return str(blocks[-1]) if blocks else reply


def right_results(hidden: Sequence[Example], found: bytes) -> int:
    """Number of results, a JSON list of JSON texts, that are the expected ones; 0 where it has another form."""
    try:
        results = json.loads(found)
    except (ValueError, RecursionError):
        return 0
    if not isinstance(results, list) or len(results) != len(hidden):
        return 0
    return sum(result == json.dumps(example.expected) for result, example in zip(results, hidden, strict=True))
