"""``afterplay plan FILE``: the processes of a run and what does not fit, before anything starts."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import File, Json, Sets, finite, load
from pipeline.cli.replay import open_run
from pipeline.runtime.plugins import load_main
from pipeline.views.tables import plain_console, table

if TYPE_CHECKING:
    from pipeline.config import RunConfig
    from pipeline.supervisor.forecast import Speeds
    from pipeline.supervisor.inventory import Inventory
    from pipeline.supervisor.plan import Place, Plan


def show_plan(
    file: File,
    gpus: Annotated[
        int | None, typer.Option(min=0, max=10_000, help="Plan for this number of GPUs, on each node, instead of ours.")
    ] = None,
    nodes: Annotated[
        str, typer.Option(metavar="N|NAME:GPUS,…", help="Plan for several nodes instead of this machine.")
    ] = "",
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, callback=finite, metavar="GIB", help="Plan for GPUs of so much memory, instead of ours."),
    ] = None,
    speeds: Annotated[
        str,
        typer.Option(
            metavar="RUN|SPEEDS",
            help="Also forecast the run: with the speeds measured in RUN, or with rollout=MEAN:P95,update=S,publish=S.",
        ),
    ] = "",
    as_json: Json = False,
    sets: Sets = None,
) -> None:
    """Show the processes of FILE with their node, GPUs, cores, ports and environment, without starting them.

    GPUs are divided as the section `placement` says, and their memory is estimated from the config.json of the model.
    The exit code is 0 if everything fits, else 2.

      afterplay plan @gpu
      afterplay plan @gpu --gpus 8 --gpu-memory 80
      afterplay plan @gpu --nodes head:8,worker:8 --set placement.tensor_parallel=4
      afterplay plan @gpu --speeds rollout=30:90,update=20,publish=5
    """
    from pipeline.runtime.process import ExitCode
    from pipeline.supervisor.forecast import forecast
    from pipeline.supervisor.inventory import given_inventory, local_inventory
    from pipeline.supervisor.plan import plan

    config = load(file, sets)
    inventory = given_inventory(gpus, nodes, local_inventory(), gpu_memory)
    found = plan(config, inventory)
    if not found.problems and (on_gpus := {place.role for place in found.places if place.gpus} & {"learner", "engine"}):
        roles = {role: role in on_gpus for role in ("learner", "engine")}
        buffers = sum(place.memory_bytes for place in found.places)
        memory = load_main("learner.policy.memory:estimate")(
            found.config, inventory.gpu_bytes, **roles, buffers=buffers
        )
        found = replace(found, reasons=(*found.reasons, *memory.sentences), problems=memory.problems)
    if config.learner.routing_replay:
        found = replace(
            found, reasons=(*found.reasons, load_main("learner.models.prepare:routing_replay_size")(config))
        )
    outlook = None
    if speeds:
        outlook, bounds = forecast(found.config, _speeds(speeds, found.config), found.config.run.total_steps)
        found = replace(found, reasons=(*found.reasons, bounds))
    if as_json:
        import orjson

        told = describe(found, inventory) | ({} if outlook is None else {"forecast": asdict(outlook)})
        typer.echo(orjson.dumps(told, option=orjson.OPT_INDENT_2).decode())
    else:
        _print(found, inventory)
        if outlook is not None:
            plain_console().print(table(("forecast", ">"), outlook.rows().items()))
    raise typer.Exit(ExitCode.CONFIGURATION if found.problems else ExitCode.FINISHED)


def _speeds(text: str, config: RunConfig) -> Speeds:
    """Given ones, or those of a run directory."""
    from pipeline.supervisor.forecast import Speeds, measure

    if "=" in text:
        return Speeds.parse(text, config.groups.n_rollout)
    return measure(*open_run(Path(text)))[0]


def describe(plan: Plan, inventory: Inventory) -> dict[str, Any]:
    """The plan as JSON values. ``FILE`` in a command stands for the run file, ``python`` for the interpreter."""
    return {
        "nodes": inventory.nodes,
        "places": [
            {"name": place.name, **asdict(place), "command": place.command("FILE", "python")} for place in plan.places
        ],
        "changes": {
            "placement": plan.config.placement.model_dump(),
            "engine": {key: getattr(plan.config.engine, key) for key in ("replicas", "colocate", "weight_transfer")},
            "learner": {key: getattr(plan.config.learner, key) for key in ("ranks", "offload")},
        },
        "reasons": plan.reasons,
        "problems": plan.problems,
    }


def _print(plan: Plan, inventory: Inventory) -> None:
    console, many = plain_console(), len(inventory.nodes) > 1
    rows = [
        (
            _name(place, plan), *([place.node] if many else []), ",".join(place.gpus) or "-", place.cpus,
            " ".join(f"{use} {port or 'any'}" for use, port in place.ports.items()),
            " ".join((*place.rule.depends, *place.rule.awaits)),
            "never" if place.rule.once else "yes, ends the run" if place.rule.ends_run else "yes",
            " ".join(f"{key}={value}" for key, value in place.environment.items()),
        )
        for place in plan.places
    ]  # fmt: skip
    node = ["node"] if many else []
    console.print(table(["process", *node, "GPUs", "cores", "ports", "waits for", "restarts", "environment"], rows))
    for sentence in (*plan.reasons, *_busy(plan, inventory)):
        console.print(sentence)
    for sentence in plan.problems:
        console.print(f"does not fit: {sentence}", style="red")


def _name(place: Place, plan: Plan) -> str:
    """The name, with the ranks of a gang, or of a learner of several."""
    if place.gang is not None:
        gang = [other for other in plan.places if other.rule.gang == place.rule.gang]
        first = sum(len(other.gpus) for other in gang[: place.gang.node])
        return f"{place.name} (ranks {first}-{first + len(place.gpus) - 1})"
    return f"{place.name} ({len(place.gpus)} ranks)" if place.role == "learner" and len(place.gpus) > 1 else place.name


def _busy(plan: Plan, inventory: Inventory) -> list[str]:
    """A sentence for each node with more busy cores than it has."""
    wanted: dict[str, int] = defaultdict(int)
    for place in plan.places:
        if not place.rule.once:
            wanted[place.node] += place.cpus
    return [
        f"the processes on {node.name} share its cores: {wanted[node.name]} would be busy, it has {node.cpus}"
        for node in inventory.nodes
        if node.cpus is not None and wanted[node.name] > node.cpus
    ]
