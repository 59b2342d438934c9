"""Sequence packing with shared-prefix deduplication: rows end to end, without padding.

Dimensions: N tokens laid, K keys read, R runs, H heads, D head size.

Rows are laid in lexicographic order of their tokens, so that what a row shares with any row before it, it shares with
the row just before. Of each row only the rest is laid, its *run*. The run's queries attend to the keys of the whole
row: of the shared part where another row laid it, then causally of the run itself. Positions are those in the row, so
a row's hidden states are what they are alone. A row's last token is not laid: nothing is predicted from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from learner.data.cost import PassCost

IntArray = npt.NDArray[np.int64]
SHARED_TOKENS_MIN = 16
"""A shorter common prefix (a first token, the opening of a chat template) is not worth the gathering of keys."""

SHARED_KEYS_MAX = 4
"""Keys that the runs of one pass may read, over the tokens that it may lay. Runs keep their keys until the backward
pass, those of a shared prefix too; so memory stays bounded by the tokens of a pass."""


@dataclass(frozen=True, slots=True)
class Form:
    """Form of the rows of a forward pass: padded to the longest, or packed."""

    packed: bool = False
    shared_min: int | None = None
    """Tokens that rows must have in common for these to be laid once. None: each row is laid whole."""
    padded_because: Literal["", "configured", "device", "model", "trial"] = field(default="", compare=False)
    """Reason for padded rows: ``learner.packing``, no variable-length attention on the device, the model's attention,
    or a trial whose values differed."""
    cost: PassCost = field(default=PassCost(), compare=False)
    """Cost of a pass of the model that takes the rows."""

    @property
    def name(self) -> Literal["padded", "packed", "shared"]:
        return "padded" if not self.packed else "packed" if self.shared_min is None else "shared"


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the tokens of packed rows, and the keys that each run reads."""

    token_ids_N: IntArray
    positions_N: IntArray
    """Positions in the row; runs of a row that shares begin later than 0."""
    query_lengths_R: IntArray
    """Tokens of each run, at least 1, in the order laid."""
    key_lengths_R: IntArray
    """Tokens of the row up to the run's end. Equal to the run's own where it shares nothing."""
    keys_K: IntArray | None
    """Index into N of each run's keys, one run after the other. None: nothing is shared, the keys are the queries'
    own tokens."""
    indices: tuple[IntArray, ...]
    """Indices into N of the tokens of each row but its last, in the order of the rows."""


def lay_out(rows: Sequence[npt.NDArray[np.int32]], shared_min: int | None) -> Layout:
    """Layout of rows of token ids, each of at least 2. See :class:`Form` for ``shared_min``."""
    order = list(range(len(rows))) if shared_min is None else lexicographic(rows)
    indices: list[IntArray] = [np.zeros(0, np.int64)] * len(rows)
    keys: list[IntArray] = []
    tokens, positions, queries = [], [], []
    laid = 0
    before: int | None = None
    for i in order:
        row = rows[i][:-1]
        common = 0
        if before is not None and shared_min is not None:
            common = worth_sharing(common_prefix(rows[before][:-1], row), shared_min)
        own = len(row) - common
        run = np.arange(laid, laid + own, dtype=np.int64)
        indices[i] = run if before is None or not common else np.concatenate([indices[before][:common], run])
        before = i
        if own:
            tokens.append(row[common:])
            positions.append(np.arange(common, len(row), dtype=np.int64))
            keys.append(indices[i])
            queries.append(own)
            laid += own
    key_lengths = np.asarray([len(k) for k in keys], dtype=np.int64)
    return Layout(
        token_ids_N=np.concatenate(tokens).astype(np.int64),
        positions_N=np.concatenate(positions),
        query_lengths_R=np.asarray(queries, dtype=np.int64),
        key_lengths_R=key_lengths,
        keys_K=None if int(key_lengths.sum()) == laid else np.concatenate(keys),
        indices=tuple(indices),
    )


def plan_packs(rows: Sequence[npt.NDArray[np.int32]], tokens_max: int, shared_min: int | None) -> list[list[int]]:
    """Row numbers of each forward pass of at most ``tokens_max`` laid tokens; a longer row travels alone. The same rows
    always give the same plan.

    Without sharing the longest row goes first, each into the first pass that has room. With sharing, rows with a
    common prefix stay together, as far as :data:`SHARED_KEYS_MAX` allows.
    """
    if shared_min is None:
        return _first_fit([len(row) - 1 for row in rows], tokens_max)
    plan: list[list[int]] = []
    used = keys = 0
    before: int | None = None
    for i in lexicographic(rows):
        row = rows[i][:-1]
        common = 0 if before is None else worth_sharing(common_prefix(rows[before][:-1], row), shared_min)
        fits = used + len(row) - common <= tokens_max and keys + len(row) <= SHARED_KEYS_MAX * tokens_max
        if plan and fits:
            plan[-1].append(i)
            used, keys = used + len(row) - common, keys + len(row)
        else:
            plan.append([i])
            used = keys = len(row)
        before = i
    return plan


def lexicographic(rows: Sequence[npt.NDArray[np.int32]]) -> list[int]:
    """Row numbers in the order of their token ids; equal rows keep theirs.

    >>> lexicographic([np.array([2, 1]), np.array([1, 300]), np.array([1, 4])])
    [2, 1, 0]
    """
    keys = [np.asarray(row, dtype=">u4").tobytes() for row in rows]
    return sorted(range(len(rows)), key=lambda i: keys[i])


def common_prefix(a: npt.NDArray[np.int32], b: npt.NDArray[np.int32]) -> int:
    """Number of first tokens that are the same.

    >>> common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def worth_sharing(common: int, shared_min: int) -> int:
    return common if common >= shared_min else 0


def _first_fit(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    plan: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for at, left in enumerate(room):
            if lengths[i] <= left:
                plan[at].append(i)
                room[at] -= lengths[i]
                break
        else:
            plan.append([i])
            room.append(tokens_max - lengths[i])
    return plan
