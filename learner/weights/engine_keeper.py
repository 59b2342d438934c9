"""Keeps one engine at the newest published version; the interfaces of weight publication.

*consumes* targets (the newest replaces older ones) and the version that the engine reports; *produces* ``state``, and
an attempt for every new target and whenever the engine reports another version; *waits for* a new target, or the next
probe of the engine. An engine that is down or slow only lags; it blocks nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import anyio

from learner.weights.engine_control import EngineControl
from pipeline.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
UNSTAMPED = "default"
"""An engine's stamp of the weights that it was started with."""


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that every engine should have."""

    version: int
    folder: Path
    """Hugging Face folder with these weights."""
    initial: bool = False
    """True for the weights that the engines were started with: an unstamped engine then needs only the stamp."""
    tensors: Mapping[str, Tensor] | None = None
    """The same weights in memory, for loaders that do not read files."""

    @property
    def stamp(self) -> str:
        return str(self.version)


@dataclass(frozen=True, slots=True)
class Publication:
    """Outcome of the publication of one version."""

    version: int
    live: tuple[str, ...]
    """Engines that serve it."""
    lagging: Mapping[str, str] = field(default_factory=dict)
    """Engines that do not yet, and why; their keepers keep trying."""
    seconds: float = 0.0
    n_bytes: int = 0


class WeightLoader(Protocol):
    """Puts the weights of a target into one engine that is paused."""

    reads_memory: bool
    """True where it needs ``Target.tensors``; else they are dropped once they are written."""

    async def load(self, engine: EngineControl, target: Target) -> None:
        """Raises :class:`pipeline.errors.EngineError`. Cancelled when it takes too long."""
        ...


class WeightPublisher(Protocol):
    """Keeps all engines at the newest published version while ``run`` runs."""

    async def run(self) -> None:
        """Watch the engines until cancelled: a restarted or lagging one is brought to the newest version."""
        ...

    async def publish(self, version: int, tensors: Mapping[str, Tensor] | None) -> Publication:
        """Make ``tensors`` the weights of ``version`` in every engine; None: the initial model.

        Returns when each engine has it or has failed once, at most ``publish.timeout_seconds`` after the weights are
        written.
        """
        ...


WATCH_SECONDS = 1.0
"""Interval at which a healthy engine is asked for its version: bounds how long a restarted one serves old weights."""
RETRY_SECONDS = 0.5
RETRY_SECONDS_MAX = 5.0
"""After failures of an engine that has served before. One that is still starting is asked every ``RETRY_SECONDS``: the
first rollouts wait for it."""


@dataclass(slots=True)
class EngineState:
    """State of one engine as last seen."""

    live: int | None = None
    """Version it serves, as last confirmed."""
    attempted: int = -1
    """Newest version that was tried, with success or not."""
    trouble: str = "not asked yet"
    """Reason for which the engine does not serve the newest version; empty if it does."""
    loads: int = 0
    lagging: bool = False
    """The engine was slower than a publication waits. Publications do not wait for it until it serves the newest
    version."""
    failures: int = 0
    load_seconds: float = 0.0
    """Pause to resume of the last load."""


def load_needed(served: str, target: Target, *, seen: bool) -> bool:
    """True where an engine that reports ``served`` must load ``target``.

    An engine not ``seen`` before by this process may carry an equal stamp of an earlier run: it loads, except when it
    is fresh and the target is the model that it was started with.
    """
    if served == UNSTAMPED:
        return not target.initial
    return served != target.stamp or not seen


class EngineKeeper:
    """Watches one engine and brings it to its target."""

    def __init__(
        self,
        control: EngineControl,
        loader: WeightLoader,
        timeout_seconds: float,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self.control = control
        self.state = EngineState()
        self.loading: Target | None = None
        """Target whose weights are being read now: its folder must stay."""
        self._loader = loader
        self._timeout_seconds = timeout_seconds
        self._on_failure = on_failure
        self._target: Target | None = None
        self._seen = False
        self._served = False
        """True once it has served a version to this process."""
        self._wake = anyio.Event()
        self._changed = anyio.Event()

    def set_target(self, target: Target) -> None:
        """The engine shall serve ``target``."""
        self._target = target
        self.look_soon()

    def look_soon(self) -> None:
        """Look at once."""
        self._wake.set()

    @property
    def responsive(self) -> bool:
        """True where a publication should wait for it: it was healthy until now, or was never asked."""
        return not self.state.lagging and (self.state.attempted < 0 or not self.state.trouble)

    async def until_attempted(self, version: int) -> None:
        """Wait until ``version`` (or a newer one) was tried."""
        while self.state.attempted < version:
            await self._changed.wait()

    async def until_served(self, version: int) -> None:
        """Wait until the engine serves ``version`` (or a newer one)."""
        while self.state.live is None or self.state.live < version:
            await self._changed.wait()

    async def run(self) -> None:
        """Until cancelled."""
        retry = RETRY_SECONDS
        while True:
            wake, target = self._wake, self._target
            await self._look(target)
            failing = self._served and not self._healthy
            retry = min(RETRY_SECONDS_MAX, retry * 2) if failing else RETRY_SECONDS
            if target is self._target:
                with anyio.move_on_after(WATCH_SECONDS if self._healthy else retry):
                    await wake.wait()
            self._wake = anyio.Event() if wake.is_set() else wake

    @property
    def _healthy(self) -> bool:
        return not self.state.trouble

    async def _look(self, target: Target | None) -> None:
        if target is not None:
            await self._attempt(target)

    async def _attempt(self, target: Target) -> None:
        try:
            with anyio.fail_after(self._timeout_seconds):
                await self._bring_to(target)
        except TimeoutError:
            self._failed(target, f"took longer than publish.timeout_seconds={self._timeout_seconds:g}")
        except EngineError as error:
            self._failed(target, str(error))
        else:
            if self.state.trouble:
                log.info("engine %s serves version %d", self.control.url, target.version)
            self.state.live, self.state.trouble = target.version, ""
            self.state.lagging = self.state.lagging and target is not self._target
            self._attempted(target)

    async def _bring_to(self, target: Target) -> None:
        served = await self.control.version()
        if load_needed(served, target, seen=self._seen):
            await self._load(target)
        elif served != target.stamp:
            await self.control.stamp(target.stamp)
        self._seen = self._served = True

    async def _load(self, target: Target) -> None:
        """Pause, load, stamp; resume in any case, cancellation included."""
        self.state.live = None
        start = time.perf_counter()
        self.loading = target
        try:
            await self.control.pause()
            await self._loader.load(self.control, target)
            await self.control.stamp(target.stamp)
        finally:
            self.loading = None
            with anyio.CancelScope(shield=True):
                await self._resume()
        self.state.loads += 1
        self.state.load_seconds = time.perf_counter() - start

    async def _resume(self) -> None:
        try:
            await self.control.resume()
        except EngineError as error:
            log.warning("engine %s could not be resumed: %s", self.control.url, error)
            self._seen = False

    def _failed(self, target: Target, why: str) -> None:
        if self.state.trouble != why:
            log.warning("engine %s does not serve version %d: %s", self.control.url, target.version, why)
        self.state.live, self.state.trouble = None, why
        self.state.failures += 1
        self._seen = False
        if target.version > self.state.attempted:
            self._on_failure()
        self._attempted(target)

    def _attempted(self, target: Target) -> None:
        self.state.attempted = max(self.state.attempted, target.version)
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
