"""Requests that the embedded engine cannot honour are refused, never served differently from what was asked."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson
import pytest

from actors.embedded.options import EngineOptions
from actors.embedded.requests import Bounds, EngineRequest
from actors.servers.refusal import Refusal

BOUNDS = Bounds(EngineOptions(model=Path("m"), max_length=32), vocabulary_size=50)


def parse(sampling: Any = None, bounds: Bounds = BOUNDS, **body: Any) -> EngineRequest:
    return bounds.parse(orjson.dumps({"token_ids": [1, 2, 3], "sampling_params": sampling or {}, **body}))


def test_defaults_are_those_of_vllm() -> None:
    request = parse()
    assert (request.max_tokens, request.temperature, request.ignore_eos, request.logprobs) == (16, 1.0, False, False)


def test_completion_never_exceeds_the_engine_length() -> None:
    assert parse({"max_tokens": 500}).max_tokens == 29


def test_what_the_actor_sends_is_accepted() -> None:
    sampling = {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    sampling |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0, "stop_token_ids": [2]}
    request = parse(sampling, cache_salt="v1")
    assert request.stop_token_ids == {2}


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"top_p": 0.9}, r"top_p=0\.9: the embedded engine supports only 1"),
        ({"top_k": 5}, "top_k=5"),
        ({"seed": 1}, "seed=1"),
        ({"n": 2}, "n=2"),
        ({"stop": ["x"]}, "stop="),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"temprature": 1.0}, "temprature: unknown"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"logprobs": 5}, "logprobs"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
    ],
)
def test_parameter_that_would_be_ignored_is_refused(sampling: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message) as refusal:
        parse(sampling)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "ids", [[], "abc", [1.0], [True], [-1], [50], list(range(32)), None, [[1]], [1, "a"]], ids=lambda ids: str(ids)[:20]
)
def test_tokens_that_are_no_prompt_are_refused(ids: Any) -> None:
    with pytest.raises(Refusal) as refusal:
        parse(token_ids=ids)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b'{"token_ids": [1]}', b'{"token_ids": [1], "sampling_params": 3}']
)
def test_body_that_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal):
        BOUNDS.parse(body)


def test_a_stream_has_no_log_probabilities_of_the_prompt() -> None:
    assert parse(stream=True).stream and not parse(stream=False).stream
    with pytest.raises(Refusal, match="prompt_logprobs"):
        parse({"prompt_logprobs": 0}, stream=True)


def test_another_model_is_not_found() -> None:
    with pytest.raises(Refusal) as refusal:
        parse(model="gpt")
    assert refusal.value.status == 404


def test_options_survive_the_command_line() -> None:
    options = EngineOptions(model=Path("/a b"), port=1, kv_cache_gib=0.25, device="cpu", threads=2)
    arguments = [f"--{field.name.replace('_', '-')}={getattr(options, field.name)}" for field in fields(options)]
    assert EngineOptions.parse(arguments) == options


@pytest.mark.parametrize("key", ["model", "token_ids", "sampling_params"])
def test_a_request_that_is_nested_too_deeply_to_be_shown_is_refused(key: str) -> None:
    body = orjson.dumps({"token_ids": [1], "sampling_params": {"n": 1}, key: "here"})
    with pytest.raises(Refusal, match="nesting"):
        BOUNDS.parse(body.replace(b'"here"', b"[" * 1000 + b"]" * 1000))
