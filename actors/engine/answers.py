"""Answers of an engine's routes, parsed and checked. Pure.

Every fault is an :class:`EngineProtocolError` with the engine, the expected and the actual value. Policy versions are
labels (:mod:`pipeline.runtime.weights`). ``default`` (vLLM's label before the first stamp), ``withdrawn`` and the label
of another run are *no* version. An engine reports ``default`` after a start or restart: its weights are then those of
its folder, which are version 0 only if the learner has not resumed from something else. So engines without a version
are not routed to, and tokens without one (the engine restarted during the request) raise :class:`EngineGone`: the
request is repeated.
"""

from __future__ import annotations

import base64
import io
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from actors.engine.base import EngineReport, Generation, Heard, ServedModel
from pipeline.errors import EngineGone, EngineProtocolError, EngineUnavailable, SchemaError
from pipeline.runtime.weights import read_stamp
from pipeline.schema import FinishReason, VersionSpan
from pipeline.schema.trajectory import LOGPROB_MAX, LOGPROB_MIN, ExpertArray, require_experts

_FINISH = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
    "repetition": FinishReason.STOP,
}


def read_generate(
    engine: str,
    answer: Any,
    tokens_max: int,
    vocabulary: int | None,
    run: str | None = None,
    n_before: int | None = None,
) -> Generation:
    """An answer of ``/inference/v1/generate``. ``tokens_max``: the ``max_tokens`` of the request; ``n_before``: tokens
    of the prompt whose experts were asked for (None: none were)."""
    choice = _choice(engine, answer)
    ids = _token_ids(engine, choice, tokens_max, vocabulary)
    logprobs = _content_logprobs(engine, choice)
    finish = _finish(engine, choice)
    spans = choice.get("weight_versions")
    versions = () if finish is FinishReason.ABORT else _version_spans(engine, spans, len(ids), run)
    experts = _experts(engine, choice, n_before, len(ids))
    return Generation(ids, logprobs, versions, finish, experts)


class AnswerStream:
    """An answer of ``/inference/v1/generate`` that comes as server-sent events. vLLM and the embedded engine give the
    versions and the experts of all tokens with the last of them."""

    def __init__(self, engine: str, vocabulary: int | None, heard: Heard) -> None:
        self._engine, self._vocabulary, self._heard = engine, vocabulary, heard
        self._line = b""
        self._choice: dict[str, Any] = {}
        self._ids: list[int] = []
        self._content: list[Any] = []
        self.begun = False
        """Something came: the answer is a stream."""

    def feed(self, data: bytes) -> None:
        """The next bytes. Raises what they mean."""
        self.begun = True
        *lines, self._line = (self._line + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (text := line[5:].strip()) != b"[DONE]":
                self._add(text)

    def _add(self, text: bytes) -> None:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            raise _fault(self._engine, "events with JSON", _short(text)) from None
        if isinstance(value, dict) and value.get("error") is not None:
            raise EngineUnavailable(f"engine {self._engine} failed inside a request: {_short(value['error'])}")
        choice = _choice(self._engine, value)
        ids = _known_ids(self._engine, choice.get("token_ids"), self._vocabulary)
        logprobs = _content_logprobs(self._engine, choice)
        self._choice |= {name: field for name, field in choice.items() if field is not None}
        self._ids += choice["token_ids"]
        self._content += choice["logprobs"]["content"]
        if len(ids):
            self._heard(ids, logprobs)

    def whole(self) -> dict[str, Any]:
        """The answer as it would have come whole. Raises :class:`EngineUnavailable` where the last event is missing."""
        if "finish_reason" not in self._choice:
            raise EngineUnavailable(
                f"engine {self._engine} ended a stream after {len(self._ids)} tokens without a reason"
            )
        return {"choices": [{**self._choice, "token_ids": self._ids, "logprobs": {"content": self._content}}]}


def read_version(engine: str, label: Any, run: str | None = None) -> int | None:
    """A version label; None for weights that are not of ``run``."""
    try:
        return read_stamp(label, run)
    except SchemaError as error:
        raise EngineProtocolError(f"engine {engine}: {error}") from error


_REPORT = {
    "num_requests_running": "running",
    "num_requests_waiting": "waiting",
    "kv_cache_usage_perc": "kv_used",
    "num_preemptions_total": "preemptions",
    "generation_tokens_total": "sampled",
    "prefix_cache_queries_total": "prefix_queries",
    "prefix_cache_hits_total": "prefix_hits",
}
"""vLLM's names (without ``vllm:``) and ours."""

_REPORTED = re.compile(rf"^vllm:({'|'.join(_REPORT)})(?:{{[^\n]*}})? (\S+)$", re.MULTILINE)


def read_report(text: str) -> EngineReport | None:
    """vLLM's metrics from the text of ``/metrics``, summed over label sets (one for each engine core behind a server);
    of the KV cache the fullest."""
    sums: dict[str, float] = {}
    for name, number in _REPORTED.findall(text):
        try:
            value = float(number)
        except ValueError:
            continue
        ours = _REPORT[name]
        sums[ours] = max(sums.get(ours, 0.0), value) if ours == "kv_used" else sums.get(ours, 0.0) + value
    return EngineReport(**sums) if sums else None


def read_served(answer: Any) -> ServedModel | None:
    """The first model of ``/v1/models``: vLLM lists the base model before its adapters."""
    match answer:
        case {"data": [{"id": str(name), **card}, *_]}:
            root, length = card.get("root"), card.get("max_model_len")
            return ServedModel(name, root if isinstance(root, str) else name, length if type(length) is int else None)
    return None


def _choice(engine: str, answer: Any) -> dict[str, Any]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise _fault(engine, "a JSON object with exactly one choice", _short(answer))
    choice: dict[str, Any] = choices[0]
    return choice


def _token_ids(engine: str, choice: dict[str, Any], tokens_max: int, vocabulary: int | None) -> npt.NDArray[np.int32]:
    ids = _known_ids(engine, choice.get("token_ids"), vocabulary)
    if len(ids) > tokens_max:
        raise _fault(engine, f"at most {tokens_max} tokens (max_tokens)", f"{len(ids)}")
    if not len(ids) and choice.get("finish_reason") != "abort":
        raise _fault(engine, "at least one sampled token", "none")
    return ids


def _known_ids(engine: str, ids: Any, vocabulary: int | None) -> npt.NDArray[np.int32]:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise _fault(engine, "token_ids as a list of integers", _short(ids))
    limit = vocabulary if vocabulary is not None else 2**31
    if ids and not (min(ids) >= 0 and max(ids) < limit):
        raise _fault(engine, f"token ids in 0..{limit - 1}", f"{min(ids)}..{max(ids)}")
    return np.asarray(ids, dtype=np.int32)


def _content_logprobs(engine: str, choice: dict[str, Any]) -> npt.NDArray[np.float32]:
    """Log-probabilities of ``choice["token_ids"]``, which is a list."""
    content, ids = (choice.get("logprobs") or {}).get("content"), choice["token_ids"]
    if not isinstance(content, list) or len(content) != len(ids):
        raise _fault(engine, f"logprobs.content with {len(ids)} entries, one per token", _short(content))
    try:
        logprobs = [entry["logprob"] for entry in content]
        labelled = [entry["token_id"] for entry in content]
    except (KeyError, TypeError):
        raise _fault(engine, "logprobs.content entries with token_id and logprob", _short(content)) from None
    if labelled != ids:
        raise _fault(engine, "log-probabilities of the sampled tokens in order", f"those of {_short(labelled)}")
    return _logprobs(engine, logprobs, len(ids))


def _logprobs(engine: str, values: Any, length: int) -> npt.NDArray[np.float32]:
    if not isinstance(values, list) or len(values) != length:
        raise _fault(engine, f"{length} log-probabilities, one per token", _short(values))
    if not all(type(v) is float or type(v) is int for v in values):
        raise _fault(engine, "log-probabilities that are numbers", _short(values))
    array = np.asarray(values, dtype=np.float32)
    if not bool(np.all((array >= LOGPROB_MIN) & (array <= LOGPROB_MAX))):
        raise _fault(engine, f"log-probabilities of sampled tokens, {LOGPROB_MIN:g} to 0", _short(values))
    return np.minimum(array, np.float32(0.0))


def _finish(engine: str, choice: dict[str, Any]) -> FinishReason:
    reason = choice.get("finish_reason")
    if reason == "error":
        raise EngineUnavailable(f"engine {engine} failed inside a request (finish_reason error)")
    if not isinstance(reason, str) or reason not in _FINISH:
        raise _fault(engine, f"finish_reason in {sorted(_FINISH)}", repr(reason))
    return _FINISH[reason]


def _version_spans(engine: str, spans: Any, length: int, run: str | None) -> tuple[VersionSpan, ...]:
    """Spans that tile ``[0, length)``. Empty ones (an update before the first token) are left out."""
    if not isinstance(spans, list):
        raise _fault(engine, "weight_versions: the policy version of each token", _short(spans))
    out: list[VersionSpan] = []
    at = 0
    for span in spans:
        try:
            label, start, end = span["version"], span["start"], span["end"]
        except (KeyError, TypeError):
            raise _fault(engine, "weight_versions entries with version, start and end", _short(spans)) from None
        if not (type(start) is int and type(end) is int and start == at and end >= start):
            raise _fault(engine, f"weight_versions that tile 0..{length}", _short(spans))
        if end > start:
            version = read_version(engine, label, run)
            if version is None:
                raise EngineGone(
                    f"engine {engine} sampled with weights labelled {str(label)[:80]!r}: it was restarted, or is not "
                    "of this run"
                )
            try:
                out.append(VersionSpan(start, end, version))
            except SchemaError as error:
                raise _fault(engine, "version spans of the data model", str(error)) from error
            if len(out) > 1 and out[-2].policy_version > version:
                raise _fault(engine, "versions that never decrease", _short(spans))
        at = end
    if at != length:
        raise _fault(engine, f"weight_versions that tile 0..{length}", _short(spans))
    return tuple(out)


def _experts(engine: str, choice: dict[str, Any], n_before: int | None, n_sampled: int) -> ExpertArray | None:
    """``routed_experts``, base64 of the bytes of a ``.npy`` file; the last sampled token was not read yet."""
    if n_before is None or not n_sampled:
        return None
    value, length = choice.get("routed_experts"), n_before + n_sampled - 1
    if not isinstance(value, str):
        remedy = "start vLLM with --enable-return-routed-experts, or set learner.routing_replay: false"
        raise _fault(engine, f"routed_experts of {length} tokens ({remedy})", _short(value))
    try:
        array: ExpertArray = np.load(io.BytesIO(base64.b64decode(value, validate=True)), allow_pickle=False)
        require_experts(array, length)
    except (ValueError, EOFError, SchemaError) as error:
        raise _fault(engine, f"routed_experts [{length}, layers, k] as a .npy file in base64", str(error)) from error
    return array


def _fault(engine: str, expected: str, came: str) -> EngineProtocolError:
    return EngineProtocolError(f"engine {engine}: expected {expected}, got {came}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:160] + "…"
