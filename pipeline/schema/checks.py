"""Small checks shared by the data types. Each raises :class:`SchemaError` with what was expected and what came."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import SchemaError

ID_LENGTH_MAX = 200


def require(condition: bool, expected: str, came: Any) -> None:
    """Raise unless ``condition``; the message reads ``expected X, got Y``."""
    if not condition:
        raise SchemaError(f"expected {expected}, got {came!r}")


def require_id(name: str, value: Any) -> None:
    """An identifier: a printable, non-empty string of at most 200 characters."""
    if not (isinstance(value, str) and 0 < len(value) <= ID_LENGTH_MAX and value.isprintable()):
        raise SchemaError(f"expected {name} to be 1-{ID_LENGTH_MAX} printable characters, got {value!r}")


def require_finite(name: str, value: float) -> None:
    """A number that is neither infinite nor NaN."""
    if not (isinstance(value, int | float) and math.isfinite(value)):
        raise SchemaError(f"expected {name} to be a finite number, got {value!r}")


def require_array(name: str, array: Any, dtype: type[np.generic], length: int | None = None) -> None:
    """A one-dimensional little-endian array of ``dtype`` (and ``length``, when given)."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.dtype(dtype):
        came = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise SchemaError(f"expected {name} to be a 1-d array of {np.dtype(dtype)}, got {came}")
    if length is not None and len(array) != length:
        raise SchemaError(f"expected {name} to have {length} entries (one per token), got {len(array)}")


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, read-only: a frozen dataclass whose arrays can be written is not frozen."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array
