"""Messages and trajectories as bytes: an orjson header and raw little-endian arrays. Never pickle.

A message is one ZeroMQ multipart message ``[kind, header, frame …]``. A trajectory is sent and stored as four payload
frames:

=====  =====================================  ==================================================
frame  content                                dtype, shape
=====  =====================================  ==================================================
0      orjson: everything but the arrays      turns carry only lengths
1      ids of all spans in order              ``<i4`` ``[T]``
2      log-probabilities of sampled tokens    ``<f4`` ``[S]``
3      version spans of all completions       ``<i4`` ``[K, 3]`` start, stop, version
=====  =====================================  ==================================================

Where experts are recorded (``experts`` in the header is their dtype, layers and k), those of all turns follow the
version spans: ``u1`` or ``<u2`` ``[T, layers, k]``.

Decoding makes views on the received buffers. msgspec reads the header as the data model, which checks its types. Spans
are checked as a whole, and turns are built only when they are asked for. Where that check fails, the checking
constructors are called at once, because they say which part of which turn is wrong.

Schema evolution: a reader ignores unknown header keys and fills missing optional ones; ``schema_version`` changes only
when a meaning changes, which raises :class:`VersionMismatch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from pipeline.errors import LimitExceeded, SchemaError, VersionMismatch, WireError
from pipeline.schema.orders import invalid_header, task_header
from pipeline.schema.record_file import Buffer, Frames, array_bytes, n_bytes, require_writable
from pipeline.schema.trajectory import (
    SCHEMA_VERSION,
    DecodedTurns,
    EngineRecord,
    ExpertArray,
    Failure,
    FinishReason,
    Message,
    PromptLessons,
    SpanSource,
    Task,
    Timings,
    TokenSpan,
    Trajectory,
    TrajectoryStatus,
    Turn,
    VersionSpan,
    are_sampled_logprobs,
    experts_of,
)

if TYPE_CHECKING:
    from pipeline.config import RunConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Explicit bounds of the wire; anything larger is refused with :class:`LimitExceeded` that names the limit."""

    header_bytes_max: int = 4 * 1024 * 1024
    message_bytes_max: int = 256 * 1024 * 1024
    """Bytes of the frames behind the header: a payload that may arrive may also be sent on under another header."""
    frames_max: int = 64
    tokens_max: int = 1_048_576
    """Tokens of one trajectory."""
    queue_messages_max: int = 4096
    """Messages held per direction before senders wait."""

    @classmethod
    def of(cls, config: RunConfig) -> Limits:
        """The limits of a run."""
        return cls(message_bytes_max=config.stage.message_bytes_max, tokens_max=config.stage.tokens_max)


_CONTEXT, _SAMPLED = SpanSource.CONTEXT, SpanSource.SAMPLED

_Count = Annotated[int, msgspec.Meta(ge=0)]


class _TurnHeader(msgspec.Struct):
    n: tuple[_Count, _Count, _Count]
    """Tokens of context and of completion, and version spans."""
    messages: tuple[Message, ...]
    completion: Message
    finish: FinishReason
    temperature: Annotated[float, msgspec.Meta(ge=0)]
    signals: dict[str, float] = {}
    branch: int = 0
    reward: float | None = None
    trained: bool = True


class _LessonsHeader(msgspec.Struct):
    ids: tuple[str, ...]
    keep: bool
    plain: tuple[tuple[int, tuple[int, ...]], ...] = ()
    query: str = ""


class _Versioned(msgspec.Struct):
    schema_version: Any = None


class _Header(_Versioned, kw_only=True):
    trajectory_id: str
    group_id: str
    task: Task
    turns: list[_TurnHeader]
    status: TrajectoryStatus
    failure: Failure | None = None
    rewards: dict[str, float | None] = {}
    reward: float | None = None
    actor_id: str = "actor"
    engine: EngineRecord = EngineRecord()
    timings: Timings = Timings()
    recorded: bool = True
    lessons: _LessonsHeader | None = None
    experts: Any = None
    hinted: tuple[tuple[int, tuple[int, ...]], ...] = ()


_decode_header = msgspec.json.Decoder(_Header).decode

_decode_version = msgspec.json.Decoder(_Versioned).decode

_new = object.__new__

_set_source, _set_token_ids, _set_logprobs, _set_version_spans = (
    TokenSpan.__dict__[name].__set__ for name in ("source", "token_ids", "behaviour_logprobs", "version_spans")
)

DEFAULT_LIMITS = Limits()


def check_limits(frames: Sequence[Buffer], limits: Limits) -> None:
    """Raise :class:`LimitExceeded` naming the limit that ``[kind, header, frame …]`` breaks."""
    if len(frames) - 2 > limits.frames_max:
        raise LimitExceeded(f"message has {len(frames) - 2} frames, more than frames_max={limits.frames_max}")
    if len(frames) > 1 and n_bytes(frames[1]) > limits.header_bytes_max:
        raise LimitExceeded(
            f"header has {n_bytes(frames[1])} bytes, more than header_bytes_max={limits.header_bytes_max}"
        )
    total = 0
    for frame in frames[2:]:
        total += len(frame) if type(frame) is bytes else n_bytes(frame)
    if total > limits.message_bytes_max:
        raise LimitExceeded(
            f"message has {total} bytes beside its header, more than stage.message_bytes_max={limits.message_bytes_max}"
        )


def encode_trajectory(trajectory: Trajectory) -> Frames:
    """Payload frames of a trajectory (see the table above)."""
    ids = [np.zeros(0, np.int32)]  # a failed episode has no turns
    logprobs = [np.zeros(0, np.float32)]
    spans: list[int] = []
    turns = []
    for turn in trajectory.turns:
        completion = turn.completion
        assert completion.behaviour_logprobs is not None
        ids += [turn.context.token_ids, completion.token_ids]
        logprobs.append(completion.behaviour_logprobs)
        for span in completion.version_spans:
            spans += (span.start, span.stop, span.policy_version)
        turns.append(_turn_header(turn))
    header = {
        "schema_version": trajectory.schema_version,
        "trajectory_id": trajectory.trajectory_id,
        "group_id": trajectory.group_id,
        "task": task_header(trajectory.task),
        "status": trajectory.status.value,
        "failure": trajectory.failure,
        "rewards": dict(trajectory.rewards),
        "reward": trajectory.reward,
        "actor_id": trajectory.actor_id,
        "engine": trajectory.engine,
        "timings": trajectory.timings,
        "turns": turns,
    }
    if not trajectory.recorded:
        header["recorded"] = False
    if (lessons := trajectory.lessons) is not None:
        plain = [[turn, list(ids)] for turn, ids in lessons.plain_contexts.items()]
        header["lessons"] = {"ids": list(lessons.ids), "keep": lessons.keep, "plain": plain, "query": lessons.query}
    experts = experts_of(trajectory.turns)
    if experts is not None:
        header["experts"] = [experts.dtype.newbyteorder("<").str, *experts.shape[1:]]
    if trajectory.hinted_contexts:
        header["hinted"] = [[turn, list(ids)] for turn, ids in trajectory.hinted_contexts.items()]
    try:
        json = orjson.dumps(header)
    except TypeError as error:
        raise SchemaError(f"trajectory {trajectory.trajectory_id} holds something that is not JSON: {error}") from error
    tail = array_bytes(np.fromiter(spans, "<i4", len(spans)))
    return (
        json,
        array_bytes(np.concatenate(ids)),
        array_bytes(np.concatenate(logprobs)),
        tail if experts is None else b"".join((tail, array_bytes(experts))),
    )


def decode_trajectory(frames: Sequence[Buffer], limits: Limits = DEFAULT_LIMITS) -> Trajectory:
    """The inverse of :func:`encode_trajectory`; arrays are views on ``frames``.

    Raises :class:`WireError` for bytes that are no trajectory, :class:`LimitExceeded` for too many tokens,
    :class:`VersionMismatch` for another schema, :class:`SchemaError` for values that break the data model.
    """
    if len(frames) != 4:
        raise WireError(f"expected 4 payload frames of a trajectory, got {len(frames)}")
    header = _checked_header(frames[0])
    ids = _array(frames[1], "<i4", "token ids")
    logprobs = _array(frames[2], "<f4", "log-probabilities")
    tail, experts = _divided(frames[3], header.experts, len(ids))
    spans = _array(tail, "<i4", "version spans")
    if len(ids) > limits.tokens_max:
        raise LimitExceeded(f"trajectory has {len(ids)} tokens, more than stage.tokens_max={limits.tokens_max}")
    if len(spans) % 3:
        raise WireError(f"expected version spans as [K, 3], got {len(spans)} numbers")
    lessons = header.lessons
    return Trajectory(
        trajectory_id=header.trajectory_id,
        group_id=header.group_id,
        task=header.task,
        turns=_decode_turns(header.turns, ids, logprobs, spans.reshape(-1, 3).tolist(), experts),
        status=header.status,
        failure=header.failure,
        rewards=header.rewards,
        reward=header.reward,
        actor_id=header.actor_id,
        engine=header.engine,
        timings=header.timings,
        recorded=header.recorded,
        lessons=PromptLessons(lessons.ids, lessons.keep, dict(lessons.plain), lessons.query) if lessons else None,
        hinted_contexts=dict(header.hinted),
    )


def _checked_header(data: Buffer) -> _Header:
    try:
        header = _decode_header(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _check_version(_decode_version(data))
        raise invalid_header("trajectory", error) from error
    _check_version(header)
    messages = (message for turn in header.turns for message in (*turn.messages, turn.completion))
    if plain := [value for value in (header.task.payload, *(m.extra for m in messages)) if value]:
        require_writable(plain, "trajectory header")
    return header


def _turn_header(turn: Turn) -> dict[str, Any]:
    """Leaves out defaults."""
    header = {
        "n": (len(turn.context.token_ids), len(turn.completion.token_ids), len(turn.completion.version_spans)),
        "messages": [_message_header(message) for message in turn.context_messages],
        "completion": _message_header(turn.completion_message),
        "finish": turn.finish_reason,
        "temperature": turn.temperature,
    }
    if turn.signals:
        header["signals"] = dict(turn.signals)
    if turn.branch:
        header["branch"] = turn.branch
    if turn.reward is not None:
        header["reward"] = turn.reward
    if not turn.trained:
        header["trained"] = False
    return header


def _message_header(message: Message) -> dict[str, Any]:
    """A plain dictionary: orjson writes it four times as fast as a dataclass."""
    header: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.extra:
        header["extra"] = message.extra
    return header


def _check_version(header: _Versioned) -> None:
    if header.schema_version != SCHEMA_VERSION:
        raise VersionMismatch(
            f"trajectory has schema version {header.schema_version!r}, this process reads {SCHEMA_VERSION}: run the "
            f"same Afterplay everywhere"
        )


def _array(frame: Buffer, dtype: str, what: str) -> np.ndarray[Any, Any]:
    try:
        return np.frombuffer(frame, dtype=dtype)
    except ValueError as error:
        raise WireError(f"{what}: {n_bytes(frame)} bytes are no array of {dtype}") from error


def _divided(frame: Buffer, form: Any, n_tokens: int) -> tuple[Buffer, ExpertArray | None]:
    """The version spans in the last frame, and the experts behind them. ``form``: that of the header."""
    match form:
        case None:
            return frame, None
        case ["|u1" | "<u2" as dtype, int(layers), int(k)] if layers > 0 and k > 0:
            at = n_bytes(frame) - np.dtype(dtype).itemsize * n_tokens * layers * k
            if at >= 0:
                experts = np.frombuffer(frame, dtype, offset=at) if at < n_bytes(frame) else np.zeros(0, dtype)
                return memoryview(frame)[:at], experts.reshape(n_tokens, layers, k)
    raise WireError(f"expected experts of {n_tokens} tokens, got {n_bytes(frame)} bytes in the form {form!r:.100}")


def _decode_turns(
    headers: list[_TurnHeader],
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    spans: list[list[int]],
    experts: ExpertArray | None,
) -> Sequence[Turn]:
    """``ids`` int32 ``[T]``, ``logprobs`` float32 ``[S]``, ``spans`` int32 ``[K, 3]`` and ``experts``
    ``[T, layers, k]`` of all turns in order.

    Raises :class:`WireError` where lengths do not add up, and :class:`SchemaError` for values that break the data
    model.
    """
    ids.flags.writeable = logprobs.flags.writeable = False
    sound = (
        (not len(ids) or ids.min() >= 0)
        and are_sampled_logprobs(logprobs)
        and _are_sound(headers, len(ids), len(logprobs), spans)
    )
    build = partial(_build_turns, headers, ids, logprobs, spans, experts, sound)
    if not sound:
        return build()
    trained = any(header.n[1] for header in headers if header.trained)
    versions = [version for _, _, version in spans]
    return DecodedTurns(build, len(headers), trained, (min(versions), max(versions)) if versions else None)


def _are_sound(headers: list[_TurnHeader], n_ids: int, n_logprobs: int, spans: list[list[int]]) -> bool:
    """True only if :func:`_build_turns` raises nothing for them, and their branches may follow one another."""
    at_id = at_logprob = at_span = branch = 0
    for header in headers:
        n_context, n_completion, n_spans = header.n
        at = version = 0
        for start, stop, of in spans[at_span : at_span + n_spans]:
            if start != at or stop <= start or of < version:
                return False
            at, version = stop, of
        if at != n_completion or not 0 <= header.branch - branch <= 1:
            return False
        branch = header.branch
        at_id += n_context + n_completion
        at_logprob += n_completion
        at_span += n_spans
    return (at_id, at_logprob, at_span) == (n_ids, n_logprobs, len(spans))


def _build_turns(
    headers: list[_TurnHeader],
    ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    rows: list[list[int]],
    experts: ExpertArray | None,
    sound: bool,
) -> tuple[Turn, ...]:
    """The turns of :func:`_decode_turns`. ``sound``: their spans need no check."""
    turns = []
    span = _span if sound else TokenSpan
    at_id = at_logprob = at_span = 0
    for header in headers:
        n_context, n_completion, n_spans = header.n
        middle = at_id + n_context
        end, end_logprob, end_span = middle + n_completion, at_logprob + n_completion, at_span + n_spans
        if end > len(ids) or end_logprob > len(logprobs) or end_span > len(rows):
            raise _lengths_disagree(end, end_logprob, end_span, ids, logprobs, rows)
        versions = tuple([VersionSpan(*row) for row in rows[at_span:end_span]])
        turns.append(
            Turn(
                span(_CONTEXT, ids[at_id:middle]),
                span(_SAMPLED, ids[middle:end], logprobs[at_logprob:end_logprob], versions),
                header.messages,
                header.completion,
                header.finish,
                header.temperature,
                header.signals,
                header.branch,
                header.reward,
                None if experts is None else experts[at_id:end],
                header.trained,
            )
        )
        at_id, at_logprob, at_span = end, end_logprob, end_span
    if (at_id, at_logprob, at_span) != (len(ids), len(logprobs), len(rows)):
        raise _lengths_disagree(at_id, at_logprob, at_span, ids, logprobs, rows)
    return tuple(turns)


def _span(
    source: SpanSource,
    token_ids: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32] | None = None,
    version_spans: tuple[VersionSpan, ...] = (),
) -> TokenSpan:
    """A span that needs no check."""
    span = _new(TokenSpan)
    _set_source(span, source)
    _set_token_ids(span, token_ids)
    _set_logprobs(span, logprobs)
    _set_version_spans(span, version_spans)
    return span


def _lengths_disagree(
    at_id: int, at_logprob: int, at_span: int, ids: npt.NDArray[Any], logprobs: npt.NDArray[Any], rows: list[Any]
) -> WireError:
    return WireError(
        f"turn lengths add up to {at_id} ids, {at_logprob} log-probabilities and {at_span} version spans, "
        f"the arrays hold {len(ids)}, {len(logprobs)} and {len(rows)}"
    )
