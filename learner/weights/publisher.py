"""Publication of weights to all engines: write a version once, set it as every keeper's target, wait a bounded time.

Engines join and leave meanwhile (:meth:`Publisher.set_engines`): one that joined is brought to the newest version, as
one that restarted; for one that left nothing waits.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.abc
import anyio.to_thread
import orjson
import torch
from torch import Tensor

from learner.data.rows import TokenArray
from learner.metrics import LearnerMetrics
from learner.policy.policy import DTYPES, DtypeName, Policy
from learner.weights.colocated import ColocatedKeeper, SharedDevice
from learner.weights.delta_loader import DeltaLoader
from learner.weights.device_weights import DeviceWeights, Write, write_version
from learner.weights.engine_client import EngineControl
from learner.weights.engine_keeper import Attendance, EngineKeeper, Target, WeightLoader, WeightProbe, make_probe
from pipeline.config import RunConfig
from pipeline.config.learner import PublishConfig
from pipeline.errors import ConfigurationError, EngineRefused
from pipeline.runtime.disk import left_out, when_room
from pipeline.runtime.engine_addresses import EngineAddresses, engine_addresses
from pipeline.runtime.engine_keys import authorization, find_key
from pipeline.runtime.folders import CONTENTS, atomic_folder, find_damage, remove_leftovers, write_contents
from pipeline.runtime.http import HttpClient
from pipeline.runtime.run_directory import RunDirectory

if TYPE_CHECKING:
    from learner.policy.lora import Adapters

log = logging.getLogger(__name__)
_WHOLE = re.compile(r"v(\d{6,})")
_PUBLISHED = re.compile(r"(?:v|delta-)(\d{6,})(?:\.safetensors)?")


@dataclass(frozen=True, slots=True)
class Publication:
    """Outcome of the publication of one version."""

    version: int
    live: tuple[str, ...]
    """Engines that serve it."""
    lagging: Mapping[str, str] = field(default_factory=dict)
    """Engines that do not yet, and why; their keepers keep trying."""
    n_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FolderLoader:
    """Engines read the safetensors folder themselves: any device, any engine that sees the same file system."""

    adapter: str | None = None
    """Name under which vLLM serves the adapters in the folder; None: the folder has whole weights."""
    reads_memory = False

    async def load(self, engine: EngineControl, target: Target) -> None:
        if self.adapter is None:
            await engine.reload(target.folder)
        else:
            await engine.load_adapter(self.adapter, target.folder)


class CheckedLoader:
    """Compares the files of a folder with what was written before ``loader`` has an engine read them, and writes them
    again from memory where they are damaged. Not during their own publication: then they were written just now, and
    their digests are being computed."""

    def __init__(self, loader: WeightLoader, write: Write) -> None:
        self.publishing: Path | None = None
        """Folder of the publication under way."""
        self.reads_memory = loader.reads_memory
        self._loader = loader
        self._write = write
        self._repairing = anyio.Lock()

    async def load(self, engine: EngineControl, target: Target) -> None:
        """Raises :class:`EngineRefused`, before anything has changed, where the files are damaged and their weights are
        not in memory."""
        if not self.reads_memory and target.folder != self.publishing and await _damage(target, target.folder):
            async with self._repairing:
                target = await self._repaired(target)
        await self._loader.load(engine, target)

    async def _repaired(self, target: Target) -> Target:
        """The same weights from the folder in which the learner writes them, where another engine may have had them
        written again just now."""
        if not await _damage(target, target.written):
            return replace(target, folder=target.written)
        what = f"the weights in {target.folder} are damaged ({await _damage(target, target.folder)})"
        if target.tensors is None:
            raise EngineRefused(f"{what}, and this process does not have them: the next version takes their place")
        log.error("%s: version %d is written again", what, target.version)
        with anyio.CancelScope(shield=True):
            await write_version(self._write, target.written, target.version, target.tensors)
            await anyio.to_thread.run_sync(_write_contents, target.written)
        return replace(target, folder=target.written)


async def _damage(target: Target, folder: Path) -> str:
    if target.initial and folder == target.folder and not (folder / CONTENTS).exists():
        return ""  # a model that an older Afterplay prepared
    return await anyio.to_thread.run_sync(find_damage, folder)


class Publisher:
    """Keeps all engines at the newest published version while ``run`` runs. Use as an async context manager."""

    def __init__(
        self,
        addresses: Iterable[str],
        directory: RunDirectory,
        config: PublishConfig,
        write: Write,
        loader: WeightLoader | None = None,
        on_failure: Callable[[], None] = lambda: None,
        device: SharedDevice | None = None,
        key: str | None = None,
        run: str | None = None,
        probe: WeightProbe | None = None,
        discovery: EngineAddresses | None = None,
    ) -> None:
        """``write`` makes the folder of a version. ``key`` opens the engines' control routes; ``run`` is stamped with
        the version. ``discovery`` is followed from then on; None: ``addresses`` never change."""
        self._addresses = tuple(addresses)
        self._discovery = discovery
        self._directory = directory
        self._config = config
        self._write = write
        self._loader = CheckedLoader(loader or FolderLoader(), self._write)
        self._on_failure = on_failure
        self._http = HttpClient(authorization(key), reuse=False)
        self.device = device
        """Set where engines and learner take turns on one device."""
        self._run = run
        self.probe = probe
        """Proves which weights an engine serves; None: nothing does."""
        self.keepers: dict[str, EngineKeeper] = {}
        self._epoch: int | None = None
        self._controls: dict[str, EngineControl] = {}
        """Controls of all engines, also of those that left: one that comes back expects its requests numbered on."""
        self._kept: defaultdict[str, anyio.Lock] = defaultdict(anyio.Lock)
        self._watchers: anyio.abc.TaskGroup | None = None
        self._target: Target | None = None
        self._engines_changed = anyio.Event()

    async def __aenter__(self) -> Publisher:
        self.set_engines(self._addresses)
        remove_leftovers(self._directory.weights(0).parent)
        return self

    def set_engines(self, urls: Iterable[str]) -> None:
        """These are the engines from now on."""
        wanted = tuple(urls)
        for url in wanted:
            if url not in self.keepers:
                keeper = self.keepers[url] = self._keeper(url)
                if self._target is not None:
                    keeper.set_target(self._target)
                if self._watchers is not None:
                    log.info("engine %s has joined", url)
                    self._watchers.start_soon(self._watch, url, keeper)
        for url in [url for url in self.keepers if url not in wanted]:
            log.info("engine %s has left", url)
            self.keepers.pop(url).leave()
        changed, self._engines_changed = self._engines_changed, anyio.Event()
        changed.set()

    async def _watch(self, url: str, keeper: EngineKeeper) -> None:
        """Run the keeper of an engine, where it came back after the one from before has ended its attempt."""
        async with self._kept[url]:
            await keeper.run()

    def _keeper(self, url: str) -> EngineKeeper:
        timeout = self._config.timeout_seconds
        control = self._controls.setdefault(url, EngineControl(url, self._http, timeout))
        control.epoch = self._epoch
        if self.device is None:
            return EngineKeeper(control, self._loader, timeout, self._on_failure, self.probe)
        return ColocatedKeeper(control, self._loader, timeout, self._on_failure, self.device, self.probe)

    async def __aexit__(self, *args: object) -> None:
        await self._http.close()

    def identify(self, epoch: int) -> None:
        """Send the number of this learner process with every request: engines refuse it once it was replaced."""
        self._epoch = epoch
        for keeper in self.keepers.values():
            keeper.control.epoch = epoch

    async def run(self) -> None:
        """Watch the engines until cancelled: a restarted or lagging one is brought to the newest version."""
        async with anyio.create_task_group() as group:
            self._watchers = group
            for url, keeper in self.keepers.items():
                group.start_soon(self._watch, url, keeper)
            if self._discovery is not None:
                group.start_soon(self._discovery.follow, self.set_engines)

    async def publish(
        self,
        version: int,
        tensors: Mapping[str, Tensor] | DeviceWeights | None,
        expected: TokenArray | None = None,
        initial: bool = False,
    ) -> Publication:
        """Make ``tensors`` the weights of ``version`` in every engine, and keep them until the next version.
        ``initial``, or None: the engines were started with them. ``expected``: what they give the probe. ``run`` must
        be running.

        Returns when each engine has it or has failed once, at most ``publish.timeout_seconds`` after the weights are
        written.
        """
        folder, n_bytes = self._directory.weights(version), 0
        weights, tensors = (tensors, None) if isinstance(tensors, DeviceWeights) else (None, tensors)
        initial = initial or (tensors is None and weights is None)
        if not initial and weights is not None:
            n_bytes = weights.n_bytes
            mark = partial(folder.mkdir, exist_ok=True)  # its name says that the version was used
            await when_room(mark, folder, f"version {version} of the weights")
        elif not initial and tensors is not None:
            n_bytes = await write_version(self._write, folder, version, tensors)
        read = self._directory.model if initial else folder
        responsive = [keeper for keeper in self.keepers.values() if keeper.responsive]
        attendance = Attendance(keeper.control.url for keeper in responsive)
        target = Target(version, read, folder, initial, tensors, weights, self._run, expected, attendance)
        async with self._digesting(target):
            self._target = target
            for keeper in self.keepers.values():
                keeper.set_target(target)
            if self.device is not None:
                self.device.release()
            with anyio.move_on_after(self._config.timeout_seconds):
                for keeper in responsive:
                    await keeper.until_attempted(version)
        for keeper in responsive:
            keeper.state.lagging = keeper.state.attempted < version
        if reason := await anyio.to_thread.run_sync(left_out, self._delete_old, folder.parent):
            log.warning("no old versions of the weights are removed: %s", reason)
        live = self.live(version)
        lagging = {
            url: keeper.state.reason or f"still loading after {self._config.timeout_seconds:g} s"
            for url, keeper in self.keepers.items()
            if url not in live
        }
        return Publication(version, live, lagging, n_bytes)

    @asynccontextmanager
    async def _digesting(self, target: Target) -> AsyncIterator[None]:
        """Write the digests of the folder meanwhile, from the memory of the operating system: no engine waits."""
        written = not target.initial and target.weights is None and target.folder.is_dir()
        if not written or (target.folder / CONTENTS).exists():
            yield
            return
        self._loader.publishing = target.folder
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(
                    partial(anyio.to_thread.run_sync, _write_contents, target.folder, abandon_on_cancel=True)
                )
                yield
        finally:
            self._loader.publishing = None

    async def until_live(self, version: int) -> None:
        """Wait until at least one engine serves ``version`` or a newer one. Unbounded: without engines there is
        nothing to do; the caller shows what it waits for."""
        while not any(keeper.serves(version) for keeper in self.keepers.values()):
            async with anyio.create_task_group() as group:

                async def first(event: Callable[[], Awaitable[object]]) -> None:
                    await event()
                    group.cancel_scope.cancel()

                for keeper in self.keepers.values():
                    group.start_soon(first, partial(keeper.until_served, version))
                group.start_soon(first, self._engines_changed.wait)

    def live(self, version: int) -> tuple[str, ...]:
        """Engines that serve ``version``."""
        return tuple(url for url, keeper in self.keepers.items() if keeper.state.live == version)

    def reason(self) -> dict[str, str]:
        """Reasons for which engines do not serve the newest version, by engine."""
        return {url: keeper.state.reason for url, keeper in self.keepers.items() if keeper.state.reason}

    def _delete_old(self) -> None:
        """Keep the newest ``publish.keep`` folders, and any that an engine is reading."""
        keepers = list(self.keepers.values())  # engines come and go meanwhile
        used = {loading.folder for keeper in keepers if (loading := keeper.loading) is not None}
        for version in _versions(self._directory, _WHOLE)[: -self._config.keep]:
            folder = self._directory.weights(version)
            if folder not in used:
                shutil.rmtree(folder, ignore_errors=True)


def published_versions(directory: RunDirectory) -> list[int]:
    """Versions whose weights are on disk, whole or as a delta, oldest first: a version that an engine may have seen is
    or was among them."""
    return _versions(directory, _PUBLISHED)


def _versions(directory: RunDirectory, name: re.Pattern[str]) -> list[int]:
    parent = directory.weights(0).parent
    paths = parent.iterdir() if parent.is_dir() else ()
    return sorted({int(found.group(1)) for path in paths if (found := name.fullmatch(path.name))})


def _write_contents(folder: Path) -> None:
    try:
        write_contents(folder)
    except OSError as error:  # a full disk, say: an engine that needs this version again has it written again
        log.warning("no digests of the weights in %s: %s", folder, error)


def write_weights(model: Any, folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """A Hugging Face folder with ``config.json`` and ``tensors`` as safetensors; bytes written.

    ``model`` gives configuration and names only: its weights, which training changes meanwhile, are not read.
    """
    with atomic_folder(folder) as scratch:
        model.save_pretrained(scratch, state_dict=dict(tensors), save_original_format=False)  # names are files' own
        config = orjson.loads((scratch / "config.json").read_bytes())
        sizes = Counter[torch.dtype]()
        for tensor in tensors.values():
            sizes[tensor.dtype] += tensor.numel() * tensor.is_floating_point()
        config["dtype"] = str(sizes.most_common(1)[0][0]).removeprefix("torch.")
        (scratch / "config.json").write_bytes(orjson.dumps(config, option=orjson.OPT_INDENT_2))
        return sum(path.stat().st_size for path in scratch.iterdir())


def write_adapters(adapters: Adapters, folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """An adapter folder as peft and vLLM read it; bytes written."""
    with atomic_folder(folder) as scratch:
        adapters.save(scratch, tensors)
        return sum(path.stat().st_size for path in scratch.iterdir())


def make_publisher(config: RunConfig, directory: RunDirectory, policy: Policy, metrics: LearnerMetrics) -> Publisher:
    """Files, deltas, or vLLM's own transfer, as ``engine.weight_transfer`` selects.

    Raises :class:`pipeline.errors.ConfigurationError` when the transfer needs something that is not there.
    """
    _check_dtype(config, policy)
    key = find_key(config.engine, "learner_key")
    loader, write = _transfer(config, directory, policy, key, metrics)
    addresses, sleep = engine_addresses(config.engine, directory, key), config.engine.colocate == "sleep"
    return Publisher(
        addresses.fixed,
        directory,
        config.publish,
        write,
        loader,
        metrics.weight_publish_failures_total.inc,
        SharedDevice(addresses.fixed, metrics, config.engine.sleep_level) if sleep else None,
        key,
        config.run.id,
        make_probe(config, directory.model, metrics),
        addresses,
    )


def sent_from_device(config: RunConfig) -> bool:
    """True where engines get the weights from the learner's device, without a copy in host memory and without a folder:
    by NCCL, unless the run shall leave its last version as a folder."""
    return config.engine.weight_transfer == "nccl" and config.checkpoint.at_end


def weights_to_publish(policy: Policy, config: PublishConfig) -> dict[str, Tensor]:
    """Copies of the whole weights, or of the adapters alone, as ``publish.lora`` says."""
    if config.lora == "adapter" and policy.adapters is not None:
        return policy.adapter_snapshot(DTYPES[published_dtype(policy, config)]) or {}
    return policy.snapshot(published_dtype(policy, config))


def published_dtype(policy: Policy, config: PublishConfig) -> DtypeName:
    """``publish.dtype``."""
    if config.dtype != "auto":
        return config.dtype
    return next(name for name, dtype in DTYPES.items() if dtype is policy.compute_dtype)


def _check_dtype(config: RunConfig, policy: Policy) -> None:
    """Raises :class:`pipeline.errors.ConfigurationError` where deltas cannot have the type that ``auto`` is."""
    dtype = published_dtype(policy, config.publish)
    if config.engine.weight_transfer == "delta" and dtype == "float32":
        raise ConfigurationError(
            "engine.weight_transfer is delta, which expects bfloat16, but learner.compute_dtype is float32 here, and "
            "publish.dtype: auto follows it: set weight_transfer: files, or learner.compute_dtype: bfloat16"
        )
    if dtype != "float32" and policy.compute_dtype is torch.float32:
        log.warning(
            "the learner computes in float32 and publishes %s: engines follow late, because most updates are smaller "
            "than it can show; set publish.dtype: auto",
            dtype,
        )


def record_version(folder: Path, tensors: Mapping[str, Tensor]) -> int:
    """An empty folder, whose name says that the version was used: engines get the weights from memory."""
    folder.mkdir(exist_ok=True)
    return sum(tensor.nbytes for tensor in tensors.values())


def _transfer(
    config: RunConfig, directory: RunDirectory, policy: Policy, key: str | None, metrics: LearnerMetrics
) -> tuple[WeightLoader, Write]:
    """The loader of ``engine.weight_transfer``, and what writes a version before engines load it."""
    transfer, whole = config.engine.weight_transfer, partial(write_weights, policy.model)
    if config.publish.lora == "adapter" and policy.adapters is not None:
        whole = partial(write_adapters, policy.adapters)
    if config.publish.served_name or transfer == "files":
        return FolderLoader(config.publish.served_name), whole
    if transfer == "delta":
        deltas = DeltaLoader(directory.weights, whole, CheckedLoader(FolderLoader(), whole))
        return deltas, deltas.write
    from learner.weights.vllm_transfer import VllmTransferLoader

    loader = VllmTransferLoader(transfer, config.publish.timeout_seconds, whole, key, policy.ranks, metrics=metrics)
    return loader, record_version if config.checkpoint.at_end else whole
