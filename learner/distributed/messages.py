"""Orders and rows as bytes: an orjson header and raw arrays, as in ``pipeline.codec``; nothing is pickled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from learner.data.rows import Row, TokenScores

Arrays = Mapping[str, npt.NDArray[Any]]
_LENGTH = 8
_PER_TOKEN = ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions", "temperatures", "turns")
_EVIDENCE = tuple(f.name for f in fields(TokenScores))
_PER_ROW = tuple(f.name for f in fields(Row) if f.name not in (*_PER_TOKEN, "advantages"))


def pack(header: Mapping[str, Any], arrays: Arrays) -> npt.NDArray[np.uint8]:
    """uint8 ``[N]``: length of the header (8 bytes), the header, the arrays one after the other."""
    parts = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in parts.items()]
    head = orjson.dumps([dict(header), shapes], option=orjson.OPT_SERIALIZE_NUMPY)
    whole = b"".join([len(head).to_bytes(_LENGTH, "little"), head, *(array.tobytes() for array in parts.values())])
    return np.frombuffer(bytearray(whole), dtype=np.uint8)


def unpack(message: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """The inverse of :func:`pack`; the arrays share one buffer."""
    whole = bytearray(message.tobytes())
    at = _LENGTH + int.from_bytes(whole[:_LENGTH], "little")
    header, shapes = orjson.loads(whole[_LENGTH:at])
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, kind, shape in shapes:
        dtype = np.dtype(kind)
        count = int(np.prod(shape, dtype=np.int64))
        arrays[name] = np.frombuffer(whole, dtype=dtype, count=count, offset=at).reshape(shape)
        at += count * dtype.itemsize
    return header, arrays


def pack_rows(rows: Sequence[Row]) -> tuple[list[list[Any]], dict[str, npt.NDArray[Any]]]:
    """What a rank needs of rows: facts of each, and the arrays of all, one row after the other."""
    facts = [[getattr(row, name) for name in _PER_ROW] for row in rows]
    arrays = {name: _joined([getattr(row, name) for row in rows]) for name in (*_PER_TOKEN, "advantages")}
    arrays["lengths"] = np.asarray([len(row) for row in rows], dtype=np.int64)
    return facts, arrays


def unpack_rows(facts: Sequence[Sequence[Any]], arrays: Arrays) -> tuple[Row, ...]:
    """The inverse of :func:`pack_rows`. Raises :class:`pipeline.errors.TrainingError` for rows that do not fit."""
    return tuple(_rows(facts, arrays))


def pack_order(
    order: str, rows: Sequence[Row] = (), facts: Mapping[str, Any] | None = None, evidence: TokenScores | None = None
) -> npt.NDArray[np.uint8]:
    """What rank 0 tells the others to do, with what."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    header: dict[str, Any] = {"order": order, **(facts or {})}
    if rows:
        header["rows"], arrays = pack_rows(rows)
    for name in _EVIDENCE:
        array = getattr(evidence, name, None)
        if array is not None:
            arrays[f"evidence/{name}"] = array
    return pack(header, arrays)


def unpack_order(message: npt.NDArray[np.uint8]) -> tuple[dict[str, Any], tuple[Row, ...], TokenScores]:
    """Facts (``order`` says which), rows and evidence."""
    header, arrays = unpack(message)
    rows = unpack_rows(header.pop("rows"), arrays) if "rows" in header else ()
    return header, rows, TokenScores(**{name: arrays.get(f"evidence/{name}") for name in _EVIDENCE})


def _rows(facts: Sequence[Sequence[Any]], arrays: Arrays) -> Iterator[Row]:
    at = trained = 0
    for of_row, length in zip(facts, arrays["lengths"].tolist(), strict=True):
        of_token: dict[str, Any] = {name: arrays[name][at : at + length] for name in _PER_TOKEN}
        sampled = int(of_token["loss_mask"].sum())
        yield Row(
            **dict(zip(_PER_ROW, of_row, strict=True)),
            **of_token,
            advantages=arrays["advantages"][trained : trained + sampled],
        )
        at += length
        trained += sampled


def _joined(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)
