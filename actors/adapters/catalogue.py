"""The adapters by name with their requirements, and code that several of them share: splits of seeds, random states,
ends of what did not begin, lists of actions, and a test of how long a start takes."""

from __future__ import annotations

import importlib
import importlib.util
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from pipeline.errors import ConfigurationError, explained

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter and the package behind it."""

    module: str | None
    """Module that has to be importable. None: nothing, it talks to a server."""
    install: str
    """Command that installs it."""
    program: str | None = None
    """A program that has to be on the PATH too."""
    server: str | None = None
    """Server that has to run elsewhere during its episodes."""

    @property
    def missing(self) -> str | None:
        """Instructions to follow before it can be used; None when nothing is missing."""
        try:
            found = self.module is None or importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            return self.install
        if self.program is not None and not _is_there(self.program):
            return f"install {self.program} and put it on the PATH"
        return None


def _is_there(program: str) -> bool:
    path = shutil.which(program)
    if path == "/usr/bin/java" and sys.platform == "darwin":  # macOS has it without any Java
        return subprocess.run(["/usr/libexec/java_home"], capture_output=True).returncode == 0
    return path is not None


ADAPTERS: Mapping[str, Adapter] = {
    "alfworld": Adapter("alfworld", "pip install '.[alfworld]' && alfworld-download"),
    "appworld": Adapter(
        None,
        "pip install appworld && appworld install && appworld download data (in an environment of its own)",
        server="needs its servers: appworld serve environment",
    ),
    "babyai": Adapter("minigrid", "pip install '.[minigrid]'"),
    "bfcl": Adapter("bfcl_eval", "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"),
    "gymnasium": Adapter("gymnasium", "pip install '.[gymnasium]'"),
    "openenv": Adapter("websockets", "pip install '.[openenv]'", server="needs a server"),
    "reasoning_gym": Adapter("reasoning_gym", "pip install '.[reasoning-gym]'"),
    "textarena": Adapter("textarena", "pip install '.[textarena]'"),
    "textworld_express": Adapter("textworld_express", "pip install '.[textworld-express]'", program="java"),
}
"""Adapters by the name that run files use."""


def package(name: str, *modules: str) -> Any:
    """The package behind the adapter ``name``, after importing ``modules`` of it too.

    Raises :class:`ConfigurationError` that says what to install."""
    adapter = ADAPTERS[name]
    if adapter.module is None:
        raise ConfigurationError(f"the environment {name} has no package that could be imported here")
    if adapter.missing is not None:
        raise ConfigurationError(f"the environment {name} is missing an installation: {adapter.missing}")
    with explained(
        f"the environment {name}, which is installed by {adapter.install}: importing {adapter.module} failed with"
    ):
        for module in modules:
            importlib.import_module(module)
        return importlib.import_module(adapter.module)


_ONE_AT_A_TIME = threading.Lock()


@contextmanager
def own_random(mine: random.Random) -> Iterator[None]:
    """``random``'s global state is ``mine`` inside, and what it was before after that. One at a time in a process."""
    with _ONE_AT_A_TIME:
        before = random.getstate()
        random.setstate(mine.getstate())
        try:
            yield
        finally:
            mine.setstate(random.getstate())
            random.setstate(before)


@contextmanager
def numpy_state_restored() -> Iterator[None]:
    """Restores NumPy's global random state afterwards."""
    numpy = sys.modules.get("numpy")
    before = numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        if numpy is not None:
            numpy.random.set_state(before)


def held_out(first: int) -> Mapping[str, range]:
    """Seeds below ``first`` are for training, as many from there on are the ``eval`` split."""
    return {"train": range(first), "eval": range(first, 2 * first)}


def splits_of(lists: Mapping[str, Sequence[object]]) -> dict[str, range]:
    """Seeds of fixed tasks in lists by split: those of list ``i`` begin at ``i * 100_000``."""
    return {name: range(i * 100_000, i * 100_000 + len(tasks)) for i, (name, tasks) in enumerate(lists.items())}


def task_at(lists: Mapping[str, Sequence[T]], seed: int) -> T:
    """The task of a seed of :func:`splits_of`; any other seed is taken as one of the first list."""
    splits = splits_of(lists)
    name = next((name for name, seeds in splits.items() if seed in seeds), next(iter(lists)))
    return lists[name][(seed - splits[name].start) % len(lists[name])]


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls ``undo`` where the code inside raises or is cancelled: an episode that did not begin holds nothing."""
    try:
        yield
    except BaseException:
        undo()
        raise


def with_actions(seen: str, actions: Iterable[object], most: int) -> str:
    """An observation, followed by the possible actions in alphabetical order, ``most`` of them."""
    names = sorted(map(str, actions))
    more = ", ..." if len(names) > most else ""
    return f"{seen}\nPossible actions: {', '.join(names[:most])}{more}" if names else seen


BLOCKING_SECONDS = 0.005
"""A start that takes longer would hold up the other episodes of the actor."""


def takes_long(start: Callable[[], object]) -> bool:
    """True if ``start``, called once, takes longer than :data:`BLOCKING_SECONDS`."""
    started = time.perf_counter()
    start()
    return time.perf_counter() - started > BLOCKING_SECONDS
