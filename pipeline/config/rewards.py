"""Section ``scorer``: the parts of a reward (docs/REWARDS.md)."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.base import Section

JUDGE_PROMPT = """Grade the reply to a task.

Task:
{prompt}

Right answer:
{answer}

Reply:
{reply}

Think it over briefly. Then end with one line that reads "Score: N", N a number from 0 (useless) to 10 (perfect)."""


class Part(Section):
    """Keys of every part of a reward."""

    name: str | None = Field(None, min_length=1, max_length=200)
    """Its name in ``Trajectory.rewards`` and in the metrics. None: the path (functions need one where a path is used
    twice)."""
    weight: float = 1.0
    """``reward = Σ weight · part``. 0: computed and recorded, but it does not count."""
    environments: tuple[str, ...] = ()
    """Sections of ``environments`` whose trajectories it scores; for others it is no part of the reward. Empty: all."""

    def applies_to(self, environment: str) -> bool:
        """True if trajectories of this environment have the part."""
        return not self.environments or environment in self.environments


class ScoreFunction(Part):
    """One reward function beside the environment's score."""

    path: str
    """A built-in grader (``exact``, ``number``, ``choice``, ``contains``, ``regex``, ``math``, ``json_schema``), or
    ``module:function`` or ``file.py:function``; called with a Trajectory (see ``per``), returns a number or None. May
    be async."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, for example ``{tolerance: 0.01}``."""
    per: Literal["trajectory", "batch", "group"] = "trajectory"
    """``trajectory``: called with one. ``batch``: with a list of whatever waits to be scored, of any tasks. ``group``:
    with the list of all fresh trajectories of a group. The last two return a list of as many numbers (or None)."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Of one call; one that takes longer has failed."""
    worker: bool | None = None
    """Run in a worker process: for functions that are slow, use the CPU or might hang. None: as a built-in grader needs
    it, false for others."""
    batch_max: int = Field(64, ge=1, le=65_536)
    """With ``per: batch``: most trajectories of one call."""
    batch_wait_seconds: float = Field(0.1, ge=0, le=60)
    """With ``per: batch``: how long the first trajectory of a batch waits for others."""

    @property
    def known_as(self) -> str:
        """The name of the part."""
        return self.name or self.path


class Service(Part):
    """A part that an HTTP server computes."""

    name: str = Field(min_length=1, max_length=200)
    """Its name in ``Trajectory.rewards`` and in the metrics."""
    url: str = Field(pattern=r"^https?://")
    """URL of the server."""
    model: str = ""
    """Name of the model in each request; empty: none is sent."""
    api_key_env: str | None = None
    """Environment variable of the replay stage that holds the bearer token. Never put the token into the run file."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Of one request; one that takes longer is tried again like one that fails."""
    retries: int = Field(2, ge=0, le=20)
    """Times a request is tried again when the server does not answer, answers 429 or 5xx, or takes too long."""
    retry_seconds: float = Field(0.5, gt=0, le=60)
    """Pause before the first retry; doubles for each, up to 30 s. A ``Retry-After`` of the server counts where it is
    longer."""
    concurrency: int = Field(16, ge=1, le=4096)
    """Requests in flight."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More keys of each request's body, for example ``{chat_template_kwargs: {enable_thinking: false}}``."""

    @property
    def known_as(self) -> str:
        """The name of the part."""
        return self.name


class JudgeConfig(Service):
    """A language model that grades, behind an OpenAI-compatible ``/v1/chat/completions`` at ``url``."""

    system: str | None = None
    """System message of the judge. None: none."""
    prompt: str = JUDGE_PROMPT
    """Question to the judge. ``{prompt}`` (the conversation before the last reply), ``{reply}``, ``{transcript}``
    (all of it) and names of the task's payload are replaced; other braces stay."""
    score_pattern: str = r"(?i)score\s{0,5}(?:is|:|=)?\s{0,5}\*{0,3}\s{0,5}(-?\d{1,12}(?:\.\d{1,12})?)"
    """Finds the score in the judge's reply: the first group of the last match. None found: a failure."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score of the judge; they become 0 and 1. A score outside is a failure."""
    temperature: float = Field(0.0, ge=0, le=10)
    max_tokens: int = Field(512, ge=1)
    """Of the judge's reply."""

    @field_validator("score_pattern")
    @classmethod
    def _pattern_has_a_group(cls, value: str) -> str:
        try:
            if re.compile(value).groups < 1:
                raise ValueError("score_pattern needs a group around the score, for example 'Score: (\\d+)'")
        except re.error as error:
            raise ValueError(f"score_pattern is no regular expression: {error}") from error
        return value

    @model_validator(mode="after")
    def _scale_rises(self) -> JudgeConfig:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale must rise, got {self.scale}")
        return self


class RewardModelConfig(Service):
    """A reward model behind an HTTP endpoint that scores many trajectories in one request."""

    format: Literal["plain", "openrlhf", "vllm_classify", "vllm_pooling"] = "plain"
    """Format of request and answer (docs/REWARDS.md). ``plain``: ``{items: [{messages, reply, payload}]}`` gives
    ``{scores: [...]}``; ``openrlhf``: ``{query, prompts, labels}`` gives ``{rewards: [...]}``; ``vllm_classify`` and
    ``vllm_pooling``: vLLM's ``/classify`` and ``/pooling`` with the text of ``template``."""
    template: str = "{transcript}"
    """The text of one trajectory, in all formats but ``plain``; names as in ``judges.prompt``."""
    label: int = Field(0, ge=0, le=4096)
    """With ``vllm_classify`` and ``vllm_pooling``: which of the values is the score."""
    batch_max: int = Field(32, ge=1, le=4096)
    """Trajectories of one request."""
    batch_wait_seconds: float = Field(0.1, ge=0, le=60)
    """Longest time that the first trajectory of a batch waits for others."""


class ScorerConfig(Section):
    """The reward of a trajectory: a weighted sum of the environment's score, functions, judges and reward models. One
    part that fails, and the trajectory has no reward (never 0): its rollout is ordered again."""

    environment_weight: float = 1.0
    """Weight of the environment's own score."""
    functions: tuple[ScoreFunction, ...] = ()
    """Graders and functions of yours."""
    judges: tuple[JudgeConfig, ...] = ()
    """Language models that grade."""
    reward_models: tuple[RewardModelConfig, ...] = ()
    """Reward models over HTTP."""
    concurrency: int = Field(64, ge=1)
    """Trajectories scored at once. Batches cannot be larger than this."""
    workers: int = Field(1, ge=1)
    """Worker processes for functions with ``worker: true``."""

    @model_validator(mode="after")
    def _unique_names(self) -> ScorerConfig:
        names = [part.known_as for part in self.parts]
        if len(set(names)) != len(names) or "environment" in names:
            raise ValueError(f"the parts of scorer need different names, none of them 'environment', got {names}")
        return self

    @property
    def parts(self) -> tuple[ScoreFunction | JudgeConfig | RewardModelConfig, ...]:
        """Every part but the environment's own score."""
        return (*self.functions, *self.judges, *self.reward_models)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts, that of the environment's score first."""
        return ("environment", *(part.known_as for part in self.parts))

    @property
    def by_group(self) -> bool:
        """True if a function must see a whole group."""
        return any(function.per == "group" for function in self.functions)
