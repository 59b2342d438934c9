"""Sum trees: draws in proportion to weight, in time logarithmic in the number of keys.

What is drawn depends on the keys and weights that are held, not on the order of past changes: sums are exact integers,
and keys are ordered by a digest. So a resumed stage draws the same.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from array import array
from collections.abc import Collection, Sequence

TRIES = 16
"""Draws that may hit an excluded key before the excluded ones are sorted out exactly."""

_PLACE_BITS = 64
_LEVEL_BITS = 16
"""Logarithms to base 2 that one tree of :class:`Priorities` covers."""
_FRACTION_BITS = 20
"""The smallest integer weight there is ``2^20``: rounding changes a weight by at most a millionth."""
_REACH_BITS = 256
"""A key whose weight is smaller than the largest by this power of two is not drawn."""


class SumTree:
    """Keys with positive integer weights, which add up to less than ``2^63``.

    A Fenwick tree over leaves; a leaf has the keys whose digests begin with its bits, in order of digest. The tree
    grows and shrinks with the number of keys, which does not change the order.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[int, int]] = {}
        self._leaves: list[list[str]] = [[]]
        self._sums = array("q", [0, 0])
        self._shift = _PLACE_BITS
        self.total = 0
        """Sum of the weights."""
        self.squares = 0
        """Sum of their squares."""

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: str) -> bool:
        return key in self._held

    def weight(self, key: str) -> int:
        """0 for a key that is not held."""
        return self._held[key][1] if key in self._held else 0

    def put(self, key: str, weight: int) -> None:
        """Enter a key, or change its weight."""
        if key in self._held:
            place, before = self._held[key]
        else:
            place, before = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()), 0
        self._held[key] = (place, weight)
        if not before:
            bisect.insort(self._leaves[place >> self._shift], key, key=self._order)
        self._add(place, weight - before, weight * weight - before * before)
        self._fit()

    def discard(self, key: str) -> None:
        """Take a key out, if it is there."""
        if key not in self._held:
            return
        place, weight = self._held[key]
        self._leaves[place >> self._shift].remove(key)
        del self._held[key]
        self._add(place, -weight, -weight * weight)
        self._fit()

    def draw(self, rng: random.Random) -> str:
        """A key by its weight. There must be one."""
        return self._at(rng.randrange(self.total))

    def _order(self, key: str) -> tuple[int, str]:
        return self._held[key][0], key

    def _at(self, sum_below: int) -> str:
        """The first key up to which the weights add up to more than this."""
        sums, held = self._sums, self._held
        leaf, step = 0, (len(sums) - 1) // 2
        while step:
            if (below := sums[leaf + step]) <= sum_below:
                leaf += step
                sum_below -= below
            step //= 2
        for key in self._leaves[leaf]:
            sum_below -= held[key][1]
            if sum_below < 0:
                return key
        raise AssertionError("the sums of a sum tree do not agree with its weights")

    def _add(self, place: int, weight: int, square: int) -> None:
        self.total += weight
        self.squares += square
        i = (place >> self._shift) + 1
        while i < len(self._sums):
            self._sums[i] += weight
            i += i & -i

    def _fit(self) -> None:
        """Keep the number of leaves near half the number of keys."""
        leaves = len(self._leaves)
        if leaves // 8 <= len(self._held) <= 8 * leaves:
            return
        bits = (len(self._held) // 2).bit_length()
        self._shift = _PLACE_BITS - bits
        keys = list(itertools.chain.from_iterable(self._leaves))
        self._leaves = [[] for _ in range(1 << bits)]
        self._sums = array("q", bytes(8 * (len(self._leaves) + 1)))
        for key in keys:
            place, weight = self._held[key]
            self._leaves[place >> self._shift].append(key)
            self._sums[(place >> self._shift) + 1] += weight
        for i in range(1, len(self._sums)):
            if (above := i + (i & -i)) < len(self._sums):
                self._sums[above] += self._sums[i]


_Level = tuple[bool, int]
"""Magnitude of the weights of a tree, behind a mark that says if they decay."""
_Scaled = tuple[SumTree, float]


class Priorities:
    """Keys with weights of any size, given by their logarithms; those that decay share one factor, given at a draw.

    So a weight ``v exp(-age / tau)`` needs no touch as versions pass: put ``log v + born / tau``, and draw with a decay
    of ``version / tau``. Weights of one magnitude are in one tree, so that nothing overflows, underflows or is rebuilt.
    """

    def __init__(self) -> None:
        self._trees: dict[_Level, SumTree] = {}
        self._levels: dict[bool, list[int]] = {False: [], True: []}
        self._held: dict[str, tuple[_Level, int]] = {}
        self._drawn_at: tuple[float, list[_Scaled]] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: str, log_weight: float, *, decays: bool = False) -> None:
        """Enter a key, or change its weight (natural logarithm)."""
        power = log_weight / math.log(2)
        level = math.floor(power / _LEVEL_BITS)
        self.discard(key)
        self._enter(key, (decays, level), int(2.0 ** (power - level * _LEVEL_BITS + _FRACTION_BITS)))

    def discard(self, key: str) -> None:
        """Take a key out, if it is there."""
        if key not in self._held:
            return
        at, _ = self._held.pop(key)
        self._trees[at].discard(key)
        if not self._trees[at]:
            del self._trees[at]
            self._levels[at[0]].remove(at[1])
            self._drawn_at = None

    def draw(self, exclude: Collection[str], rng: random.Random, decay: float = 0.0) -> tuple[str, float] | None:
        """A key that is not excluded, by its weight; None when there is none. With it comes its :meth:`ratio`."""
        trees = self._drawn(decay)
        if not trees:
            return None
        ends, mean = _sums(trees)
        for _ in range(TRIES):
            tree, scale = trees[_index(ends, rng)]
            key = tree.draw(rng)
            if key not in exclude:
                return key, mean / (tree.weight(key) * scale)
        out = {key: self._held[key] for key in exclude if key in self._held}
        for key in out:
            self.discard(key)
        left = self._drawn(decay)
        drawn = left[_index(_sums(left)[0], rng)][0].draw(rng) if left else None
        for key, (at, weight) in out.items():
            self._enter(key, at, weight)
        return None if drawn is None else (drawn, self.ratio(drawn, decay))

    def ratio(self, key: str, decay: float = 0.0) -> float:
        """``1 / (M P)`` of a key that is held: P is its probability where nothing is excluded, and ``M = 1 / sum_j
        P_j^2`` the effective number of keys (Kish). Infinite for a key that is never drawn."""
        trees = self._drawn(decay)
        at, weight = self._held[key]
        scale = next((scale for tree, scale in trees if tree is self._trees[at]), 0.0)
        return _sums(trees)[1] / (weight * scale) if scale else math.inf

    def _enter(self, key: str, at: _Level, weight: int) -> None:
        if at not in self._trees:
            self._trees[at] = SumTree()
            bisect.insort(self._levels[at[0]], at[1])
            self._drawn_at = None
        self._held[key] = (at, weight)
        self._trees[at].put(key, weight)

    def _drawn(self, decay: float) -> list[_Scaled]:
        """Trees that a key can be drawn from, each with the scale of its weights."""
        if self._drawn_at is not None and self._drawn_at[0] == decay:
            return self._drawn_at[1]
        powers: list[tuple[SumTree, float]] = []
        for decays, levels in self._levels.items():
            for level in reversed(levels):
                power = level * _LEVEL_BITS - (decay / math.log(2) if decays else 0.0)
                if level < levels[-1] - _REACH_BITS // _LEVEL_BITS:
                    break
                powers.append((self._trees[decays, level], power))
        largest = max((power for _, power in powers), default=0.0)
        trees = [(tree, 2.0 ** (power - largest)) for tree, power in powers if power > largest - _REACH_BITS]
        self._drawn_at = decay, trees
        return trees


def draw_weighted(weights: Sequence[float], rng: random.Random) -> int:
    """Index of a weight, with a probability proportional to it; one of them is positive."""
    return _index(list(itertools.accumulate(weights)), rng)


def _index(ends: Sequence[float], rng: random.Random) -> int:
    """The same, of weights that add up to ``ends[i]`` up to the i-th."""
    return min(bisect.bisect_right(ends, rng.random() * ends[-1]), bisect.bisect_left(ends, ends[-1]))


def _sums(trees: Sequence[_Scaled]) -> tuple[list[float], float]:
    """Weights added up, tree after tree, and the mean weight of a drawn key, ``sum_j w_j^2 / sum_j w_j``."""
    ends = list(itertools.accumulate(tree.total * scale for tree, scale in trees))
    return ends, sum(tree.squares * scale**2 for tree, scale in trees) / ends[-1]
