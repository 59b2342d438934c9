"""Spans of tokens with log-probabilities and policy versions by position, and checks shared by the data types.

A failed check raises :class:`SchemaError` with the expected and the actual value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
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


NO_VERSION = -1
"""``policy_versions`` entry of a token that no policy sampled."""
LOGPROB_MAX = 1e-4
"""Largest log-probability that is taken for rounding of 0."""
LOGPROB_MIN = -100.0
"""Smallest log-probability of a sampled token. A token whose probability is below ``p`` is drawn with a probability of
at most ``vocabulary * p``: for exp(-100) and 300,000 tokens once in 1e38 draws. Engines that compute probabilities in
float32 cannot draw one below exp(-103.3). What an engine reports below is an error of it."""


def are_sampled_logprobs(logprobs: npt.NDArray[np.float32]) -> bool:
    """True if all of them can be log-probabilities of sampled tokens; False with NaN."""
    return not len(logprobs) or bool(logprobs.min() >= LOGPROB_MIN and logprobs.max() <= LOGPROB_MAX)


class SpanSource(StrEnum):
    """Origin of tokens."""

    CONTEXT = "context"
    """Prompt, tool output, chat scaffold: seen by the policy, never trained."""
    SAMPLED = "sampled"
    """Sampled by the policy: trained."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens ``[start, stop)`` of one completion came from ``policy_version``."""

    start: int
    stop: int
    policy_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise SchemaError(f"expected 0 <= start < stop, got {(self.start, self.stop)}")
        if self.policy_version < 0:
            raise SchemaError(f"expected policy_version >= 0, got {self.policy_version}")


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens from one source.

    ``token_ids`` is int32 ``[n]``. A SAMPLED span also has ``behaviour_logprobs``, float32 ``[n]`` in nats, the
    log-probability of each token under the distribution it was really drawn from (after temperature), and
    ``version_spans`` that tile ``[0, n)`` with versions that never decrease.

    Raises :class:`SchemaError` when lengths disagree, versions leave a gap, or a log-probability is positive, NaN or
    below ``LOGPROB_MIN``.
    """

    source: SpanSource
    token_ids: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32] | None = None
    version_spans: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        require_array("token_ids", self.token_ids, np.int32)
        if len(self.token_ids) and int(self.token_ids.min()) < 0:
            raise SchemaError(f"expected token ids >= 0, got {int(self.token_ids.min())}")
        object.__setattr__(self, "token_ids", frozen(self.token_ids))
        if self.source is SpanSource.CONTEXT:
            require(self.behaviour_logprobs is None, "no log-probabilities on context tokens", "some")
            require(not self.version_spans, "no version spans on context tokens", self.version_spans)
            return
        require(self.behaviour_logprobs is not None, "log-probabilities on sampled tokens", None)
        assert self.behaviour_logprobs is not None
        require_array("behaviour_logprobs", self.behaviour_logprobs, np.float32, len(self.token_ids))
        if not are_sampled_logprobs(self.behaviour_logprobs):
            least, most = float(self.behaviour_logprobs.min()), float(self.behaviour_logprobs.max())
            raise SchemaError(
                f"expected log-probabilities of sampled tokens, {LOGPROB_MIN:g} to 0, got {least:g} to {most:g}: check "
                "the engine's logprobs mode"
            )
        object.__setattr__(self, "behaviour_logprobs", frozen(self.behaviour_logprobs))
        self._check_tiling()

    def _check_tiling(self) -> None:
        at, version = 0, 0
        for span in self.version_spans:
            if span.start != at:
                raise SchemaError(f"expected a version span starting at {at}, got {span}")
            if span.policy_version < version:
                raise SchemaError(f"expected versions that never decrease (>= {version}), got {span}")
            at, version = span.stop, span.policy_version
        if at != len(self.token_ids):
            raise SchemaError(f"expected version spans covering {len(self.token_ids)} tokens, got {at}")

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def context(cls, token_ids: npt.ArrayLike) -> TokenSpan:
        """A CONTEXT span from any sequence of ids."""
        return cls(SpanSource.CONTEXT, np.asarray(token_ids, dtype=np.int32))

    @classmethod
    def sampled(
        cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, versions: tuple[VersionSpan, ...] | int
    ) -> TokenSpan:
        """A SAMPLED span; ``versions`` may be one version for all tokens."""
        ids = np.asarray(token_ids, dtype=np.int32)
        if isinstance(versions, int):
            versions = (VersionSpan(0, len(ids), versions),) if len(ids) else ()
        return cls(SpanSource.SAMPLED, ids, np.asarray(logprobs, dtype=np.float32), versions)

    def versions(self) -> npt.NDArray[np.int32]:
        """Policy version of each token, int32 ``[n]``; ``NO_VERSION`` on context."""
        out = np.full(len(self.token_ids), NO_VERSION, dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.stop] = span.policy_version
        return out


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """A sequence that the engine saw, as arrays of one length T, aligned by position."""

    token_ids: npt.NDArray[np.int32]
    """int32 ``[T]``."""
    loss_mask: npt.NDArray[np.bool_]
    """bool ``[T]``: True exactly on sampled tokens."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """float32 ``[T]``, nats; 0 where ``loss_mask`` is False."""
    policy_versions: npt.NDArray[np.int32]
    """int32 ``[T]``; ``NO_VERSION`` where ``loss_mask`` is False."""
    turn_index: npt.NDArray[np.int32]
    """int32 ``[T]``: the turn whose context or completion the token belongs to."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def join(cls, spans: list[tuple[int, TokenSpan]]) -> FlatTokens:
        """Concatenate ``(turn index, span)`` pairs in order."""
        if not spans:
            empty = np.zeros(0, dtype=np.int32)
            return cls(empty, empty.astype(np.bool_), empty.astype(np.float32), empty, empty)
        return cls(
            token_ids=np.concatenate([s.token_ids for _, s in spans]),
            loss_mask=np.concatenate([np.full(len(s), s.source is SpanSource.SAMPLED) for _, s in spans]),
            behaviour_logprobs=np.concatenate(
                [
                    s.behaviour_logprobs if s.behaviour_logprobs is not None else np.zeros(len(s), np.float32)
                    for _, s in spans
                ]
            ),
            policy_versions=np.concatenate([s.versions() for _, s in spans]),
            turn_index=np.concatenate([np.full(len(s), turn, dtype=np.int32) for turn, s in spans]),
        )
