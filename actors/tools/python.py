"""``python``: a Python subset in pydantic-monty's sandbox.

The interpreter is Rust, has no access to files, network or processes, and runs in worker processes of its own with
limits on time, memory, recursion and sleep; a worker that crashes or hangs is replaced. Variables last for an episode:
they travel as bytes between calls, so an episode holds no worker, and its calls take turns. Where bubblewrap works, the
workers also run in the namespaces of a sandbox (:mod:`actors.sandboxes.bubblewrap`), which have no network and no files
but the system's.
"""

from __future__ import annotations

import ast
import importlib
import logging
import os
import shlex
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS
from actors.sandboxes import bubblewrap
from actors.tools.base import Tool, ToolError, ToolResult
from pipeline.errors import ConfigurationError
from pipeline.schema import Task

log = logging.getLogger(__name__)
ANSWER_CHARACTERS_MAX = 100_000


@dataclass(config=STRICT_OPTIONS)
class Python(Tool):
    """Runs code and answers with its output and the value of its last expression. Needs the extra ``tools``."""

    seconds_max: float = Field(default=5.0, gt=0, le=600)
    """CPU time of one call."""
    memory_mib: int = Field(default=64, ge=1, le=65_536)
    """Memory of the code's objects."""
    recursion_max: int = Field(default=200, ge=10, le=1000)
    processes: int = Field(default=2, ge=1, le=256)
    """Workers of one actor; calls beyond that wait."""
    code_characters_max: int = Field(default=20_000, ge=1)
    keep_variables: bool = True
    """Variables last from one call of an episode to the next."""
    state_bytes_max: int = Field(default=1_000_000, ge=1)
    """Variables that take more are dropped, with a message to the policy."""
    sandbox: Literal["auto", "bubblewrap", "none"] = "auto"
    """Namespaces around the workers, a second wall around the interpreter. auto: bubblewrap where it works (many
    containers forbid it, with a warning). bubblewrap: where it does not work is an error."""

    name = "python"
    description = (
        "Run Python code (a subset: functions, classes, math, json, re, datetime; no files, no network, no packages). "
        "Answers with what was printed and the value of the last expression. Variables are kept between calls."
    )
    parameters = {  # noqa: RUF012 - never changed
        "type": "object",
        "properties": {"code": {"type": "string"}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __post_init__(self) -> None:
        try:
            monty: Any = importlib.import_module("pydantic_monty")
        except ImportError as error:
            raise ConfigurationError("the tool python needs pydantic-monty: pip install '.[tools]'") from error
        self._monty = monty
        self._limits = monty.ResourceLimits(
            max_feed_duration_secs=self.seconds_max,
            max_memory=self.memory_mib * 2**20,
            max_recursion_depth=self.recursion_max,
            max_total_sleep_secs=0.0,
        )
        self._pool: Any = None
        self._starting = anyio.Lock()
        self._states: dict[str, bytes] = {}
        self._turns: dict[str, anyio.Lock] = {}
        """The calls of an episode run one after the other: each may use the variables of the one before."""
        self._wrapper: int | None = None

    async def create(self, episode_key: str, task: Task) -> None:
        await self._workers()

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        code = arguments["code"]
        if len(code) > self.code_characters_max:
            raise ToolError(f"expected at most {self.code_characters_max} characters of code, got {len(code)}")
        pool = await self._workers()
        printed = self._monty.CollectString()
        note = ""
        turn = self._turns.setdefault(episode_key, anyio.Lock()) if self.keep_variables else nullcontext()
        async with turn, pool.checkout(limits=self._limits) as session:
            if episode_key in self._states:
                await session.load_session(self._states[episode_key])
            try:
                await session.feed_run(showing_the_last_value(code), print_callback=printed)
            except (self._monty.MontyError, ValueError, OverflowError) as error:  # or a value that Python cannot take
                return ToolResult(f"{_shown(printed.output)}{error}", signals={"python_errors": 1.0})
            if self.keep_variables:
                state = await session.dump()
                if len(state) <= self.state_bytes_max:
                    self._states[episode_key] = state
                else:
                    self._states.pop(episode_key, None)
                    note = "(the variables are too large to be kept and were forgotten)\n"
        return ToolResult(_shown(printed.output) + note or "(nothing was printed)")

    async def release(self, episode_key: str) -> None:
        self._states.pop(episode_key, None)
        self._turns.pop(episode_key, None)

    async def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.__aexit__(None, None, None)
        if self._wrapper is not None:
            os.close(self._wrapper)
            self._wrapper = None

    async def _workers(self) -> Any:
        async with self._starting:
            if self._pool is None:
                pool = self._monty.AsyncMonty(
                    min_processes=0,
                    max_processes=self.processes,
                    request_timeout=self.seconds_max + 5.0,
                    binary_path=await self._binary(),
                )
                self._pool = await pool.__aenter__()
        return self._pool

    async def _binary(self) -> str | None:
        """A script that starts the worker in namespaces, or None for the worker itself."""
        if self.sandbox == "none":
            return None
        bwrap = bubblewrap.find()
        if refusal := await anyio.to_thread.run_sync(bubblewrap.refusal, bwrap):
            if self.sandbox == "bubblewrap":
                raise ConfigurationError(
                    f"the tool python: {refusal}. Allow user namespaces here, or set sandbox to auto or none"
                )
            if bwrap is not None:
                log.warning("the tool python: %s. Workers run without it, in pydantic-monty's sandbox alone", refusal)
            return None
        assert bwrap is not None
        find_monty_binary: Any = importlib.import_module("pydantic_monty._binary").find_monty_binary
        worker = Path(os.path.realpath(find_monty_binary()))
        words = bubblewrap.namespaces(bwrap, user=True)
        words += [*bubblewrap.showing([worker], (), Path("/")), *bubblewrap.READ_ONLY, "--", str(worker)]
        # a file that nothing leaves behind
        self._wrapper = os.memfd_create("worker")  # type: ignore[attr-defined, unused-ignore]  # Linux, as bubblewrap
        os.write(self._wrapper, f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'.encode())
        return f"/proc/{os.getpid()}/fd/{self._wrapper}"


def showing_the_last_value(code: str) -> str:
    """``code`` that also prints the value of its last expression, as a console would. Unchanged where it has none, or
    cannot be read: the sandbox then says why.

    >>> showing_the_last_value("x = 1; x + 1")
    'x = 1; \\n_ = (x + 1)\\nif _ is not None: print(repr(_))\\n'
    """
    code = code.replace("\r\n", "\n").replace("\r", "\n")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return code
    if not body or not isinstance(body[-1], ast.Expr) or isinstance(body[-1].value, ast.Starred):
        return code
    last = body[-1]  # with the parentheses around its value
    lines = code.encode().split(b"\n")
    start = sum(len(line) + 1 for line in lines[: last.lineno - 1]) + last.col_offset
    expression = ast.get_source_segment(code, last)
    before = code.encode()[:start].decode()
    return f"{before}\n_ = ({expression})\nif _ is not None: print(repr(_))\n"


def _shown(printed: str) -> str:
    if len(printed) <= ANSWER_CHARACTERS_MAX:
        return printed
    half = ANSWER_CHARACTERS_MAX // 2
    return f"{printed[:half]}\n...\n{printed[-half:]}"
