"""From the calls of one session to turns in branches. A pure state machine: no task, no socket, no clock.

A call states a whole conversation. Where it goes on from what was said in a branch (messages are compared as
structures, the policy's reply as it was returned), the tokens of that branch stay as they are and only what the
template adds is tokenised. Where it does not (the program rewrote its history, began another conversation, or asks
twice from the same place), a new branch begins with the whole prompt as context. While a call is under way its branch
is taken: another call from the same place becomes a branch of its own. A call that fails gives its branch back.

Invariants, property-tested: the spans of a branch, concatenated, are what the engine saw and sampled; every sampled
token stands in exactly one turn; branches are numbered without gaps in the order in which their first calls arrived; a
call that failed leaves no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.engine.base import Generation
from actors.gateway.messages import Key, key_of, tools_key
from actors.gateway.requests import ChatRequest
from actors.rendering.renderer import Completed, Conversation, Renderer
from actors.tools.parsing.base import Parsed, ToolCall
from pipeline.errors import PlugInError
from pipeline.schema import FinishReason, Message, TokenSpan, Turn

NAME_CHARACTERS_MAX = 64
Parse = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A reply as the program gets it."""

    content: str
    tool_calls: tuple[Mapping[str, Any], ...]
    """``{"id", "type", "function": {"name", "arguments"}}`` with arguments as objects."""
    finish_reason: str
    """``stop``, ``length`` or ``tool_calls``."""


@dataclass(slots=True, eq=False)
class _BranchTip:
    """The end of a branch."""

    branch: int
    ids: tuple[int, ...]
    """Everything in it: prompt and completion."""
    keys: tuple[Key, ...] | None = None
    """Of its messages, the last reply included. None: it is known by its tokens alone."""
    tools: bytes = b""
    conversation: Conversation | None = None
    completion_ids: tuple[int, ...] = ()
    completed: Completed | None = None
    said: Message | None = None
    taken: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PendingCall:
    """A call under way."""

    number: int
    branch: int
    """Provisional: branches in which nothing was said are left out in the end."""
    prompt_ids: tuple[int, ...]
    added_ids: tuple[int, ...]
    added: tuple[Message, ...]
    leaf: _BranchTip | None = field(repr=False)
    """What it goes on from."""
    keys: tuple[Key, ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    conversation: Conversation | None = field(default=None, repr=False)
    calls_max: int | None = None


class Recorder:
    """See the module. Methods raise :class:`PlugInError` (boundary ``renderer``) for what a template refuses."""

    def __init__(self, renderer: Renderer, parse: Parse, *, append: bool = False) -> None:
        """``append``: what was sampled is never changed by the template (:class:`Renderer`)."""
        self._renderer = renderer
        self._parse = parse
        self._append = append
        self._leaves: dict[int, _BranchTip] = {}
        self._turns: list[tuple[int, int, Turn]] = []
        self._replies: dict[Key, Message] = {}
        self._calls = 0
        self._branches = 0

    @property
    def n_turns(self) -> int:
        return len(self._turns)

    @property
    def last_reply(self) -> str:
        """Text of the reply that came last; empty before the first."""
        return self._turns[-1][2].completion_message.content if self._turns else ""

    def chat(self, request: ChatRequest) -> PendingCall:
        """Begin a call that states messages."""
        tools = tools_key(request.tools)
        leaf = self._leaf_before(request.keys, tools)
        if leaf is not None:
            assert leaf.keys is not None and leaf.conversation is not None and leaf.completed is not None
            new = tuple(self._known(request)[len(leaf.keys) :])
            conversation = self._renderer.extend(
                leaf.conversation, leaf.completion_ids, leaf.completed, new, said=leaf.said, append=self._append
            )
            if conversation.branch == leaf.conversation.branch:
                return self._begun(leaf, conversation.added_ids, new, request, conversation)
            return self._begun(None, conversation.prompt_ids, conversation.messages, request, conversation)
        conversation = self._rendered(request)
        same = self._leaf_of_tokens(conversation.prompt_ids)
        if same is None:
            return self._begun(None, conversation.prompt_ids, conversation.messages, request, conversation)
        added_ids = conversation.prompt_ids[len(same.ids) :]
        conversation = replace(conversation, added_ids=added_ids)
        return self._begun(same, added_ids, conversation.messages[-1:], request, conversation)

    def tokens(self, token_ids: tuple[int, ...]) -> PendingCall:
        """Begin a call that states token ids."""
        leaf = self._leaf_of_tokens(token_ids)
        added_ids = token_ids if leaf is None else token_ids[len(leaf.ids) :]
        added = (Message("user", self._renderer.decode_ids(added_ids)),) if added_ids else ()
        if leaf is not None:
            leaf.taken = True
        return PendingCall(self._number(), self._branch(leaf), token_ids, added_ids, added, leaf)

    def finish(
        self, pending: PendingCall, generation: Generation, temperature: float, stop: Sequence[str] = ()
    ) -> ChatReply:
        """The engine has answered: it is a turn from here on. ``stop``: texts that the reply is cut before."""
        renderer = self._renderer
        ids = tuple(generation.token_ids.tolist())
        completed = renderer.completed(ids)
        said, unreadable = self._said(pending, _truncate(completed.text, stop), generation.finish_reason)
        turn = Turn(
            context=TokenSpan.context(pending.added_ids),
            completion=generation.as_span(),
            context_messages=pending.added,
            completion_message=Message("assistant", completed.text),
            finish_reason=generation.finish_reason,
            temperature=temperature,
            signals={"tool_calls": float(len(said.tool_calls)), "unreadable_calls": float(unreadable)},
        )
        leaf = _BranchTip(pending.branch, (*pending.prompt_ids, *ids))
        if pending.keys is not None:
            stated = {"tool_calls": [dict(call) for call in said.tool_calls]} if said.tool_calls else {}
            reply = key_of("assistant", said.content, said.tool_calls)
            self._replies[reply] = Message("assistant", completed.text)
            leaf.keys = (*pending.keys, reply)
            leaf.tools = tools_key(pending.tools)
            leaf.conversation = pending.conversation
            leaf.completion_ids = ids
            leaf.completed = completed
            leaf.said = Message("assistant", said.content, stated) if stated else None
        self._turns.append((pending.branch, pending.number, turn))
        self._leaves[pending.branch] = leaf
        return said

    def fail(self, pending: PendingCall) -> None:
        """The call has ended without an answer."""
        if pending.leaf is not None:
            pending.leaf.taken = False

    def turns(self) -> tuple[Turn, ...]:
        """Branch by branch, numbered from 0; within a branch in the order of its calls."""
        played = sorted(self._turns, key=lambda entry: entry[:2])
        numbers = {branch: i for i, branch in enumerate(dict.fromkeys(branch for branch, _, _ in played))}
        return tuple(replace(turn, branch=numbers[branch]) for branch, _, turn in played)

    def _begun(
        self,
        leaf: _BranchTip | None,
        added_ids: tuple[int, ...],
        added: tuple[Message, ...],
        request: ChatRequest,
        conversation: Conversation,
    ) -> PendingCall:
        if leaf is not None:
            leaf.taken = True
        return PendingCall(
            self._number(),
            self._branch(leaf),
            conversation.prompt_ids,
            added_ids,
            added,
            leaf,
            request.keys,
            request.tools,
            replace(conversation, branch=0),
            request.calls_max,
        )

    def _number(self) -> int:
        self._calls += 1
        return self._calls

    def _branch(self, leaf: _BranchTip | None) -> int:
        if leaf is not None:
            return leaf.branch
        self._branches += 1
        return self._branches - 1

    def _leaf_before(self, keys: tuple[Key, ...], tools: bytes) -> _BranchTip | None:
        """The branch with the longest history that ``keys`` goes on from; the oldest of equals."""
        found: _BranchTip | None = None
        for leaf in self._leaves.values():
            if leaf.keys is None or leaf.taken or leaf.tools != tools:
                continue
            n = len(leaf.keys)
            if n < len(keys) and keys[:n] == leaf.keys and (found is None or n > len(found.keys or ())):
                found = leaf
        return found

    def _leaf_of_tokens(self, ids: tuple[int, ...]) -> _BranchTip | None:
        """The branch with the most tokens that ``ids`` begins with."""
        found: _BranchTip | None = None
        for leaf in self._leaves.values():
            n = len(leaf.ids)
            if not leaf.taken and n < len(ids) and ids[:n] == leaf.ids and (found is None or n > len(found.ids)):
                found = leaf
        return found

    def _rendered(self, request: ChatRequest) -> Conversation:
        """The whole prompt. Replies of this session stand in it as they were sampled, where the template takes that."""
        sampled = self._known(request)
        try:
            return self._renderer.start(sampled, request.tools)
        except PlugInError:
            stated = [self._shown(message) for message in request.messages]
            if stated == sampled:
                raise
            return self._renderer.start(stated, request.tools)

    def _known(self, request: ChatRequest) -> list[Message]:
        """Its messages, replies of this session as they were sampled."""
        pairs = zip(request.messages, request.keys, strict=True)
        return [self._shown(self._replies.get(key, message)) for message, key in pairs]

    def _shown(self, message: Message) -> Message:
        """What a tool said cannot end a turn or begin another."""
        if message.role != "tool":
            return message
        return replace(message, content=self._renderer.without_special(message.content))

    def _said(self, pending: PendingCall, text: str, reason: FinishReason) -> tuple[ChatReply, int]:
        """The reply taken apart, and how many of its calls cannot be read."""
        ended = "length" if reason is FinishReason.LENGTH else "stop"
        if not pending.tools or pending.calls_max == 0:
            return ChatReply(text, (), ended), 0
        parsed = self._parse(text, pending.tools)
        calls = [call for call in parsed.calls if isinstance(call, ToolCall)]
        unreadable = len(parsed.calls) - len(calls)
        if not calls:
            return ChatReply(text, (), ended), unreadable
        stated = tuple(
            {
                "id": f"{pending.number % 10**5:05d}{index % 10**4:04d}",
                "type": "function",
                "function": {"name": call.name[:NAME_CHARACTERS_MAX], "arguments": dict(call.arguments)},
            }
            for index, call in enumerate(calls[: pending.calls_max])
        )
        return ChatReply(parsed.content, stated, "tool_calls"), unreadable


def _truncate(text: str, stops: Sequence[str]) -> str:
    """What stands before the first of ``stops``."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    return text[: min(found)] if found else text
