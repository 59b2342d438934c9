"""A fixed short text that an engine scores after each publication, to prove which weights it serves.

One forward pass of the learner and one prefill of each engine: both compute the log-probabilities of the same tokens.
Their mean absolute difference is the engine's mismatch, a few hundredths of a nat with a bfloat16 engine. Weights of
another model, of the initial policy after long training, or half loaded ones differ by more than
``publish.probe_nats_max``. Two versions in a row usually differ by less than rounding: that an engine missed one update
does not show here, but its log-probabilities are then right within the same bound.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from learner.data.rows import Row, TokenArray
from learner.policy.reference import prompt_logprobs
from learner.weights.engine_control import EngineControl
from pipeline.config import RunConfig
from pipeline.metrics.learner import LearnerMetrics

TEXT = (
    "The list has 3 apples, 17 pears and 24 plums. Question: how many pieces of fruit are there? Answer: 3 + 17 = 20, "
    "and 20 + 24 = 44."
)
TOKENS_MAX = 32
SECONDS_MAX = 30.0
"""An engine that has not answered until then is too busy to prove anything."""


class WeightProbe:
    """The probe of a run. ``row`` is what the learner scores itself."""

    def __init__(
        self, token_ids: list[int], nats_max: float, metrics: LearnerMetrics, request: dict[str, Any] | None = None
    ) -> None:
        """``request``: further fields of the engine's request, ``sampling_params`` among them."""
        n = len(token_ids)
        zeros = np.zeros(n, np.float32)
        self.row = Row(
            trajectory_id="probe",
            trajectory_index=0,
            environment="",
            token_ids=np.asarray(token_ids, np.int32),
            loss_mask=np.arange(n) > 0,
            behaviour_logprobs=zeros,
            policy_versions=np.zeros(n, np.int32),
            temperatures=np.ones(n, np.float32),
            turns=np.zeros(n, np.int32),
            advantages=np.zeros(n - 1, np.float32),
        )
        self.nats_max = nats_max
        self.metrics = metrics
        more = dict(request or {})
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, **more.pop("sampling_params", {})}
        self._request = {"token_ids": token_ids, "sampling_params": sampling, **more}

    async def difference(self, engine: EngineControl, expected: TokenArray) -> float:
        """Mean |learner - engine| of the log-probabilities, nats. Raises :class:`pipeline.errors.EngineError`."""
        answer = await engine.generate(self._request, SECONDS_MAX)
        return float(np.abs(prompt_logprobs(answer, self.row) - expected).mean())


def make_probe(config: RunConfig, model: Path, metrics: LearnerMetrics) -> WeightProbe | None:
    """The probe over the tokenizer in the folder ``model``; None where ``publish.probe_nats_max`` switches it off."""
    if config.publish.probe_nats_max is None:
        return None
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model, trust_remote_code=config.model.trust_remote_code)
    token_ids = tokenizer.encode(TEXT, add_special_tokens=False)[: min(TOKENS_MAX, config.model.max_length - 1)]
    sampling = {"top_p": config.sampling.top_p, "top_k": config.sampling.top_k}
    request: dict[str, Any] = {"sampling_params": sampling}
    if config.publish.served_name:
        request["model"] = config.publish.served_name
    return WeightProbe(token_ids, config.publish.probe_nats_max, metrics, request)
