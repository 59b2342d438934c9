"""The supervisor with processes elsewhere: waits for a place, lost machines, the end of the run meanwhile."""

from __future__ import annotations

import asyncio
import errno
import io
import math
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import anyio
from rich.console import Console

from pipeline.runtime.children import OrphanReaper
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.supervisor.display import Display
from pipeline.supervisor.processes import HealthAnswer, ProcessLost, ProcessSpec, Waiting
from pipeline.supervisor.restarts import RestartLimits, Rule
from pipeline.supervisor.shell import Supervisor
from pipeline.views.step_lines import MetricsTail


@dataclass
class FakeChild:
    """A process that ends when it is told to."""

    name: str
    pid: int = 1
    end: anyio.Event = field(default_factory=anyio.Event)
    code: int = 0
    lost: str = ""

    def terminate(self) -> None:
        self.stop(-signal.SIGTERM)

    def kill(self) -> None:
        self.stop(-signal.SIGKILL)

    def stop(self, code: int, lost: str = "") -> None:
        self.code, self.lost = code, lost
        self.end.set()

    async def wait(self) -> int:
        await self.end.wait()
        if self.lost:
            raise ProcessLost(self.lost)
        return self.code


class FakeHost:
    """Machines with a place for every process but those in ``full``. Each start is put into ``started``."""

    def __init__(self, *full: str) -> None:
        self.full = set(full)
        self.started: asyncio.Queue[FakeChild] = asyncio.Queue()
        self.waiting = anyio.Event()

    async def start(self, spec: ProcessSpec, waiting: Waiting) -> FakeChild:
        if spec.name in self.full:
            waiting("a node with GPU 1")
            self.waiting.set()
            await anyio.sleep_forever()
        waiting("")
        child = FakeChild(spec.name)
        self.started.put_nowait(child)
        return child

    async def check(self, spec: ProcessSpec, child: object) -> HealthAnswer:
        return HealthAnswer(True, "serving")


def supervisor_on(host: FakeHost, folder: Path, *rules: Rule) -> tuple[Supervisor, Display]:
    specs = [ProcessSpec(rule, ("none",), probed=False) for rule in rules]
    limits = RestartLimits(backoff_seconds=0.01)
    supervisor = Supervisor(specs, limits, RunDirectory(folder).create(), OrphanReaper(), host=host)
    output = Console(file=io.StringIO(), width=200)
    return supervisor, Display("run", 1, supervisor.machine.processes, supervisor.answers, output)


async def test_a_process_whose_machine_is_lost_is_started_again_elsewhere(tmp_path: Path) -> None:
    host = FakeHost()
    supervisor, display = supervisor_on(host, tmp_path, Rule("learner", 0, ends_run=True))
    async with anyio.create_task_group() as group:
        group.start_soon(supervisor.run, display, MetricsTail(tmp_path / "none"))
        first = await host.started.get()
        first.stop(0, "its node b is lost")
        (await host.started.get()).stop(0)
    assert supervisor.machine.code is ExitCode.FINISHED
    assert supervisor.machine.processes["learner"].restarts == 1
    said = display.console.file.getvalue()  # type: ignore[attr-defined]
    assert "learner ended (its node b is lost); restart 1 in" in said


async def test_a_process_that_finds_no_place_in_the_limit_of_processes_is_started_again(tmp_path: Path) -> None:
    class Full(FakeHost):
        refusals = 2

        async def start(self, spec: ProcessSpec, waiting: Waiting) -> FakeChild:
            if self.refusals:
                self.refusals -= 1
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return await super().start(spec, waiting)

    host = Full()
    supervisor, display = supervisor_on(host, tmp_path, Rule("learner", 0, ends_run=True))
    async with anyio.create_task_group() as group:
        group.start_soon(supervisor.run, display, MetricsTail(tmp_path / "none"))
        (await host.started.get()).stop(0)
    assert supervisor.machine.code is ExitCode.FINISHED
    said = display.console.file.getvalue()  # type: ignore[attr-defined]
    assert "learner ended (it cannot be started: [Errno 11] Resource temporarily unavailable); restart 2 in" in said


async def test_a_run_ends_while_a_process_waits_for_a_place(tmp_path: Path) -> None:
    host = FakeHost("engine-0")
    rules = (Rule("learner", 0, ends_run=True), Rule("engine-0", 1))
    supervisor, display = supervisor_on(host, tmp_path, *rules)
    async with anyio.create_task_group() as group:
        group.start_soon(supervisor.run, display, MetricsTail(tmp_path / "none"))
        learner = await host.started.get()
        await host.waiting.wait()
        assert supervisor.answers["engine-0"].reason == "a node with GPU 1"
        assert supervisor.machine.processes["engine-0"].started_at == math.inf, "the wait is no part of the start"
        learner.stop(0)
    assert supervisor.machine.code is ExitCode.FINISHED
    assert supervisor.machine.processes["engine-0"].restarts == 0, "the wait counts as no start that failed"
