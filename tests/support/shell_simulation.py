"""The real shells of stage, hub, links, actors, engine pools, learner session and publisher on virtual time, over an
in-memory wire, with faults.

What runs is :func:`pipeline.stage.role.serve` over a store and the hub, :func:`actors.process.role.main` with its
pool, router and client, and :mod:`tests.support.simulated_learner` around the learner's session, publisher, keepers and
checkpoints. Simulated are the wire, HTTP and the engines behind it, training, the time that the disk takes, and what it
refuses or loses; what threads do happens in the event loop. A history draws faults for its first seconds
(:mod:`tests.support.shell_faults`). Then it must end its run in time; :class:`tests.support.shell_auditor.Auditor`
compares the ledgers of all sides, meanwhile and at the end.

Play many histories: ``python -m tests.support.shell_simulation 10000`` (with ``--from`` the first seed, with
``--processes`` on several cores).
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aiohttp
import anyio
import anyio.to_thread

from actors.process import role as actor_role
from learner.weights.publisher import Publisher
from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, leaves
from pipeline.runtime.process import RoleContext
from pipeline.runtime.run_directory import RunDirectory
from pipeline.stage import loop, role
from pipeline.stage.core import StageCore
from pipeline.stage.role import UntrainedTraces
from tests.support.memory_transport import Faults, MemoryHub, MemoryLink, MemoryNetwork
from tests.support.shell_auditor import Auditor, Violation
from tests.support.shell_faults import FAULTS
from tests.support.simulated_actor import SimulatedActors
from tests.support.simulated_disk import SimulatedDisk
from tests.support.simulated_engine import PROCESS, EngineFleet, SimulatedEngine
from tests.support.simulated_learner import SimulatedLearner, Truth
from tests.support.virtual_time import run_virtually

UPDATES, GROUPS, ROLLOUTS, SLOTS = 6, 2, 2, 4
FAULT_SECONDS = 12.0
"""Faults happen in this time."""
SILENCE_SECONDS_MAX = 3.0
REPAIR_SECONDS_MAX, UPDATE_SECONDS_MAX = 80.0, 4.0
"""Longest time from the last fault until the run has its rate again, and of an update from then on: an order that a
lying peer took expires after 37 s, that of its replacement as well; without faults an update takes 1.5 s."""
WALL_SECONDS = 1.7e9
"""Unix time at the begin of a history."""


class ShellSimulation:
    """One history. :meth:`play` runs it and audits it. ``faults``: names of those that are drawn. ``joins``: engines
    join and leave."""

    def __init__(self, folder: Path, seed: int, faults: Sequence[str] = tuple(FAULTS), *, joins: bool = False) -> None:
        self.rng = rng = random.Random(seed)
        self._joins = random.Random(f"engines that join {seed}") if joins else None
        """A stream of its own: the same history without them is not another one."""
        self._faults = [FAULTS[name] for name in faults]
        of_the_wire = Faults(
            seed,
            disconnect=rng.choice((0.0, 0.0, 0.02, 0.1)),
            delay_seconds=(0.0, rng.choice((0.0, 0.01, 0.2))),
            greetings=rng.random() < 0.5,
        )
        self.network = MemoryNetwork(of_the_wire)
        self.network.keys = rng.random() < 0.5
        self.config = _config(folder, seed, rng)
        self.directory = RunDirectory(self.config.run.path).create()
        self.disk = SimulatedDisk(self.directory, rng)
        self.silence_seconds_max = SILENCE_SECONDS_MAX
        self.truth = Truth()
        self.auditor = Auditor(self)
        self.playing = SimulatedActors(rng, self.auditor.moved)
        self.fleet: EngineFleet
        self.core: StageCore | None = None
        self.hub: MemoryHub | None = None
        self.learner: SimulatedLearner | None = None
        self.unexpected: list[str] = []
        """Processes that ended although nobody killed them."""
        self.lies = 0
        """Impossible messages that the learner sent."""
        self.contexts: dict[str, RoleContext] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}
        self._learners = 0
        self.calm = False
        """No fault comes any more."""
        self.start: Callable[..., None]
        """Begin a task."""

    @property
    def publisher(self) -> Publisher | None:
        """Of the learner that is alive."""
        return None if self.learner is None else self.learner.publisher

    @property
    def may_be_refused(self) -> bool:
        """True if the stage may refuse what the learner tells."""
        return self.lies > 0 or self.disk.went_back

    def play(self) -> float:
        """The virtual time that it took. Raises :class:`Violation`."""
        with self._patched():
            return run_virtually(self._play)

    async def _play(self) -> float:
        lives: dict[str, Callable[[], Awaitable[None]]] = {"stage": self._stage, "learner": self._learner}
        lives |= {name: partial(self._actor, name) for name in ("actor-0", "actor-1")}
        async with anyio.create_task_group() as tasks:
            self.start = tasks.start_soon
            self.fleet = EngineFleet(list(self.config.engine.urls), self.rng, tasks.start_soon)
            for engine in self.fleet.engines.values():
                tasks.start_soon(self.boot, engine)
            for name, life in lives.items():
                tasks.start_soon(self._supervise, name, life)
            tasks.start_soon(self._watch)
            tasks.start_soon(self._mischief)
            if self._joins is not None:
                tasks.start_soon(self._come_and_go, self._joins)
            await anyio.sleep(FAULT_SECONDS)
            self._become_calm()
            left = UPDATES - (0 if self.learner is None else self.learner.updates)
            with anyio.move_on_after(REPAIR_SECONDS_MAX + UPDATE_SECONDS_MAX * left):
                while not self.auditor.settled():
                    await anyio.sleep(0.5)
            ended = anyio.current_time()
            self.auditor.audit()
            tasks.cancel_scope.cancel()
        return ended

    def _become_calm(self) -> None:
        """No fault from here on."""
        self.calm, self.network.faults, self.disk.error = True, Faults(), 0
        for engine in self.fleet.members:
            engine.mend()
            if not engine.up:
                self.start(self.boot, engine)

    async def _watch(self) -> None:
        while True:
            await anyio.sleep(0.25)
            self.auditor.check()

    async def _supervise(self, name: str, life: Callable[[], Awaitable[None]]) -> None:
        """As the supervisor does: a process that ends is started again."""
        PROCESS.set(name)
        while True:
            with anyio.CancelScope() as scope:
                self._scopes[name] = scope
                try:
                    await life()
                except* Exception as errors:
                    self._ended(name, errors)
            await anyio.sleep(self.rng.uniform(0.1, 2.0))

    def _ended(self, name: str, errors: BaseExceptionGroup[Exception]) -> None:
        """A process ended with an error. Reasons to: a disk that gives errors, and an impossible claim, which is also
        what the learner tells a store that went back. Such a store may also take a late HELLO of the learner before for
        that of a newer one."""
        single = list(leaves(errors))
        if any(isinstance(error, Violation) for error in single):
            raise errors
        reasons = ["Input/output error", "disk I/O error"]
        if self.may_be_refused:
            reasons += ["refused what this learner told", "was replaced by process"]
        if not any(reason in str(error) for error in single for reason in reasons):
            self.unexpected.append(f"{name}: {leaves!r}")

    async def _stage(self) -> None:
        self.disk.before_start()
        self.contexts["stage"] = ctx = RoleContext("replay", 0, self.config, self.directory)
        self.hub = MemoryHub(self.network, silence_seconds_max=SILENCE_SECONDS_MAX)
        try:
            await role.serve(ctx, self.hub)
        finally:
            self.core = self.hub = None

    async def _learner(self) -> None:
        self._learners += 1
        PROCESS.set(f"learner#{self._learners}")
        self.learner = learner = SimulatedLearner(self.config, self.directory, self.truth, self.rng, self.fleet)
        learner.on_groups = self.auditor.delivered
        self._learner_over = over = anyio.Event()
        scope = anyio.CancelScope()

        async def live() -> None:
            with scope:
                try:
                    await learner.run(self._link("learner"))
                except* AfterplayError as errors:
                    if not learner.stopped:
                        self._ended("learner", errors)
                except* Exception as errors:
                    self._ended("learner", errors)
            learner.publisher = None
            over.set()

        self.start(live)
        try:
            await over.wait()
        except BaseException:
            scope.cancel()
            learner.publisher = None
            raise

    async def _actor(self, name: str) -> None:
        self.contexts[name] = ctx = RoleContext(name, 0, self.config, self.directory)
        await actor_role.main(ctx)

    def _link(self, name: str) -> MemoryLink:
        return MemoryLink(self.network, name, silence_seconds_max=SILENCE_SECONDS_MAX)

    async def boot(self, engine: SimulatedEngine) -> None:
        boots = engine.boots
        await anyio.sleep(self.rng.uniform(0.0, 3.0))
        if boots == engine.boots:
            engine.boot()

    async def _mischief(self) -> None:
        rng = self.rng
        for at in sorted(rng.uniform(0.5, FAULT_SECONDS - 1) for _ in range(rng.randint(1, 8))):
            await anyio.sleep(at - anyio.current_time())
            rng.choices([fault for fault, _ in self._faults], [weight for _, weight in self._faults])[0](self)

    async def _come_and_go(self, rng: random.Random) -> None:
        """Engines join, and leave: they serve on for a while, and may end before their requests do."""
        for at in sorted(rng.uniform(0.5, FAULT_SECONDS - 1) for _ in range(rng.randint(1, 6))):
            await anyio.sleep(at - anyio.current_time())
            members = self.fleet.members
            if len(members) > 1 and rng.random() < 0.5:
                engine = rng.choice(members)
                self.fleet.leave(engine)
                self.after(rng.uniform(0.0, 8.0), engine.die)
            else:
                engine = SimulatedEngine(f"http://engine-{len(self.fleet.engines)}:8000", rng, self.start)
                self.fleet.join(engine)
                self.start(self.boot, engine)

    def kill(self, name: str) -> None:
        """As ``kill -9``."""
        if name == "stage":
            self.network.kill_hub()
        else:
            self.network.kill_link(name)
        if name == "learner" and self.learner is not None:
            self.learner.stopped = True
        if name in self._scopes:
            self._scopes[name].cancel()

    def replace_learner(self, seconds: float) -> None:
        """Stop the learner for ``seconds``; another begins meanwhile."""
        learner = self.learner
        if learner is not None and learner.session is not None and learner.session.epoch:
            learner.stopped = True
            self.network.hold("learner", seconds)
            self.fleet.held[f"learner#{self._learners}"] = anyio.current_time() + seconds
            self._learner_over.set()

    def after(self, seconds: float, call: Callable[..., object], *arguments: object) -> None:
        """Call a function later."""

        async def later() -> None:
            await anyio.sleep(seconds)
            call(*arguments)

        self.start(later)

    @contextmanager
    def _patched(self) -> Iterator[None]:
        rng = self.rng
        slow = rng.choice((0.02, 0.1, 0.5))

        async def run_sync(function: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
            """A thread that works for a while before and after what it does."""
            await anyio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, slow))))
            result = function(*arguments)
            await anyio.sleep(rng.choice((0.0, 0.0, rng.uniform(0, slow))))
            return result

        def core(*arguments: Any, **more: Any) -> StageCore:
            self.core = StageCore(*arguments, **more)
            return self.core

        now = anyio.current_time
        clock = SimpleNamespace(perf_counter=now, time=lambda: WALL_SECONDS + now())
        with ExitStack() as stack:
            stack.enter_context(self.disk.below())
            stack.enter_context(self.playing.over(self._link))
            for target, name, value in (
                (anyio.to_thread, "run_sync", run_sync),
                (aiohttp, "ClientSession", lambda **more: self.fleet.session(**more)),
                (aiohttp, "TCPConnector", lambda **_: None),
                (actor_role, "engine_addresses", lambda *_: self.fleet),
                (actor_role, "ENGINE_WAIT_SECONDS_MAX", 20.0),
                (actor_role, "DRAIN_SECONDS_MAX", 2.0),
                (role, "StageCore", core),
                (role, "untrained_traces", lambda *_, **__: nullcontext(UntrainedTraces())),
                (role, "interrupting_blocks", nullcontext),
                (loop, "time", clock),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            yield


def _config(folder: Path, seed: int, rng: random.Random) -> RunConfig:
    engines = rng.choice((1, 2, 2, 3))
    return RunConfig.model_validate(
        {
            "run": {"directory": str(folder), "name": "r", "id": "r1", "total_steps": UPDATES, "seed": seed},
            "groups": {"n_rollout": ROLLOUTS, "groups_per_step": GROUPS, "attempts_max": 100},
            "staleness": {"max": rng.choice((0, 1, 2))},
            "environments": {"a": {"name": "tests.support.simulated_actor:Turns", "max_seconds": 5}},
            "stage": {"synchronous": "NORMAL", "silence_seconds_max": SILENCE_SECONDS_MAX},
            "sampling": {"max_tokens": 4},
            "actor": {"concurrency": SLOTS},
            "engine": {
                "kind": "external",
                "urls": [f"http://engine-{number}:8000" for number in range(engines)],
                "request_seconds_max": 4.0,
                "part_tokens": 2,
            },
            "publish": {"timeout_seconds": 5.0},
            "replay": {"keep_trained": seed % 3},
        }
    )


def play(folder: Path, seed: int, faults: Sequence[str] = tuple(FAULTS), *, joins: bool = False) -> float:
    """One history; the virtual seconds that it took. Raises :class:`Violation` that names the seed."""
    try:
        return ShellSimulation(folder / str(seed), seed, faults, joins=joins).play()
    except Exception as error:
        first = next(leaves(error))
        raise Violation(f"history {seed}: {type(first).__name__}: {first}") from first


def problem(seed: int) -> str:
    """The violation that one history finds; empty if none."""
    logging.disable(logging.CRITICAL)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        try:
            play(Path(folder), seed, joins=seed % 2 == 1)
        except Violation as violation:
            return str(violation)
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("histories", type=int)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    started, found = time.monotonic(), 0
    seeds = range(options.first, options.first + options.histories)
    with multiprocessing.get_context("spawn").Pool(options.processes, maxtasksperchild=500) as pool:
        for text in pool.imap(problem, seeds, chunksize=10):
            if text:
                found += 1
                print(text, flush=True)
    print(f"{options.histories} histories, {found} failed, {time.monotonic() - started:.0f} s")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
