"""Order and group plan: the replay stage's requests for rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from pipeline.errors import ImpossibleClaim, SchemaError, WireError
from pipeline.schema.trajectory import Task, require, require_finite, require_id


@dataclass(frozen=True, slots=True)
class Order:
    """Request for one rollout of ``task``. The answer is one :class:`Trajectory` whose id is ``order_id``.

    An order is a lease: the actor that holds it must be heard from, and must answer within ``seconds_max``.
    """

    order_id: str
    group_id: str
    task: Task
    slot: int
    """Place in the group, 0 to n_rollout - 1; n_rollout for the greedy rollout."""
    attempt: int
    """0 for the first try of the slot; a failed rollout is ordered again with attempt + 1."""
    policy_version: int
    """Newest published version when the order was issued: engines older than this may not sample it."""
    seconds_max: float
    """Wall time the actor may spend on it, seconds."""
    greedy: bool = False
    """Decode greedily (temperature 0): its reward is the baseline of its group, or part of an evaluation."""
    evaluation: bool = False
    """The task is held out: what comes back is measured and never trained. Such a rollout gets no lessons."""
    temperature: float | None = None
    """Sample at this instead of ``sampling.temperature``; only where the rollout is an evaluation."""

    def __post_init__(self) -> None:
        require_id("order_id", self.order_id)
        require_id("group_id", self.group_id)
        require(self.slot >= 0, "slot >= 0", self.slot)
        require(self.attempt >= 0, "attempt >= 0", self.attempt)
        require(self.policy_version >= 0, "policy_version >= 0", self.policy_version)
        require(self.seconds_max > 0, "seconds_max > 0", self.seconds_max)
        if self.temperature is not None:
            require(self.evaluation and self.temperature > 0, "a temperature > 0 of an evaluation", self.temperature)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """``n_rollout`` trajectories of one task that share an advantage group: ``n_fresh`` new ones and the rest
    replayed."""

    group_id: str
    task: Task
    n_rollout: int
    n_fresh: int
    replay_ids: tuple[str, ...] = ()
    """Trajectory ids taken from the pool, as the stored entropy chose; ``n_rollout - n_fresh`` of them."""
    candidates: tuple[str, ...] = ()
    """Everything delivered from the pool, ``replay_ids`` first: the learner may choose others of these instead.
    Empty: there is no choice."""
    attempt: int = 0
    """Number of rollouts of this group that were ordered again."""
    admitted_update: int = 0
    """Number of learner updates that were done when the group was admitted; staleness is counted from here."""
    baseline: float | None = None
    """Reward of the group's greedy rollout; None: none was ordered."""
    left_out: bool = False
    """Its rewards were all equal and it is not trained: nothing of it is delivered, and its update is made without
    it."""

    def __post_init__(self) -> None:
        require_id("group_id", self.group_id)
        if self.baseline is not None:
            require_finite("baseline", self.baseline)
        require(self.n_rollout >= 1, "n_rollout >= 1", self.n_rollout)
        require(0 <= self.n_fresh <= self.n_rollout, f"n_fresh in 0..{self.n_rollout}", self.n_fresh)
        require(
            len(self.replay_ids) == self.n_rollout - self.n_fresh,
            f"{self.n_rollout - self.n_fresh} replay ids",
            len(self.replay_ids),
        )
        require(len(set(self.replay_ids)) == len(self.replay_ids), "no trajectory twice in a group", self.replay_ids)
        require(
            not self.candidates or self.candidates[: len(self.replay_ids)] == self.replay_ids,
            "candidates that begin with the replay ids",
            self.candidates,
        )
        require(len(set(self.candidates)) == len(self.candidates), "no candidate twice", self.candidates)
        require(self.attempt >= 0 and self.admitted_update >= 0, "attempt and admitted_update >= 0", self)

    @property
    def delivered(self) -> int:
        """Trajectories that the learner is sent for this group: fresh ones and everything it may choose from."""
        if self.left_out:
            return 0
        return self.n_fresh + max(len(self.candidates), len(self.replay_ids))


Record = TypeVar("Record")

_DEFAULTS = {cls: [(field.name, field.default) for field in fields(cls)] for cls in (Order, GroupPlan)}


def encode_request(record: Order | GroupPlan) -> dict[str, Any]:
    """Header of an ORDER or PLAN message; what has its default is left out."""
    header = {name: value for name, default in _DEFAULTS[type(record)] if (value := getattr(record, name)) != default}
    header["task"] = task_header(record.task)
    return header


def decode_request(cls: type[Record], header: Mapping[str, Any]) -> Record:
    """The inverse; unknown keys are ignored. Raises :class:`WireError`, and :class:`SchemaError` for values that break
    the data model."""
    try:
        return msgspec.convert(header, cls)
    except msgspec.ValidationError as error:
        raise invalid_header(cls.__name__, error) from error


def invalid_header(what: str, error: Exception) -> SchemaError | WireError:
    """The error to raise for msgspec's: :class:`SchemaError` where a constructor of the data model raised it."""
    kind = SchemaError if isinstance(error.__cause__, SchemaError) else WireError
    return kind(f"invalid {what} header: {error}")


def task_header(task: Task) -> dict[str, Any]:
    """A task in the header of an order, a plan or a trajectory."""
    return {"task_id": task.task_id, "environment": task.environment, "seed": task.seed, "payload": dict(task.payload)}


decode_task = msgspec.json.Decoder(Task).decode
"""A task from the JSON of :func:`task_header`. Raises ``msgspec.DecodeError``."""

WHOLE_MAX = 2**53
"""Largest whole number in a header: every reader of JSON has it exactly."""


def whole(
    header: Mapping[str, Any], key: str, least: int = 0, most: int = WHOLE_MAX, *, default: int | None = None
) -> int:
    """A whole number of a header. Raises :class:`WireError` for any other value, :class:`ImpossibleClaim` for one
    beyond the bounds."""
    value = header.get(key, default)
    if type(value) is not int:
        raise WireError(f"expected {key} to be a whole number, got {str(value)[:80]!r}")
    if not least <= value <= most:
        raise ImpossibleClaim(f"expected {key} of {least} to {most}, got {value}")
    return value
