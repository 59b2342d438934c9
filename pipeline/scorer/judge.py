"""Language models as judges: one chat completion per trajectory, and a pattern that finds the score in it.

The route and its fields are those of OpenAI's chat completions, which vLLM and most others serve.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from pipeline.config.rewards import JudgeConfig
from pipeline.errors import EngineError, EngineProtocolError, SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.conversation import filled
from pipeline.scorer.functions import Outcome
from pipeline.scorer.http_client import JsonPost, reason_of
from pipeline.scorer.verdict import ScoreFailure

log = logging.getLogger("afterplay.scorer")

ROUTE = "/v1/chat/completions"
REPLY_TOKENS_MAX = 512
"""Limit of a judge; ``extra`` of the section may have another."""


class Judge:
    """One entry of ``scorer.judges``. Its outcome is a number from 0 to 1, or a failure; never raises for what the
    judge does."""

    def __init__(self, section: JudgeConfig, retried: Callable[[str], None]) -> None:
        self.name = section.name
        self._section = section
        base, whole = section.url.rstrip("/"), section.url.rstrip("/").endswith("/chat/completions")
        self._post = JsonPost(section, base.removesuffix("/v1"), "" if whole else ROUTE, retried)
        self._score = re.compile(section.score_pattern)

    async def close(self) -> None:
        await self._post.close()

    async def one(self, trajectory: Trajectory) -> Outcome:
        """The judge's score of this trajectory."""
        try:
            answer = await self._post(self._body(trajectory))
            return self._read(answer)
        except EngineError as error:
            failure = ScoreFailure(self.name, reason_of(error), str(error))
        except SchemaError as error:
            failure = ScoreFailure(self.name, "raised", str(error))
        log.warning("judge %s, trajectory %s: %s: %s", self.name, trajectory.trajectory_id, failure.reason,
                    failure.details)  # fmt: skip
        return failure

    def _body(self, trajectory: Trajectory) -> dict[str, Any]:
        section = self._section
        messages = [{"role": "user", "content": filled(section.prompt, trajectory)}]
        if section.system is not None:
            messages.insert(0, {"role": "system", "content": section.system})
        return {"messages": messages, "temperature": 0.0, "max_tokens": REPLY_TOKENS_MAX}

    def _read(self, answer: Any) -> float:
        try:
            text = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise EngineProtocolError(f"expected choices[0].message.content as text, got {str(answer)[:200]}")
        found = deque(self._score.finditer(text), maxlen=1)
        low, high = self._section.scale
        try:
            score = float(found[0].group(1)) if found else math.nan
        except (TypeError, ValueError):
            score = math.nan
        if not low <= score <= high:
            came = repr(found[0].group(0)) if found else f"none in {text[-200:]!r}"
            raise EngineProtocolError(f"expected a score from {low:g} to {high:g}, got {came}")
        return (score - low) / (high - low)
