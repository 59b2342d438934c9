"""What the learner saw at the sampled tokens of one trajectory. S: its sampled tokens, in order of turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag

import numpy as np
import numpy.typing as npt

FLOAT = np.dtype("<f2")
FloatArray = npt.NDArray[np.floating]


class Flag(IntFlag):
    """What the loss did with a token."""

    SEEN = 1
    """A row of the update held it."""
    TRAINED = 2
    """It counted in the loss; unset: rejected as not finite, or by a mask."""
    CLIPPED_LOW = 4
    CLIPPED_HIGH = 8
    MASKED = 16
    """Rejected by the second-moment mask, or by one of ``importance.masks``."""
    TRUNCATED = 32
    """The importance weight was cut at its maximum."""


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Arrays ``[S]``; NaN where nothing is known.

    Stored as float16. log π is stored as its difference from log μ, so that the ratio keeps its three digits however
    unlikely the token was.
    """

    log_ratios: FloatArray
    """log π - log μ, nats, with π before the optimizer step; log π where log μ was not recorded."""
    entropies: FloatArray
    """Of π, nats."""
    advantages: FloatArray
    flags: npt.NDArray[np.uint8]
    """:class:`Flag` of each."""

    @classmethod
    def unknown(cls, n: int) -> SeenTokens:
        """Of ``n`` tokens that nobody saw."""
        a, b, c = (np.full(n, np.nan, np.float32) for _ in range(3))
        return cls(a, b, c, np.zeros(n, np.uint8))

    def __len__(self) -> int:
        return len(self.flags)

    def pack(self) -> dict[str, bytes]:
        """Bytes by name: float16, and one byte of flags."""
        return {
            "log_ratios": _half(self.log_ratios),
            "entropies": _half(self.entropies),
            "advantages": _half(self.advantages),
            "flags": np.ascontiguousarray(self.flags, np.uint8).tobytes(),
        }

    @classmethod
    def unpack(cls, parts: Mapping[str, bytes]) -> SeenTokens:
        """The inverse; floats come back as float32. Raises KeyError or ValueError."""
        halves = [np.frombuffer(parts[name], FLOAT).astype(np.float32) for name in
                  ("log_ratios", "entropies", "advantages")]  # fmt: skip
        flags = np.frombuffer(parts["flags"], np.uint8)
        if {len(half) for half in halves} != {len(flags)}:
            raise ValueError(f"arrays of {[len(half) for half in halves]} tokens and flags of {len(flags)}")
        return cls(halves[0], halves[1], halves[2], flags)


def _half(values: FloatArray) -> bytes:
    limit = float(np.finfo(np.float16).max)
    finite = np.clip(np.asarray(values, np.float32), -limit, limit)
    return np.where(np.isfinite(values), finite, np.float32(np.nan)).astype(FLOAT).tobytes()
