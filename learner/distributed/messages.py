"""Messages between the ranks of a learner: commands with outlines of rows and token scores, and whole rows, each as
one uint8 array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from learner.data.rows import Row, TokenScores
from pipeline.schema import record_file as frames

Arrays = Mapping[str, npt.NDArray[Any]]
_PER_TOKEN = ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions", "temperatures", "turns")
_TOKEN_SCORES = tuple(f.name for f in fields(TokenScores))
_PER_ROW = tuple(f.name for f in fields(Row) if f.name not in (*_PER_TOKEN, "advantages", "experts"))


def pack(header: Mapping[str, Any], arrays: Arrays) -> npt.NDArray[np.uint8]:
    """uint8 ``[N]``: a record of :mod:`pipeline.schema.record_file` with an array in each part."""
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    buffers = frames.pack({"facts": header, "arrays": shapes}, [frames.array_bytes(a) for a in arrays.values()])
    return np.frombuffer(bytearray().join(buffers), dtype=np.uint8)


def unpack(message: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The inverse of :func:`pack`; the arrays share one buffer of their own. Raises :class:`WireError`."""
    header, parts = frames.unpack(bytearray(message.data))
    return header["facts"], {
        name: np.frombuffer(part, dtype=dtype).reshape(shape)
        for (name, dtype, shape), part in zip(header["arrays"], parts, strict=True)
    }


def pack_command(
    command: str, rows: Sequence[Row] = (), facts: Mapping[str, Any] | None = None, scores: TokenScores | None = None
) -> npt.NDArray[np.uint8]:
    """A command of rank 0 to the other ranks, with its data: outlines of the rows, and the token scores."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    header: dict[str, Any] = {"command": command, **(facts or {})}
    if rows:
        header["rows"] = [[getattr(row, name) for name in _PER_ROW] for row in rows]
        arrays["lengths"] = np.asarray([len(row) for row in rows], dtype=np.int64)
        arrays["loss_mask"] = np.packbits(np.concatenate([row.loss_mask for row in rows]))
        arrays["behaviour_logprobs"] = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row in rows])
        arrays["advantages"] = np.concatenate([row.advantages for row in rows])
    for name in _TOKEN_SCORES:
        array = getattr(scores, name, None)
        if array is not None:
            arrays[f"evidence/{name}"] = array
    return pack(header, arrays)


def unpack_command(message: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], tuple[Row, ...], TokenScores]:
    """The inverse of :func:`pack_command`: facts (``command`` among them), outlines of the rows, and token scores.

    An outline has what every rank reads of a row: its facts, and mask, log μ and advantages of its sampled tokens. Its
    token ids are -1, which no model takes.
    """
    header, arrays = unpack(message)
    rows = tuple(_outlines(header.pop("rows"), arrays)) if "rows" in header else ()
    return header, rows, TokenScores(**{name: arrays.get(f"evidence/{name}") for name in _TOKEN_SCORES})


def _outlines(facts: Sequence[Sequence[Any]], arrays: Arrays) -> Iterator[Row]:
    """Raises :class:`pipeline.errors.TrainingError` for rows that do not fit."""
    lengths = arrays["lengths"]
    at = trained = 0
    loss_masks = np.unpackbits(arrays["loss_mask"], count=int(lengths.sum())).astype(np.bool_)
    for of_row, length in zip(facts, lengths.tolist(), strict=True):
        loss_mask, nothing = loss_masks[at : at + length], np.broadcast_to(np.int32(-1), length)
        sampled = slice(trained, trained + int(loss_mask.sum()))
        behaviour_logprobs = np.zeros(length, np.float32)
        behaviour_logprobs[loss_mask] = arrays["behaviour_logprobs"][sampled]
        yield Row(
            **dict(zip(_PER_ROW, of_row, strict=True)),
            token_ids=nothing,
            loss_mask=loss_mask,
            behaviour_logprobs=behaviour_logprobs,
            policy_versions=nothing,
            temperatures=np.broadcast_to(np.float32(1), length),
            turns=nothing,
            advantages=arrays["advantages"][sampled],
        )
        at, trained = at + length, sampled.stop


class CommandRows:
    """Rows of a command: rank 0 has them whole, the others outlines, and those whole that they compute."""

    def __init__(self, rows: Sequence[Row] = (), ranks: int = 1) -> None:
        self.rows = rows
        self._numbers = {id(row): i for i, row in enumerate(rows)}
        self._whole: dict[int, Row] = {}
        self._sent: list[set[int]] = [set() for _ in range(ranks)]

    def __contains__(self, row: Row) -> bool:
        return id(row) in self._numbers

    def whole(self, row: Row) -> Row:
        """``row`` with all of its arrays, where this rank was sent them."""
        return self._whole.get(self._numbers.get(id(row), -1), row)

    def message(self, rows: Sequence[Row], rank: int) -> npt.NDArray[np.uint8]:
        """Rank 0: uint8 ``[N]`` with those of ``rows`` that ``rank`` was not sent before; empty without any."""
        numbers = [self._numbers[id(row)] for row in rows]
        new = [i for i in numbers if i not in self._sent[rank]]
        self._sent[rank].update(new)
        return pack_rows({i: self.rows[i] for i in new}) if new else np.zeros(0, np.uint8)

    def take(self, message: npt.NDArray[np.uint8]) -> None:
        """Another rank: keep what :meth:`message` made."""
        self._whole |= unpack_rows(message)


def pack_rows(rows: Mapping[int, Row]) -> npt.NDArray[np.uint8]:
    """Whole rows by their numbers: facts of each row, and the arrays of all rows, one after the other."""
    header = {"numbers": list(rows), "rows": [[getattr(row, name) for name in _PER_ROW] for row in rows.values()]}
    arrays: dict[str, npt.NDArray[Any]] = {
        name: np.concatenate([getattr(row, name) for row in rows.values()]) for name in (*_PER_TOKEN, "advantages")
    }
    arrays["lengths"] = np.asarray([len(row) for row in rows.values()], dtype=np.int64)
    arrays |= {f"experts/{i}": row.experts for i, row in enumerate(rows.values()) if row.experts is not None}
    return pack(header, arrays)


def unpack_rows(message: npt.NDArray[np.uint8]) -> dict[int, Row]:
    """The inverse of :func:`pack_rows`."""
    header, arrays = unpack(message)
    return dict(zip(header["numbers"], _rows(header["rows"], arrays), strict=True))


def _rows(facts: Sequence[Sequence[Any]], arrays: Arrays) -> Iterator[Row]:
    """Rows of a command. Raises :class:`pipeline.errors.TrainingError` for rows that do not fit."""
    at = trained = 0
    for i, (of_row, length) in enumerate(zip(facts, arrays["lengths"].tolist(), strict=True)):
        of_token: dict[str, Any] = {name: arrays[name][at : at + length] for name in _PER_TOKEN}
        sampled = int(of_token["loss_mask"].sum())
        yield Row(
            **dict(zip(_PER_ROW, of_row, strict=True)),
            **of_token,
            advantages=arrays["advantages"][trained : trained + sampled],
            experts=arrays.get(f"experts/{i}"),
        )
        at += length
        trained += sampled
