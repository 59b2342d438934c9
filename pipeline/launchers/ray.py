"""Processes of a run on the nodes of a Ray cluster (``afterplay run FILE --on ray``, on one of them).

This process is the driver: the supervisor decides as on one machine, and shows the same progress. Ray reserves a
placement group for each role and starts a keeper for each process (:mod:`pipeline.launchers.ray_placement`). When a
node is lost, Ray moves its bundles to nodes with room, and the supervisor starts the processes again there, with the
waits and limits of any restart. The replay stage waits for its own node. Messages go over ZeroMQ and HTTP, never
through Ray.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from pipeline.config import RunConfig
from pipeline.config.explain import bracketed, free_ports, split_address
from pipeline.errors import ConfigurationError
from pipeline.launchers.launcher import Launch
from pipeline.launchers.ray_placement import Keeper, PlacementGroup, Seat, describe, has_disk, lacking, placement_groups
from pipeline.runtime.disk import left_out
from pipeline.runtime.engine_addresses import signed_line
from pipeline.runtime.engine_keys import find_digests
from pipeline.runtime.process import ADDRESS, ExitCode
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically
from pipeline.store.store import store_path
from pipeline.supervisor.cluster import Cluster, Found
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.plan import Place, plan
from pipeline.supervisor.processes import PROBE_SECONDS_MAX, HealthAnswer, ProcessLost, ProcessSpec, Waiting
from pipeline.supervisor.run import run
from pipeline.views.tables import plain_console

LOOK_SECONDS = 0.5
"""Time between two looks at a placement group that has no nodes yet."""
PATIENCE_SECONDS = 5.0
"""Wait for a node from which on the user reads of it."""
KILL_SECONDS_MAX = 10.0
"""Between SIGKILL to a process and its end, which its keeper reports; a keeper that stands still reports nothing."""


def launch(request: Launch) -> int:
    """Run to the end. A dry run prints the placement groups. Raises :class:`ConfigurationError`."""
    request.refuse_machines("is not for --on ray, whose nodes and GPUs are those of the cluster: omit it")
    config, console = request.config, plain_console()
    directory = RunDirectory(config.run.path.absolute())
    ray = connect(f"afterplay:{directory.path}")
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        cluster = cluster_of(ray, config, directory)
        chosen = plan(config, cluster.inventory).fitting()
        groups = placement_groups(chosen.places, cluster.inventory.nodes)
        if sentence := lacking(groups, cluster.inventory.nodes):
            raise ConfigurationError(sentence)
        if request.dry_run:
            for line in (*chosen.reasons, *describe(groups)):
                console.print(line)
            return ExitCode.FINISHED

        def host_of(places: Sequence[Place], resolved: RunConfig) -> RayHost:
            host = RayHost(ray, places, resolved, config.engine.port, cluster.inventory)
            stack.callback(host.close)
            return host

        return run(config, request.fresh, console, cluster, host_of)


def connect(namespace: str) -> Any:
    """Ray, as a driver of the cluster that runs on this node or at ``RAY_ADDRESS``. Raises
    :class:`ConfigurationError`."""
    try:
        import ray
    except ImportError as error:
        raise ConfigurationError("--on ray: expected Ray, found none: pip install '.[ray]'") from error
    path = os.environ.get("PYTHONPATH")
    variables = {"env_vars": {"PYTHONPATH": path}} if path else {}
    try:
        ray.init(
            address=os.environ.get("RAY_ADDRESS", "auto"),
            namespace=namespace,
            runtime_env=variables,
            log_to_driver=False,
            logging_level="error",
        )
    except ConnectionError as error:
        raise ConfigurationError(
            f"--on ray: expected a Ray cluster with a node on this machine, found none ({error}): start one with "
            "`ray start --head`, join others with `ray start --address`, or set RAY_ADDRESS"
        ) from error
    except (RuntimeError, ValueError) as error:  # other versions of Ray or Python, or an address that is none
        raise ConfigurationError(f"--on ray: expected a Ray cluster that takes this process, got: {error}") from error
    return ray


@dataclass(frozen=True, slots=True)
class RayCluster(Cluster):
    """Addresses of a run whose engines may move: they are in a file of the run directory."""

    replay_port: int = 0
    ray: Any = None
    store_node: str = ""
    """Ray's name of the node with ``stage.store``; empty: the store is in the run directory."""

    def at_store(self, look: Callable[[], Found]) -> Found:
        """As for any cluster."""
        if not self.store_node:
            return look()
        try:
            found: Found = self.ray.get(_on_node(self.ray, _call, self.store_node).remote(look))
        except ConfigurationError as error:  # Ray's has a traceback in its words
            raise ConfigurationError(
                f"node {self.inventory.nodes[0].name}: {getattr(error, 'cause', error)}"
            ) from error
        return found

    def addressed(self, config: RunConfig) -> RunConfig:
        """As for any cluster; the replay stage gets its address later, for its node may be another than ours."""
        return Cluster.addressed(self, config).updated(stage={"address": "ipc://"})

    def located(self, config: RunConfig, places: Iterable[Place]) -> RunConfig:
        """A copy with the address of the replay stage, and the file with those of the engines. An engine that shares
        its device with the learner stays on its node and has a fixed address."""
        engine, changed = config.engine, dict[str, str]()
        if engine.kind != "external" and not engine.urls:
            changed = {"discovery": f"file:{engine_urls(RunDirectory(config.run.path))}"}
            if engine.colocate != "none":
                shared = next(place.node for place in places if place.role == "engine")
                changed = {"host": self.inventory.addresses[shared]}
        head = bracketed(self.inventory.nodes[0].address)
        return config.updated(engine=changed, stage={"address": f"tcp://{head}:{self.replay_port}"})


def engine_urls(directory: RunDirectory) -> Path:
    """Base URLs of the engines that run now, one a line."""
    return directory.path / "engine_urls"


def cluster_of(ray: Any, config: RunConfig, directory: RunDirectory) -> RayCluster:
    """The nodes that live, that with the replay stage's disk first. Raises :class:`ConfigurationError`."""
    here, store = ray.get_runtime_context().get_node_id(), str(store_path(config, directory))
    found = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
    ids = [str(node["NodeID"]) for node in found]
    if config.stage.store is not None:
        look = [_on_node(ray, has_disk, one).remote(store, str(directory.path)) for one in ids]
        disks = ray.get(look)
        if not any(disks):
            raise ConfigurationError(
                f"expected the disk with {store} (stage.store) on a node of the Ray cluster, found it on none of "
                f"{len(ids)}: the replay stage never starts without its store. Start the node that has it"
            )
        found.insert(0, found.pop(disks.index(True)))
    inventory = inventory_of(found)
    address = config.stage.address
    port = split_address(address)[1] if address.startswith("tcp://") else 0
    if not port:
        host = inventory.nodes[0].address
        port = ray.get(_on_node(ray, free_ports, str(found[0]["NodeID"])).remote(host, 1))
    store_node = str(found[0]["NodeID"]) if config.stage.store is not None else ""
    return RayCluster(inventory, lambda place, command: command, port, ray, store_node)


def inventory_of(nodes: Sequence[Mapping[str, Any]]) -> Inventory:
    """From what Ray says about its nodes. Their GPUs have numbers: Ray chooses among them."""
    names = [str(node.get("NodeName") or node["NodeManagerAddress"]) for node in nodes]
    found = []
    for name, node in zip(names, nodes, strict=True):
        unique = name if names.count(name) == 1 else f"{name}-{str(node['NodeID'])[:8]}"
        gpus, cpus, memory = (int(node["Resources"].get(what, 0)) for what in ("GPU", "CPU", "memory"))
        address = str(node["NodeManagerAddress"])
        found.append(Node(unique, tuple(map(str, range(gpus))), cpus, memory or None, address))
    return Inventory(tuple(found), "Ray knows none")


def lost(node: Node, error: Exception) -> ProcessLost:
    """For a keeper that has ended. Ray's last words tell whether its node did, or why it could not be started there."""
    *_, said = str(error).strip().splitlines() or [type(error).__name__]
    return ProcessLost(f"its node {node.name} is lost, or Ray's process for it: {said.strip()}")


def _call(look: Callable[[], Found]) -> Found:
    return look()


def _on_node(ray: Any, function: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return ray.remote(function).options(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
    )


@dataclass(slots=True, eq=False)
class RayChild:
    """A process under its keeper."""

    keeper: Any
    pid: int
    node: Node
    url: str | None
    """Base URL of an engine."""
    gang: bool
    host: RayHost

    def terminate(self) -> None:
        self.keeper.terminate.remote()

    def kill(self) -> None:
        self.keeper.kill.remote()
        asyncio.get_running_loop().call_later(KILL_SECONDS_MAX, self.host.abandon, self)

    async def wait(self) -> int:
        """Its exit code. Raises :class:`ProcessLost` when its node or its keeper is gone."""
        from ray.exceptions import ActorUnavailableError, RayActorError

        try:
            while True:
                try:
                    return await self._until_end()
                except ActorUnavailableError:  # not reached for the moment
                    await anyio.sleep(LOOK_SECONDS)
        except RayActorError as error:
            raise lost(self.node, error) from error
        finally:
            self.host.forget(self)

    async def _until_end(self) -> int:
        """Meanwhile the keeper hears that the driver lives."""
        end = asyncio.ensure_future(self.keeper.wait.remote())
        while not (await asyncio.wait([end], timeout=self.host.renew_seconds))[0]:
            self.keeper.renew.remote()
        return int(end.result())


class RayHost:
    """The nodes of a cluster. Reserves all placement groups when it is made; blocks for some answers of Ray."""

    def __init__(
        self, ray: Any, places: Sequence[Place], config: RunConfig, engine_port: int, inventory: Inventory
    ) -> None:
        """``engine_port``: that of the run file; 0: any free port of the node."""
        self._ray = ray
        self._config = config
        self.renew_seconds = config.supervisor.stuck_seconds_max / 10
        """Interval at which keepers hear of us."""
        self._engine_port = engine_port
        self._directory = RunDirectory(config.run.path)
        self._namespace = ray.get_runtime_context().namespace
        self._keepers = ray.remote(Keeper)
        self._urls: dict[str, str] = {}
        self._urls_wait = False
        """The file of the engines' addresses could not be written: the disk is full."""
        self._count = 0
        self._children: set[RayChild] = set()
        self._end_earlier()
        self._groups: dict[str, Any] = {}
        self._seats: dict[str, tuple[PlacementGroup, int, Seat]] = {}
        for group in placement_groups(places, inventory.nodes):
            name = f"{self._namespace}/{group.name}/{os.getpid()}"
            resources = [bundle.resources for bundle in group.bundles]
            self._groups[group.name] = ray.util.placement_group(
                resources, strategy=group.strategy, name=name, lifetime="detached"
            )
            for index, bundle in enumerate(group.bundles):
                self._seats |= {seat.place.name: (group, index, seat) for seat in bundle.seats}
        self._write_urls()

    def close(self) -> None:
        """End what is left, and give the nodes back."""
        for child in self._children:
            self._ray.kill(child.keeper)
        for group in self._groups.values():
            self._ray.util.remove_placement_group(group)

    async def start(self, spec: ProcessSpec, waiting: Waiting) -> RayChild:
        """Start a process where its bundle is. Raises :class:`ProcessLost` if that node is lost meanwhile."""
        from ray.exceptions import RayActorError

        while True:
            node = await self._await_bundle(spec.name, waiting)
            keeper = self._make_keeper(spec.name)
            try:
                child = await self._begin(spec, keeper, node, waiting)
            except RayActorError as error:
                raise lost(node, error) from error
            except BaseException:
                self._ray.kill(keeper)
                raise
            if child is not None:
                return child
            self._ray.kill(keeper)
            await anyio.sleep(LOOK_SECONDS)

    async def check(self, spec: ProcessSpec, child: Any) -> HealthAnswer:
        """Ask its keeper, which asks it on its own node."""
        from ray.exceptions import RayError

        url = None if child.url is None else f"{child.url}/health"
        if self._urls_wait:
            self._write_urls()
        with anyio.move_on_after(2 * PROBE_SECONDS_MAX), suppress(RayError):
            answer: HealthAnswer = await child.keeper.check.remote(spec.name, url, child.gang)
            return answer
        return HealthAnswer(False)

    def abandon(self, child: RayChild) -> None:
        """End the keeper of ``child``, unless it has ended: its node counts as lost."""
        if child in self._children:
            self._ray.kill(child.keeper)

    def forget(self, child: RayChild) -> None:
        """``child`` has ended."""
        self._children.discard(child)
        self._ray.kill(child.keeper)
        if child.url is not None:
            self._urls = {name: url for name, url in self._urls.items() if url != child.url}
            self._write_urls()

    def _write_urls(self) -> None:
        digests = find_digests(self._config.engine, self._directory.path) if self._urls else None
        text = "".join(f"{signed_line(url, digests or ())}\n" for _, url in sorted(self._urls.items()))
        path = engine_urls(self._directory)
        self._urls_wait = bool(left_out(partial(write_bytes_atomically, path, text.encode()), path))

    async def _begin(self, spec: ProcessSpec, keeper: Any, node: Node, waiting: Waiting) -> RayChild | None:
        """Start the process under ``keeper``; None where its disk is missing."""
        place = self._seats[spec.name][2].place
        if place.needs_disk and (missing := await keeper.claim.remote(str(store_path(self._config, self._directory)))):
            waiting(f"{missing}; {node.name} does not have it")
            return None
        url = None
        command = self._gang(place).command(str(self._directory.config_file))
        if place.role == "engine" and place.serves_health:
            port = self._engine_port + place.index if self._engine_port else await keeper.free_port.remote(node.address)
            if self._config.engine.colocate != "none":
                port = self._config.engine.port + place.index
            url = f"http://{bracketed(node.address)}:{port}"
            command += ["--set", f"engine.host={node.address}", "--set", f"engine.port={port - place.index}"]
        environment = {**spec.environment, ADDRESS: node.address}
        waiting("")
        pid = await keeper.begin.remote(spec.name, command, environment, bool(place.gpus))
        child = RayChild(keeper, pid, node, url, place.gang is not None, self)
        self._children.add(child)
        if url is not None:
            self._urls[spec.name] = url
            self._write_urls()
        return child

    def _gang(self, place: Place) -> Place:
        """``place`` with the address at which the parts of its gang meet: that of the node of the first."""
        if place.gang is None:
            return place
        group, index, _ = self._seats[place.rule.gang]
        first = self._nodes().get(self._table(group.name)["bundles_to_node_id"][index])
        if first is None:
            raise ProcessLost(f"the node of {place.rule.gang} is lost, at which {place.name} meets it")
        return replace(place, gang=replace(place.gang, address=first.address))

    def _make_keeper(self, name: str) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, index, seat = self._seats[name]
        self._count += 1
        stuck, drain = self._config.supervisor.stuck_seconds_max, self._config.checkpoint.drain_seconds_max
        return self._keepers.options(
            name=f"{name}/{os.getpid()}-{self._count}",
            lifetime="detached",
            num_cpus=seat.cpus,
            num_gpus=seat.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._groups[group.name], index),
        ).remote(str(self._directory.path), os.getcwd(), stuck, drain)

    async def _await_bundle(self, name: str, waiting: Waiting) -> Node:
        """The node of the bundle of ``name``, once Ray has one."""
        group, index, _ = self._seats[name]
        begun = time.monotonic()
        while True:
            table = await anyio.to_thread.run_sync(self._table, group.name)
            node = self._nodes().get(table["bundles_to_node_id"].get(index, ""))
            if table["state"] == "CREATED" and node is not None:
                return node
            if time.monotonic() - begun > PATIENCE_SECONDS:
                wanted = ", ".join(f"{what} {n:g}" for what, n in group.bundles[index].resources.items())
                waiting(f"a node with {wanted}: Ray has none free")
            await anyio.sleep(LOOK_SECONDS)

    def _end_earlier(self) -> None:
        """End the keepers of an earlier driver of this run, which we cannot watch."""
        for name in self._ray.util.list_named_actors():
            with suppress(ValueError):  # it has ended meanwhile
                self._ray.kill(self._ray.get_actor(name))
        for group in self._ray.util.placement_group_table().values():
            if str(group["name"]).startswith(f"{self._namespace}/") and group["state"] != "REMOVED":
                with suppress(ValueError):
                    self._ray.util.remove_placement_group(self._ray.util.get_placement_group(group["name"]))

    def _table(self, name: str) -> dict[str, Any]:
        table: dict[str, Any] = self._ray.util.placement_group_table(self._groups[name])
        return table

    def _nodes(self) -> dict[str, Node]:
        """The nodes that live, by the names that Ray gives them."""
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        return {str(node["NodeID"]): found for node, found in zip(alive, inventory_of(alive).nodes, strict=True)}
