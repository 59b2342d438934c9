"""Section ``scorer``: the parts of a reward (docs/REWARDS.md)."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from pipeline.config.base import Section

JUDGE_PROMPT = """Grade the reply to a task.

Task:
{prompt}

Right answer:
{answer}

Reply:
{reply}

Reason briefly. Then end with one line of the form "Score: N", where N is a number from 0 (useless) to 10 (perfect)."""


CONCURRENCY = 64
"""Trajectories scored at the same time."""


class Part(Section):
    """Keys common to all parts of a reward."""

    name: str | None = Field(None, min_length=1, max_length=200)
    """Name of the part in ``Trajectory.rewards`` and in the metrics. None: its path. Needed if two functions have the
    same path."""
    weight: float = 1.0
    """Weight w of the part in ``reward = Σ w · part``. 0: it is computed and recorded but does not count."""
    environments: tuple[str, ...] = ()
    """Sections of ``environments`` whose trajectories the part scores. Other trajectories do not have it. Empty:
    all."""

    @property
    def known_as(self) -> str:
        """The name of the part."""
        return self.name or ""

    def applies_to(self, environment: str) -> bool:
        """True if trajectories of this environment have the part."""
        return not self.environments or environment in self.environments


class ScoreFunction(Part):
    """A grader or a reward function."""

    path: str
    """A built-in grader (``exact``, ``number``, ``choice``, ``contains``, ``regex``, ``math``, ``json_schema``), or
    your own function as ``module:function`` or ``file.py:function``. It gets a Trajectory (see ``per``) and returns a
    number, or None if it has none. It may be async."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, for example ``{tolerance: 0.01}``."""
    per: Literal["trajectory", "batch", "group"] = "trajectory"
    """Argument of one call. ``trajectory``: one trajectory. ``batch``: a list of up to 64 that wait to be scored, of
    any task. ``group``: the list of all fresh trajectories of one group. With a list, the function returns a list of as
    many numbers (or None)."""
    timeout_seconds: float = Field(30.0, gt=0)
    """Time limit of one call, in seconds. A slower call fails."""
    worker: bool | None = None
    """Run the function in a worker process. Use it for functions that are slow, use the CPU or may hang. None: false,
    except for built-in graders that need it."""

    @property
    def known_as(self) -> str:
        return self.name or self.path


class Service(Part):
    """A part computed by an HTTP server."""

    name: str = Field(min_length=1, max_length=200)
    """Name of the part in ``Trajectory.rewards`` and in the metrics."""
    url: str = Field(pattern=r"^https?://")
    """URL of the server."""
    model: str = ""
    """Name of the model in each request. Empty: none is sent."""
    api_key_env: str | None = None
    """Name of the environment variable of the replay stage that holds the bearer token. The token itself must not be in
    the run file. None: no token is sent."""
    timeout_seconds: float = Field(60.0, gt=0)
    """Time limit of one request, in seconds. A slower request is retried like a failed one."""
    retries: int = Field(2, ge=0, le=20)
    """Retries of one request if the server does not answer, answers 429 or 5xx, or is too slow. The first comes after
    0.5 s; the wait doubles each time, up to 30 s. A longer ``Retry-After`` from the server has priority."""
    concurrency: int = Field(16, ge=1, le=4096)
    """Requests in flight."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Additional keys of each request's body, for example ``{chat_template_kwargs: {enable_thinking: false}}``."""


class JudgeConfig(Service):
    """A language model as judge, behind an OpenAI-compatible ``/v1/chat/completions`` at ``url``. It answers at
    temperature 0 in at most 512 tokens, unless ``extra`` has ``temperature`` or ``max_tokens``."""

    system: str | None = None
    """System message for the judge. None: no system message."""
    prompt: str = JUDGE_PROMPT
    """Prompt for the judge. ``{prompt}`` (the conversation before the last reply), ``{reply}``, ``{transcript}`` (the
    whole conversation) and the keys of the task's payload are replaced. Other braces are left alone."""
    score_pattern: str = r"(?i)score\s{0,5}(?:is|:|=)?\s{0,5}\*{0,3}\s{0,5}(-?\d{1,12}(?:\.\d{1,12})?)"
    """Regular expression that finds the score in the judge's reply: the first group of the last match. Without a match
    the part fails."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Lowest and highest score of the judge, which are mapped to 0 and 1. A score outside of the scale is a failure."""

    @field_validator("score_pattern")
    @classmethod
    def _pattern_has_a_group(cls, value: str) -> str:
        try:
            if re.compile(value).groups < 1:
                raise ValueError("score_pattern needs a group around the score, for example 'Score: (\\d+)'")
        except re.error as error:
            raise ValueError(f"score_pattern: expected a regular expression, got an error: {error}") from error
        return value

    def check(self) -> None:
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale: expected the lowest score before the highest, got {self.scale}")


class RewardModelConfig(Service):
    """A reward model behind an HTTP endpoint that scores several trajectories per request."""

    format: Literal["plain", "openrlhf", "vllm_classify", "vllm_pooling"] = "plain"
    """Format of request and response (docs/REWARDS.md). ``plain``: ``{items: [{messages, reply, payload}]}`` returns
    ``{scores: [...]}``. ``openrlhf``: ``{query, prompts, labels}`` returns ``{rewards: [...]}``. ``vllm_classify`` and
    ``vllm_pooling``: vLLM's ``/classify`` and ``/pooling`` with the text of ``template``."""
    template: str = "{transcript}"
    """Text of one trajectory, in all formats but ``plain``. Placeholders as in ``judges.prompt``."""
    label: int = Field(0, ge=0, le=4096)
    """With ``vllm_classify`` and ``vllm_pooling``: index of the value that is the score."""
    batch_max: int = Field(32, ge=1, le=4096)
    """Most trajectories in one request."""


class ScorerConfig(Section):
    """The reward of a trajectory: a weighted sum of the environment's score, functions, judges and reward models. If
    one part fails, the trajectory has no reward (it is never 0), and its rollout is repeated."""

    environment_weight: float = Field(1.0)
    """Weight of the environment's own score."""
    functions: tuple[ScoreFunction, ...] = ()
    """Built-in graders and your own functions."""
    judges: tuple[JudgeConfig, ...] = ()
    """Language models as judges."""
    reward_models: tuple[RewardModelConfig, ...] = ()
    """Reward models over HTTP."""
    workers: int = Field(1, ge=1)
    """Worker processes for functions with ``worker: true``."""

    def check(self) -> None:
        names = [part.known_as for part in self.parts]
        if len(set(names)) != len(names) or "environment" in names:
            raise ValueError(f"scorer: expected parts with different names other than 'environment', got {names}")

    @property
    def parts(self) -> tuple[ScoreFunction | JudgeConfig | RewardModelConfig, ...]:
        """Every part but the environment's own score."""
        return (*self.functions, *self.judges, *self.reward_models)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all parts, that of the environment's score first."""
        return ("environment", *(part.known_as for part in self.parts))

    @property
    def concurrency(self) -> int:
        """Trajectories scored at the same time: as many as the largest part takes at once."""
        judged = (judge.concurrency for judge in self.judges)
        return max([CONCURRENCY, *judged, *(model.batch_max for model in self.reward_models)])

    @property
    def by_group(self) -> bool:
        """True if a function must see a whole group."""
        return any(function.per == "group" for function in self.functions)

    def needs_group(self, environment: str) -> bool:
        """True if trajectories of this environment have a part that must see their whole group."""
        return any(function.per == "group" and function.applies_to(environment) for function in self.functions)
