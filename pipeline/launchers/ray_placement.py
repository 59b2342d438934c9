"""Placement groups of Ray for the places of a plan. Pure.

The plan says how many GPUs and cores each process has, and which processes share a GPU. Ray reserves them, chooses the
nodes and the GPUs, and does so again for what was on a node that is lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeline.supervisor.inventory import Node
from pipeline.supervisor.plan import Place, Wish

STRATEGIES = {Wish.PACK: "PACK", Wish.SPREAD: "SPREAD", Wish.ANY: "PACK"}
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
    together: dict[object, list[Place]] = defaultdict(list)
    for place in places:
        at_disk = place.needs_disk or place.rule.once
        shared = next(((place.node, gpu) for gpu in place.gpus), None)
        together["replay" if at_disk else shared or place.name].append(place)
    groups: dict[str, list[list[Place]]] = defaultdict(list)
    for members in together.values():
        groups["replay" if any(place.needs_disk for place in members) else members[0].role].append(members)
    found = [
        PlacementGroup(
            role,
            STRATEGIES[bundles[0][0].wish],
            tuple(_bundle(members, addresses[members[0].node]) for members in bundles),
        )
        for role, bundles in groups.items()
    ]
    return tuple(sorted(found, key=lambda group: max(map(_size, group.bundles)), reverse=True))


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


def _size(bundle: Bundle) -> tuple[bool, float, float]:
    pinned = any(name.startswith("node:") for name in bundle.resources)
    return pinned, bundle.resources.get("GPU", 0), bundle.resources.get("CPU", 0)


def lacking(groups: Iterable[PlacementGroup], nodes: Sequence[Node]) -> str:
    """A sentence if the nodes together have fewer cores or GPUs than the bundles, or none has those of one bundle."""
    bundles = [bundle for group in groups for bundle in group.bundles]
    for what, has in (
        ("CPU", [node.cpus or 0 for node in nodes]),
        ("GPU", [len(node.gpus) for node in nodes]),
    ):
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
