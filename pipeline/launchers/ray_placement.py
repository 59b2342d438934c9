"""Placement groups of Ray for the places of a plan, and the keeper of one process on a node. Imports no Ray.

The plan says how many GPUs and cores each process has, and which processes share a GPU. Ray reserves them, chooses the
nodes and the GPUs, and does so again for what was on a node that is lost. A keeper is a detached actor: it outlives the
driver by :attr:`Keeper.lease_seconds`. Its process ends with it, however it ends (:class:`OrphanReaper`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pipeline.config.explain import free_ports
from pipeline.runtime.children import ChildGroup, OrphanReaper
from pipeline.runtime.disk import FULL, wait_for_room
from pipeline.runtime.run_directory import RunDirectory, read_json, write_json_atomically
from pipeline.supervisor.inventory import VISIBLE, Node
from pipeline.supervisor.plan import Place
from pipeline.supervisor.processes import HealthAnswer, check_health, child_environment, health_url, open_log

ON_NODE = 0.001
"""Part of the resource ``node:ADDRESS`` that every node has once: a bundle with it is on that node."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Part of a bundle that one process gets."""

    place: Place
    cpus: float
    gpus: float
    """Below 1 for a process that shares a GPU."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Processes that are always on one node, with what Ray reserves for them there."""

    seats: tuple[Seat, ...]
    resources: dict[str, float]


@dataclass(frozen=True, slots=True)
class PlacementGroup:
    """The processes of one role; with those that share a GPU with them."""

    name: str
    strategy: str
    bundles: tuple[Bundle, ...]


def placement_groups(places: Iterable[Place], nodes: Sequence[Node]) -> tuple[PlacementGroup, ...]:
    """The learner packed, engines and actors spread with a bundle each, the replay stage and what runs once on the
    first of ``nodes``, where its disk is. Processes that share a GPU share a bundle on the node of the plan, in the
    group of the first of them. In the order in which they should be reserved: what is hard to place comes first."""
    addresses = {node.name: node.address for node in nodes}
    together: dict[str, list[Place]] = defaultdict(list)
    owners: dict[tuple[str, str], str] = {}
    places = list(places)
    for place in sorted(places, key=lambda place: len(place.gpus)):  # a learner has those of several engines
        owners |= {(place.node, gpu): place.name for gpu in place.gpus}
    for place in places:
        at_disk = place.needs_disk or place.rule.once
        owner = next((owners[place.node, gpu] for gpu in place.gpus), place.name)
        together["replay" if at_disk else owner].append(place)
    groups: dict[str, list[list[Place]]] = defaultdict(list)
    for members in together.values():
        groups["replay" if any(place.needs_disk for place in members) else members[0].role].append(members)
    found = [
        PlacementGroup(
            role,
            "SPREAD" if bundles[0][0].spread else "PACK",
            tuple(_bundle(members, addresses[members[0].node]) for members in bundles),
        )
        for role, bundles in groups.items()
    ]

    def size(bundle: Bundle) -> tuple[bool, float, float]:
        pinned = any(name.startswith("node:") for name in bundle.resources)
        return pinned, bundle.resources.get("GPU", 0), bundle.resources.get("CPU", 0)

    return tuple(sorted(found, key=lambda group: max(map(size, group.bundles)), reverse=True))


def _bundle(members: Sequence[Place], address: str) -> Bundle:
    """One process may be on any node; several on that with the ``address``. What runs once needs a core only before
    the others of its bundle work."""
    owners: dict[str, int] = defaultdict(int)
    for place in members:
        for gpu in place.gpus:
            owners[gpu] += 1
    seats = tuple(
        Seat(place, 0 if place.rule.once else place.cpus, sum(1 / owners[gpu] for gpu in place.gpus))
        for place in members
    )
    resources: dict[str, float] = {"CPU": sum(seat.cpus for seat in seats), "GPU": len(owners)}
    if len(members) > 1:
        resources[f"node:{address}"] = ON_NODE
    return Bundle(seats, {name: amount for name, amount in resources.items() if amount})


def lacking(groups: Iterable[PlacementGroup], nodes: Sequence[Node]) -> str:
    """A sentence if the nodes together have fewer cores or GPUs than the bundles, or none has those of one bundle; or
    where processes share several GPUs."""
    bundles = [bundle for group in groups for bundle in group.bundles]
    for bundle in bundles:
        sharing = [seat.place.name for seat in bundle.seats if seat.gpus]
        if bundle.resources.get("GPU", 0) > 1 and len(sharing) > 1:
            return (
                f"expected GPUs that one process has for itself, but {' and '.join(sharing)} would share several "
                "(engine.colocate: sleep), of which Ray cannot give each a part: start the run on one machine or with "
                "--on slurm, or set engine.colocate: none"
            )
    for what, has in (("CPU", [node.cpus or 0 for node in nodes]), ("GPU", [len(node.gpus) for node in nodes])):
        wanted = [bundle.resources.get(what, 0) for bundle in bundles]
        most = max(bundles, key=lambda bundle: bundle.resources.get(what, 0))
        names = " and ".join(seat.place.name for seat in most.seats)
        if sum(wanted) > sum(has):
            return (
                f"expected {sum(wanted):g} {what}s, {max(wanted):g} of them for {names}, found {sum(has)} on the nodes "
                "of the Ray cluster: lower actor.replicas, engine.replicas or their threads, or add nodes"
            )
        if max(wanted) > max(has):
            return (
                f"expected a node with {max(wanted):g} {what}s for {names}, the largest of the Ray cluster has "
                f"{max(has)}: lower the numbers of threads or GPUs of one process, or add a larger node"
            )
    return ""


def describe(groups: Iterable[PlacementGroup]) -> list[str]:
    """A line for each bundle."""
    return [
        f"{group.name} ({group.strategy}) bundle {i}: {' and '.join(seat.place.name for seat in bundle.seats)} "
        f"with {', '.join(f'{name} {amount:g}' for name, amount in bundle.resources.items())}"
        for group in groups
        for i, bundle in enumerate(group.bundles)
    ]


EXPIRED = 1
"""Exit code of a keeper without a driver."""


class Keeper:
    """Starts one process of the run in ``directory``, asks for its health, and takes it down with itself. ``folder``:
    working folder of the process. Without a word of the driver for ``lease_seconds`` it drains the process, for at most
    ``drain_seconds``, and ends."""

    def __init__(self, directory: str, folder: str, lease_seconds: float, drain_seconds: float) -> None:
        self._directory = RunDirectory(Path(directory))
        self._folder = folder
        self._lease_seconds, self._drain_seconds = lease_seconds, drain_seconds
        self._reaper = OrphanReaper()
        self._child: ChildGroup | None = None
        self._heard_at = time.monotonic()
        threading.Thread(target=self._watch, name="lease", daemon=True).start()

    async def free_port(self, host: str) -> int:
        """A port of ``host`` that is free now."""
        return free_ports(host, 1)

    async def claim(self, store: str) -> str:
        """Empty if the disk with ``store`` is here, else what is missing."""
        claim = partial(claim_disk, Path(store), self._directory)
        return await asyncio.to_thread(wait_for_room, claim, Path(store), "the mark of the disk", FULL)

    async def begin(self, name: str, command: list[str], environment: dict[str, str], gpus: bool) -> int:
        """Start the process ``name``; returns its process id. Ray chose the GPUs: they are in our environment."""
        if VISIBLE in environment:
            environment[VISIBLE] = os.environ.get(VISIBLE, "") if gpus else ""
        log, variables = self._directory.log_file(name), child_environment(environment)

        def start() -> ChildGroup:
            with open_log(log) as output:
                return ChildGroup(command, self._reaper, environment=variables, folder=self._folder, output=output)

        self._child = await asyncio.to_thread(wait_for_room, start, log, f"the log of {name}", FULL)
        return self._child.pid

    async def check(self, name: str, url: str | None, any_pid: bool) -> HealthAnswer:
        """Health of the process, at ``url`` or where it says itself. ``any_pid``: one of its children says it."""
        self._heard_at = time.monotonic()
        assert self._child is not None
        found = url or health_url(self._directory, name, None if any_pid else self._child.pid)
        return HealthAnswer(False) if found is None else await asyncio.to_thread(check_health, found)

    async def renew(self) -> None:
        """The driver lives."""
        self._heard_at = time.monotonic()

    async def terminate(self) -> None:
        """SIGTERM to the process."""
        if self._child is not None:
            self._child.terminate()

    async def kill(self) -> None:
        """SIGKILL to the process and its children."""
        if self._child is not None:
            self._child.kill()

    async def wait(self) -> int:
        """Its exit code."""
        assert self._child is not None
        return await self._child.wait()

    def _watch(self) -> None:
        while (left := self._heard_at + self._lease_seconds - time.monotonic()) > 0:
            time.sleep(left)
        if self._child is not None:
            self._child.stop(self._drain_seconds)
        os._exit(EXPIRED)


def claim_disk(store: Path, directory: RunDirectory) -> str:
    """Empty if ``store`` is on this node, else what is missing. A mark beside the store and a record in the run
    directory, made when the stage is first started, tell the disk from an empty folder of the same name."""
    mark, record = store.with_name(f"{store.name}.disk"), directory.path / "replay_disk.json"
    known, found = read_json(record), read_json(mark)
    if known is not None:
        return "" if found == known else f"its disk, which has {mark}"
    if found is None:
        if not store.parent.is_dir():
            return f"its disk, which has the folder {store.parent}"
        found = {"disk": secrets.token_hex(8)}
        write_json_atomically(mark, found, durable=True)
    write_json_atomically(record, found, durable=True)
    return ""


def has_disk(store: str, directory: str) -> bool:
    """True if the disk with ``store`` is on this node, as far as anybody knows. Changes nothing."""
    known = read_json(RunDirectory(Path(directory)).path / "replay_disk.json")
    path = Path(store)
    return path.parent.is_dir() if known is None else read_json(path.with_name(f"{path.name}.disk")) == known
