"""What a trajectory looks like in bytes: one C struct per unit, so that one unit is one read. Never pickle.

A payload is named arrays with one leading dimension, the *units* (steps, turns, tokens). ``{"observation": [512, 72],
"reward": [512]}`` becomes 512 records of 73 numbers each. A unit of a trajectory on disk is then ``pread`` of one
place, and a batch is a join of such reads. Views of the arrays come from the block without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.errors import SchemaError

Array = npt.NDArray[Any]
Block = npt.NDArray[np.void]
"""``[units]`` records."""
_KINDS = "biufc"
_FIELDS_MAX = 256


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of one unit's arrays. Equal layouts are interchangeable."""

    fields: tuple[tuple[str, str, tuple[int, ...]], ...]
    """(name, little-endian numpy dtype such as ``<f4``, shape of one unit), by name."""
    dtype: np.dtype[np.void] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        widest_first = sorted(self.fields, key=lambda f: -np.dtype(f[1]).itemsize)
        object.__setattr__(self, "dtype", np.dtype(widest_first, align=True))

    @property
    def unit_bytes(self) -> int:
        return self.dtype.itemsize

    def pack(self, arrays: Mapping[str, Array], units: int) -> Block:
        """A copy of ``arrays`` as one block."""
        # Holes between fields reach the disk: they must not show what the memory held before.
        holes = self.unit_bytes != sum(self.dtype[name].itemsize for name, _, _ in self.fields)
        block = (np.zeros if holes else np.empty)(units, self.dtype)
        for name, _, _ in self.fields:
            block[name] = arrays[name]
        return block

    def unpack(self, data: bytearray) -> dict[str, Array]:
        """Named arrays ``[units, ...]`` from the bytes of whole units, each contiguous and writable."""
        block: Block = np.frombuffer(data, self.dtype)
        return {name: np.ascontiguousarray(view) for name, view in views(block).items()}

    def encode(self) -> bytes:
        return orjson.dumps(self.fields)

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Raises :class:`SchemaError` for anything that :meth:`encode` did not write."""
        try:
            fields = tuple((str(name), str(dtype), tuple(map(int, shape))) for name, dtype, shape in orjson.loads(data))
            if not 0 < len(fields) <= _FIELDS_MAX or any(np.dtype(dtype).kind not in _KINDS for _, dtype, _ in fields):
                raise ValueError("fields")
            return cls(fields)
        except (ValueError, TypeError) as error:
            raise SchemaError(f"expected the layout of a trajectory, got {data!r:.200}") from error


def layout_of(arrays: Mapping[str, Array]) -> tuple[Layout, int]:
    """The layout of ``arrays`` and how many units they have.

    Raises :class:`SchemaError` unless they are at least one numeric array, all with the same leading dimension >= 1.
    """
    fields, units = [], -1
    if not 0 < len(arrays) <= _FIELDS_MAX:
        raise SchemaError(f"expected 1 to {_FIELDS_MAX} named arrays in a trajectory, got {len(arrays)}")
    for name in sorted(arrays):
        array = arrays[name]
        if not isinstance(name, str) or not name:
            raise SchemaError(f"expected names of arrays as non-empty strings, got {name!r}")
        if not isinstance(array, np.ndarray) or array.dtype.kind not in _KINDS:
            came = f"dtype {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise SchemaError(f"expected {name!r} to be a numeric numpy array, got {came}")
        if array.ndim == 0 or len(array) == 0:
            raise SchemaError(f"expected {name!r} with a leading unit dimension of at least 1, got shape {array.shape}")
        if units not in (-1, len(array)):
            raise SchemaError(f"expected {name!r} to have {units} units like the others, got {len(array)}")
        units = len(array)
        fields.append((name, array.dtype.newbyteorder("<").str, array.shape[1:]))
    return Layout(tuple(fields)), units


def views(block: Block) -> dict[str, Array]:
    """The named arrays ``[units, ...]`` of a block, without a copy."""
    assert block.dtype.names is not None
    return {name: block[name] for name in sorted(block.dtype.names)}


def join_steps(array: Array) -> Array:
    """``[T, B, ...]`` as ``[T * B, ...]``: every step of every environment is a unit."""
    if array.ndim < 2:
        raise SchemaError(f"expected an array [T, B, ...], got shape {array.shape}")
    return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
