"""Micro-batches: rows of one forward pass under a budget of tokens, their arrays, and what the pass costs.

Dimensions: B rows, T padded length, S sampled tokens of the micro-batch, N tokens laid, K keys read, R runs.

Padded: rows of similar length, padded on the right. Under a causal mask no real token sees padding, so positions are
``0 … T-1`` in every row and no attention mask is needed.

Packed: rows end to end, without padding; B is 1. Rows are laid in lexicographic order of their tokens, so that what a
row shares with any row before it, it shares with the row just before. Of each row only the rest is laid, its *run*. The
run's queries attend to the keys of the whole row: of the shared part where another row laid it, then causally of the
run itself. Positions are those in the row, so a row's hidden states are what they are alone. A row's last token is not
laid: nothing is predicted from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from learner.data.rows import Row
from pipeline.errors import TrainingError
from pipeline.schema.trajectory import ExpertArray, known_experts, unknown_experts

Count = TypeVar("Count", int, npt.NDArray[np.int64])
IntArray = npt.NDArray[np.int64]
SHARED_TOKENS_MIN = 16
"""A shorter common prefix (a first token, the opening of a chat template) is not worth the gathering of keys."""
SHARED_KEYS_MAX = 4
"""Keys that the runs of one pass may read, over the tokens that it may lay. Runs keep their keys until the backward
pass, those of a shared prefix too; so memory stays bounded by the tokens of a pass."""
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "sequence_sum_norm"]


@dataclass(frozen=True, slots=True)
class PassCost:
    """Operations of one forward pass by what causes them. Whole numbers, so that all ranks compute the same sums."""

    token: int = 1
    """Operations of the layers' weights for each token laid."""
    pair: int = 0
    """Operations of full attention for each key that a token attends to, itself included."""
    windows: tuple[tuple[int, int], ...] = ()
    """The same of layers with a window: its tokens, and the operations for each key."""
    sampled: int = 0
    """Operations of the output layer for each sampled token."""
    backward: int = 2
    """The backward pass in forward passes: 1 where the weights are frozen under adapters."""

    @property
    def learning(self) -> int:
        """Forward and backward pass in forward passes. What checkpointing computes again is not counted."""
        return 1 + self.backward

    def prefix(self, n: Count) -> Count:
        """Operations for the first ``n`` tokens of a row, without the output layer."""
        total = self.token * n + self.pair * (n * (n + 1) // 2)
        for window, pair in self.windows:
            inside = min(n, window) if isinstance(n, int) else np.minimum(n, window)
            total = total + pair * (inside * (inside + 1) // 2 + (n - inside) * window)
        return total

    def operations(self, keys: IntArray, sampled: int) -> int:
        """Operations of a pass over tokens that attend to so many ``keys`` each without a window, int64 ``[N]``, of
        which ``sampled`` pass the output layer."""
        attention = self.pair * int(keys.sum())
        attention += sum(pair * int(np.minimum(keys, window).sum()) for window, pair in self.windows)
        return self.token * len(keys) + attention + self.sampled * sampled


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
    def of_context(self) -> Form:
        """Form of the passes whose tokens ranks divide: never padded."""
        return self if self.packed else Form(packed=True, cost=self.cost)

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


PADDED = Form()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward pass. Arrays ``_S`` follow the sampled tokens, row by row, in order of position."""

    token_ids_BT: npt.NDArray[np.int64]
    predictors_S: npt.NDArray[np.int64]
    """Index into the flattened ``[B·T]`` of the position whose output predicts the sampled token (the one before
    it)."""
    targets_S: npt.NDArray[np.int64]
    temperatures_S: npt.NDArray[np.float32]
    behaviour_logprobs_S: npt.NDArray[np.float32]
    policy_versions_S: npt.NDArray[np.int32]
    advantages_S: npt.NDArray[np.float32]
    loss_weights_S: npt.NDArray[np.float32]
    """Weight of the token in the loss of the optimizer step (``token_weights``)."""
    row_index_S: npt.NDArray[np.int64]
    """Index of the row in this micro-batch: sequence-level ratios are taken over it."""
    trajectory_index_S: npt.NDArray[np.int32]
    replayed_S: npt.NDArray[np.bool_]
    with_lessons_S: npt.NDArray[np.bool_]
    discarded_S: npt.NDArray[np.bool_]
    """With lessons, and trained on the prompt without the lessons."""
    recorded_S: npt.NDArray[np.bool_]
    """log μ was recorded."""
    replay_weights_S: npt.NDArray[np.float32]
    """Weight of a replayed trajectory; 1 on fresh ones."""
    token_index_S: npt.NDArray[np.int64]
    """Index of the sampled token in its batch (``token_offsets``): joins values of different passes."""
    n_real: int
    """Tokens that are not padding."""
    real_N: npt.NDArray[np.bool_] | None = None
    """Laid tokens, flattened, that are not padding; None: all are."""
    experts_NLK: ExpertArray | None = None
    """Experts that the engine chose for each laid token in L layers, of a shared token for the first row that knows.
    None: unknown."""
    layout: Layout | None = None
    """Layout of packed rows; None: the rows are padded."""
    n_shared: int = 0
    """Tokens that are not computed again because another row of the pass has them."""
    operations: int = 0
    """Operations of a forward pass (``Form.cost``), padding left out; 0 where another rank counts them."""
    divided: bool = False
    """The ranks of a context group divide the tokens; each has the whole micro-batch."""
    counted: bool = True
    """This rank adds its sums and values to those of the others. Of a divided one the group's first rank does."""

    @property
    def n_padded(self) -> int:
        return int(self.token_ids_BT.size)

    @property
    def n_sampled(self) -> int:
        return len(self.targets_S)

    def of_context(self, rank: int) -> MicroBatch:
        """The same for a rank of the context group that divides its tokens."""
        first = rank == 0
        operations, shared = (self.operations, self.n_shared) if first else (0, 0)
        return replace(self, divided=True, counted=first, operations=operations, n_shared=shared)


def plan_microbatches(lengths: Sequence[int], tokens_max: int) -> list[list[int]]:
    """Row numbers of each micro-batch, longest rows first, so that rows × longest row stays within ``tokens_max``.

    A row that is longer than the budget travels alone. The same lengths always give the same plan.

    >>> plan_microbatches([10, 30, 29, 9], 60)
    [[1, 2], [0, 3]]
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan: list[list[int]] = []
    for i in order:
        if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= tokens_max:
            plan[-1].append(i)
        else:
            plan.append([i])
    return plan


def plan_rows(rows: Sequence[Row], tokens_max: int, form: Form = PADDED) -> list[list[int]]:
    """Row numbers of each micro-batch of at most ``tokens_max`` tokens, padding included where there is some."""
    if form.packed:
        return plan_packs([row.token_ids for row in rows], tokens_max, form.shared_min)
    return plan_microbatches([len(row) for row in rows], tokens_max)


def token_weights(rows: Sequence[Row], aggregation: Aggregation, length: int | None = None) -> list[float]:
    """Weight of each sampled token of each row, for one optimizer step over ``rows``. Tokens that the loss masks out
    later do not change them. The branches of a trajectory are one sequence.

    ``token_mean``: one over the number of sampled tokens. ``sequence_mean``: one over (sequences × the sequence's own
    sampled tokens). Of both all tokens' weights sum to 1. ``sequence_sum``: one over sequences. ``sequence_sum_norm``:
    one over (sequences × ``length``). Raises :class:`TrainingError` without a length there.
    """
    if aggregation == "token_mean":
        total = sum(row.n_sampled for row in rows)
        return [1.0 / total] * len(rows)
    n_sampled: Counter[int] = Counter()
    for row in rows:
        n_sampled[row.trajectory_index] += row.n_sampled
    if aggregation in ("sequence_sum", "sequence_sum_norm"):
        if aggregation == "sequence_sum_norm" and not length:
            raise TrainingError("expected loss.aggregation_length for sequence_sum_norm, got none")
        divisor = length if aggregation == "sequence_sum_norm" and length else 1
        return [1.0 / (len(n_sampled) * divisor)] * len(rows)
    return [1.0 / (len(n_sampled) * n_sampled[row.trajectory_index]) for row in rows]


def token_offsets(rows: Sequence[Row]) -> npt.NDArray[np.int64]:
    """Index of each row's first sampled token among the sampled tokens of all rows, in order, int64 ``[rows]``."""
    counts = np.asarray([row.n_sampled for row in rows], dtype=np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)[:-1]]) if len(counts) else counts


def collate(rows: Sequence[Row], weights: Sequence[float], offsets: Sequence[int], form: Form = PADDED) -> MicroBatch:
    """Arrays of one micro-batch; ``offsets`` as :func:`token_offsets` gives them. Padding is token 0: nothing reads the
    outputs there."""
    positions = [np.flatnonzero(row.loss_mask) for row in rows]
    layout: Layout | None = None
    n_real = sum(len(row) for row in rows)
    if form.packed:
        layout = lay_out([row.token_ids for row in rows], form.shared_min)
        token_ids = layout.token_ids_N[None]
        n_shared, n_real = n_real - len(rows) - token_ids.size, token_ids.size
        keys = layout.positions_N + 1
        predictors = [at[p - 1] for at, p in zip(layout.indices, positions, strict=True)]
    else:
        longest, n_shared = max(len(row) for row in rows), 0
        keys = np.concatenate([np.arange(1, len(row) + 1) for row in rows])
        token_ids = np.zeros((len(rows), longest), dtype=np.int64)
        for b, row in enumerate(rows):
            token_ids[b, : len(row)] = row.token_ids
        predictors = [b * longest + p - 1 for b, p in enumerate(positions)]
    counts = [len(p) for p in positions]
    places = [np.arange(len(row)) + b * longest for b, row in enumerate(rows)] if layout is None else layout.indices
    real = None
    if layout is None and n_real < token_ids.size:
        real = np.zeros(token_ids.size, np.bool_)
        real[np.concatenate(places)] = True

    def sampled(name: str) -> npt.NDArray[Any]:
        return np.concatenate([getattr(row, name)[p] for row, p in zip(rows, positions, strict=True)])

    def of_rows(name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
        return np.repeat(np.asarray([getattr(row, name) for row in rows], dtype), counts)

    token_index = [np.arange(n) + offset for n, offset in zip(counts, offsets, strict=True)]
    return MicroBatch(
        token_ids_BT=token_ids,
        predictors_S=np.concatenate(predictors),
        targets_S=sampled("token_ids").astype(np.int64),
        temperatures_S=sampled("temperatures"),
        behaviour_logprobs_S=sampled("behaviour_logprobs"),
        policy_versions_S=sampled("policy_versions"),
        advantages_S=np.concatenate([row.advantages for row in rows]),
        loss_weights_S=np.repeat(np.asarray(weights, np.float32), counts),
        row_index_S=np.repeat(np.arange(len(rows)), counts),
        trajectory_index_S=of_rows("trajectory_index", np.int32),
        replayed_S=of_rows("replayed", np.bool_),
        with_lessons_S=of_rows("with_lessons", np.bool_),
        discarded_S=of_rows("discarded", np.bool_),
        recorded_S=of_rows("recorded", np.bool_),
        replay_weights_S=of_rows("replay_weight", np.float32),
        token_index_S=np.concatenate(token_index).astype(np.int64),
        n_real=n_real,
        real_N=real,
        experts_NLK=_laid_experts(rows, places, token_ids.size),
        layout=layout,
        n_shared=n_shared,
        operations=form.cost.operations(keys, sum(counts)),
    )


def _laid_experts(rows: Sequence[Row], places: Sequence[IntArray], n_laid: int) -> ExpertArray | None:
    """``places``: where the first tokens of each row are laid. Known experts are not replaced by unknown ones."""
    like = next((row.experts for row in rows if row.experts is not None), None)
    if like is None:
        return None
    experts = unknown_experts(n_laid, like)
    for row, at in zip(rows, places, strict=True):
        if row.experts is None:
            continue
        if row.experts.dtype != like.dtype or row.experts.shape[1:] != like.shape[1:]:
            raise TrainingError(f"expected experts [tokens, {like.shape[1:]}] of one model in all rows, got others")
        own = row.experts[: len(at)]
        known = known_experts(own) & ~known_experts(experts[at])
        experts[at[known]] = own[known]
    return experts
