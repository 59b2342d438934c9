"""Demonstrations: trajectories that no policy of the run sampled, one JSON object a line.

With token ids, optionally with recorded log-probabilities::

    {"environment": "arithmetic", "seed": 17, "reward": 1.0,
     "turns": [{"context_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.1, -0.2]}]}

or as text, rendered with the chat template of the run's model::

    {"environment": "arithmetic", "seed": 17, "reward": 1.0,
     "messages": [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]}

``task_id`` may replace ``seed`` (``arithmetic/17``); ``payload``, ``temperature`` and ``actor`` are optional.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.errors import AfterplayError, SchemaError, StoreError
from pipeline.schema import ROLES, FinishReason, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn

LINE_BYTES_MAX = 1 << 28

Rendered = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Context and completion ids of each assistant message."""
Render = Callable[..., Rendered]
"""Takes the messages, and the tool schemas where there are any."""


def read_demonstrations(path: Path, render: Render, version: int) -> Iterator[Trajectory]:
    """Every line as a trajectory whose id tells its content. Recorded log-probabilities count as those of ``version``.

    Raises :class:`StoreError` that names the line where one is not understood.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield _trajectory(line, render, version)
                except (AfterplayError, KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
                    what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
                    raise StoreError(f"{path}, line {number}: {what}. Nothing was imported") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error


def import_id(content: bytes) -> str:
    """The id of an imported trajectory: the same content has the same id, no order ever has it."""
    return f"import-{hashlib.sha256(content).hexdigest()[:24]}"


def _trajectory(line: bytes, render: Render, version: int) -> Trajectory:
    if len(line) > LINE_BYTES_MAX:
        raise SchemaError(f"expected at most {LINE_BYTES_MAX} bytes, got {len(line)}")
    value = orjson.loads(line)
    if not isinstance(value, dict):
        raise SchemaError(f"expected a JSON object, got {type(value).__name__}")
    if ("turns" in value) == ("messages" in value):
        raise SchemaError("expected either turns (token ids) or messages (text)")
    reward = value["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise SchemaError(f"expected reward as a number, got {reward!r}")
    temperature = float(value.get("temperature", 1.0))
    if "turns" in value:
        turns, recorded = _turns(value["turns"], temperature, version)
    else:
        turns, recorded = _rendered(value["messages"], value.get("tools"), render, temperature), False
    identity = import_id(orjson.dumps(value, option=orjson.OPT_SORT_KEYS))
    return Trajectory(
        trajectory_id=identity,
        group_id="imported",
        task=_task(value),
        turns=turns,
        status=TrajectoryStatus.COMPLETE,
        rewards={"environment": float(reward)},
        reward=float(reward),
        actor_id=str(value.get("actor", "demonstration")),
        recorded=recorded,
    )


def _task(value: Mapping[str, Any]) -> Task:
    environment, seed, task_id = value["environment"], value.get("seed"), value.get("task_id")
    if seed is None and isinstance(task_id, str) and task_id.rpartition("/")[2].isdecimal():
        seed = int(task_id.rpartition("/")[2])
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SchemaError(f"expected seed as a whole number, or task_id that ends in one, got {seed!r} and {task_id!r}")
    return Task(task_id or f"{environment}/{seed}", environment, seed, value.get("payload") or {})


def _objects(values: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(values, list) or not values or not all(isinstance(value, dict) for value in values):
        raise SchemaError(f"expected {name} as a list of JSON objects, at least one, got {values!r:.200}")
    return values


def _turns(values: Any, temperature: float, version: int) -> tuple[tuple[Turn, ...], bool]:
    values = _objects(values, "turns")
    recorded = [value.get("logprobs") is not None for value in values]
    if any(recorded) != all(recorded):
        raise SchemaError("expected logprobs in every turn or in none, got some")
    turns = []
    for value in values:
        context, completion = _ids(value["context_ids"]), _ids(value["completion_ids"])
        logprobs = np.zeros(len(completion), np.float32)
        if all(recorded):
            logprobs = np.asarray(value["logprobs"], np.float32)
            if logprobs.shape != (len(completion),) or not np.isfinite(logprobs).all():
                raise SchemaError(f"expected {len(completion)} finite logprobs (one per completion id)")
        turns.append(_turn(context, completion, logprobs, temperature, version if all(recorded) else 0))
    return tuple(turns), all(recorded)


def _rendered(values: Any, tools: Any, render: Render, temperature: float) -> tuple[Turn, ...]:
    messages = []
    for value in _objects(values, "messages"):
        extra = {k: v for k, v in value.items() if k not in ("role", "content")}
        if not isinstance(value["role"], str) or not isinstance(value["content"], str):
            raise SchemaError(f"expected role and content as text, got {value!r:.200}")
        if value["role"] not in ROLES:
            raise SchemaError(f"expected one of the roles {', '.join(sorted(ROLES))}, got {value['role']!r:.100}")
        messages.append(Message(value["role"], value["content"], extra))
    turns, start = [], 0
    ends = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if not ends:
        raise SchemaError("expected a message of the role assistant, which is what is trained, got none")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise SchemaError(f"expected tools as a list of schemas, got {tools!r:.200}")
    rendered = render(messages, tools) if tools else render(messages)
    for end, (context, completion) in zip(ends, rendered, strict=True):
        zeros = np.zeros(len(completion), np.float32)
        turns.append(
            _turn(
                _ids(list(context)), _ids(list(completion)), zeros, temperature, 0, messages[start:end], messages[end]
            )
        )
        start = end + 1
    return tuple(turns)


def _turn(
    context: np.ndarray[Any, np.dtype[np.int32]],
    completion: np.ndarray[Any, np.dtype[np.int32]],
    logprobs: np.ndarray[Any, np.dtype[np.float32]],
    temperature: float,
    version: int,
    messages: Sequence[Message] = (),
    answer: Message | None = None,
) -> Turn:
    if not len(completion):
        raise SchemaError("expected at least one completion id in every turn, got none")
    return Turn(
        TokenSpan.context(context),
        TokenSpan.sampled(completion, logprobs, version),
        tuple(messages),
        answer or Message("assistant", ""),
        FinishReason.STOP,
        temperature,
    )


def _ids(values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    whole = isinstance(values, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in values)
    if not whole or any(not 0 <= v < 2**31 for v in values):
        raise SchemaError("expected token ids as whole numbers from 0 to 2**31 - 1")
    return np.asarray(values, np.int32)
