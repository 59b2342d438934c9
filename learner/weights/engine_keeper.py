"""Keeps one engine at the newest published version, and proves which weights it serves.

*consumes* targets (the newest replaces older ones) and the version that the engine reports; *produces* ``state``, and
an attempt for every new target and whenever the engine reports another version; *waits for* a new target, or the next
look at the engine. An engine that is down or slow only lags; it blocks nothing else. One that hangs, so that nothing
comes from it for too long (:class:`pipeline.runtime.progress.EngineSilence`), fails its attempt at once.

A load is not atomic: vLLM replaces weights layer by layer. An engine in which a load began and did not succeed stays
paused, its weights labelled ``withdrawn``, until a load has succeeded. The next one first undoes what is left of the
last; after ``SPOILT_MAX`` in a row, or as many attempts to pause it, the engine is ended, and its supervisor restarts
it. One that refused the load before it began continues with the weights that it has. An engine counts as live only
after it has resumed. One that is paused later, by a request that was given up and came late, is resumed. Then a probe
proves which weights it serves (:class:`WeightProbe`), beside its rollouts and without delaying the publication; an
engine that it refutes is withdrawn and loads again. An engine that has just started, or joined the run, is proved
before its weights are labelled: until then no actor sends it anything.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import anyio
import numpy as np

from learner.data.rows import Row, TokenArray
from learner.metrics import LearnerMetrics
from learner.policy.reference import encoded_check_text, prompt_logprobs
from learner.weights.engine_client import EngineControl
from pipeline.config import RunConfig
from pipeline.errors import EngineError, EngineGone, EngineProtocolError, EngineRefused, EngineUnavailable
from pipeline.runtime.progress import TICK_SECONDS
from pipeline.runtime.weights import UNSTAMPED, write_stamp

if TYPE_CHECKING:
    from torch import Tensor

    from learner.weights.device_weights import DeviceWeights

log = logging.getLogger(__name__)
CHECK_TOKENS_MAX = 32
CHECK_SECONDS_MAX = 30.0
"""An engine that has not answered until then is too busy to prove anything."""
WATCH_SECONDS = 1.0
"""Interval at which a healthy engine is asked for its version: bounds how long a restarted one serves old weights."""
PROBE_SECONDS = 1.0
"""An engine that says nothing for so long is asked whether it lives, while it loads."""
RETRY_SECONDS = 0.5
SPOILT_MAX = 3
"""Loads in a row that were not whole, or attempts to pause it, before the engine is ended."""
PAUSE_SHARE_MAX = 0.9
"""An engine whose server answers but that does not pause within this share of an attempt has workers that hang."""
RETRY_SECONDS_MAX = 5.0
"""After failures of an engine that has served before. One that is still starting is asked every ``RETRY_SECONDS``: the
first rollouts wait for it."""


class WeightProbe:
    """The probe of a run. ``row`` is what the learner scores itself."""

    def __init__(
        self, token_ids: list[int], nats_max: float, metrics: LearnerMetrics, request: dict[str, Any] | None = None
    ) -> None:
        """``request``: further fields of the engine's request, ``sampling_params`` among them."""
        self.row = Row.plain("probe", token_ids)
        self.nats_max = nats_max
        self.metrics = metrics
        more = dict(request or {})
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **more.pop("sampling_params", {})}
        self._request = {"token_ids": token_ids, "sampling_params": sampling, **more}

    async def difference(self, engine: EngineControl, expected: TokenArray) -> float:
        """Mean |learner - engine| of the log-probabilities, nats. Raises :class:`pipeline.errors.EngineError`."""
        answer = await engine.generate(self._request, CHECK_SECONDS_MAX)
        return float(np.abs(prompt_logprobs(answer, self.row) - expected).mean())


def make_probe(config: RunConfig, model: Path, metrics: LearnerMetrics) -> WeightProbe | None:
    """The probe over the tokenizer in the folder ``model``; None where ``publish.probe_nats_max`` switches it off."""
    if config.publish.probe_nats_max is None:
        return None
    token_ids = encoded_check_text(config, model)[: min(CHECK_TOKENS_MAX, config.model.max_length - 1)]
    request: dict[str, Any] = {"sampling_params": {"top_p": 1.0, "top_k": -1}}
    if config.publish.served_name:
        request["model"] = config.publish.served_name
    return WeightProbe(token_ids, config.publish.probe_nats_max, metrics, request)


class Attendance:
    """Engines that may still come to load a version together with others. For any thread."""

    def __init__(self, engines: Iterable[str] = ()) -> None:
        self._missing = set(engines)
        self._changed = threading.Condition()

    def seen(self, engine: str) -> None:
        """Count one that has come, or will not."""
        with self._changed:
            self._missing.discard(engine)
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until none is missing, at most ``seconds``. Those that are still missing are not waited for again."""
        with self._changed:
            self._changed.wait_for(lambda: not self._missing, seconds)
            self._missing.clear()


@dataclass(frozen=True, slots=True)
class Target:
    """The weights that every engine should have."""

    version: int
    folder: Path
    """Hugging Face folder with these weights."""
    written: Path
    """Folder in which the learner writes this version; another one only where ``initial``."""
    initial: bool = False
    """True for the weights that the engines were started with: an unstamped engine then needs only the stamp."""
    tensors: Mapping[str, Tensor] | None = None
    """The same weights in memory, for loaders that do not read files, and to write the files again."""
    weights: DeviceWeights | None = None
    """The same weights where they are trained, in place of ``tensors``; nothing is written then."""
    run: str | None = None
    """``run.id``, which is part of the stamp."""
    expected: TokenArray | None = None
    """The learner's log-probabilities of the probe; None: nothing is proved."""
    attendance: Attendance = field(default_factory=Attendance)
    """Engines that the publication waits for and that have not begun to load."""

    @property
    def stamp(self) -> str:
        return write_stamp(self.run, self.version)

    @property
    def gone(self) -> bool:
        """True where training has changed the weights since, and no folder has them."""
        return self.weights is not None and self.weights.retired and not (self.weights.written or self.initial)


class WeightLoader(Protocol):
    """Puts the weights of a target into one engine that is paused."""

    reads_memory: bool
    """True where it needs ``Target.tensors`` and reads no files."""

    async def load(self, engine: EngineControl, target: Target) -> None:
        """Raises :class:`pipeline.errors.EngineError`. Cancelled when it takes too long."""
        ...


@dataclass(slots=True)
class EngineState:
    """State of one engine as last seen."""

    live: int | None = None
    """Version it serves, as last confirmed."""
    attempted: int = -1
    """Newest version that was tried, with success or not."""
    reason: str = "not asked yet"
    """Reason for which the engine does not serve the newest version; empty if it does."""
    lagging: bool = False
    """The engine was slower than a publication waits. Publications do not wait for it until it serves the newest
    version."""
    failures: int = 0
    load_seconds: float = 0.0
    """Time that its last load took."""


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
        probe: WeightProbe | None = None,
    ) -> None:
        self.control = control
        self.state = EngineState()
        self.loading: Target | None = None
        """Target whose weights are being read now: its folder must stay."""
        self._loader = loader
        self._timeout_seconds = timeout_seconds
        self._on_failure = on_failure
        self._probe = probe
        self._unproven = False
        """True while it serves weights that no probe has proved."""
        self._whole = False
        """True once this process knows that the engine's weights are all of one version."""
        self._idle = False
        """True from the start of the engine until its weights have a label: it has no requests that could wait."""
        self._spoilt = 0
        """Loads in a row that began and were not whole, or whose result the probe refuted."""
        self._unpaused = 0
        """Attempts in a row in which it did not pause."""
        self._target: Target | None = None
        self._seen = False
        """True while the engine's label is of this process: one that only answers late is not loaded again."""
        self._served = False
        """True once it has served a version to this process."""
        self._tried = -1
        """Newest version that was tried while it took connections: the failure of each counts once."""
        self._came_late = False
        """True where it was healthy at the last attempt, but its weights were gone."""
        self._left = False
        self._shield = anyio.CancelScope()
        """Scope of the newest call that must not be cancelled."""
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
        """True where a publication should wait for it: it was healthy until now, was never asked, or lacked nothing but
        weights that training had changed."""
        return not self.state.lagging and (self.state.attempted < 0 or not self.state.reason or self._came_late)

    async def until_attempted(self, version: int) -> None:
        """Wait until ``version`` (or a newer one) was tried."""
        while self.state.attempted < version:
            await self._changed.wait()

    async def until_served(self, version: int) -> None:
        """Wait until the engine serves ``version`` (or a newer one)."""
        while not self.serves(version):
            await self._changed.wait()

    def serves(self, version: int) -> bool:
        """True if the engine serves ``version`` or a newer one."""
        return self.state.live is not None and self.state.live >= version

    def leave(self) -> None:
        """The engine has left the run: ``run`` returns after an attempt that is under way, so that no request stays in
        a paused engine, and whoever waits for an attempt waits no longer."""
        self._left = True
        self.state.attempted = sys.maxsize
        if self._target is not None:
            self._target.attendance.seen(self.control.url)
        self._tell()
        self.look_soon()

    async def run(self) -> None:
        """Until cancelled, or the engine has left."""
        retry = RETRY_SECONDS
        while not self._left:
            wake, target = self._wake, self._target
            await self._look(target)
            if target is not None and target is self._target:
                await self._prove(target, wake)
            failing = self._served and not self._healthy
            retry = min(RETRY_SECONDS_MAX, retry * 2) if failing else RETRY_SECONDS
            if target is self._target:
                with anyio.move_on_after(WATCH_SECONDS if self._healthy else retry):
                    await wake.wait()
            self._wake = anyio.Event() if wake.is_set() else wake

    @property
    def _healthy(self) -> bool:
        return not self.state.reason

    async def _look(self, target: Target | None) -> None:
        if target is not None:
            await self._attempt(target)

    async def _attempt(self, target: Target) -> None:
        try:
            with anyio.fail_after(self._timeout_seconds):
                await self._unless_it_hangs(target)
        except TimeoutError:
            self._failed(target, f"took longer than publish.timeout_seconds={self._timeout_seconds:g}")
        except EngineError as error:
            self._failed(target, str(error), starting=isinstance(error, EngineGone) and not self._served)
        else:
            if self.state.reason:
                log.info("engine %s serves version %d", self.control.url, target.version)
            self.state.live, self.state.reason = target.version, ""
            self.state.lagging = self.state.lagging and target is not self._target
            self._attempted(target)

    async def _unless_it_hangs(self, target: Target) -> None:
        """:meth:`_bring_to`, given up when the engine says nothing at all. Loads may take minutes, but its server
        answers meanwhile."""
        silence, error = self.control.silence, None
        async with anyio.create_task_group() as group:
            group.start_soon(self._listen, group.cancel_scope)
            try:
                await self._bring_to(target)
            except Exception as raised:  # else it would come in a group
                error = raised
            group.cancel_scope.cancel()
        if error is not None:
            raise error
        if silence.too_long:
            raise EngineUnavailable(f"{self.control.url} hangs, or cannot be reached: nothing came from it")

    async def _listen(self, attempt: anyio.CancelScope) -> None:
        silence = self.control.silence
        silence.heard()
        async with anyio.create_task_group() as probes:
            asking = False

            async def ask() -> None:
                nonlocal asking
                asking = True
                with contextlib.suppress(EngineError):
                    await self.control.health()
                asking = False

            while not silence.too_long:
                await anyio.sleep(TICK_SECONDS)
                silence.tick()
                if silence.seconds >= PROBE_SECONDS and not asking:
                    probes.start_soon(ask)
            self._shield.cancel()
            attempt.cancel()

    async def _bring_to(self, target: Target) -> None:
        self._came_late = False
        served = await self.control.version()
        if load_needed(served, target, seen=self._seen):
            self._came_late = target.gone
            if target.gone:
                raise EngineRefused("the learner trains, and nothing else has these weights: the next version comes")
            await self._load(target, served)
        elif served != target.stamp:
            await self._stamp_initial(target)
        elif await self.control.is_paused():
            log.warning("engine %s was paused after it had resumed: it resumes again", self.control.url)
            await self.control.resume()
        self._seen = self._served = True

    async def _stamp_initial(self, target: Target) -> None:
        """Label the weights that the engine was started with."""
        self._whole = self._unproven = True
        await self.control.stamp(target.stamp)

    async def _load(self, target: Target, served: str) -> None:
        """Pause, load, stamp, resume. After a failure the engine resumes only if its weights are whole."""
        self.state.live, self._seen = None, False
        self.loading = target
        try:
            if served == UNSTAMPED:
                self._whole, self._spoilt, self._idle = True, 0, True
                self.control.starts += 1
                await self.control.withdraw()  # else a learner that takes over takes them for the initial weights
            await self._pause()
            await self._replace_weights(target)
        except BaseException:
            with self._shielded():
                await (self._try(self.control.resume, "resumed") if self._whole else self._withdraw())
            raise
        finally:
            self.loading = None
        with self._shielded():
            await self.control.resume()

    async def _pause(self) -> None:
        """Raises :class:`EngineError` where it does not pause, after having ended it if that happens too often."""
        seconds = PAUSE_SHARE_MAX * self._timeout_seconds
        with anyio.move_on_after(seconds):
            await self.control.pause()
            self._unpaused = 0
            return
        self._unpaused += 1
        if self._unpaused >= SPOILT_MAX:
            self._unpaused = 0
            with self._shielded():
                await self._end("pause")
        raise EngineUnavailable(f"{self.control.url} answers, but did not pause within {seconds:g} s")

    async def _end(self, what: str) -> None:
        """Have the engine start again. Raises :class:`EngineError` unless its supervisor is another's."""
        with contextlib.suppress(EngineRefused):  # it has no lock of ours: somebody else starts it again
            await self.control.end()
            raise EngineUnavailable(f"{self.control.url} has failed to {what} {SPOILT_MAX} times: it starts again")

    @contextlib.contextmanager
    def _shielded(self) -> Iterator[None]:
        """Inside, only an engine that hangs ends a call."""
        with anyio.CancelScope(shield=True) as self._shield:
            if self.control.silence.too_long:
                self._shield.cancel()
            yield

    async def _replace_weights(self, target: Target) -> None:
        """Load into an engine that is paused, and stamp."""
        before, self._whole, self._unproven = self._whole, False, True
        if self._spoilt >= SPOILT_MAX:
            self._spoilt = 1
            await self._end("load")
        if self._spoilt:
            with contextlib.suppress(EngineError):  # the embedded engine loads all or nothing
                await self.control.abandon_update()
        began = anyio.current_time()
        try:
            await self._loader.load(self.control, target)
        except EngineRefused:  # it said so before anything changed
            self._whole = before
            raise
        except EngineError:
            self._spoilt += 1
            raise
        except BaseException:
            self._spoilt = max(1, self._spoilt)
            raise
        self.state.load_seconds = anyio.current_time() - began
        if self._idle:
            await self._prove_idle(target)
        await self.control.stamp(target.stamp)
        self._whole, self._idle = True, False

    async def _prove_idle(self, target: Target) -> None:
        """Probe an engine without requests before its weights have a label. Raises :class:`EngineError` where it serves
        others, or does not answer."""
        if self._probe is None or target.expected is None:
            return
        await self.control.resume()
        if problem := await self._refutation(target):
            raise EngineProtocolError(f"{self.control.url}: {problem}")
        if self._unproven:
            raise EngineUnavailable(f"{self.control.url} did not answer the probe of version {target.version}")

    async def _try(self, call: Callable[[], Awaitable[None]], done: str) -> None:
        """A call whose failure is only logged."""
        try:
            await call()
        except EngineError as error:
            log.warning("engine %s could not be %s: %s", self.control.url, done, error)

    async def _withdraw(self) -> None:
        """Take the engine out of routing. If it is paused, it stays so."""
        await self._try(self.control.withdraw, "taken out of routing")

    async def _prove(self, target: Target, wake: anyio.Event) -> None:
        """Probe the weights that the engine serves, unless that is done; give up when ``wake`` is set."""
        if self.state.live is None or not self._unproven:
            return
        problem = ""
        async with anyio.create_task_group() as group:

            async def give_up() -> None:
                await wake.wait()
                group.cancel_scope.cancel()

            group.start_soon(give_up)
            problem = await self._refutation(target)
            group.cancel_scope.cancel()
        if problem:
            self._on_failure()
            self._seen = False
            await self._withdraw()
            self._failed(target, problem)

    async def _refutation(self, target: Target) -> str:
        """Problem that the probe finds; empty where it proves the weights, or the engine cannot be asked."""
        if self._probe is None or target.expected is None:
            return ""
        results = self._probe.metrics.weight_probes_total
        try:
            difference = await self._probe.difference(self.control, target.expected)
        except EngineError as error:
            self._unproven = isinstance(error, EngineUnavailable)
            results.labels(result="unanswered").inc()
            log.warning("engine %s: no answer to the probe of version %d: %s", self.control.url, target.version, error)
            return ""
        self._probe.metrics.weight_probe_diff_nats.set(difference)
        self._unproven = False
        if difference <= self._probe.nats_max:
            self._spoilt = 0
            results.labels(result="proven").inc()
            return ""
        results.labels(result="refuted").inc()
        self._whole = False
        self._spoilt += 1
        return (
            f"it serves other weights: its log-probabilities of the probe differ by {difference:.3g} nats from the "
            f"learner's (publish.probe_nats_max: {self._probe.nats_max:g})"
        )

    def _failed(self, target: Target, reason: str, *, starting: bool = False) -> None:
        """``starting``: it takes no connections yet, which is no failure to count."""
        if self.state.reason != reason:
            log.warning("engine %s does not serve version %d: %s", self.control.url, target.version, reason)
        self.state.live, self.state.reason = None, reason
        self.state.failures += 1
        if target.version > self._tried and not starting:
            self._on_failure()
        self._attempted(target, starting=starting)

    def _attempted(self, target: Target, *, starting: bool = False) -> None:
        self.state.attempted = max(self.state.attempted, target.version)
        self._tried = self._tried if starting else self.state.attempted
        target.attendance.seen(self.control.url)
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
