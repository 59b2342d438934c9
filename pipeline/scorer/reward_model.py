"""A reward model behind an HTTP endpoint: many trajectories in one request, one number for each.

``openrlhf`` is the request of OpenRLHF's remote reward models (its documentation, "Remote Reward Server");
``vllm_classify`` and ``vllm_pooling`` are routes of vLLM's server for models that pool.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.config.rewards import RewardModelConfig
from pipeline.errors import EngineError, EngineProtocolError, SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.conversation import conversation, filled, prompt_text, reply
from pipeline.scorer.functions import Outcome
from pipeline.scorer.http_client import JsonPost, reason_of
from pipeline.scorer.verdict import ScoreFailure

log = logging.getLogger("afterplay.scorer")

ROUTES = {"vllm_classify": "/classify", "vllm_pooling": "/pooling"}


class RewardModel:
    """One entry of ``scorer.reward_models``. Never raises for what the server does."""

    def __init__(self, section: RewardModelConfig, retried: Callable[[str], None]) -> None:
        self.name = section.name
        self._section = section
        route = ROUTES.get(section.format, "")
        url = section.url.rstrip("/").removesuffix(route) if route else section.url
        self._post = JsonPost(section, url, route, retried)

    async def close(self) -> None:
        await self._post.close()

    async def many(self, trajectories: Sequence[Trajectory]) -> list[Outcome]:
        """A number for each, or why there is none: a server that fails fails them all, a null in its list only one."""
        try:
            values = self._read(await self._post(self._body(trajectories)), len(trajectories))
            return [self._checked(value) for value in values]
        except EngineError as error:
            failure = ScoreFailure(self.name, reason_of(error), str(error))
        except SchemaError as error:
            failure = ScoreFailure(self.name, "raised", str(error))
        log.warning("reward model %s, %d trajectories: %s: %s", self.name, len(trajectories), failure.reason,
                    failure.details)  # fmt: skip
        return [failure] * len(trajectories)

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
