"""Engines that share the learner's device: each is kept asleep in the learner's turn, and at the newest version else.

*Consumes* turns (:mod:`learner.publisher.turns`) and targets; *produces* sleep, wake and load calls of one engine, one
after another; *waits for* the engine's answers; *unblocked by* a new turn, a new target, or the next look.

Waking an engine with new weights: weights memory, load, stamp, KV cache. vLLM samples only once both are there, so no
token comes from weights that are half loaded, or from discarded ones. A load that fails on the way leaves the engine
asleep, and it is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import anyio

from learner.publisher.base import Target, WeightLoader
from learner.publisher.control import EngineControl
from learner.publisher.keeper import EngineKeeper, load_needed
from learner.publisher.turns import Order, Turns
from pipeline.errors import EngineError, EngineProtocolError
from pipeline.metrics.learner import LearnerMetrics

log = logging.getLogger(__name__)


class SharedDevice:
    """The shell around :class:`Turns`, for the keepers and for the learner's loop."""

    def __init__(
        self, engines: Iterable[str], metrics: LearnerMetrics, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.turns = Turns(engines)
        self.troubles: dict[str, str] = {}
        """Why an engine does not fall asleep."""
        self._metrics = metrics
        self._now = now
        self._changed = anyio.Event()
        self._nudges: list[Callable[[], None]] = []

    def follow(self, nudge: Callable[[], None]) -> None:
        """Call ``nudge`` whenever the order changes."""
        self._nudges.append(nudge)

    async def taken(self, waiting: Callable[[str], None] = lambda why: None, look_seconds: float = 5.0) -> None:
        """Ask for the device and wait until all engines sleep. Unbounded: without the device nothing can be trained;
        ``waiting`` is told why, at least every ``look_seconds``. Cancelled on the way, the request is withdrawn."""
        granted = self.turns.request()
        self._tell()
        try:
            while not granted:
                waiting(self.waiting_for())
                with anyio.move_on_after(look_seconds):
                    await self._changed.wait()
                granted = self.turns.granted
        finally:
            if not granted:
                self.turns.withdraw()
                self._tell()
        self._metrics.device_handovers_total.labels(to="learner").inc()

    def give_back(self) -> None:
        """The engines' turn: they wake with the next target. Harmless when the learner does not have it."""
        if self.turns.give_back():
            self._metrics.device_handovers_total.labels(to="engines").inc()
        self._tell()

    def waiting_for(self) -> str:
        """``engine http://… to sleep (no answer)``."""
        return ", ".join(
            f"engine {name} to sleep" + (f" ({self.troubles[name]})" if name in self.troubles else "")
            for name in self.turns.awake
        )

    def fell_asleep(self, engine: str) -> None:
        self.troubles.pop(engine, None)
        self.turns.fell_asleep(engine, self._now())
        self._tell()

    def woke(self, engine: str) -> None:
        self._metrics.engine_sleep_seconds_total.inc(self.turns.woke(engine, self._now()))

    def failed(self, operation: str, engine: str, why: str) -> None:
        """``operation``: sleep or wake."""
        self._metrics.device_handover_failures_total.labels(operation=operation).inc()
        if operation == "sleep":
            if self.troubles.get(engine) != why:
                log.warning("engine %s does not sleep: %s", engine, why)
            self.troubles[engine] = why

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        for nudge in self._nudges:
            nudge()


class ColocatedKeeper(EngineKeeper):
    """A keeper that follows the turns of ``device``."""

    def __init__(
        self,
        control: EngineControl,
        loader: WeightLoader,
        timeout_seconds: float,
        on_failure: Callable[[], None],
        device: SharedDevice,
        sleep_level: int,
    ) -> None:
        super().__init__(control, loader, timeout_seconds, on_failure)
        self._device = device
        self._level = sleep_level
        self._rests = False
        """It was put to sleep by this process and not woken since."""
        device.follow(self.nudge)

    async def _look(self, target: Target | None) -> None:
        if self._device.turns.order() is Order.SLEEP:
            await self._keep_asleep()
        else:
            await super()._look(target)

    async def _keep_asleep(self) -> None:
        url = self.control.url
        try:
            with anyio.fail_after(self._timeout_seconds):
                if not self._rests or not await self.control.is_sleeping():
                    self._device.woke(url)
                    self.state.live, self._rests = None, False
                    await self.control.sleep(self._level)
                    if not await self.control.is_sleeping():
                        raise EngineProtocolError(f"expected {url} to sleep after /sleep, but it says that it does not")
        except (TimeoutError, EngineError) as error:
            why = str(error) or f"took longer than publish.timeout_seconds={self._timeout_seconds:g}"
            self._device.woke(url)
            self._rests = False
            self._device.failed("sleep", url, why)
        else:
            if not self._rests:
                self._rests = True
                self._device.fell_asleep(url)

    @property
    def _well(self) -> bool:
        """A keeper whose engine does not do as it is told looks again soon."""
        asked = self._device.turns.order() is Order.SLEEP
        return self._rests if asked else super()._well

    async def _bring_to(self, target: Target) -> None:
        served = await self.control.version()
        asleep = await self.control.is_sleeping()
        if asleep or load_needed(served, target, known=self._known):
            await (self._wake_with(target) if asleep else self._load(target))
        elif served != target.stamp:
            await self.control.stamp(target.stamp)
        self._known = True

    async def _wake_with(self, target: Target) -> None:
        """With the weights of ``target``. Whatever fails, an engine without whole weights does not go on."""
        self.state.live, self._rests = None, False
        self._device.woke(self.control.url)
        start = time.perf_counter()
        self.loading = target
        try:
            if await self.control.wake_up("weights"):
                await self.control.pause()  # it was only paused, and this call has ended that
            await self._loader.load(self.control, target)
            await self.control.stamp(target.stamp)
            if not await self.control.wake_up("kv_cache"):
                raise EngineProtocolError(
                    f"expected {self.control.url} to be awake after /wake_up, but it still sleeps"
                )
            await self.control.resume()
        except BaseException:
            self._device.failed("wake", self.control.url, "")
            raise
        finally:
            self.loading = None
        self.state.loads += 1
        self.state.load_seconds = time.perf_counter() - start
