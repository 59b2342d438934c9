"""Context parallelism: the ranks of a context group divide the tokens of one forward pass.

Each rank computes a contiguous part of the tokens, and every module but attention works on tokens one by one. Attention
exchanges heads for tokens, computes all tokens of its share of the heads, and exchanges back (Jacobs et al. 2023,
DeepSpeed-Ulysses, arXiv:2309.14509), so masks and kernels are those of one process. Outputs of single tokens are
gathered, so each rank has the loss of the whole pass and passes on the gradient of its own tokens; their sum over ranks
is the gradient of the pass.

Dimensions: N tokens of the pass, n those of this rank, C ranks of the group, H query heads, G key heads, D head size,
S sampled tokens of the pass, s those that this rank predicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextGroup:
    """Ranks that divide the tokens of a pass; ``rank`` is this one's among them."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def bounds(self, tokens: int) -> list[int]:
        """First token of each rank's part of N, and N itself: parts differ by one token at most."""
        return [rank * tokens // self.size for rank in range(self.size + 1)]

    def part(self, tokens: int) -> slice:
        """This rank's part of N tokens."""
        bounds = self.bounds(tokens)
        return slice(bounds[self.rank], bounds[self.rank + 1])

    def own(self, predictors_S: npt.NDArray[np.int64], tokens: int) -> npt.NDArray[np.int64]:
        """Indices into S of the sampled tokens that this rank predicts, int64 ``[s]``."""
        part = self.part(tokens)
        return np.flatnonzero((predictors_S >= part.start) & (predictors_S < part.stop))

    def gathered(self, outputs: Sequence[Tensor], own_s: Tensor, n_sampled: int) -> tuple[Tensor, ...]:
        """Outputs ``[S]`` of all ranks from those of this one, ``[s]`` each of one type. The backward pass takes the
        gradient of this rank's tokens, which every rank of the group must have computed from the whole outputs."""
        whole: tuple[Tensor, ...] = _Gather.apply(own_s, n_sampled, self.group, *outputs)  # type: ignore[no-untyped-call]
        return whole

    def summed(self, values: Tensor) -> Tensor:
        """Sums over the ranks, without gradient."""
        total = values.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def exchange(self, tokens: int) -> Exchange:
        bounds = self.bounds(tokens)
        return Exchange(self, tuple(end - begin for begin, end in pairwise(bounds)))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Exchanges heads for tokens around the attention of a pass."""

    context: ContextGroup
    tokens: tuple[int, ...]
    """Tokens of each rank."""

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All tokens of this rank's heads, ``[1, H/C, N, D]`` and ``[1, G'/C, N, D]``, from the heads of this rank's
        tokens, ``[1, H, n, D]`` and ``[1, G, n, D]``; C must divide H. Key heads are repeated to G', the least common
        multiple of G and C, so that each rank has those of its query heads."""
        repeats = math.lcm(key.shape[1], self.context.size) // key.shape[1]
        parts = [query, *(x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))]
        shapes = [(x.shape[1] // self.context.size, x.shape[3]) for x in parts]
        sent = torch.cat([self._by_rank(x) for x in parts], dim=2)
        whole = self._exchanged(sent.flatten(0, 1), self._equal, list(self.tokens))
        found = torch.split(whole, [heads * size for heads, size in shapes], dim=1)
        q, k, v = (x.reshape(-1, *shape).transpose(0, 1)[None] for x, shape in zip(found, shapes, strict=True))
        return q, k, v

    def to_tokens(self, out: Tensor) -> Tensor:
        """All heads of this rank's tokens, ``[1, n, H, D]``, from all tokens of its heads, ``[1, N, H/C, D]``."""
        heads, size = out.shape[2:]
        found = self._exchanged(out.reshape(-1, heads * size), list(self.tokens), self._equal)
        by_rank = found.view(self.context.size, -1, heads, size)
        return by_rank.transpose(0, 1).flatten(1, 2)[None]

    def of_heads(self, values_H: Tensor) -> Tensor:
        """Values of this rank's query heads, ``[H/C]``."""
        return values_H.chunk(self.context.size)[self.context.rank]

    @property
    def _equal(self) -> list[int]:
        return [self.tokens[self.context.rank]] * self.context.size

    def _by_rank(self, x: Tensor) -> Tensor:
        """``[C, n, features]`` of the heads of each rank, from ``[1, heads, n, D]``."""
        return x[0].reshape(self.context.size, -1, *x.shape[2:]).transpose(1, 2).flatten(2)

    def _exchanged(self, sent: Tensor, sent_tokens: list[int], got_tokens: list[int]) -> Tensor:
        found: Tensor = _AllToAll.apply(sent, sent_tokens, got_tokens, self.context.group)  # type: ignore[no-untyped-call]
        return found


class _AllToAll(torch.autograd.Function):
    """Rows ``[sum of got, features]`` from all ranks, in order of rank, for rows ``[sum of sent, features]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.got, ctx.group = sent, got, group
        return _all_to_all(x, sent, got, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.got, ctx.sent, ctx.group), None, None, None


def _all_to_all(x: Tensor, sent: list[int], got: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(got), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own_s: Tensor, n_sampled: int, group: dist.ProcessGroup, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(own_s)
        whole = outputs[0].new_zeros(len(outputs), n_sampled)
        whole[:, own_s] = torch.stack(outputs)
        dist.all_reduce(whole, group=group)
        return tuple(each.clone() for each in whole)  # FSDP warns of outputs that are views

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (own_s,) = ctx.saved_tensors
        return None, None, None, *(grad.index_select(0, own_s) for grad in grads)
