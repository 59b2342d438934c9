"""What ranks other than 0 do: wait for an order, do the same work as rank 0, wait again.

*consumes* orders of rank 0; *produces* its part of every collective; *waits for* the next order, which comes at least
every ``BEAT_SECONDS``; *unblocked by* it, by rank 0's end, or by the timeout of the group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from learner.backbone import Interrupted
from learner.checkpoint import CheckpointState, take_image
from learner.evidence import Evidence
from learner.ranks.group import RankGroup
from learner.ranks.wire import unpack_order
from learner.rows import Batch, Row
from learner.trainer import Trainer
from pipeline.errors import TrainingError

log = logging.getLogger(__name__)
BEAT_SECONDS = 5.0
"""How often rank 0 shows that it is there while it waits for groups."""

Handler = Callable[[Trainer, Mapping[str, Any], tuple[Row, ...], Evidence], Any]


def follow(trainer: Trainer, group: RankGroup, image: Callable[[int], None]) -> None:
    """Obey until rank 0 ends the work. ``image`` takes part in a checkpoint of so many updates.

    Raises :class:`TrainingError` when rank 0 is gone.
    """
    while True:
        facts, rows, evidence = unpack_order(_next(group))
        order = facts["order"]
        if order == "end":
            return
        try:
            if order == "image":
                image(int(facts["updates"]))
            elif order != "beat":
                _HANDLERS[order](trainer, facts, rows, evidence)
        except Interrupted:
            log.info("rank %d gave up %s: the learner is stopping", group.rank, order)


class Saver:
    """Writes this rank's part of each checkpoint in a thread, so that the next order need not wait. Use as a context
    manager: its end waits for the last write, and raises what went wrong in it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._last: Future[None] | None = None

    def image(self, updates: int) -> None:
        """Copy, and begin to write."""
        self.wait()
        shards = take_image(self._trainer, CheckpointState(updates, 0, {})).shards
        assert shards is not None, "one rank has no orders"
        self._last = self._threads.submit(shards.write, None)

    def wait(self) -> None:
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _next(group: RankGroup) -> Any:
    try:
        return group.hear()
    except RuntimeError as error:
        raise TrainingError(
            f"rank {group.rank} lost rank 0, which ended or was silent for too long ({_first_line(error)}): all ranks "
            "end together; start the learner again, it goes on from its newest checkpoint"
        ) from error


def _step(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], evidence: Evidence) -> None:
    trainer.kl.coefficient = facts["kl"]
    trainer.step(Batch(facts["update"], (), rows), facts["policy_version"], evidence)


def _gather(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], evidence: Evidence) -> None:
    trainer.gather(rows)


def _score(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], evidence: Evidence) -> None:
    trainer.score(rows)


def _snapshot(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], evidence: Evidence) -> None:
    trainer.policy.snapshot(facts["dtype"])


def _adapters(trainer: Trainer, facts: Mapping[str, Any], rows: tuple[Row, ...], evidence: Evidence) -> None:
    trainer.policy.adapter_snapshot(torch.float32)


_HANDLERS: dict[str, Handler] = {
    "step": _step,
    "gather": _gather,
    "score": _score,
    "snapshot": _snapshot,
    "adapters": _adapters,
}


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
