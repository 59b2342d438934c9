"""Record of what an update computed, for a repetition of it (``afterplay retrain``): checksums of its rows, the values
of its tokens and the bits of its gradients and weights; a file for each of the newest updates.

:data:`STAGES` are in the order of the computation, so the first that differs is where two passes part. Rows have
Fletcher sums (Fletcher 1982) by field: the sum of the words, and the sum of the words times their positions. Of the
values of tokens all bits are kept, so that a difference has a token and a size.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from learner.data.rows import Batch, Row
from learner.distributed.messages import pack, unpack
from learner.policy.policy import DTYPES
from learner.training.report import AppliedStep, StepReport
from pipeline.errors import StoreError, WireError
from pipeline.runtime.disk import left_out
from pipeline.runtime.run_directory import write_bytes_atomically
from pipeline.schema.record_file import FileKind

log = logging.getLogger(__name__)
Stage = Literal["rows", "scores", "advantages", "log-probs", "loss", "gradient", "optimizer", "metrics"]
STAGES: tuple[Stage, ...] = get_args(Stage)
KIND = FileKind(
    "update record", 3, "a record of an update", "repeat the run with the Afterplay that wrote it, or delete the file"
)
FIELDS = ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions", "temperatures", "turns")
"""Arrays of a row that have sums of their own; the rest of a row has one together."""
_REST = ("environment", "replayed", "with_lessons", "discarded", "recorded", "replay_weight", "trajectory_id")
_OF_TOKENS: dict[str, Stage] = {
    "old log-probs": "scores", "entropies": "scores", "reference log-probs": "scores", "values": "scores",
    "hinted log-probs": "scores", "advantages": "advantages", "returns": "advantages", "log-probs": "log-probs",
    "loss": "loss",
}  # fmt: skip
"""Values of tokens and their stage, in the order of the computation."""
_OF_STEPS = tuple(field.name for field in fields(AppliedStep))[:-1]
"""All but the sums, which are an array."""


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """Dimensions: R rows, F fields, S sampled tokens of all rows."""

    update: int
    policy_version: int
    machine: dict[str, Any]
    """Facts that the arithmetic depends on beside the inputs: :func:`describe_machine`, and the type of the passes."""
    trajectories: list[str]
    """Id of the trajectory of each row."""
    steps: tuple[AppliedStep, ...]
    rows: npt.NDArray[np.uint64]
    """``[R, F + 1, 2]``."""
    tokens: dict[str, npt.NDArray[np.float32]]
    """``[S]`` each, by name."""

    @classmethod
    def of(cls, batch: Batch, report: StepReport, compute_dtype: torch.dtype) -> UpdateRecord:
        """``batch`` as it was before advantages were estimated."""
        values, scores = report.statistics.values, report.scores
        tokens = {
            "old log-probs": scores.logprobs, "entropies": scores.entropies, "reference log-probs": scores.reference,
            "values": scores.values, "hinted log-probs": scores.hinted, "returns": scores.returns,
        }  # fmt: skip
        found = {name: np.asarray(array, np.float32) for name, array in tokens.items() if array is not None}
        if values is not None and len(values):
            for name, of_pass in (
                ("advantages", values.advantages), ("log-probs", values.logprobs), ("loss", values.losses)
            ):  # fmt: skip
                found[name] = np.full(batch.n_sampled, np.nan, np.float32)
                found[name][values.numbers] = of_pass
        return cls(
            update=report.update,
            policy_version=report.policy_version,
            machine={**describe_machine(), "compute_dtype": str(compute_dtype).removeprefix("torch.")},
            trajectories=[row.trajectory_id for row in batch.rows],
            steps=report.steps,
            rows=np.stack([_row_sums(row) for row in batch.rows]) if batch.rows else np.zeros((0, 7, 2), np.uint64),
            tokens={name: found[name] for name in _OF_TOKENS if name in found},
        )

    @property
    def fresh_optimizer(self) -> bool:
        """The policy's had no state before the update."""
        return any(step.fresh_optimizer for step in self.steps if step.model == "policy")

    def pack(self) -> bytes:
        facts = {name: getattr(self, name) for name in ("update", "policy_version", "machine", "trajectories")}
        facts["steps"] = [[getattr(step, name) for name in _OF_STEPS] for step in self.steps]
        arrays = {f"steps/{i}": step.sums for i, step in enumerate(self.steps)}
        tokens = {f"tokens/{name}": array for name, array in self.tokens.items()}
        message = pack(facts, {"rows": self.rows, **arrays, **tokens})
        return KIND.magic + message.tobytes()

    @classmethod
    def unpack(cls, data: bytes, where: Path) -> UpdateRecord:
        """Raises :class:`StoreError` for anything else than :meth:`pack` gives."""
        try:
            KIND.check(where, data)
            facts, arrays = unpack(np.frombuffer(data, np.uint8, offset=len(KIND.magic)))
            of_steps = [dict(zip(_OF_STEPS, numbers, strict=True)) for numbers in facts.pop("steps")]
            steps = tuple(AppliedStep(**of, sums=arrays.pop(f"steps/{i}")) for i, of in enumerate(of_steps))
            tokens = {name.removeprefix("tokens/"): arrays.pop(name) for name in list(arrays) if "/" in name}
            fields: dict[str, Any] = {**facts, **arrays, "steps": steps, "tokens": tokens}
            return cls(**fields)
        except (WireError, KeyError, ValueError, TypeError) as error:
            raise StoreError(f"expected {where} to be {KIND.noun}, got {error}: {KIND.remedy}") from error


def describe_machine() -> dict[str, Any]:
    """Hardware, library and threads: with others the last bits of a sum may be others."""
    gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if gpu else torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def record_path(folder: Path, update: int) -> Path:
    return folder / f"u{update:06d}.record"


def write_record(folder: Path, record: UpdateRecord, keep: int) -> None:
    """Write ``folder/uNNNNNN.record`` and delete all but the newest ``keep``. Blocks. Where the disk does not take it,
    the update can be repeated without telling what differs."""
    packed = record.pack()

    def write() -> None:
        folder.mkdir(exist_ok=True)
        write_bytes_atomically(record_path(folder, record.update), packed, make_folder=False)

    def remove_old() -> None:
        for old in sorted(folder.glob("u*.record"))[:-keep]:
            old.unlink(missing_ok=True)

    if reason := left_out(write, folder):
        log.warning("what update %d computed was not recorded: %s", record.update + 1, reason)
    left_out(remove_old, folder)


def read_record(folder: Path, update: int) -> UpdateRecord | None:
    """None where there is none. Raises :class:`StoreError`."""
    path = record_path(folder, update)
    return UpdateRecord.unpack(path.read_bytes(), path) if path.exists() else None


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a stage."""

    stage: Stage
    where: str
    """In words: the value, and as far as it has them micro-batch, row, token and parameter."""
    recorded: Any = None
    came: Any = None
    count: int = 1
    """Values of the stage that differ."""
    largest: float | None = None
    """Largest absolute difference of these; None where only sums of bits are known."""
    row: int | None = None
    token: int | None = None
    """Its index in the row."""

    def __str__(self) -> str:
        values = "" if self.recorded is None else f": recorded {self.recorded!r}, came {self.came!r}"
        more = f" ({self.count} differ" if self.count > 1 else ""
        if self.largest is not None:
            more += f"{', ' if more else ' ('}by at most {self.largest:.3g}"
        return f"{self.stage}: {self.where}{values}{more}{')' if more else ''}"


def differences(
    recorded: UpdateRecord, batch: Batch, report: StepReport, parameters: Mapping[str, Sequence[str]]
) -> Iterator[Difference]:
    """The first difference of each stage between a record and the update made again, in the order of the computation.
    ``parameters``: their names, by model (:attr:`AppliedStep.model`)."""
    came = UpdateRecord.of(batch, report, DTYPES[recorded.machine["compute_dtype"]])
    if (found := _of_rows(recorded, came, batch.rows)) is not None:
        yield found
        return  # tokens have other numbers
    microbatches = np.zeros(batch.n_sampled, np.int64)
    if (values := report.statistics.values) is not None:
        microbatches[values.numbers] = np.repeat(np.arange(len(report.microbatch_sizes)), report.microbatch_sizes)
    seen: set[Stage] = set()
    for name, stage in _OF_TOKENS.items():
        found = _of_tokens(stage, name, recorded, came, batch.rows, microbatches)
        if found is not None and stage not in seen:
            seen.add(stage)
            yield found
    yield from (found for found in _of_steps(recorded, came, parameters) if found.stage not in seen)


def _of_rows(recorded: UpdateRecord, came: UpdateRecord, rows: Sequence[Row]) -> Difference | None:
    for i, (a, b) in enumerate(zip(recorded.trajectories, came.trajectories, strict=False)):
        if a != b:
            return Difference("rows", f"row {i} is of another trajectory", a, b, row=i)
        if (at := _first(recorded.rows[i] != came.rows[i])) is not None:
            field = (*FIELDS, "facts of the row")[at // 2]
            length = len(rows[i]) if field in FIELDS else 0
            token = _changed_word(recorded.rows[i, at // 2], came.rows[i, at // 2], length)
            where = f"{field} of row {i} ({a})" + ("" if token is None else f", token {token}")
            return Difference("rows", where, row=i, token=token)
    if len(recorded.trajectories) != len(came.trajectories):
        return Difference("rows", "number of rows", len(recorded.trajectories), len(came.trajectories))
    return None


def _of_tokens(
    stage: Stage,
    name: str,
    recorded: UpdateRecord,
    came: UpdateRecord,
    rows: Sequence[Row],
    microbatches: npt.NDArray[np.int64],
) -> Difference | None:
    a, b = recorded.tokens.get(name), came.tokens.get(name)
    if a is None or b is None:
        if (a is None) != (b is None):
            return Difference(stage, f"{name} {'came' if a is None else 'were recorded'} on one side only")
        return None
    unequal = a.view(np.uint32) != b.view(np.uint32)
    if (number := _first(unequal)) is None:
        return None
    row, token = place(rows, number)
    distance = np.abs(a[unequal].astype(np.float64) - b[unequal].astype(np.float64))
    finite = distance[np.isfinite(distance)]
    where = f"{name} of row {row} ({rows[row].trajectory_id}), token {token}, micro-batch {microbatches[number]}"
    largest = float(finite.max()) if finite.size else None
    return Difference(stage, where, float(a[number]), float(b[number]), int(unequal.sum()), largest, row, token)


def _of_steps(
    recorded: UpdateRecord, came: UpdateRecord, parameters: Mapping[str, Sequence[str]]
) -> Iterator[Difference]:
    """The steps' first difference: in the loss, the gradient or the optimizer."""
    taken, again = (", ".join(step.model for step in side.steps) for side in (recorded, came))
    if taken != again:
        yield Difference("optimizer", "optimizer steps taken", taken, again)
        return
    for i, (a, b) in enumerate(zip(recorded.steps, came.steps, strict=True)):
        which = f" of optimizer step {i} ({a.model})" if len(recorded.steps) > 1 else ""
        scalars: tuple[tuple[Stage, str, float, float], ...] = (
            ("loss", "sum over the batch", a.loss, b.loss),
            ("gradient", "norm before clipping", a.grad_norm, b.grad_norm),
            ("optimizer", "learning rate", a.learning_rate, b.learning_rate),
        )
        found = [
            Difference(stage, name + which, of_a, of_b, largest=abs(of_a - of_b))
            for stage, name, of_a, of_b in scalars
            if of_a != of_b
        ]
        sums: tuple[tuple[Stage, str], ...] = ("gradient", "after clipping"), ("optimizer", "weights")
        for (stage, name), unequal in zip(sums, a.sums != b.sums, strict=True):
            if (at := _first(unequal)) is not None:
                where = f"{name}, {parameters[a.model][at]}{which}"
                found.append(Difference(stage, where, count=int(unequal.sum())))
        if found:
            yield from sorted(found, key=lambda one: STAGES.index(one.stage))
            return


def place(rows: Sequence[Row], number: int) -> tuple[int, int]:
    """Row, and index in it, of a sampled token by its number in the update."""
    for i, row in enumerate(rows):
        if number < row.n_sampled:
            return i, int(np.flatnonzero(row.loss_mask)[number])
        number -= row.n_sampled
    raise IndexError(f"expected fewer sampled tokens than {number}")


def _row_sums(row: Row) -> npt.NDArray[np.uint64]:
    rest = zlib.crc32(repr([getattr(row, name) for name in _REST]).encode())
    if row.experts is not None:
        rest = zlib.crc32(np.ascontiguousarray(row.experts).tobytes(), rest)
    return np.stack([*(_fletcher(getattr(row, name)) for name in FIELDS), np.asarray([rest, 0], np.uint64)])


def _fletcher(array: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    words = array.view({1: np.uint8, 4: np.uint32}[array.itemsize]).astype(np.uint64)
    positions = np.arange(1, len(words) + 1, dtype=np.uint64)
    return np.stack([words.sum(dtype=np.uint64), (words * positions).sum(dtype=np.uint64)])


def _changed_word(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64], length: int) -> int | None:
    """Index of the one word by which two arrays of ``length`` with these sums differ; None where it is not one."""
    change = a - b
    found = np.flatnonzero(np.arange(1, length + 1, dtype=np.uint64) * change[0] == change[1])
    return int(found[0]) if len(found) == 1 and change[0] else None


def _first(unequal: npt.NDArray[np.bool_]) -> int | None:
    found = np.flatnonzero(unequal)
    return int(found[0]) if len(found) else None


def of_metrics(recorded: dict[str, Any], came: dict[str, Any], ignored: Iterable[str]) -> Difference | None:
    """The first number of the line in ``metrics.jsonl`` that differs."""
    keys = [key for key in recorded | came if key not in ignored and recorded.get(key) != came.get(key)]
    if not keys:
        return None
    return Difference("metrics", keys[0], recorded.get(keys[0]), came.get(keys[0]), len(keys))
