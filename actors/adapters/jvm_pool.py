"""Java processes of TextWorldExpress, shared by many games.

The package starts one process (120 MB, more later) for each of its environments; a process can hold any number of
games. Calls into one process are made one at a time. Games whose Java code keeps state outside of the game get a
separate process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

from actors.adapters.catalogue import undone_on_error

WAIT_SECONDS_MAX = 30.0
"""Longest wait of a start for a process of its own."""
CALL_SECONDS_MAX = 60.0
"""Longest time of one call into a process while others wait for it."""


@dataclass(eq=False, slots=True)
class Process:
    """One Java process. Every call into it is made inside :meth:`call`."""

    main: Any
    """The package's environment that started it."""
    games: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _since: float = 0.0

    def __post_init__(self) -> None:
        """Keep Python's garbage collector from calls into Java, on which any thread would wait for one that hangs."""
        self.main._gateway._gateway_client.gateway_property.enable_memory_management = False
        import_module("py4j.finalizer").clear_finalizers(clear_all=True)

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call at a time. A process that hangs is ended, which also frees the thread that hangs with it. Raises
        :class:`TimeoutError`."""
        while not self._lock.acquire(timeout=CALL_SECONDS_MAX):
            if time.monotonic() - self._since >= CALL_SECONDS_MAX:
                self.forget()
                self.main._gateway.java_process.kill()
                raise TimeoutError(
                    f"a Java process did not answer for {CALL_SECONDS_MAX:g} s and was ended; its games are lost, "
                    "the next game gets a new process"
                )
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._lock.release()

    def let_go(self, java_object: Any) -> None:
        """Java may collect the object; a dead process needs no call. Inside :meth:`call`."""
        self.main._gateway.detach(java_object)

    def forget(self) -> None:
        """Close the connection: py4j would otherwise report every collected object to a dead process."""
        self.main._gateway._gateway_client.is_connected = False


class Pool:
    """At most ``processes_max`` processes, started when they are needed."""

    def __init__(self, environment: type, processes_max: int, alone: bool, heap_mib: int) -> None:
        """``environment``: the package's class. ``alone``: one game in a process at a time. ``heap_mib``: the most that
        the objects of one process take."""
        self._environment = environment
        self._max = processes_max
        self._alone = alone
        self._heap_mib = heap_mib
        self._processes: list[Process] = []
        logging.getLogger("py4j").setLevel(logging.CRITICAL)  # what fails is raised as well
        self._changed = threading.Condition()

    def take(self) -> tuple[Process, Any]:
        """A process and a new game in it. A process that died is replaced. Raises :class:`TimeoutError` where all stay
        taken."""
        with self._changed:
            self._bury()
            has_room = lambda: len(self._processes) < self._max or not all(p.games for p in self._processes)  # noqa: E731
            if self._alone and not self._changed.wait_for(has_room, WAIT_SECONDS_MAX):
                raise TimeoutError(
                    f"no Java process became free in {WAIT_SECONDS_MAX:g} s: this game needs one for each episode. "
                    "Raise options.jvms, or lower actor.concurrency"
                )
            if len(self._processes) < self._max and all(p.games for p in self._processes):
                with _java_options(f"-Xmx{self._heap_mib}m"):
                    self._processes.append(Process(self._environment(envStepLimit=10**9)))
            process = min(self._processes, key=lambda p: p.games)
            process.games += 1
        with undone_on_error(lambda: self.give_back(process)), process.call():
            return process, _game_in(self._environment, process.main)

    def give_back(self, process: Process, game: Any = None) -> None:
        """``game`` of it ended, or none was made. Java is notified here, in a thread that may wait: py4j's objects are
        in cycles, so that else Python's garbage collector would tell it, late, and on whatever thread it runs on."""
        if game is not None:
            with suppress(TimeoutError), process.call():
                process.let_go(game.server)
        with self._changed:
            process.games -= 1
            self._changed.notify()

    def close(self) -> None:
        """End every process."""
        with self._changed:
            for process in self._processes:
                _end(process.main)
            self._processes.clear()

    def _bury(self) -> None:
        """Forget processes that died."""
        dead = [p for p in self._processes if p.main._gateway.java_process.poll() is not None]
        for process in dead:
            process.forget()
            with suppress(Exception):
                _end(process.main)
        self._processes = [p for p in self._processes if p not in dead]


@contextmanager
def _java_options(options: str) -> Iterator[None]:
    """Options for a Java process that is started inside, unless the environment of this process sets some already."""
    mine = "JAVA_TOOL_OPTIONS" not in os.environ
    if mine:
        os.environ["JAVA_TOOL_OPTIONS"] = options
    try:
        yield
    finally:
        if mine:
            os.environ.pop("JAVA_TOOL_OPTIONS", None)


def _game_in(base: type, main: Any) -> Any:
    """One more game in a running process: the package's own class with everything but the game shared."""
    game: Any = object.__new__(_shared(base))
    game.__dict__.update(main.__dict__)
    game.server = main._gateway.jvm.textworldexpress.runtime.PythonInterface()
    game.runHistory, game.lastStepScore = [], 0
    game.gameName, game.gameParams, game.seed = None, "", None
    return game


@cache
def _shared(base: type) -> type:
    """The package's class without the end of the process when a game is collected."""
    return type("SharedGame", (base,), dict.fromkeys(("close", "__del__"), lambda _: None))


def _end(main: Any) -> None:
    """End a process, alive or not, and close its pipes and the package's scratch file."""
    java = main._gateway.java_process
    try:
        main.close()
    finally:
        for pipe in (java.stdin, java.stdout, getattr(main, "_obj_tree_tempfile", None)):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()
        java.wait(timeout=5)
