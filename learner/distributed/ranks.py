"""The trainer's view of the ranks of a learner, and the device of a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from learner.data.microbatch import Form
from learner.data.rows import Row, TokenScores
from learner.distributed.context import ContextGroup
from learner.observability.statistics import TokenValues, Weights
from pipeline.errors import ConfigurationError

HEARTBEAT_SECONDS = 5.0
"""Interval at which rank 0 sends a heartbeat while it waits for groups."""

T = TypeVar("T")


class Ranks:
    """The only rank of a learner; :class:`learner.distributed.collectives.RankGroup` is one of several.

    Every method is a collective unless it says otherwise: all ranks must call it, in the same order.
    """

    rank = 0
    size = 1
    replica = 0
    """Number of this rank's replica of the weights: ``size / replicas`` ranks, one after another, divide each."""
    shard = 0
    """Number of this rank in its replica."""

    context: ContextGroup | None = None
    """Group of this rank whose ranks divide the tokens of long rows."""

    def mine(self, rows: Sequence[Row], form: Form, tokens_max: int) -> tuple[list[int], list[int]]:
        """Numbers of the rows that this rank computes, which has them whole then: with its context group, because they
        are longer than ``tokens_max``, and alone."""
        return [], list(range(len(rows)))

    def whole_row(self, row: Row) -> Row:
        """One of :meth:`mine` with all of its arrays. Not a collective."""
        return row

    def together(
        self,
        command: str,
        rows: Sequence[Row] = (),
        facts: Mapping[str, Any] | None = None,
        scores: TokenScores | None = None,
    ) -> AbstractContextManager[None]:
        """Around work that all ranks must do. Rank 0 sends ``command`` to the others, which wait for one; on them, and
        within other work, it does nothing. Not a collective by itself."""
        return nullcontext()

    def agree(self, code: int = 0) -> int:
        """The largest code of any rank. Raises :class:`pipeline.errors.Interrupted` on all ranks where one is
        asked to stop."""
        return code

    def padded(self, parts: list[T]) -> list[T | None]:
        """``parts`` of every rank made as many as those of the rank with most."""
        return list(parts)

    def summed(self, values: Sequence[float]) -> list[float]:
        """Sums over ranks, float64."""
        return list(values)

    def merged(self, arrays: tuple[npt.NDArray[np.float32], ...]) -> tuple[npt.NDArray[np.float32], ...]:
        """Sums over ranks of arrays that are 0 wherever another rank computed; NaN stays NaN."""
        return arrays

    def ratios(self, weights: Weights) -> Weights:
        """Weights of all ranks together."""
        return weights

    def values(self, values: list[TokenValues]) -> list[TokenValues]:
        """Values of all ranks, in order of rank; the same on all of them."""
        return values

    def whole(self, tensor: Tensor) -> Tensor:
        """A parameter or buffer with the shards of all ranks, on those of rank 0's replica; the others keep theirs."""
        return tensor

    def sum_replicas(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum the gradients over the replicas, after the last backward pass of an optimizer step. The random states of
        torch become equal too, so that an optimizer that draws keeps the replicas equal."""

    def of_first_replica(self, tensor: Tensor) -> Tensor:
        """``tensor`` of the same shard of replica 0: where networks differ, sums over shards may in their last bits."""
        return tensor

    def divide(self, module: torch.nn.Module) -> None:
        """Shard a module that is called by itself. Not a collective."""


ALONE = Ranks()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor that is divided, which shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Interrupt:
    """Asks the work of a learner to end, from any thread.

    It is heeded while the weights are those of complete updates, so that a checkpoint can be made of them; once an
    update has begun to change them, only after :meth:`force`.
    """

    def __init__(self) -> None:
        self.mid_update = False
        """True while the weights hold a part of an update: such weights must not be saved."""
        self.asked = False
        self._forced = False

    def set(self) -> None:
        """Ask."""
        self.asked = True

    def force(self) -> None:
        """Ask, in the middle of an update too."""
        self.asked = self._forced = True

    def is_set(self) -> bool:
        """True if the work should end where it is."""
        return self.asked and (self._forced or not self.mid_update)


IDLE = Row.plain("idle", (0, 0))
"""Row that a rank passes through the model when it has fewer micro-batches than another: every rank must take part in
the collectives of every layer. Its values are thrown away and its gradient is multiplied with 0."""


def resolve_device(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """``auto`` takes the GPU where there is one. Raises :class:`ConfigurationError` for cuda without one."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError(
            "learner.device is cuda, but torch sees no GPU: install a CUDA build of torch or set it to cpu"
        )
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def on_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy of ``array`` on a GPU, for which the host does not wait; on a CPU the array itself."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def free_cached(device: torch.device) -> None:
    """Give memory that torch keeps for later back to the device, also that of tensors that others have had open."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
