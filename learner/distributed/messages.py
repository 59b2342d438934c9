"""Messages between the ranks of a learner: commands, rows and token scores as one uint8 array."""

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
    """A command of rank 0 to the other ranks, with its data: facts of each row, and the arrays of all rows, one after
    the other."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    header: dict[str, Any] = {"command": command, **(facts or {})}
    if rows:
        header["rows"] = [[getattr(row, name) for name in _PER_ROW] for row in rows]
        for name in (*_PER_TOKEN, "advantages"):
            arrays[name] = np.concatenate([getattr(row, name) for row in rows])
        arrays["lengths"] = np.asarray([len(row) for row in rows], dtype=np.int64)
        arrays |= {f"experts/{i}": row.experts for i, row in enumerate(rows) if row.experts is not None}
    for name in _TOKEN_SCORES:
        array = getattr(scores, name, None)
        if array is not None:
            arrays[f"evidence/{name}"] = array
    return pack(header, arrays)


def unpack_command(message: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], tuple[Row, ...], TokenScores]:
    """The inverse of :func:`pack_command`: facts (``command`` among them), rows and token scores."""
    header, arrays = unpack(message)
    rows = tuple(_rows(header.pop("rows"), arrays)) if "rows" in header else ()
    return header, rows, TokenScores(**{name: arrays.get(f"evidence/{name}") for name in _TOKEN_SCORES})


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
