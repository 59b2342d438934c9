"""The turns of one rollout, in branches: token for token what the engine saw and sampled.

A completion that continues a branch adds the new tokens; one whose prompt does not continue from
there begins a branch, with its whole prompt as context. The spans of a branch, concatenated, are what the engine saw
and sampled; every sampled token stands in exactly one turn; a call that was never finished leaves no trace. Branches
are numbered without gaps in the order in which their first calls began, but that of the graded reply comes last.

The graded reply is the newest of the main conversation. That is the conversation which the first call began, with the
branches that continue it, and those that open with the same first message (a compacted history, say). What opens
otherwise is a helper's conversation: it is trained, and never graded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import numpy as np
import orjson

from actors.engine.base import Generation
from actors.rendering.renderer import Completed, Conversation, Renderer
from actors.rollout.summaries import is_summary
from pipeline.schema import FinishReason, Message, TokenSpan, Turn
from pipeline.schema.trajectory import ExpertArray, unknown_experts


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A prompt that waits for its completion."""

    number: int
    branch: int
    """Provisional: branches in which nothing was sampled are left out in the end."""
    prompt_ids: tuple[int, ...]
    added_ids: tuple[int, ...]
    added: tuple[Message, ...]
    conversation: Conversation | None = field(default=None, repr=False)
    """None: the prompt was given as token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class BranchTip:
    """A completed call: the end of a branch, which another call may continue."""

    call: PendingCall
    completion_ids: tuple[int, ...]
    completed: Completed

    @property
    def ids(self) -> tuple[int, ...]:
        """Everything in the branch: prompt and completion."""
        return (*self.call.prompt_ids, *self.completion_ids)


@dataclass(slots=True, eq=False)
class _Sampled:
    """A finished call, with the reward that it gets later. It does not hold the whole prompt: only what was added."""

    branch: int
    number: int
    added_ids: tuple[int, ...]
    added: tuple[Message, ...]
    completion: TokenSpan
    text: str
    finish_reason: FinishReason
    temperature: float
    signals: Mapping[str, float]
    experts: ExpertArray | None = None
    reward: float | None = None

    def turn(self, branch: int, trained: bool) -> Turn:
        return Turn(
            context=TokenSpan.context(self.added_ids),
            completion=self.completion,
            context_messages=tuple(map(_storable, self.added)),
            completion_message=Message("assistant", self.text),
            finish_reason=self.finish_reason,
            temperature=self.temperature,
            signals=self.signals,
            branch=branch,
            reward=self.reward,
            trained=trained,
            experts=self.experts,
        )


class Recorder:
    """Writes the turns of one rollout. A pure state machine: no task, no socket, no clock."""

    def __init__(self, renderer: Renderer, *, append: bool = False, mask_summaries: bool = False) -> None:
        """``append``: what was sampled is never changed by the template (:class:`Renderer`). ``mask_summaries``: the
        turns of summaries are not trained."""
        self.renderer = renderer
        self.score: float | None = 0.0
        """Undiscounted sum of the rewards so far. None: the rollout has no score of its own."""
        self._append = append
        self._mask_summaries = mask_summaries
        self._sampled: list[_Sampled] = []
        self._main: set[int] = set()
        """Branches of the main conversation."""
        self._opening: Message | None = None
        """The first message of the first call; None where it gave token ids alone."""
        self._judged = 0
        self._calls = 0
        self._branches = 0

    @property
    def n_turns(self) -> int:
        return len(self._sampled)

    @property
    def graded_reply(self) -> str:
        """Text of the reply that is graded; empty before the first."""
        return self._graded().text if self._sampled else ""

    def next_prompt(
        self, before: Conversation, tip: BranchTip, new: Sequence[Message], parsed: Message | None = None
    ) -> Conversation:
        """The prompt after ``before``, the completion of ``tip`` and ``new``. ``parsed`` is the completion with its
        tool calls apart (:meth:`Renderer.extend`)."""
        return self.renderer.extend(
            before, tip.completion_ids, tip.completed, new, parsed_reply=parsed, append=self._append
        )

    def begin(
        self, conversation: Conversation, tip: BranchTip | None = None, new: Sequence[Message] = ()
    ) -> PendingCall:
        """Begin a call that continues ``tip`` with ``new``, or in a new branch: at the first prompt, and where the
        template or a loop changed the history (``conversation`` is then in a branch after that of ``tip``)."""
        opening = conversation.messages[0] if conversation.messages else None
        main = self._opens_main(opening) if tip is None else tip.call.branch in self._main
        if tip is None or conversation.branch:
            added_ids, added, tip = conversation.prompt_ids, conversation.messages, None
        else:
            added_ids, added = conversation.added_ids, tuple(new)
        begun = replace(conversation, branch=0) if conversation.branch else conversation
        return self._begun(conversation.prompt_ids, added_ids, added, tip, begun, main)

    def begin_tokens(self, token_ids: tuple[int, ...], tip: BranchTip | None = None) -> PendingCall:
        """Begin a call whose prompt is given as tokens alone. With ``tip`` they begin with those of its branch."""
        added_ids = token_ids if tip is None else token_ids[len(tip.ids) :]
        added = (Message("user", self.renderer.decode_ids(added_ids)),) if added_ids else ()
        return self._begun(token_ids, added_ids, added, tip, None, tip is None and self._opens_main(None))

    def finish(
        self,
        call: PendingCall,
        generation: Generation,
        completed: Completed,
        temperature: float,
        signals: Mapping[str, float] | None = None,
    ) -> BranchTip:
        """Record the completion of ``call`` as a turn. ``completed`` is its text."""
        self._sampled.append(
            _Sampled(
                branch=call.branch,
                number=call.number,
                added_ids=call.added_ids,
                added=call.added,
                completion=generation.as_span(),
                text=completed.text,
                finish_reason=generation.finish_reason,
                temperature=temperature,
                signals=signals or {},
                experts=_of_turn(generation.experts, len(call.added_ids) + len(generation.token_ids)),
            )
        )
        return BranchTip(call, tuple(generation.token_ids.tolist()), completed)

    def judge(self, reward: float, signals: Mapping[str, float]) -> None:
        """Reward the newest turn."""
        newest = self._sampled[-1]
        newest.reward, newest.signals = reward, signals
        self._judged = len(self._sampled)
        self.score = (self.score or 0.0) + reward

    def judge_rollout(self, score: float | None, signals: Mapping[str, float]) -> None:
        """Reward the rollout as a whole: the graded turn gets ``score`` and ``signals``, the others 0."""
        self.score = score
        self._judged = len(self._sampled)
        if score is None:
            return
        for sampled in self._sampled:
            sampled.reward = 0.0
        graded = self._graded()
        graded.reward, graded.signals = score, {**graded.signals, **signals}

    def drop_unjudged(self) -> tuple[int, int]:
        """Remove the turns after the last judged one. (turns left, tokens removed)"""
        removed = sum(len(sampled.completion) for sampled in self._sampled[self._judged :])
        if self._judged:
            del self._sampled[self._judged :]
        return self._judged, removed

    def turns(self) -> tuple[Turn, ...]:
        """Branch by branch, numbered from 0, that of the graded reply last; within a branch in the order of its
        calls."""
        last = self._graded().branch if self._sampled else 0
        ordered = sorted(self._sampled, key=lambda sampled: (sampled.branch == last, sampled.branch, sampled.number))
        branches = {branch: i for i, branch in enumerate(dict.fromkeys(s.branch for s in ordered))}
        masked = self._summaries() if self._mask_summaries else set()
        return tuple(sampled.turn(branches[sampled.branch], sampled.number not in masked) for sampled in ordered)

    def _summaries(self) -> set[int]:
        """Numbers of the calls whose replies sum up their branches for later ones of the main conversation."""
        openings: dict[int, _Sampled] = {}
        before: dict[int, list[Message]] = {}
        last: dict[int, _Sampled] = {}
        for sampled in sorted(self._sampled, key=lambda sampled: sampled.number):
            branch, previous = sampled.branch, last.get(sampled.branch)
            if branch in self._main:
                openings.setdefault(branch, sampled)
            said = [] if previous is None else [Message("assistant", previous.text)]
            before[branch] = [*before.get(branch, ()), *said, *sampled.added]
            last[branch] = sampled
        return {
            end.number
            for branch, end in last.items()
            if any(o.number > end.number and is_summary(end.text, before[branch], o.added) for o in openings.values())
        }

    def _graded(self) -> _Sampled:
        """The newest reply of the main conversation; the newest of all where that has none."""
        return next((s for s in reversed(self._sampled) if s.branch in self._main), self._sampled[-1])

    def _opens_main(self, opening: Message | None) -> bool:
        """True if a conversation that begins with ``opening`` is the main one. Token ids alone tell nothing else."""
        if not self._calls:
            self._opening = opening
        return opening is None or self._opening is None or opening == self._opening

    def _begun(
        self,
        prompt_ids: tuple[int, ...],
        added_ids: tuple[int, ...],
        added: tuple[Message, ...],
        tip: BranchTip | None,
        conversation: Conversation | None,
        main: bool,
    ) -> PendingCall:
        self._calls += 1
        if tip is None:
            branch, self._branches = self._branches, self._branches + 1
            if main:
                self._main.add(branch)
        else:
            branch = tip.call.branch
        return PendingCall(self._calls, branch, prompt_ids, added_ids, added, conversation)


def _of_turn(experts: ExpertArray | None, n_tokens: int) -> ExpertArray | None:
    """Experts before each of the turn's ``n_tokens``: the last ones that the engine returned; before the first token of
    a branch there is none."""
    if experts is None or len(experts) >= n_tokens:
        return experts if experts is None else experts[len(experts) - n_tokens :]
    return np.concatenate([unknown_experts(n_tokens - len(experts), experts), experts])


def _storable(message: Message) -> Message:
    """The message, with JSON text as arguments of its calls where these cannot be stored as they are: a policy may
    write whole numbers of any size, and lists in lists to any depth."""
    calls = message.extra.get("tool_calls") if message.role == "assistant" else None
    if not calls:
        return message
    try:
        orjson.dumps(calls)
    except orjson.JSONEncodeError:
        with suppress(LookupError, TypeError, ValueError, RecursionError):  # calls in a form of an environment's own
            functions = [{**call["function"], "arguments": json.dumps(call["function"]["arguments"])} for call in calls]
            stated = [{**call, "function": function} for call, function in zip(calls, functions, strict=True)]
            return replace(message, extra={**message.extra, "tool_calls": stated})
    return message
