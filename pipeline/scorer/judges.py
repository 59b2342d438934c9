"""Judges and reward models: rewards from servers.

A judge is a language model: one chat completion per trajectory, and a pattern that finds the score in it. The route and
its fields are those of OpenAI's chat completions, which vLLM and most others serve. A reward model gets many
trajectories in one request and gives a number for each: ``openrlhf`` is the request of OpenRLHF's remote reward models
(its documentation, "Remote Reward Server"); ``vllm_classify`` and ``vllm_pooling`` are routes of vLLM's server for
models that pool.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import orjson

from pipeline.config.rewards import JudgeConfig, RewardModelConfig, Service
from pipeline.errors import (
    ConfigurationError,
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineUnavailable,
    SchemaError,
)
from pipeline.runtime.http import HttpClient, retried
from pipeline.schema import Trajectory
from pipeline.scorer.conversation import conversation, filled, prompt_text, reply
from pipeline.scorer.functions import Outcome
from pipeline.scorer.verdict import ScoreFailure

log = logging.getLogger(__name__)

JUDGE_ROUTE = "/v1/chat/completions"
REPLY_TOKENS_MAX = 512
"""Limit of a judge; ``extra`` of the section may set another."""
ROUTES = {"vllm_classify": "/classify", "vllm_pooling": "/pooling"}
RETRY_SECONDS = 0.5
"""Before the first retry; it doubles with each."""


class ServedPart:
    """The part of a reward that the server at ``url`` and ``route`` computes. Use in one event loop and ``await
    close()`` it. ``retrying`` gets the part's name for each request that is made again.

    Raises :class:`ConfigurationError` when the environment variable of the token is not set."""

    def __init__(self, section: Service, url: str, route: str, retrying: Callable[[str], None]) -> None:
        self.name = section.name
        self._service, self._url, self._route, self._retrying = section, url, route, retrying
        headers = {}
        if section.api_key_env is not None:
            key = os.environ.get(section.api_key_env)
            if not key:
                raise ConfigurationError(
                    f"scorer: {section.known_as}: expected its token in the environment variable "
                    f"{section.api_key_env}, got none: set it where the replay stage starts"
                )
            headers["Authorization"] = f"Bearer {key}"
        self._http = HttpClient(headers)
        self._slots = anyio.CapacityLimiter(section.concurrency)

    async def close(self) -> None:
        """Close the connections. Requests in flight fail."""
        await self._http.close()

    async def _ask(self, body: dict[str, Any]) -> Any:
        """The answer to ``body``, to which the section's model and extra keys are added. Raises
        :class:`EngineError`."""
        section = self._service
        if section.model:
            body = {"model": section.model, **body}
        data = orjson.dumps({**body, **section.extra})

        async def once() -> Any:
            async with self._slots:
                answer = await self._http.request(
                    "POST", self._url, self._route, data=data, seconds=section.timeout_seconds
                )
            return answer.accepted()

        return await retried(once, section.retries + 1, RETRY_SECONDS, lambda _: self._retrying(self.name))

    def _failure(self, error: EngineError | SchemaError, what: str) -> ScoreFailure:
        failure = ScoreFailure(self.name, _reason(error), str(error))
        log.warning("%s, %s: %s: %s", self.name, what, failure.reason, failure.details)
        return failure


def _reason(error: EngineError | SchemaError) -> str:
    if isinstance(error, SchemaError):
        return "raised"
    if not isinstance(error, EngineUnavailable):
        return "refused" if isinstance(error, EngineRefused) else "protocol"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, TimeoutError):
        cause = cause.__cause__
    return "unavailable" if cause is None else "timeout"


class Judge(ServedPart):
    """One entry of ``scorer.judges``. Its outcome is a number from 0 to 1, or a failure; never raises for what the
    judge does."""

    def __init__(self, section: JudgeConfig, retrying: Callable[[str], None]) -> None:
        base, whole = section.url.rstrip("/"), section.url.rstrip("/").endswith("/chat/completions")
        super().__init__(section, base.removesuffix("/v1"), "" if whole else JUDGE_ROUTE, retrying)
        self._section = section
        self._score = re.compile(section.score_pattern)

    async def one(self, trajectory: Trajectory) -> Outcome:
        """The judge's score of this trajectory."""
        try:
            return self._read(await self._ask(self._body(trajectory)))
        except (EngineError, SchemaError) as error:
            return self._failure(error, f"trajectory {trajectory.trajectory_id}")

    def _body(self, trajectory: Trajectory) -> dict[str, Any]:
        section = self._section
        messages = [{"role": "user", "content": filled(section.prompt, trajectory)}]
        if section.system is not None:
            messages.insert(0, {"role": "system", "content": section.system})
        return {"messages": messages, "temperature": 0.0, "max_tokens": REPLY_TOKENS_MAX}

    def _read(self, answer: Any) -> float:
        try:
            choice = answer["choices"][0]
            text, cut = choice["message"]["content"], choice.get("finish_reason") == "length"
        except (KeyError, IndexError, TypeError, AttributeError):
            text = None
        if not isinstance(text, str):
            raise EngineProtocolError(f"expected choices[0].message.content as text, got {str(answer)[:200]}")
        found = deque(self._score.finditer(text), maxlen=1)
        if cut and found and text[: found[0].start()].strip():  # a score on the way to another, or half of one
            raise EngineProtocolError(
                f"expected a whole reply, got one that was cut at the limit of tokens, in which {found[0].group(0)!r} "
                f"stands: give the judge more (extra: {{max_tokens: {4 * REPLY_TOKENS_MAX}}})"
            )
        low, high = self._section.scale
        try:
            score = float(found[0].group(1)) if found else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not low <= score <= high:
            came = repr(found[0].group(0)) if found else f"none in {text[-200:]!r}"
            raise EngineProtocolError(f"expected a score from {low:g} to {high:g}, got {came}")
        return (score - low) / (high - low)


class RewardModel(ServedPart):
    """One entry of ``scorer.reward_models``. Never raises for what the server does."""

    def __init__(self, section: RewardModelConfig, retrying: Callable[[str], None]) -> None:
        route = ROUTES.get(section.format, "")
        url = section.url.rstrip("/").removesuffix(route) if route else section.url
        super().__init__(section, url, route, retrying)
        self._section = section

    async def many(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """A number for each, or why there is none: a server that fails fails them all, a null in its list only one."""
        try:
            values = self._read(await self._ask(self._body(trajectories)), len(trajectories))
        except (EngineError, SchemaError) as error:
            return [self._failure(error, f"{len(trajectories)} trajectories")] * len(trajectories)
        return [self._checked(value) for value in values]

    def _body(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        section = self._section
        if section.format == "plain":
            return {"items": [_item(trajectory) for trajectory in trajectories]}
        texts = [filled(section.template, trajectory) for trajectory in trajectories]
        if section.format == "openrlhf":
            labels = [trajectory.task.payload.get("answer") for trajectory in trajectories]
            return {"query": texts, "prompts": [prompt_text(t) for t in trajectories], "labels": labels}
        return {"input": texts}

    def _read(self, answer: Any, n: int) -> list[Any]:
        section = self._section
        key = {"plain": "scores", "openrlhf": "rewards"}.get(section.format, "data")
        values = answer.get(key) if isinstance(answer, dict) else None
        if not isinstance(values, list) or len(values) != n:
            came = f"{len(values)} values" if isinstance(values, list) else str(answer)[:200]
            raise EngineProtocolError(f"expected {key} as a list of {n} values, got {came}")
        if section.format in ROUTES:
            field = "probs" if section.format == "vllm_classify" else "data"
            return [self._labelled(value, field) for value in _in_order(values)]
        return values

    def _labelled(self, value: Any, field: str) -> Any:
        found = value.get(field) if isinstance(value, dict) else None
        while isinstance(found, list) and found and isinstance(found[-1], list):
            found = found[-1]  # a value for every token: that of the last
        if not isinstance(found, list) or len(found) <= self._section.label:
            raise EngineProtocolError(f"expected {field} with a value {self._section.label}, got {str(value)[:200]}")
        return found[self._section.label]

    def _checked(self, value: Any) -> Outcome:
        if value is None:
            return ScoreFailure(self.name, "missing", "the server gave null")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ScoreFailure(self.name, "type", f"expected a number, got {value!r:.200}")
        number = float(value)
        return number if math.isfinite(number) else ScoreFailure(self.name, "nonfinite", f"the server gave {number}")


def _item(trajectory: Trajectory) -> dict[str, Any]:
    messages = [message.as_template_input() for message in conversation(trajectory)[:-1]]
    return {"messages": messages, "reply": reply(trajectory), "payload": dict(trajectory.task.payload)}


def _in_order(values: list[Any]) -> list[Any]:
    """By ``index`` where each value has its own."""
    by_index = {value.get("index"): value for value in values if isinstance(value, dict)}
    places = range(len(values))
    return [by_index[i] for i in places] if by_index.keys() == set(places) else values
