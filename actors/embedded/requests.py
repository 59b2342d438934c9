"""Generate requests, checked before they reach the generator, and the record of policy versions of sampled tokens.
Pure: no threads, no engine."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.embedded.options import EngineOptions
from actors.servers.refusal import Refusal, read_object

GREEDY_TEMPERATURE = 1e-6
"""Temperature used for 0: it gives the most likely token all the probability (log-probability 0)."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None),
    "top_p": (1, None),
    "top_k": (-1, 0, None),
    "seed": (None,),
    "stop": (None, [], ""),
    "min_tokens": (0, None),
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "prompt_logprobs": (None, 0),
    "logit_bias": (None, {}),
}
"""Sampling parameters of vLLM, and the values that the embedded engine supports."""
_IGNORED = {
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
}
_USED = {"max_tokens", "temperature", "logprobs", "stop_token_ids", "ignore_eos", "routed_experts_prompt_start"}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A checked request."""

    request_id: str
    token_ids: list[int]
    max_tokens: int
    """Tokens to sample at most, what the engine's max_length leaves included."""
    temperature: float
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    logprobs: bool
    prompt_logprobs: bool = False
    """Also score the tokens of the prompt."""
    stream: bool = False
    """Tell of the tokens as they are sampled."""
    experts_from: int = 0
    """First position whose experts are returned, where the engine returns them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits of the model and the engine."""

    options: EngineOptions
    vocabulary_size: int

    def parse(self, body: bytes) -> EngineRequest:
        """Read the JSON of ``POST /inference/v1/generate``. Raises :class:`Refusal`: what was expected, what came."""
        request = read_object(body)
        if request.get("model") not in (None, self.options.served_name):
            raise Refusal(
                404, f"The model {request['model']!r} does not exist: this engine serves {self.options.served_name!r}"
            )
        sampling = request.get("sampling_params")
        if not isinstance(sampling, dict):
            raise Refusal(400, "expected sampling_params to be a JSON object")
        if request.get("stream") and sampling.get("prompt_logprobs") is not None:
            raise Refusal(400, "stream: the embedded engine does not stream prompt_logprobs: omit one of both")
        token_ids = self._tokens(request.get("token_ids"))
        self._check_parameters(sampling)
        wanted = _integer(sampling, "max_tokens", 16, least=1)
        return EngineRequest(
            request_id=str(request.get("request_id") or uuid.uuid4().hex),
            token_ids=token_ids,
            max_tokens=min(wanted, self.options.max_length - len(token_ids)),
            temperature=_temperature(sampling),
            stop_token_ids=self._stops(sampling.get("stop_token_ids")),
            ignore_eos=bool(sampling.get("ignore_eos", False)),
            logprobs=sampling.get("logprobs") is not None,
            prompt_logprobs=sampling.get("prompt_logprobs") is not None,
            stream=bool(request.get("stream")),
            experts_from=min(_integer(sampling, "routed_experts_prompt_start", 0, least=0), len(token_ids)),
        )

    def _tokens(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise Refusal(400, "expected token_ids to be a list of at least one token id")
        if set(map(type, ids)) != {int} or min(ids) < 0:
            raise Refusal(400, "expected token_ids to be integers >= 0")
        if (high := max(ids)) >= self.vocabulary_size:
            raise Refusal(400, f"Token id {high} is out of vocabulary (size {self.vocabulary_size})")
        if len(ids) >= self.options.max_length:
            raise Refusal(
                400, f"The prompt has {len(ids)} tokens; with one to sample the engine takes {self.options.max_length}"
            )
        return ids

    def _check_parameters(self, sampling: Mapping[str, Any]) -> None:
        for name, value in sampling.items():
            if name in _USED or name in _IGNORED:
                continue
            if name not in _NEUTRAL:
                raise Refusal(400, f"sampling_params.{name}: unknown to the embedded engine")
            if value not in _NEUTRAL[name]:
                raise Refusal(
                    400, f"sampling_params.{name}={value!r}: the embedded engine supports only {_NEUTRAL[name][0]!r}"
                )
        if sampling.get("logprobs") not in (None, 0):
            raise Refusal(400, "sampling_params.logprobs: only 0 (the sampled tokens) is supported")

    def _stops(self, ids: Any) -> frozenset[int]:
        if ids is None:
            return frozenset()
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise Refusal(400, "expected sampling_params.stop_token_ids to be a list of integers")
        return frozenset(ids)


def _integer(sampling: Mapping[str, Any], name: str, default: int, least: int) -> int:
    value = sampling.get(name, default)
    if type(value) is not int or value < least:
        raise Refusal(400, f"sampling_params.{name} must be an integer >= {least}, got {value!r}")
    return value


def _temperature(sampling: Mapping[str, Any]) -> float:
    value = sampling.get("temperature", 1.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise Refusal(400, f"sampling_params.temperature must be a number >= 0, got {value!r}")
    return max(float(value), GREEDY_TEMPERATURE)


FIRST_VERSION = "default"
"""vLLM's label of the weights before the first stamp."""

Span = dict[str, int | str]


class VersionRecord:
    """Marks ``(first token, version)`` for each request in flight.

    A request begins with the version that is current; :meth:`stamp` adds a mark to each request that has tokens left to
    sample; :meth:`finish` turns the marks into spans that tile the sampled tokens.
    """

    def __init__(self) -> None:
        self.current = FIRST_VERSION
        self._marks: dict[str, list[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._marks)

    def begin(self, request_id: str) -> None:
        """Start recording. Raises ValueError for an id that is in flight."""
        if request_id in self._marks:
            raise ValueError(f"request {request_id!r} is already in flight")
        self._marks[request_id] = [(0, self.current)]

    def stamp(self, version: str, sampled: Mapping[str, int]) -> None:
        """Label tokens with ``version`` from here on; ``sampled`` counts the tokens of each unfinished request so far.

        A request that is not in ``sampled`` begins later, or has finished.
        """
        self.current = version
        for request_id, count in sampled.items():
            marks = self._marks.get(request_id)
            if marks is None:
                continue
            while marks and marks[-1][0] >= count:
                marks.pop()
            if not marks or marks[-1][1] != version:
                marks.append((count, version))

    def finish(self, request_id: str, count: int) -> list[Span]:
        """Stop recording; spans ``{version, start, end}`` that tile ``[0, count)``. KeyError for an unknown id."""
        marks = self._marks.pop(request_id)
        ends = [start for start, _ in marks[1:]] + [count]
        return [
            {"version": version, "start": start, "end": end}
            for (start, version), end in zip(marks, ends, strict=True)
            if end > start
        ]

    def forget(self, request_id: str) -> None:
        """Stop recording a request that was cancelled or failed."""
        self._marks.pop(request_id, None)
