"""A task, and the trajectory of one episode of it: turns, tokens, rewards, timings and failures.

Spans of tokens have log-probabilities and policy versions by position.

A failed check raises :class:`SchemaError` with the expected and the actual value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, groupby
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from pipeline.errors import SchemaError

ID_LENGTH_MAX = 200


def require(condition: bool, expected: str, came: Any) -> None:
    """Raise unless ``condition``; the message reads ``expected X, got Y``."""
    if not condition:
        raise SchemaError(f"expected {expected}, got {came!r}")


def require_id(name: str, value: Any) -> None:
    """An identifier: a printable, non-empty string of at most 200 characters."""
    if not (isinstance(value, str) and 0 < len(value) <= ID_LENGTH_MAX and value.isprintable()):
        raise SchemaError(f"expected {name} to be 1-{ID_LENGTH_MAX} printable characters, got {value!r}")


def require_finite(name: str, value: float) -> None:
    """A number that is neither infinite nor NaN."""
    if not (isinstance(value, int | float) and math.isfinite(value)):
        raise SchemaError(f"expected {name} to be a finite number, got {value!r}")


def finite_number(value: object) -> float | None:
    """A number of user code, also of NumPy or PyTorch, as ``float``; None for text, and for what is no finite number.

    >>> finite_number(1), finite_number("1"), finite_number(float("nan")), finite_number(10**400)
    (1.0, None, None, None)
    """
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except Exception:  # whatever the object's own conversion raises
        return None
    return number if math.isfinite(number) else None


def require_array(name: str, array: Any, dtype: type[np.generic], length: int | None = None) -> None:
    """A one-dimensional little-endian array of ``dtype`` (and ``length``, when given)."""
    if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype != np.dtype(dtype):
        came = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise SchemaError(f"expected {name} to be a 1-d array of {np.dtype(dtype)}, got {came}")
    if length is not None and len(array) != length:
        raise SchemaError(f"expected {name} to have {length} entries (one per token), got {len(array)}")


def frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same array, read-only: a frozen dataclass whose arrays can be written is not frozen."""
    if array.flags.writeable:
        array = array.view()
        array.flags.writeable = False
    return array


NO_VERSION = -1
"""``policy_versions`` entry of a token that no policy sampled."""

LOGPROB_MAX = 1e-4
"""Largest log-probability that is taken for rounding of 0."""

LOGPROB_MIN = -100.0
"""Smallest log-probability of a sampled token. A token whose probability is below ``p`` is drawn with a probability of
at most ``vocabulary * p``: for exp(-100) and 300,000 tokens once in 1e38 draws. Engines that compute probabilities in
float32 cannot draw one below exp(-103.3). What an engine reports below is an error of it."""


def are_sampled_logprobs(logprobs: npt.NDArray[np.float32]) -> bool:
    """True if all of them can be log-probabilities of sampled tokens; False with NaN."""
    return not len(logprobs) or bool(logprobs.min() >= LOGPROB_MIN and logprobs.max() <= LOGPROB_MAX)


class SpanSource(StrEnum):
    """Origin of tokens."""

    CONTEXT = "context"
    """Prompt, tool output, chat scaffold: seen by the policy, never trained."""
    SAMPLED = "sampled"
    """Sampled by the policy: trained."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens ``[start, stop)`` of one completion came from ``policy_version``."""

    start: int
    stop: int
    policy_version: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise SchemaError(f"expected 0 <= start < stop, got {(self.start, self.stop)}")
        if self.policy_version < 0:
            raise SchemaError(f"expected policy_version >= 0, got {self.policy_version}")


def are_tiles(spans: tuple[VersionSpan, ...], n_tokens: int) -> bool:
    """True if version spans cover ``[0, n_tokens)`` without a gap and with versions that never decrease."""
    at = version = 0
    for span in spans:
        if span.start != at or span.policy_version < version:
            return False
        at, version = span.stop, span.policy_version
    return at == n_tokens


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """A run of tokens from one source.

    ``token_ids`` is int32 ``[n]``. A SAMPLED span also has ``behaviour_logprobs``, float32 ``[n]`` in nats, the
    log-probability of each token under the distribution it was really drawn from (after temperature), and
    ``version_spans`` that tile ``[0, n)`` with versions that never decrease.

    Raises :class:`SchemaError` when lengths disagree, versions leave a gap, or a log-probability is positive, NaN or
    below ``LOGPROB_MIN``.
    """

    source: SpanSource
    token_ids: npt.NDArray[np.int32]
    behaviour_logprobs: npt.NDArray[np.float32] | None = None
    version_spans: tuple[VersionSpan, ...] = ()

    def __post_init__(self) -> None:
        require_array("token_ids", self.token_ids, np.int32)
        if len(self.token_ids) and int(self.token_ids.min()) < 0:
            raise SchemaError(f"expected token ids >= 0, got {int(self.token_ids.min())}")
        object.__setattr__(self, "token_ids", frozen(self.token_ids))
        if self.source is SpanSource.CONTEXT:
            require(self.behaviour_logprobs is None, "no log-probabilities on context tokens", "some")
            require(not self.version_spans, "no version spans on context tokens", self.version_spans)
            return
        require(self.behaviour_logprobs is not None, "log-probabilities on sampled tokens", None)
        assert self.behaviour_logprobs is not None
        require_array("behaviour_logprobs", self.behaviour_logprobs, np.float32, len(self.token_ids))
        if not are_sampled_logprobs(self.behaviour_logprobs):
            least, most = float(self.behaviour_logprobs.min()), float(self.behaviour_logprobs.max())
            raise SchemaError(
                f"expected log-probabilities of sampled tokens, {LOGPROB_MIN:g} to 0, got {least:g} to {most:g}: check "
                "the engine's logprobs mode"
            )
        object.__setattr__(self, "behaviour_logprobs", frozen(self.behaviour_logprobs))
        if not are_tiles(self.version_spans, len(self)):
            raise SchemaError(
                f"expected version spans that cover {len(self)} tokens without a gap, with versions that never "
                f"decrease, got {self.version_spans!r:.300}"
            )

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def context(cls, token_ids: npt.ArrayLike) -> TokenSpan:
        """A CONTEXT span from any sequence of ids."""
        return cls(SpanSource.CONTEXT, np.asarray(token_ids, dtype=np.int32))

    @classmethod
    def sampled(
        cls, token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, versions: tuple[VersionSpan, ...] | int
    ) -> TokenSpan:
        """A SAMPLED span; ``versions`` may be one version for all tokens."""
        ids = np.asarray(token_ids, dtype=np.int32)
        if isinstance(versions, int):
            versions = (VersionSpan(0, len(ids), versions),) if len(ids) else ()
        return cls(SpanSource.SAMPLED, ids, np.asarray(logprobs, dtype=np.float32), versions)

    def versions(self) -> npt.NDArray[np.int32]:
        """Policy version of each token, int32 ``[n]``; ``NO_VERSION`` on context."""
        out = np.full(len(self.token_ids), NO_VERSION, dtype=np.int32)
        for span in self.version_spans:
            out[span.start : span.stop] = span.policy_version
        return out


ExpertArray = npt.NDArray[np.uint8 | np.uint16]
"""Experts that a router chose, ``[tokens, layers, k]``. ``layers`` counts all layers of the model, also those without
experts, whose entries mean nothing. A token whose experts are unknown has the largest number of the type everywhere:
no router chooses an expert twice."""


def require_experts(array: Any, length: int) -> None:
    """Experts of ``length`` tokens."""
    if not isinstance(array, np.ndarray) or array.ndim != 3 or array.dtype not in (np.uint8, np.uint16):
        came = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
        raise SchemaError(f"expected experts as a 3-d array of uint8 or uint16, got {came}")
    if len(array) != length or 0 in array.shape[1:]:
        raise SchemaError(f"expected experts of {length} tokens, got an array of the shape {array.shape}")


def unknown_experts(length: int, like: ExpertArray) -> ExpertArray:
    """Unknown experts of ``length`` tokens, in the form of those in ``like``."""
    return np.full((length, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def known_experts(experts: ExpertArray) -> npt.NDArray[np.bool_]:
    """bool ``[tokens]``: the experts of the token are known."""
    return np.asarray((experts != np.iinfo(experts.dtype).max).any(axis=(1, 2)))


@dataclass(frozen=True, slots=True)
class FlatTokens:
    """A sequence that the engine saw, as arrays of one length T, aligned by position."""

    token_ids: npt.NDArray[np.int32]
    """int32 ``[T]``."""
    loss_mask: npt.NDArray[np.bool_]
    """bool ``[T]``: True exactly on sampled tokens that are trained."""
    behaviour_logprobs: npt.NDArray[np.float32]
    """float32 ``[T]``, nats; 0 where ``loss_mask`` is False."""
    policy_versions: npt.NDArray[np.int32]
    """int32 ``[T]``; ``NO_VERSION`` where ``loss_mask`` is False."""
    turn_index: npt.NDArray[np.int32]
    """int32 ``[T]``: the turn whose context or completion the token belongs to."""
    experts: ExpertArray | None = None
    """``[T, layers, k]``: experts that the engine chose for the token itself; of the last token unknown. None: no turn
    has any."""

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def join(cls, spans: list[tuple[int, TokenSpan]]) -> FlatTokens:
        """Concatenate ``(turn index, span)`` pairs in order."""
        if not spans:
            empty = np.zeros(0, dtype=np.int32)
            return cls(empty, empty.astype(np.bool_), empty.astype(np.float32), empty, empty)
        return cls(
            token_ids=np.concatenate([s.token_ids for _, s in spans]),
            loss_mask=np.concatenate([np.full(len(s), s.source is SpanSource.SAMPLED) for _, s in spans]),
            behaviour_logprobs=np.concatenate(
                [
                    s.behaviour_logprobs if s.behaviour_logprobs is not None else np.zeros(len(s), np.float32)
                    for _, s in spans
                ]
            ),
            policy_versions=np.concatenate([s.versions() for _, s in spans]),
            turn_index=np.concatenate([np.full(len(s), turn, dtype=np.int32) for turn, s in spans]),
        )


SCHEMA_VERSION = 1
"""Raised when a field changes its meaning. New optional fields do not raise it; readers ignore unknown ones."""

SEED_MAX = 2**63 - 1


class TrajectoryStatus(StrEnum):
    """Outcome of an episode. Truncated and complete are different facts."""

    COMPLETE = "complete"
    """The environment said it was done."""
    TRUNCATED = "truncated"
    """A limit on turns, tokens or time ended it; the turns until then count."""
    ABORTED = "aborted"
    """We ended it (shutdown, cancelled order); it is never trained."""
    ERROR = "error"
    """Something failed; ``failure`` says what; it is never trained and has no reward."""


class FinishReason(StrEnum):
    """Reason for which the engine stopped sampling."""

    STOP = "stop"
    """A stop token was sampled."""
    LENGTH = "length"
    """The token limit of the request was reached."""
    ABORT = "abort"
    """The engine gave up the request."""


@dataclass(frozen=True, slots=True)
class Task:
    """One problem. The same task gives every member of a group an identical start.

    >>> Task("arithmetic/17", "arithmetic", 17)
    Task(task_id='arithmetic/17', environment='arithmetic', seed=17, payload={})
    """

    task_id: str
    """Stable over the life of a run: difficulty and replay are kept per task id."""
    environment: str
    """Name of its environment section in the run file."""
    seed: int
    """Seeds the environment's start, 0 to 2**63 - 1. Never the sampler's seed."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON data for environments whose tasks are rows of a data set."""

    def __post_init__(self) -> None:
        require_id("task_id", self.task_id)
        require_id("environment", self.environment)
        require(isinstance(self.seed, int) and 0 <= self.seed <= SEED_MAX, "seed in 0..2**63-1", self.seed)
        require(
            type(self.payload) is dict or isinstance(self.payload, Mapping), "payload to be a mapping", self.payload
        )


ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "ipython", "function", "observation", "model"})
"""Roles of messages that chat templates know."""


@dataclass(frozen=True, slots=True)
class Message:
    """A chat message as the template sees it; ``extra`` holds tool calls, names and the like (JSON)."""

    role: str
    content: str
    extra: Mapping[str, Any] = field(default_factory=dict)

    def as_template_input(self) -> dict[str, Any]:
        """The dictionary that ``apply_chat_template`` expects."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True, slots=True)
class Turn:
    """One request to the policy: the tokens added before it, and the tokens it sampled.

    ``context`` holds only what was added since the last turn of the same branch, so size is linear in turns. The first
    turn of a branch holds the whole prompt, earlier completions included, as CONTEXT: they are not trained twice.
    """

    context: TokenSpan
    completion: TokenSpan
    context_messages: tuple[Message, ...]
    completion_message: Message
    finish_reason: FinishReason
    temperature: float
    """Temperature that the completion was sampled with; ``behaviour_logprobs`` include it."""
    signals: Mapping[str, float] = field(default_factory=dict)
    """Numbers the environment reports about this turn, for metrics; they are not rewards."""
    branch: int = 0
    """Rises by one when the template could not extend the conversation without changing earlier ids."""
    reward: float | None = None
    """The environment's reward of this turn, unweighted. None: nobody recorded it. The episode's score, in
    ``Trajectory.rewards``, is what counts as the outcome."""
    experts: ExpertArray | None = None
    """Experts that the engine chose for the token *before* each token of context and completion: a request returns
    those of all tokens but the last one sampled, which the next request of the branch reads. None: nobody recorded
    them."""
    trained: bool = True
    """False: a summary that training leaves out (``loop.summaries: mask``). Its tokens are context to the learner."""

    def __post_init__(self) -> None:
        if self.context.source is not SpanSource.CONTEXT:
            raise SchemaError(f"expected a CONTEXT span as context, got {self.context.source!r}")
        if self.completion.source is not SpanSource.SAMPLED:
            raise SchemaError(f"expected a SAMPLED span as completion, got {self.completion.source!r}")
        if not self.temperature >= 0:
            raise SchemaError(f"expected temperature >= 0, got {self.temperature!r}")
        for name, value in self.signals.items():
            require_finite(f"signal {name!r}", value)
        if self.reward is not None:
            require_finite("reward of a turn", self.reward)
        if self.experts is not None:
            require_experts(self.experts, len(self.context) + len(self.completion))
            object.__setattr__(self, "experts", frozen(self.experts))

    @property
    def spans(self) -> tuple[TokenSpan, TokenSpan]:
        """Context and completion as the learner takes them: a completion that is not trained is context too."""
        return self.context, self.completion if self.trained else TokenSpan.context(self.completion.token_ids)


class DecodedTurns(Sequence[Turn]):
    """Turns that were checked as a whole, and are built when one is first asked for.

    The replay stage looks at no turn of most trajectories, the learner not before it makes rows, and building them
    costs three times as much as checking.
    """

    __slots__ = ("_build", "_turns", "n_turns", "trained", "version_range")

    def __init__(
        self, build: Callable[[], tuple[Turn, ...]], n_turns: int, trained: bool, version_range: tuple[int, int] | None
    ) -> None:
        """``trained``: a turn that is trained has sampled tokens."""
        self._build, self.n_turns, self.trained, self.version_range = build, n_turns, trained, version_range
        self._turns: tuple[Turn, ...] | None = None

    def __len__(self) -> int:
        return self.n_turns

    @overload
    def __getitem__(self, index: int) -> Turn: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Turn, ...]: ...
    def __getitem__(self, index: int | slice) -> Turn | tuple[Turn, ...]:
        if self._turns is None:
            self._turns = self._build()
        return self._turns[index]


def experts_of(turns: Sequence[Turn]) -> ExpertArray | None:
    """:attr:`Turn.experts` of turns, one after another; None where no turn has any."""
    like = next((turn.experts for turn in turns if turn.experts is not None), None)
    if like is None:
        return None
    lengths = [len(turn.context) + len(turn.completion) for turn in turns]
    parts = zip((turn.experts for turn in turns), lengths, strict=True)
    return np.concatenate([unknown_experts(n, like) if part is None else part for part, n in parts])


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of an episode that failed or was aborted."""

    boundary: str
    """Place of the failure: ``environment step``, ``engine``, ``renderer``, ``agent loop``, ``actor``."""
    kind: str
    """Class name of the error, or a short reason."""
    message: str
    details: str = ""
    """Traceback as text, for debugging."""


SECONDS_MAX = 1e12
"""Largest time of an episode: every sum of such times is finite, and fits a column of the store."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Wall-clock of one episode. Times are Unix seconds, durations seconds."""

    started_at: float = 0.0
    finished_at: float = 0.0
    generate_seconds: float = 0.0
    environment_seconds: float = 0.0
    requests: tuple[tuple[float, float], ...] = ()
    """Begin since ``started_at`` and duration of each request to an engine that succeeded, in the order of their ends:
    one for each turn, or for each part of a long one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple([(begin, seconds) for begin, seconds in self.requests]))
        plain = (self.started_at, self.finished_at, self.generate_seconds, self.environment_seconds)
        for seconds in (*plain, *chain.from_iterable(self.requests)):
            if not -SECONDS_MAX <= seconds <= SECONDS_MAX:
                raise SchemaError(f"expected times of at most {SECONDS_MAX:g} s, got {seconds!r}")

    @property
    def duration_seconds(self) -> float:
        return max(0.0, self.finished_at - self.started_at)


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """Engines that sampled a trajectory."""

    backend: str = "unknown"
    """``vllm`` or ``embedded``."""
    model: str = ""
    engine_ids: tuple[str, ...] = ()
    """In order of use; more than one when the session had to move."""


@dataclass(frozen=True, slots=True)
class PromptLessons:
    """Lessons that the prompt of an episode held (docs/LESSONS.md)."""

    ids: tuple[str, ...]
    """Ids of the lessons."""
    keep: bool = True
    """True: trained on the prompt of the rollout. False: on the prompt without the lessons, which is off-policy."""
    plain_contexts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Without ``keep``: by turn, the context token ids to train with instead of those of the rollout."""
    query: str = ""
    """The first message of the user as it reads without the lessons; they were searched by it."""

    def __post_init__(self) -> None:
        require(len(self.ids) > 0, "at least one lesson", self.ids)
        require(self.keep or len(self.plain_contexts) > 0, "the contexts without the lessons", self.plain_contexts)
        for turn, ids in self.plain_contexts.items():
            require(turn >= 0 and all(i >= 0 for i in ids), "turns and token ids >= 0", (turn, ids))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode, from the order to its reward.

    ``reward is None`` means unscored or failed. It is never 0.0 for that.

    Raises :class:`SchemaError` when a failed trajectory has no failure or has a reward, or when versions run backwards.
    """

    trajectory_id: str
    """Idempotency key; equal to the id of the order it answers."""
    group_id: str
    task: Task
    turns: Sequence[Turn]
    status: TrajectoryStatus
    failure: Failure | None = None
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Named parts; ``environment`` is the environment's own undiscounted episode score."""
    reward: float | None = None
    actor_id: str = "actor"
    engine: EngineRecord = field(default_factory=EngineRecord)
    timings: Timings = field(default_factory=Timings)
    recorded: bool = True
    """False: a demonstration whose log-probabilities nobody recorded; its ``behaviour_logprobs`` are 0 and mean
    nothing, and its policy version is 0."""
    lessons: PromptLessons | None = None
    """None: no lessons were in the prompt."""
    hinted_contexts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By turn, the context token ids instead of the rollout's, had the first prompt held the environment's hint.
    The policy never saw them; empty: no hint was given or asked for."""
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        require_id("trajectory_id", self.trajectory_id)
        require_id("group_id", self.group_id)
        require_id("actor_id", self.actor_id)
        failed = self.status in (TrajectoryStatus.ABORTED, TrajectoryStatus.ERROR)
        require(
            (self.failure is not None) == failed, "a failure exactly on aborted and error trajectories", self.status
        )
        require(not (failed and self.reward is not None), "no reward on a failed trajectory", self.reward)
        require(failed or len(self.turns) > 0, "at least one turn", 0)
        if self.reward is not None:
            require_finite("reward", self.reward)
        for name, value in self.rewards.items():
            if value is not None:
                require_finite(f"reward {name!r}", value)
        for index, ids in self.hinted_contexts.items():
            require(0 <= index < len(self.turns) and all(i >= 0 for i in ids), "hinted turns and ids >= 0", index)
        if isinstance(self.turns, DecodedTurns):
            return
        branch = 0
        for turn in self.turns:
            if turn.branch not in (branch, branch + 1):
                raise SchemaError(f"expected branch {branch} or {branch + 1}, got {turn.branch!r}")
            branch = turn.branch
        forms = {(t.experts.dtype, t.experts.shape[1:]) for t in self.turns if t.experts is not None}
        require(len(forms) < 2, "experts of one model in all turns", forms)

    @property
    def usable(self) -> bool:
        """True if it may be trained once it has a reward: it ended by itself or by a limit, and sampled tokens to
        train."""
        if isinstance(self.turns, DecodedTurns):
            trained = self.turns.trained
        else:
            trained = any(len(turn.completion) for turn in self.turns if turn.trained)
        return self.status in (TrajectoryStatus.COMPLETE, TrajectoryStatus.TRUNCATED) and trained

    @property
    def n_sampled(self) -> int:
        """Number of sampled tokens."""
        return sum(len(turn.completion) for turn in self.turns)

    @property
    def n_tokens(self) -> int:
        """Number of tokens stored."""
        return sum(len(turn.context) + len(turn.completion) for turn in self.turns)

    @property
    def graded_turn(self) -> Turn:
        """The turn whose reply is the answer of the episode: the last one.

        Graders, judges, reward models, the environment and views read this reply and no other. The actor orders the
        branches so that the answer stands last (``actors/rollout/recorder.py``).
        """
        return self.turns[-1]

    @property
    def turn_rewards(self) -> tuple[float, ...] | None:
        """Reward of each turn; None where a turn has none."""
        rewards = tuple(turn.reward for turn in self.turns if turn.reward is not None)
        return rewards if len(rewards) == len(self.turns) else None

    def version_range(self) -> tuple[int, int] | None:
        """Oldest and newest policy version that sampled a token, or None where nothing was sampled."""
        if isinstance(self.turns, DecodedTurns):
            return self.turns.version_range
        versions = [span.policy_version for turn in self.turns for span in turn.completion.version_spans]
        return (min(versions), max(versions)) if versions else None

    def branches(self) -> Iterator[FlatTokens]:
        """Each branch as one sequence: exactly what the engine saw."""
        for _, members in groupby(enumerate(self.turns), key=lambda member: member[1].branch):
            turns = list(members)
            spans = [(index, span) for index, turn in turns for span in turn.spans]
            tokens, experts = FlatTokens.join(spans), experts_of([turn for _, turn in turns])
            if experts is not None:
                experts = np.concatenate([experts[1:], unknown_experts(1, experts)])
            yield replace(tokens, experts=experts)

    def scored(self, reward: float | None, rewards: Mapping[str, float | None]) -> Trajectory:
        """A copy with the scorer's verdict."""
        return replace(self, reward=reward, rewards={**self.rewards, **rewards})
