"""``/inference/v1/generate`` in vLLM's form: token ids in and out. Pure."""

from __future__ import annotations

from typing import Any

from actors.engine.base import Sampling
from actors.gateway.conversation import ProgramCall, wrong
from actors.gateway.dialect import Dialect, EventWriter, Past, ProgramAnswer
from actors.gateway.requests import DRAW, ParameterRules, Parameters
from actors.servers.refusal import read_object
from pipeline.schema import FinishReason

_UNDERSTOOD = {
    *DRAW,
    *("n", "stop", "max_tokens", "logprobs", "prompt_logprobs", "stop_token_ids", "detokenize", "skip_special_tokens"),
}


def read_generate(
    data: bytes, sampling: Sampling, rules: ParameterRules, past: Past = lambda number: None
) -> ProgramCall:
    """Raises :class:`Refusal`."""
    body = read_object(data)
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise wrong("token_ids", "a list of token ids, at least one", ids)
    parameters = body.get("sampling_params")
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, dict):
        raise wrong("sampling_params", "an object", parameters)
    reader = Parameters(parameters, rules)
    reader.draw(sampling)
    reader.unsupported("n", "one completion a call", 1)
    reader.unsupported("stop", "completions are token ids; stop_token_ids are the model's own", [], "")
    reader.unsupported("prompt_logprobs", "only log-probabilities of sampled tokens are known")
    reader.unknown(_UNDERSTOOD)
    Parameters(body, rules).unsupported("stream", "completions come whole", False)
    return ProgramCall(
        token_ids=tuple(ids),
        tokens_max=reader.whole("max_tokens", 1, 2**31),
        logprobs=parameters.get("logprobs") is not None,
        ignored=tuple(reader.ignored),
        stated={"request_id": str(body.get("request_id") or "")[:256]},
    )


def generated(answer: ProgramAnswer) -> dict[str, Any]:
    """The completion as token ids, with the policy version of each."""
    generation = answer.choices[0].generation
    ids = generation.token_ids.tolist()
    logprobs = None
    if answer.call.logprobs:
        pairs = zip(ids, generation.logprobs.tolist(), strict=True)
        entry: dict[str, Any] = {"bytes": None, "top_logprobs": []}
        logprobs = {"content": [{"token": f"token_id:{i}", "token_id": i, "logprob": p, **entry} for i, p in pairs]}
    choice = {
        "index": 0,
        "token_ids": ids,
        "logprobs": logprobs,
        "finish_reason": "length" if generation.finish_reason is FinishReason.LENGTH else "stop",
        "weight_versions": [
            {"version": str(span.policy_version), "start": span.start, "end": span.stop}
            for span in generation.version_spans
        ],
    }
    return {
        "request_id": answer.call.stated["request_id"] or f"generate-{answer.number}",
        "choices": [choice],
        "prompt_logprobs": None,
        "usage": answer.usage,
    }


def _no_events(answer: ProgramAnswer) -> EventWriter:
    raise NotImplementedError("no request of token ids is streamed: its reader refuses that")


GENERATE = Dialect("generate", "/inference/v1/generate", read_generate, generated, _no_events)
