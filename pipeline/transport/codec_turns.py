"""Turns of a trajectory from their header and the arrays of the whole trajectory.

Building each span with its own checks costs a dozen small numpy calls a turn. Here every check of
:mod:`pipeline.schema` is made once on the whole arrays (or on plain numbers), and the parts are built without
repeating them. Where a check fails, the checking constructors are called after all: they say which part of which turn
is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.errors import WireError
from pipeline.schema import FinishReason, Message, SpanSource, TokenSpan, Turn, VersionSpan
from pipeline.schema.tokens import LOGPROB_MAX

_CONTEXT, _SAMPLED = SpanSource.CONTEXT, SpanSource.SAMPLED
_FINISH = {reason.value: reason for reason in FinishReason}
_new = object.__new__
_set_source, _set_token_ids, _set_logprobs, _set_version_spans = (
    TokenSpan.__dict__[name].__set__ for name in ("source", "token_ids", "behaviour_logprobs", "version_spans")
)


def decode_turns(
    headers: list[dict[str, Any]],
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    spans: npt.NDArray[np.int32],
) -> tuple[Turn, ...]:
    """``ids`` int32 ``[T]``, ``logprobs`` float32 ``[S]`` and ``spans`` int32 ``[K, 3]`` of all turns in order.

    Raises :class:`WireError` where lengths do not add up, :class:`SchemaError` for values that break the data model,
    and ``KeyError``, ``TypeError``, ``ValueError`` or ``AttributeError`` for a header of another form.
    """
    ids, logprobs = _read_only(ids), _read_only(logprobs)
    sound = (not len(ids) or ids.min() >= 0) and (not len(logprobs) or logprobs.max() <= LOGPROB_MAX)
    rows = spans.tolist()
    turns = []
    at_id = at_logprob = at_span = 0
    for header in headers:
        n_context, n_completion, n_spans = _lengths(header["n"])
        middle = at_id + n_context
        end, end_logprob, end_span = middle + n_completion, at_logprob + n_completion, at_span + n_spans
        if end > len(ids) or end_logprob > len(logprobs) or end_span > len(rows):
            raise _lengths_disagree(end, end_logprob, end_span, ids, logprobs, rows)
        versions = tuple([VersionSpan(*row) for row in rows[at_span:end_span]])
        span = _span if sound and _tiles(versions, n_completion) else _checked_span
        turns.append(
            Turn(
                span(_CONTEXT, ids[at_id:middle]),
                span(_SAMPLED, ids[middle:end], logprobs[at_logprob:end_logprob], versions),
                tuple([decode_chat_message(m) for m in header["messages"]]),
                decode_chat_message(header["completion"]),
                _FINISH[header["finish"]],
                header["temperature"],
                header.get("signals") or {},
                header.get("branch", 0),
                header.get("reward"),
            )
        )
        at_id, at_logprob, at_span = end, end_logprob, end_span
    if (at_id, at_logprob, at_span) != (len(ids), len(logprobs), len(rows)):
        raise _lengths_disagree(at_id, at_logprob, at_span, ids, logprobs, rows)
    return tuple(turns)


def decode_chat_message(header: Mapping[str, Any]) -> Message:
    """Unknown keys are ignored; role and content are strings, ``extra`` is an object."""
    role, content, extra = header["role"], header["content"], header.get("extra") or {}
    if type(role) is str and type(content) is str and type(extra) is dict:
        return Message(role, content, extra)
    raise WireError(f"expected a message with role and content as strings and extra as an object, got {header!r:.200}")


def _checked_span(
    source: SpanSource,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32] | None = None,
    version_spans: tuple[VersionSpan, ...] = (),
) -> TokenSpan:
    return TokenSpan(source, token_ids, logprobs, version_spans)


def _span(
    source: SpanSource,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32] | None = None,
    version_spans: tuple[VersionSpan, ...] = (),
) -> TokenSpan:
    span = _new(TokenSpan)
    _set_source(span, source)
    _set_token_ids(span, token_ids)
    _set_logprobs(span, logprobs)
    _set_version_spans(span, version_spans)
    return span


def _lengths(n: Any) -> tuple[int, int, int]:
    if type(n) is list and len(n) == 3:
        a, b, c = n
        if type(a) is type(b) is type(c) is int and a >= 0 and b >= 0 and c >= 0:
            return a, b, c
    raise WireError(
        f"expected the lengths of a turn as three numbers >= 0 (context, completion, version spans), got {n!r:.100}"
    )


def _tiles(spans: tuple[VersionSpan, ...], n_tokens: int) -> bool:
    """Whether version spans cover ``[0, n_tokens)`` without gap and with versions that never decrease."""
    at = version = 0
    for span in spans:
        if span.start != at or span.policy_version < version:
            return False
        at, version = span.stop, span.policy_version
    return at == n_tokens


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.flags.writeable = False
    return array


def _lengths_disagree(
    at_id: int, at_logprob: int, at_span: int, ids: npt.NDArray[Any], logprobs: npt.NDArray[Any], rows: list[Any]
) -> WireError:
    return WireError(
        f"turn lengths add up to {at_id} ids, {at_logprob} log-probabilities and {at_span} version spans, "
        f"the arrays hold {len(ids)}, {len(logprobs)} and {len(rows)}"
    )
