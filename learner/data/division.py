"""Division of an update's rows among ranks: rows that share a prefix stay together, loads are balanced by cost.

Rows in lexicographic order form a tree of common prefixes. A *piece* is a run of rows of that order, which one rank
computes: at first all rows that share anything (the rollouts of a group, the branches of a trajectory). A piece that is
too large for balance is cut where its rows have the least in common; what they share is then computed once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from learner.data.microbatch import Form, common_prefix, lexicographic, worth_sharing
from learner.data.rows import Row

IntArray = npt.NDArray[np.int64]
Piece = tuple[int, int]
"""First row of a run and the one after its last, in lexicographic order."""
LIMITS = (None, 2.0, 1.0, 0.5, 0.25, 0.125, 0.0625)
"""Largest costs of a piece that are tried, as shares of a rank's part of the whole; None: groups stay whole."""
GAIN_MIN = 0.01
"""Smaller pieces must make the most loaded rank faster by this share: each cut computes a prefix again."""


def divide_with_context(
    rows: Sequence[Row], ranks: int, context: int, tokens_max: int, form: Form
) -> list[tuple[list[int], list[int]]]:
    """Row numbers of each rank: those that it computes with the others of its context group (``context`` consecutive
    ranks), and those that it computes alone. The former are longer than ``tokens_max``."""
    if context == 1:
        return [([], alone) for alone in divide(rows, ranks, form)]
    long = [i for i, row in enumerate(rows) if len(row) - 1 > tokens_max and len(row) > context]
    short = sorted({*range(len(rows))} - {*long})
    groups = divide([rows[i] for i in long], ranks // context, form.of_context)
    costs = [_Tree([rows[long[i]] for i in group], form.of_context).whole // context for group in groups]
    alone = divide([rows[i] for i in short], ranks, form, np.repeat(costs, context).tolist())
    return [([long[i] for i in groups[rank // context]], [short[i] for i in alone[rank]]) for rank in range(ranks)]


def divide(rows: Sequence[Row], ranks: int, form: Form, loads: Sequence[int] = ()) -> list[list[int]]:
    """Row numbers of each rank, ascending. The same rows always give the same division, on every machine. ``loads``:
    costs that the ranks have already."""
    if ranks == 1 or not rows:
        return [list(range(len(rows))), *[[] for _ in range(ranks - 1)]]
    tree = _Tree(rows, form)
    bound = max((tree.whole + sum(loads)) / ranks, int(tree.own.max()), *loads)
    owners, slowest = np.zeros(0, np.int64), float("inf")
    for limit in LIMITS:
        pieces = tree.pieces(None if limit is None else limit * bound)
        found, costs = tree.placed(pieces, ranks, loads)
        if max(costs) < slowest * (1 - GAIN_MIN):
            owners, slowest = found, max(costs)
        if slowest <= bound * (1 + GAIN_MIN) or len(pieces) == len(rows):
            break
    return [sorted(tree.order[owners == rank].tolist()) for rank in range(ranks)]


class _Tree:
    """Rows in lexicographic order. Arrays follow that order."""

    def __init__(self, rows: Sequence[Row], form: Form) -> None:
        ids = [row.token_ids[:-1] for row in rows]
        order = list(range(len(rows))) if form.shared_min is None else lexicographic(ids)
        self._cost = form.cost
        self.order = np.asarray(order)
        self._common = np.zeros(len(rows), np.int64)
        """Tokens that a row shares with the row before it."""
        if form.shared_min is not None:
            for i in range(1, len(order)):
                common = common_prefix(ids[order[i - 1]], ids[order[i]])
                self._common[i] = worth_sharing(common, form.shared_min)
        lengths = np.asarray([len(ids[i]) for i in order], np.int64)
        sampled = np.asarray([rows[i].n_sampled for i in order], np.int64)
        self.own = self._cost.prefix(lengths) + self._cost.sampled * sampled
        """Cost of a row alone."""
        self._shared = self._cost.prefix(self._common)
        self._sums = np.concatenate([[0], np.cumsum(self.own - self._shared)])

    @property
    def whole(self) -> int:
        """Cost of all rows in one pass."""
        return self.cost(0, len(self.own)) if len(self.own) else 0

    def cost(self, first: int, end: int) -> int:
        """Cost of a run of rows that one pass computes."""
        return int(self._sums[end] - self._sums[first] + self._shared[first])

    def pieces(self, limit: float | None) -> list[Piece]:
        """Runs that share nothing with each other; those above ``limit`` cut, where the least is shared, as near to
        the middle as possible."""
        found, uncut = list[Piece](), [(0, len(self.own))]
        while uncut:
            first, end = uncut.pop()
            inner = self._common[first + 1 : end]
            least = int(inner.min()) if len(inner) else 0
            if len(inner) and (not least or (limit is not None and self.cost(first, end) > limit)):
                cuts = np.flatnonzero(inner == least) + first + 1
                middle = (self._sums[first] + self._sums[end]) // 2
                cut = int(cuts[np.abs(self._sums[cuts] - middle).argmin()])
                uncut += [(first, cut), (cut, end)]
            else:
                found.append((first, end))
        return found

    def placed(self, pieces: Sequence[Piece], ranks: int, before: Sequence[int]) -> tuple[IntArray, list[int]]:
        """Rank of each row, and the loads on top of those ``before``: costly pieces first, each to the rank whose load
        is least with it (Graham 1969). A rank that has a part of its prefix already computes only the rest."""
        owners = np.full(len(self.own), -1, np.int64)
        loads = np.asarray(before or [0] * ranks, np.int64)
        for first, end in sorted(pieces, key=lambda piece: (-self.cost(*piece), piece)):
            shared = np.zeros(ranks + 1, np.int64)  # the last: of rows that no rank has yet
            np.maximum.at(shared, owners, self._common_with(first, end))
            added = loads + self.cost(first, end) - self._cost.prefix(shared[:ranks])
            rank = int(added.argmin())
            owners[first:end], loads[rank] = rank, added[rank]
        return owners, loads.tolist()

    def _common_with(self, first: int, end: int) -> IntArray:
        """Tokens that each row shares with the rows of a run; 0 for those of the run itself."""
        before = np.minimum.accumulate(self._common[first:0:-1])[::-1]
        after = np.minimum.accumulate(self._common[end:])
        return np.concatenate([before, np.zeros(end - first, np.int64), after])
