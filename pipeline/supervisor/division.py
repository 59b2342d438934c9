"""Division of the GPUs of an inventory between the learner and the engines."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from pydantic import ValidationError

from pipeline.config import RunConfig
from pipeline.config.load import reasons
from pipeline.runtime.plugins import load_main
from pipeline.supervisor.inventory import VISIBLE, Inventory, Node

ROLES = ("learner", "engine")
LEARNER_SHARE = 4
"""With ``auto`` one GPU of so many is the learner's. A rule of thumb: most of the time of a run is generation."""


@dataclass(frozen=True, slots=True)
class Share:
    """GPUs of one node that belong to one process."""

    node: Node
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """GPUs of the learner and of each engine."""

    config: RunConfig
    """With the numbers of engines and ranks that were chosen, and how they share a GPU."""
    learner: tuple[Share, ...] | None = None
    """One for each node with ranks; None: on CPUs."""
    engines: tuple[tuple[Share, ...], ...] | None = None
    """Shares of each engine that has its GPUs, in order: one for each of its nodes. None: on CPUs."""
    reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def divide(config: RunConfig, inventory: Inventory, trains: bool = True) -> Division:
    """Give each process its GPUs. ``trains``: there is a learner.

    A device of ``auto`` is a GPU if the inventory has one. Without GPUs the configuration is left as it is.
    """
    engine, placement = config.engine, config.placement
    asked = isinstance(placement.engine_gpus, int) or placement.gpus_per_engine > 1
    on_gpu = {
        "engine": engine.kind != "external" and _on_gpu(engine.device, inventory, asked),
        "learner": trains and _on_gpu(config.learner.device, inventory, isinstance(placement.learner_gpus, int)),
    }
    if not any(on_gpu.values()):
        decided = _decided(config, None, None)
        _, problem = _validated(decided.model_dump()) if engine.colocate == "sleep" else (decided, "")
        return Division(decided, problems=(problem,) if problem else ())
    if not inventory.gpus:
        return _without_places(config, on_gpu, _no_gpu(config, inventory, on_gpu))
    if on_gpu["engine"] and VISIBLE in engine.env:
        problem = f"engine.env sets {VISIBLE}, which the placement sets for each engine: omit it there"
        return _without_places(config, on_gpu, problem)
    if engine.colocate != "none":
        return _shared(config, inventory, on_gpu)
    if all(on_gpu.values()) and inventory.gpus == 1 and _may_take_turns(config):
        return _taking_turns(config, inventory)
    return _divided(config, inventory, on_gpu)


def _on_gpu(device: str, inventory: Inventory, asked: bool) -> bool:
    return device == "cuda" or (device == "auto" and (asked or inventory.gpus > 0))


def _without_places(config: RunConfig, on_gpu: Mapping[str, bool], problem: str) -> Division:
    """Nothing that needs a GPU has one."""
    learner, engines = (() if on_gpu[role] else None for role in ROLES)
    return Division(config, learner, engines, problems=(problem,))


def _no_gpu(config: RunConfig, inventory: Inventory, on_gpu: Mapping[str, bool]) -> str:
    placement = config.placement
    keys = {
        "engine.device": config.engine.device if on_gpu["engine"] else None,
        "learner.device": config.learner.device if on_gpu["learner"] else None,
        "placement.engine_gpus": placement.engine_gpus,
        "placement.learner_gpus": placement.learner_gpus,
        "placement.tensor_parallel": placement.tensor_parallel if placement.gpus_per_copy > 1 else None,
        "placement.data_parallel": placement.data_parallel if placement.data_parallel > 1 else None,
    }
    asking = ", ".join(f"{key}: {value}" for key, value in keys.items() if value not in (None, "auto", "cpu"))
    return (
        f"expected a GPU ({asking}), found none on {inventory.where}: {inventory.lack}. Run it where there is one, or "
        "set engine.device and learner.device to cpu and omit placement"
    )


def _shared(config: RunConfig, inventory: Inventory, on_gpu: Mapping[str, bool]) -> Division:
    """Engines and learner on the same GPUs (``engine.colocate``): the first of each node that has room for an engine,
    until there are enough."""
    if problem := _over_nodes(config, inventory):
        return _without_places(config, on_gpu, problem)
    size, engines = config.placement.gpus_per_engine, _engines(config, True)
    room = [len(node.gpus) // size * size for node in inventory.nodes]
    wanted = _ranks(config, True) if engines is None or config.engine.kind == "external" else engines * size
    if wanted is None:
        most = 1 if config.engine.colocate == "split" or _takes_one(config, inventory) else sum(room)
        whole = math.lcm(size, config.learner.replicas * config.learner.context_ranks)
        wanted = max(whole, most // whole * whole)
    shares, left = list[Share](), wanted
    for node, n in zip(inventory.nodes, room, strict=True):
        if taken := min(n, left):
            shares.append(Share(node, node.gpus[:taken]))
            left -= taken
    if left or wanted % size:
        each = f" in engines of {size}" if size > 1 else ""
        return _without_places(
            config,
            on_gpu,
            f"expected {wanted} GPUs{each}, which engines and learner share (engine.colocate: "
            f"{config.engine.colocate}), found {sum(room)} on {inventory.where}: lower engine.replicas, learner.ranks "
            "or placement.tensor_parallel, or omit them and set placement.engine_gpus and learner_gpus to auto",
        )
    of_engines = tuple(
        (Share(share.node, share.gpus[start : start + size]),)
        for share in shares
        for start in range(0, len(share.gpus), size)
    )
    learner, engine_shares = tuple(shares) if on_gpu["learner"] else None, of_engines if on_gpu["engine"] else None
    decided, problem = _validated(_decided(config, wanted, wanted).model_dump())
    if decided is None:
        return _without_places(config, on_gpu, problem)
    gpus = f"GPU {shares[0].gpus[0]}" if wanted == 1 else f"{wanted} GPUs"
    reason = f"engine.colocate is {config.engine.colocate}: engines and learner share {gpus}"
    return Division(decided, learner, engine_shares, (reason, *_idle(inventory, shares)))


def _may_take_turns(config: RunConfig) -> bool:
    """True if one engine and one rank may share a GPU that nobody asked for by number."""
    placement = config.placement
    chosen = placement.engine_gpus == placement.learner_gpus == "auto"
    unnamed = config.engine.device == config.learner.device == "auto"
    return (
        (chosen or unnamed)
        and not {placement.engine_gpus, placement.learner_gpus} - {None, "auto"}
        and placement.gpus_per_engine == len(config.engine.addresses()) == config.learner.ranks == 1
    )


def _taking_turns(config: RunConfig, inventory: Inventory) -> Division:
    raw = _decided(config, 1, 1).model_dump()
    transfer = "files" if config.engine.gpu_transfer else config.engine.weight_transfer
    raw["engine"] |= {"colocate": "sleep", "weight_transfer": transfer}
    raw["learner"] |= {"offload": True}
    both = {"engine": True, "learner": True}
    turns, problem = _validated(raw)
    if turns is None:
        return _without_places(config, both, f"one GPU, on which engine and learner would take turns: {problem}")
    found = _shared(turns, inventory, both)
    files = "engine.weight_transfer: files, " if config.engine.gpu_transfer else ""
    reason = (
        f"one GPU: engine and learner take turns on it (engine.colocate: sleep, {files}learner.offload: true). If both "
        "fit into its memory, engine.colocate: split lets them work at the same time"
    )
    return replace(found, reasons=(reason,))


def _validated(raw: Mapping[str, Any]) -> tuple[RunConfig | None, str]:
    """The configuration; or None and the reason for which it contradicts itself."""
    try:
        return RunConfig.model_validate(raw), ""
    except ValidationError as error:
        return None, reasons(error)


def _takes_one(config: RunConfig, inventory: Inventory) -> bool:
    """True if the learner cannot have several GPUs (what it refuses itself: learner/process/build.py)."""
    return any(node.has_mig for node in inventory.nodes) or config.learner.optimizer == "adamw_8bit"


def _divided(config: RunConfig, inventory: Inventory, on_gpu: Mapping[str, bool]) -> Division:
    """Each process with GPUs of its own, in such numbers that learner and engines fit, where some do."""
    placement = config.placement
    most = 1 if _takes_one(config, inventory) else inventory.gpus
    chooses = (on_gpu["engine"] and placement.tensor_parallel, on_gpu["learner"] and placement.learner_gpus)
    fitting = None
    if "auto" in chooses and inventory.gpu_bytes is not None:
        fitting = load_main("learner.policy.memory:fitting_sizes")(config, inventory.gpu_bytes, most)
    ranks, sizes = fitting or ((), ())
    if placement.tensor_parallel != "auto" or not on_gpu["engine"]:
        sizes = ()
    for size in sizes:
        if isinstance(placement.engine_gpus, int) and placement.engine_gpus % (size * placement.data_parallel):
            continue
        sized = config.updated(placement={"tensor_parallel": size})
        found = _counted(sized, inventory, on_gpu, ranks, most)
        if not found.problems:
            reason = f"an engine takes {size} GPUs: by its estimated memory the model does not fit on fewer"
            return replace(found, reasons=(*found.reasons, reason)) if size > 1 else found
    return _counted(config, inventory, on_gpu, ranks, most)


def _counted(
    config: RunConfig, inventory: Inventory, on_gpu: Mapping[str, bool], fitting: Sequence[int], ranks_max: int
) -> Division:
    """Numbers of engines of a given size, and of ranks, those that are ``fitting`` before others."""
    nodes = inventory.nodes
    size, gpus = config.placement.gpus_per_engine, [len(node.gpus) for node in nodes]
    engines, ranks = _engines(config, on_gpu["engine"]), _ranks(config, on_gpu["learner"])
    replicas, context = config.learner.replicas, config.learner.context_ranks
    wanted_engines, wanted_ranks = choose_counts(gpus, engines, ranks, size, ranks_max, fitting, replicas, context)
    taken = place_ranks(gpus, wanted_ranks, size, replicas)
    placed = place_engines(gpus, taken or [0] * len(gpus), wanted_engines, size)
    learner = tuple(Share(node, node.gpus[:n]) for node, n in zip(nodes, taken or (), strict=False) if n)
    share = share_of(gpus, size)
    shares = tuple(tuple(Share(nodes[i], nodes[i].gpus[at : at + share]) for i, at in parts) for parts in placed)
    places = (learner if on_gpu["learner"] else None, shares if on_gpu["engine"] else None)
    problems = _problems(config, inventory, wanted_engines, wanted_ranks, taken is not None, len(shares))
    if problems:
        return Division(config, *places, problems=problems)
    engine_gpus = wanted_engines * size if on_gpu["engine"] else None
    decided = _decided(config, engine_gpus, wanted_ranks if on_gpu["learner"] else None)
    reasons = (
        *_reasons(config, inventory, wanted_engines, wanted_ranks, fitting),
        *_idle(inventory, (*learner, *chain.from_iterable(shares))),
    )
    return Division(decided, *places, reasons)


def _engines(config: RunConfig, on_gpu: bool) -> int | None:
    """Engines that need GPUs; None: to be chosen."""
    gpus = config.placement.engine_gpus
    if not on_gpu:
        return 0
    if config.engine.urls or gpus is None:
        return len(config.engine.addresses())
    return gpus // config.placement.gpus_per_engine if isinstance(gpus, int) else None


def _ranks(config: RunConfig, on_gpu: bool) -> int | None:
    """Ranks that need GPUs; None: to be chosen."""
    gpus = config.placement.learner_gpus
    if not on_gpu:
        return 0
    return config.learner.ranks if gpus is None else None if gpus == "auto" else gpus


def choose_counts(
    gpus: Sequence[int],
    engines: int | None,
    ranks: int | None,
    size: int,
    ranks_max: int,
    fitting: Sequence[int] = (),
    replicas: int = 1,
    context_ranks: int = 1,
) -> tuple[int, int]:
    """Numbers of engines and ranks for nodes with so many ``gpus``; given numbers stay as they are. A chosen number of
    ranks is a multiple of ``replicas`` times ``context_ranks``, as ``fitting`` ones must be.

    Without either, a quarter of the GPUs is the learner's, or the next larger number of ranks that is ``fitting``, else
    the next smaller one. The others are for engines of ``size`` GPUs. The learner gets what no engine can use. Where
    no number that is fitting leaves room for an engine, all count as fitting.
    """
    most = min(sum(gpus), ranks_max)

    def room(ranks: int) -> int:
        taken = place_ranks(gpus, ranks, size, replicas)
        return -1 if taken is None else len(place_engines(gpus, taken, sum(gpus), size))

    if ranks is not None:
        return max(1, room(ranks)) if engines is None else engines, ranks
    quarter = min(most, max(1, sum(gpus) // LEARNER_SHARE))
    whole = replicas * context_ranks
    counts = [n for n in range(most, 0, -1) if n % whole == 0]
    for allowed in ([n for n in counts if n in fitting], counts):
        wanted = engines
        if wanted is None:
            by_share = sorted(allowed, key=lambda n: (n < quarter, abs(n - quarter)))
            wanted = max(1, room(next((n for n in by_share if room(n) > 0), whole)))
        found = next((n for n in allowed if room(n) >= wanted), None)
        if found is not None:
            return wanted, found
    return 1 if engines is None else engines, whole


def place_ranks(gpus: Sequence[int], ranks: int, size: int, replicas: int = 1) -> list[int] | None:
    """GPUs of each node that the learner takes; None if there are too few.

    All ranks on one node if they fit: on the one where they cost the fewest engines of ``size`` GPUs. Otherwise whole
    nodes, the largest first, but of each whole ``replicas`` where it has room for one: their ranks communicate most.
    """
    taken, shards, share = [0] * len(gpus), max(1, ranks // replicas), share_of(gpus, size)
    while ranks > 0:
        free = [n - t for n, t in zip(gpus, taken, strict=True)]
        fitting = [i for i, n in enumerate(free) if n >= ranks]
        if fitting:
            best = min(fitting, key=lambda i: (free[i] // share - (free[i] - ranks) // share, i))
        else:
            best = max(range(len(free)), key=lambda i: (free[i], -i))
        if not free[best]:
            return None
        count = min(ranks, free[best])
        if shards < count < ranks and replicas > 1:
            count -= count % shards
        taken[best] += count
        ranks -= count
    return taken


def share_of(gpus: Sequence[int], size: int) -> int:
    """GPUs that an engine of ``size`` takes on each of its nodes: all on one, or whole nodes, the largest."""
    return max(1, min(size, max(gpus)))


def place_engines(gpus: Sequence[int], taken: Sequence[int], engines: int, size: int) -> list[list[tuple[int, int]]]:
    """Nodes of each engine that fits, each with the first GPU there, behind the ``taken`` GPUs. None fits where whole
    nodes do not have its number of GPUs.

    Engines of several GPUs begin at a multiple of their size where that costs none of them: such GPUs are often the
    ones with the fastest links.
    """
    share = share_of(gpus, size)
    parts: list[tuple[int, int]] = []
    for i, (n, t) in enumerate(zip(gpus, taken, strict=True)):
        aligned = -(-t // share) * share
        begin = aligned if (n - aligned) // share == (n - t) // share else t
        parts += [(i, start) for start in range(begin, n - share + 1, share)]
    if size % share:
        return []
    many = size // share
    return [parts[i : i + many] for i in range(0, len(parts) - many + 1, many)][:engines]


def _over_nodes(config: RunConfig, inventory: Inventory) -> str:
    """A sentence if an engine needs GPUs of several nodes and cannot be divided over them."""
    placement, engine, most = config.placement, config.engine, max(len(node.gpus) for node in inventory.nodes)
    size, copy = placement.gpus_per_engine, placement.gpus_per_copy
    if not most < size <= inventory.gpus:
        return ""
    what = f"an engine of {size} GPUs takes several nodes, none of which has more than {most}"
    remedy = f"lower placement.tensor_parallel or data_parallel, for at most {most} together"
    if engine.colocate != "none" or engine.weight_transfer == "ipc":
        key = "weight_transfer is ipc" if engine.colocate == "none" else f"colocate is {engine.colocate}"
        return f"{what}, but engine.{key}, which is for engine and learner on one machine: {remedy}"
    if size % most:
        return f"{what}, and takes them whole: set placement.tensor_parallel to a multiple of {most}, or {remedy}"
    if copy > most and placement.data_parallel > 1:
        return (
            f"{what}, but {placement.data_parallel} copies of the model, each on several nodes, cannot be one engine "
            f"of vLLM: set placement.data_parallel to 1, for engines of {copy} GPUs"
        )
    if copy < most and most % copy:
        return f"{what}, each with whole copies of the model: set placement.tensor_parallel to a divisor of {most}"
    return ""


def _decided(config: RunConfig, engine_gpus: int | None, ranks: int | None) -> RunConfig:
    """``config`` with numbers in place of ``auto``, and engines and ranks that agree with them. None: on CPUs."""
    placement, changed = config.placement, defaultdict[str, dict[str, int | None]](dict)
    if placement.tensor_parallel == "auto" and engine_gpus is not None:
        changed["placement"]["tensor_parallel"] = placement.gpus_per_copy
    if placement.engine_gpus is not None:
        changed["placement"]["engine_gpus"] = engine_gpus
        if engine_gpus is not None and not config.engine.urls:
            changed["engine"]["replicas"] = engine_gpus // placement.gpus_per_engine
    if placement.learner_gpus is not None:
        changed["placement"]["learner_gpus"] = ranks
        changed["learner"]["ranks"] = ranks or config.learner.ranks
    return config.updated(**changed) if changed else config


def _problems(
    config: RunConfig, inventory: Inventory, engines: int, ranks: int, has_learner: bool, placed: int
) -> tuple[str, ...]:
    """A sentence if something has no GPUs."""
    placement, total = config.placement, inventory.gpus
    size = placement.gpus_per_engine
    if any(node.has_mig for node in inventory.nodes) and (size > 1 or ranks > 1):
        return (
            f"expected whole GPUs for engines of {size} GPUs and {ranks} ranks, found MIG devices, of which CUDA shows "
            "a process only one: set placement.tensor_parallel, data_parallel and learner.ranks to 1",
        )
    if engines and (problem := _over_nodes(config, inventory)):
        return (problem,)
    if has_learner and placed >= engines:
        return ()
    parts = []
    if ranks:
        key = "learner.ranks" if placement.learner_gpus is None else "placement.learner_gpus"
        parts.append(f"{ranks} for the learner ({key})")
    if engines:
        each = f" of {size}" if size > 1 else ""
        key = "engine.replicas" if placement.engine_gpus is None else "placement.engine_gpus"
        parts.append(f"{engines * size} for {_count(engines, 'engine')}{each} ({key})")
    need = ranks + engines * size
    if need > total:
        found = f"found {total} on {inventory.where}"
    else:
        share = share_of([len(node.gpus) for node in inventory.nodes], size)
        room = f"no node with {size} free" if share == size else f"fewer than {size // share} nodes with {share} free"
        found = f"found {room} for engine-{placed} on {inventory.where}"
    remedy = "lower these numbers, or omit them and set placement.engine_gpus and learner_gpus to auto"
    if size > 1:
        remedy = f"lower placement.tensor_parallel or data_parallel, or {remedy}"
    if total == ranks == engines == size == 1:
        remedy += ", or share one GPU (engine.colocate: sleep or split)"
    return (f"expected {need} GPUs, {' and '.join(parts)}, {found}: {remedy}",)


def _reasons(config: RunConfig, inventory: Inventory, engines: int, ranks: int, fitting: Sequence[int]) -> list[str]:
    """A sentence about what was chosen; none where the run file names the numbers. ``fitting``: numbers of ranks whose
    memory fits."""
    placement = config.placement
    size, quarter = placement.gpus_per_engine, max(1, inventory.gpus // LEARNER_SHARE)
    if "auto" not in (placement.engine_gpus, placement.learner_gpus):
        return []
    parts = []
    if ranks:
        parts.append(f"{ranks} for the learner")
    if engines:
        parts.append(f"{engines * size} for {_count(engines, 'engine')}" + (f" of {size}" if size > 1 else ""))
    if not ranks or not engines:
        reason = "nothing else needs one"
    elif placement.engine_gpus == placement.learner_gpus:
        reason = "most of the time goes into generation, so a quarter is for the learner, at least one"
        if ranks in fitting and quarter not in fitting:
            reason = f"by its estimated memory the learner does not fit on a quarter of them ({quarter})"
        elif ranks > quarter:
            reason += ", and what no engine can use"
    elif placement.engine_gpus == "auto":
        reason = "engines get what placement.learner_gpus or learner.ranks leaves"
    else:
        reason = "the learner gets what the engines leave"
    return [f"{_count(inventory.gpus, 'GPU')} on {inventory.where}: {' and '.join(parts)}; {reason}"]


def _idle(inventory: Inventory, shares: Sequence[Share]) -> list[str]:
    """A sentence about GPUs without a process."""
    used = {(share.node.name, gpu) for share in shares for gpu in share.gpus}
    idle = [
        gpu if len(inventory.nodes) == 1 else f"{node.name}:{gpu}"
        for node in inventory.nodes
        for gpu in node.gpus
        if (node.name, gpu) not in used
    ]
    return [f"without a process: GPU {', '.join(idle)}"] if idle else []


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
