"""Headers of messages that carry no arrays: orders, plans, and the task in them and in a trajectory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pipeline.errors import SchemaError, WireError
from pipeline.schema import GroupPlan, Order, Task

Record = TypeVar("Record")


def encode_order(order: Order) -> dict[str, Any]:
    """Header of an ORDER message."""
    header = {
        "order_id": order.order_id,
        "group_id": order.group_id,
        "task": task_header(order.task),
        "slot": order.slot,
        "attempt": order.attempt,
        "policy_version": order.policy_version,
        "seconds_max": order.seconds_max,
    }
    if order.greedy:
        header["greedy"] = True
    if order.evaluation:
        header["evaluation"] = True
    if order.temperature is not None:
        header["temperature"] = order.temperature
    return header


def decode_order(header: Mapping[str, Any]) -> Order:
    """Raises :class:`WireError`."""
    return _built(Order, header, task=decode_task)


def encode_plan(plan: GroupPlan) -> dict[str, Any]:
    """Header of a PLAN message."""
    header = {
        "group_id": plan.group_id,
        "task": task_header(plan.task),
        "n_rollout": plan.n_rollout,
        "n_fresh": plan.n_fresh,
        "replay_ids": list(plan.replay_ids),
        "candidates": list(plan.candidates),
        "attempt": plan.attempt,
        "admitted_update": plan.admitted_update,
    }
    if plan.baseline is not None:
        header["baseline"] = plan.baseline
    if plan.left_out:
        header["left_out"] = True
    return header


def decode_plan(header: Mapping[str, Any]) -> GroupPlan:
    """Raises :class:`WireError`."""
    return _built(GroupPlan, header, task=decode_task, replay_ids=tuple, candidates=tuple)


def _built(cls: type[Record], header: Mapping[str, Any], **convert: Any) -> Record:
    try:
        names = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{k: convert.get(k, lambda v: v)(v) for k, v in header.items() if k in names})
    except SchemaError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise WireError(f"{cls.__name__} header is not understood: {type(error).__name__}: {error}") from error


def task_header(task: Task) -> dict[str, Any]:
    """As a task stands in the header of an order, a plan or a trajectory."""
    return {"task_id": task.task_id, "environment": task.environment, "seed": task.seed, "payload": dict(task.payload)}


def decode_task(header: Mapping[str, Any]) -> Task:
    """Raises what a header without the keys raises."""
    return Task(header["task_id"], header["environment"], header["seed"], header.get("payload") or {})
