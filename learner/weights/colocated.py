"""Sleep mode of engines that share a GPU with the learner: arbitration, keepers, sleep before the learner loads.

:class:`DeviceArbiter` is a pure state machine without clock, socket or task::

    ENGINES ──request──► ASKED ──last engine asleep──► LEARNER ──release──► ENGINES
       ▲                   │
       └─────withdraw──────┘

An engine counts as asleep only when it reported that after the request. One that is down may be starting again and
taking memory: it blocks the grant like one that is awake. One that starts while the learner has the device (an
*intruder*) is put to sleep at once; training continues.

Invariants, property-tested: the learner is granted the device only in a moment when all engines are asleep; no engine
gets the order to serve while the learner holds the device or requests it; every grant follows one request and ends in
at most one release; time asleep is counted once, whatever is repeated.

:class:`ColocatedKeeper` *consumes* changes of the holder and targets; *produces* sleep, wake and load calls of one
engine, one after another; *waits for* the engine's answers; *unblocked by* a new holder, a new target, or the next
look. It wakes an engine with new weights in this order: weights memory, load, stamp, KV cache. vLLM samples only once
both are there, so no token comes from weights that are half loaded or discarded. A load that fails leaves the engine
asleep and is tried again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from enum import StrEnum

import anyio

from learner.metrics import LearnerMetrics
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import EngineKeeper, Target, WeightLoader, WeightProbe, load_needed
from pipeline.errors import EngineError, EngineProtocolError
from pipeline.runtime.engine_keys import authorization, find_key
from pipeline.runtime.http import HttpClient
from pipeline.runtime.process import RoleContext
from pipeline.runtime.progress import RoleState

log = logging.getLogger(__name__)


class Holder(StrEnum):
    ENGINES = "engines"
    ASKED = "asked"
    """The learner wants it; engines are falling asleep."""
    LEARNER = "learner"


class DeviceArbiter:
    """State of the shared device. ``engines`` by name; times are seconds of any monotonic clock."""

    def __init__(self, engines: Iterable[str]) -> None:
        self.holder = Holder.ENGINES
        self._asleep_since: dict[str, float | None] = dict.fromkeys(engines)
        self._said: set[str] = set()
        """Engines that have said since the request that they sleep."""

    @property
    def granted(self) -> bool:
        return self.holder is Holder.LEARNER

    @property
    def awake(self) -> tuple[str, ...]:
        """Engines that have not said since the request that they sleep."""
        return tuple(name for name in self._asleep_since if name not in self._said)

    @property
    def engines_sleep(self) -> bool:
        """The order for every engine: to sleep, or else to serve."""
        return self.holder is not Holder.ENGINES

    def request(self) -> bool:
        """The learner asks for the device; True where it has it. Idempotent."""
        if self.holder is Holder.ENGINES:
            self.holder = Holder.ASKED
            self._said.clear()
        return self._grant()

    def withdraw(self) -> None:
        """The learner takes its request back. Changes nothing once it is granted."""
        if self.holder is Holder.ASKED:
            self.holder = Holder.ENGINES

    def fell_asleep(self, engine: str, now: float) -> bool:
        """``engine`` sleeps; True where the learner has the device. Idempotent."""
        if self._asleep_since[engine] is None:
            self._asleep_since[engine] = now
        self._said.add(engine)
        return self._grant()

    def woke(self, engine: str, now: float) -> float:
        """``engine`` is awake, restarted or gone; seconds that it slept, 0 if it did not."""
        self._said.discard(engine)
        since, self._asleep_since[engine] = self._asleep_since[engine], None
        return 0.0 if since is None else max(0.0, now - since)

    def release(self) -> bool:
        """The learner releases the device; True where it had it."""
        had, self.holder = self.granted, Holder.ENGINES
        return had

    def _grant(self) -> bool:
        if self.holder is Holder.ASKED and not self.awake:
            self.holder = Holder.LEARNER
        return self.granted


class SharedDevice:
    """Asynchronous shell of :class:`DeviceArbiter`, for the keepers and the learner's loop."""

    def __init__(self, engines: Iterable[str], metrics: LearnerMetrics, sleep_level: int = 1) -> None:
        self.arbiter = DeviceArbiter(engines)
        self.sleep_level = sleep_level
        self.reasons: dict[str, str] = {}
        """Reasons for which engines do not fall asleep."""
        self._metrics = metrics
        self._changed = anyio.Event()
        self._callbacks: list[Callable[[], None]] = []

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` whenever the order changes."""
        self._callbacks.append(callback)

    async def acquire(self, waiting: Callable[[str], None] = lambda reason: None, look_seconds: float = 5.0) -> None:
        """Ask for the device and wait until all engines sleep. Unbounded: without the device nothing can be trained;
        ``waiting`` gets the reason, at least every ``look_seconds``. Where cancelled, the request is withdrawn."""
        granted = self.arbiter.request()
        self._notify()
        try:
            while not granted:
                waiting(self.reason())
                with anyio.move_on_after(look_seconds):
                    await self._changed.wait()
                granted = self.arbiter.granted
        finally:
            if not granted:
                self.arbiter.withdraw()
                self._notify()
        self._metrics.device_handovers_total.labels(to="learner").inc()

    def release(self) -> None:
        """Return the device to the engines, which wake with the next target. Harmless when the learner has it not."""
        if self.arbiter.release():
            self._metrics.device_handovers_total.labels(to="engines").inc()
        self._notify()

    def reason(self) -> str:
        """``engine http://… to sleep (no answer)``."""
        return ", ".join(
            f"engine {name} to sleep" + (f" ({self.reasons[name]})" if name in self.reasons else "")
            for name in self.arbiter.awake
        )

    def fell_asleep(self, engine: str) -> None:
        self.reasons.pop(engine, None)
        self.arbiter.fell_asleep(engine, time.monotonic())
        self._notify()

    def woke(self, engine: str) -> None:
        self._metrics.engine_sleep_seconds_total.inc(self.arbiter.woke(engine, time.monotonic()))

    def failed(self, operation: str, engine: str, reason: str) -> None:
        """``operation``: sleep or wake."""
        self._metrics.device_handover_failures_total.labels(operation=operation).inc()
        if operation == "sleep":
            if self.reasons.get(engine) != reason:
                log.warning("engine %s does not sleep: %s", engine, reason)
            self.reasons[engine] = reason

    def _notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        for callback in self._callbacks:
            callback()


class ColocatedKeeper(EngineKeeper):
    """Keeper that keeps its engine asleep while the learner has or asks for ``device``."""

    def __init__(
        self,
        control: EngineControl,
        loader: WeightLoader,
        timeout_seconds: float,
        on_failure: Callable[[], None],
        device: SharedDevice,
        probe: WeightProbe | None = None,
    ) -> None:
        super().__init__(control, loader, timeout_seconds, on_failure, probe)
        self._device = device
        self._asleep = False
        """True if this process put the engine to sleep and has not woken it since."""
        device.subscribe(self.look_soon)

    async def _look(self, target: Target | None) -> None:
        if self._device.arbiter.engines_sleep:
            await self._keep_asleep()
        else:
            await super()._look(target)

    async def _keep_asleep(self) -> None:
        url = self.control.url
        try:
            with anyio.fail_after(self._timeout_seconds):
                if not self._asleep or not await self.control.is_sleeping():
                    self._device.woke(url)
                    self.state.live, self._asleep = None, False
                    await self.control.sleep(self._device.sleep_level)
                    if not await self.control.is_sleeping():
                        raise EngineProtocolError(f"expected {url} to sleep after /sleep, but /is_sleeping is false")
        except (TimeoutError, EngineError) as error:
            reason = str(error) or f"took longer than publish.timeout_seconds={self._timeout_seconds:g}"
            self._device.woke(url)
            self._asleep = False
            self._device.failed("sleep", url, reason)
        else:
            self._asleep = True
            if url in self._device.arbiter.awake:
                self._device.fell_asleep(url)

    @property
    def _healthy(self) -> bool:
        """True where the engine follows the order; else the keeper looks again soon."""
        return self._asleep if self._device.arbiter.engines_sleep else super()._healthy

    async def _bring_to(self, target: Target) -> None:
        served = await self.control.version()
        asleep = await self.control.is_sleeping()
        if asleep or load_needed(served, target, seen=self._seen):
            await (self._wake_with(target) if asleep else self._load(target, served))
        elif served != target.stamp:
            await self._stamp_initial(target)
        self._seen = self._served = True

    async def _wake_with(self, target: Target) -> None:
        """Wake the engine with the weights of ``target``. Without whole weights it stays asleep, whatever fails."""
        self.state.live, self._asleep, self._idle = None, False, False
        self._device.woke(self.control.url)
        self.loading = target
        try:
            if await self.control.wake_up("weights"):
                await self.control.pause()  # it was only paused, and this call has ended that
            await self._replace_weights(target)
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


RETRY_SECONDS = 1.0


async def await_engines(ctx: RoleContext) -> None:
    """Wait for the engines on the learner's device before it loads its models: vLLM measures the device when it starts,
    while nobody else may take or free memory there. With ``engine.colocate: sleep`` they are put to sleep, whatever
    state a learner that died has left them in; with ``split`` it is enough that they are up. Returns then, or when the
    process is asked to stop."""
    config = ctx.config
    sleep = config.engine.colocate == "sleep"
    wanted = "one that is up and sleeps" if sleep else "one that is up"
    headers = authorization(find_key(config.engine, "learner_key"))
    async with ctx.waiting(RoleState.WAITING_FOR_ENGINES, wanted), HttpClient(headers, reuse=False) as http:
        for url in config.engine.addresses():
            control = EngineControl(url, http, config.publish.timeout_seconds)
            while not ctx.stopping.is_set():
                try:
                    await (control.sleep(config.engine.sleep_level) if sleep else control.version())
                    log.info("engine %s %s while the models are loaded", url, "sleeps" if sleep else "is up")
                    break
                except EngineError as error:
                    ctx.report(RoleState.WAITING_FOR_ENGINES, f"{wanted} ({error})")
                with anyio.move_on_after(RETRY_SECONDS):
                    await ctx.stopping.wait()
