"""Finds the branch that a call of an agent program continues. A pure state machine: no task, no socket, no clock.

A call states a whole conversation. Where it continues a branch (messages are compared as
structures, the policy's reply as it was returned), the tokens of that branch stay as they are and only what the
template adds is tokenised. Where it does not (the program rewrote its history, began another conversation, or asks
twice from the same point), a new branch begins with the whole prompt as context. While a call is under way its branch
is reserved: another call from the same point becomes a separate branch. A call that fails releases its branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actors.engine.base import Generation
from actors.gateway.conversation import Key, ProgramCall, tools_key
from actors.gateway.preview import Preview
from actors.gateway.reply import ChatReply, thought_of
from actors.rendering.renderer import Completed, Conversation
from actors.rollout.recorder import BranchTip, PendingCall, Recorder
from actors.tools.parsing.base import NAME_CHARACTERS_MAX, ToolCall, call_number, stated_call
from actors.tools.parsing.registry import Parser
from pipeline.schema import FinishReason, Message


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The prompt of a call, and the branch that it continues."""

    call: ProgramCall
    conversation: Conversation | None
    """None: the call states token ids."""
    branch: _Branch | None
    new: Sequence[Message] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.call.token_ids if self.conversation is None else self.conversation.prompt_ids


@dataclass(frozen=True, slots=True)
class Reading:
    """A reply as the program gets it, its text as it was sampled, and numbers about it."""

    reply: ChatReply
    completed: Completed
    signals: dict[str, float]


@dataclass(slots=True, eq=False)
class _Branch:
    """A branch, and the keys that identify its next call."""

    tip: BranchTip
    ids: tuple[int, ...]
    keys: tuple[Key, ...] | None = None
    """Keys of its messages, the last reply included. None: only its tokens are given."""
    tools: bytes = b""
    parsed: Message | None = None
    """The last reply with its tool calls apart."""
    taken: bool = False


class ChatRecorder:
    """Records the calls of one session. Methods raise :class:`PlugInError` (boundary ``renderer``) for what a template
    refuses."""

    def __init__(self, recorder: Recorder, parser: Parser) -> None:
        self._recorder = recorder
        self._parser = parser
        self._branches: dict[int, _Branch] = {}
        self._replies: dict[Key, Completed] = {}
        self._open: dict[int, tuple[ProgramCall, _Branch | None]] = {}
        """ProgramCall and taken branch, by number of the call."""

    def prompt(self, call: ProgramCall) -> Prompt:
        """The prompt of a call. It changes nothing, and may run in a thread while no other call begins."""
        if call.token_ids:
            return Prompt(call, None, self._longest(call.token_ids, lambda branch: branch.ids))
        tools = tools_key(call.tools)
        messages, sampled = self._as_sampled(call)
        branch = self._longest(call.keys, lambda branch: branch.keys if branch.tools == tools else None)
        if branch is not None:
            assert branch.keys is not None and branch.tip.call.conversation is not None
            before, new = branch.tip.call.conversation, messages[len(branch.keys) :]
            before = replace(before, sampled=tuple(reply for reply in sampled if reply.special))
            return Prompt(call, self._recorder.next_prompt(before, branch.tip, new, branch.parsed), branch, new)
        instead = None if messages == list(call.messages) else call.messages
        conversation = self._recorder.renderer.start(messages, call.tools, sampled, instead)
        branch = self._longest(conversation.prompt_ids, lambda branch: branch.ids)
        if branch is not None:
            conversation = replace(conversation, added_ids=conversation.prompt_ids[len(branch.ids) :])
        return Prompt(call, conversation, branch, list(conversation.messages[-1:]))

    def begin(self, prompt: Prompt) -> PendingCall:
        """Begin a call with its prompt."""
        branch, conversation = prompt.branch, prompt.conversation
        tip = branch.tip if branch is not None else None
        if conversation is None:
            call = self._recorder.begin_tokens(prompt.call.token_ids, tip)
        else:
            call = self._recorder.begin(conversation, tip, prompt.new)
        if branch is not None and branch.tip.call.branch != call.branch:
            branch = None
        if branch is not None:
            branch.taken = True
        self._open[call.number] = prompt.call, branch
        return call

    def read(self, call: PendingCall, generation: Generation, stop: Sequence[str] = ()) -> Reading:
        """The engine's answer, read. ``stop``: texts that the reply is truncated before. It changes nothing, and raises
        what the tokenizer or the parser raises."""
        asked = self._open[call.number][0]
        completed = self._recorder.renderer.completed(generation.token_ids.tolist())
        text, stopped = completed.text, ""
        for found in stop:
            if (at := text.find(found)) >= 0:
                text, stopped = text[:at], found
        reply, unreadable = self._parsed(call, asked, text, generation.finish_reason)
        thought, end = thought_of(_prompt_text(call), reply.content)
        reply = replace(reply, stop=stopped, thought=thought, thought_end=end)
        signals = {"tool_calls": float(len(reply.tool_calls)), "unreadable_calls": float(unreadable)}
        return Reading(reply, completed, signals)

    def finish(self, call: PendingCall, generation: Generation, temperature: float, reading: Reading) -> ChatReply:
        """The engine's answer is a turn from here on."""
        asked, reply = self._open[call.number][0], reading.reply
        tip = self._recorder.finish(call, generation, reading.completed, temperature, reading.signals)
        branch = self._branches[call.branch] = _Branch(tip, tip.ids)
        if not asked.token_ids:
            self._replies[reply.key] = reading.completed
            branch.keys = (*asked.keys, reply.key)
            branch.tools = tools_key(asked.tools)
            branch.parsed = reply.message if reply.tool_calls else None
        del self._open[call.number]
        return reply

    def preview(self, call: PendingCall) -> Preview:
        """Follows the reply to a call that has begun, before :meth:`finish`."""
        asked = self._open[call.number][0]
        content = self._parser.partial() if asked.tools and asked.calls_max != 0 else None
        return Preview(self._recorder.renderer.partial_text(), _prompt_text(call), asked.stop, content)

    def fail(self, call: PendingCall) -> None:
        """The call has ended without an answer."""
        _, branch = self._open.pop(call.number, (None, None))
        if branch is not None:
            branch.taken = False

    def _longest(self, whole: tuple[Any, ...], begun: Callable[[_Branch], tuple[Any, ...] | None]) -> _Branch | None:
        """The free branch with the longest beginning of ``whole``; the oldest of equals."""
        found, longest = None, -1
        for branch in tuple(self._branches.values()):
            own = begun(branch)
            if own is None or branch.taken or not longest < len(own) < len(whole):
                continue
            if whole[: len(own)] == own:
                found, longest = branch, len(own)
        return found

    def _as_sampled(self, request: ProgramCall) -> tuple[list[Message], list[Completed]]:
        """Its messages, replies of this session as they were sampled, and these replies."""
        messages, sampled = [], []
        for message, key in zip(request.messages, request.keys, strict=True):
            reply = self._replies.get(key)
            if reply is not None:
                message = Message("assistant", reply.text)
                sampled.append(reply)
            messages.append(message)
        return messages, sampled

    def _parsed(
        self, call: PendingCall, request: ProgramCall, text: str, reason: FinishReason
    ) -> tuple[ChatReply, int]:
        """The reply taken apart, and how many of its tool calls cannot be read."""
        ended = "length" if reason is FinishReason.LENGTH else "stop"
        if not request.tools or request.calls_max == 0:
            return ChatReply(text, (), ended), 0
        parsed = self._parser(text, request.tools)
        tools = [tool for tool in parsed.calls if isinstance(tool, ToolCall)]
        unreadable = len(parsed.calls) - len(tools)
        if not tools:
            return ChatReply(text, (), ended), unreadable
        stated = tuple(
            stated_call(call_number(call.number, i), tool.name[:NAME_CHARACTERS_MAX], dict(tool.arguments))
            for i, tool in enumerate(tools[: request.calls_max])
        )
        return ChatReply(parsed.content, stated, "tool_calls"), unreadable


def _prompt_text(call: PendingCall) -> str:
    return call.conversation.text.rstrip() if call.conversation is not None else ""
