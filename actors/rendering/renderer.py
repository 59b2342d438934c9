"""Extends a conversation by exactly the ids that the chat template adds, or forks a branch if that is impossible.

Let ``T(m)`` be the template's text for the messages ``m`` with the generation prompt. The engine saw ``T(m)`` and
sampled ids whose text is ``c`` and then, perhaps, an end-of-turn token ``e``. With the assistant message ``c`` and
the answer ``n`` of the environment, the next prompt should read ``T(m + c + n)``. If that text begins with ``T(m) +
c`` (followed by ``e`` if it was sampled), then the rest of it is what the template adds: it is tokenised
alone and appended, and the sampled ids stay as they are. This is the *prefix property*, proved for each turn and not
assumed for a template.

If it does not hold (the template strips thinking, trims content, or closes a turn with another token than was
sampled), the conversation forks: a new branch begins with the whole prompt ``T(m + c + n)``, its earlier completions
as context. With ``append`` it never does: what the template puts between *some* reply and the next one (found by
rendering a short conversation around ``n``) is appended to what was sampled, and what the template would have changed
earlier stays.

Every text that an environment, a tool, an example or a program said is in the prompt. A conversation is rendered in the
first form that the template takes *and* in which nothing of it is missing (:mod:`actors.rendering.template_probes`).
Where there is none, that is an error with the template's name. A template may drop what the policy itself wrote, such
as its thoughts: then the conversation forks.

A tokenizer cuts its input at special tokens before it does anything else, so the rest is tokenised behind the
end-of-turn token and the ids are those of the whole text. Only a template without special tokens around turns can
give other ids than a tokenisation of the whole text would; the ids that are recorded are those that the engine sees
in either case.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from actors.rendering.partial_text import PartialText
from actors.rendering.said import TextLost, lost, lost_schema
from actors.rendering.special_text import Span, SpecialText
from actors.rendering.template_probes import MARK, ProbedTemplate, template_source
from actors.rendering.tokenizer import load_tokenizer, plain_backend, plain_decoder
from actors.rendering.tool_messages import Form, described
from actors.tools.parsing.base import ToolSchema
from pipeline.config.rollouts import ModelConfig
from pipeline.errors import ConfigurationError, boundary
from pipeline.schema import Message
from pipeline.views.vocabulary import bytes_of_tokens, is_byte

RENDERER = "renderer"
_NEXT = "afterplaynext"


@dataclass(frozen=True, slots=True)
class Conversation:
    """Prompt of the next completion: ``prompt_ids`` = everything before + ``added_ids``, in one branch."""

    messages: tuple[Message, ...]
    text: str
    """The template's text for ``messages`` with the generation prompt. The template saw special tokens in the policy's
    own replies alone (:mod:`actors.rendering.special_text`)."""
    prompt_ids: tuple[int, ...]
    """The whole prompt of the branch, sampled ids included."""
    added_ids: tuple[int, ...]
    """The tail of ``prompt_ids`` that is new since the last completion (all of it at the start of a branch)."""
    branch: int = 0
    tools: tuple[ToolSchema, ...] = ()
    """Tools of the policy, rendered with every prompt of the conversation; marked for the template."""
    sampled: tuple[Completed, ...] = ()
    """The completions of the policy that hold special tokens: they stay special when a template renders them."""
    given: int = 0
    """The replies among so many first messages were written, not sampled: every prompt has them whole."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The text of a completion and the end-of-turn token that closed it, if one was sampled."""

    text: str
    end_id: int | None
    special: tuple[Span, ...] = ()
    """The parts of the text that were sampled as special tokens."""


class Renderer:
    """One tokenizer with its chat template. Every method raises :class:`PlugInError` (boundary ``renderer``) when a
    template or a tokenizer does."""

    end_ids: tuple[int, ...]
    """Token ids that end a turn; the engine gets them as ``stop_token_ids``."""

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = (), name: str = "") -> None:
        """``end_ids``: more end-of-turn tokens, beside the tokenizer's and the template's. ``name``: of the template,
        for errors.

        Raises :class:`ConfigurationError` for a tokenizer without a chat template or without any end-of-turn token, and
        for a template that leaves out what is said.
        """
        self.tokenizer = tokenizer
        self.name = name or str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                f"the tokenizer {self.name!r} has no chat template: set model.chat_template to a Jinja file"
            )
        self._backend = plain_backend(tokenizer)
        self._decoder = plain_decoder(tokenizer, self._backend)
        self._bytes_of = bytes_of_tokens(tokenizer)
        self._special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._special = SpecialText(tokenizer, self._backend, template_source(tokenizer))
        self._template = ProbedTemplate(tokenizer, self._special, self.name)
        ends = {int(i) for i in end_ids}
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        tail = self._encode(self._template.after_reply().lstrip())
        template_end = tail[0] if tail and tail[0] in self._special_ids else None
        if template_end is not None:
            ends.add(template_end)
        if not ends:
            raise ConfigurationError(
                "neither the tokenizer nor its chat template has an end-of-turn token: turns could not end"
            )
        self.end_ids = tuple(sorted(ends))
        self._usual_end = self.end_ids[0] if template_end is None else template_end
        self._has_end = template_end is not None
        self._end_texts = {i: self._decode([i]) for i in self.end_ids}

    @property
    def template(self) -> str:
        """The chat template's source: the one for tools where the tokenizer has several."""
        return self._template.source

    def forms(self) -> tuple[bool, Form, Form]:
        """True if the template writes tool schemas; the first forms that it takes of a conversation with written calls,
        and of one in which a tool answers a reply that is kept as text."""
        template = self._template
        calls, answers = (next(filter(None, f)) for f in (template.forms_of_calls, template.forms_of_answers))
        return template.schemas, calls, answers

    def as_text(self, message: Message) -> Message:
        """A message with its calls in its content, as the policy writes them."""
        return self._template.as_text(message)

    def start(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        sampled: Sequence[Completed] = (),
        instead: Sequence[Message] | None = None,
    ) -> Conversation:
        """The first prompt. ``tools``: the schemas of what may be called, rendered as the template does. ``sampled``:
        completions of the policy that stand in ``messages`` as replies; other replies are the text of others.
        ``instead``: the same messages with these replies stated otherwise, for templates that do not take them so."""
        with boundary(RENDERER):
            marked = tuple(self._special.mark_all(tool) for tool in tools)
        variants = [messages] if instead is None else [messages, instead]
        texts = [reply.text for reply in sampled]
        own = (i for i, m in enumerate(messages) if m.role == "assistant" and any(m.content in text for text in texts))
        return self._started(variants, marked, tuple(sampled), next(own, len(messages)), texts)

    def restart(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The next branch, which begins with a rewritten history."""
        same = (a == b for a, b in zip(messages, conversation.messages[: conversation.given], strict=False))
        given = next((i for i, equal in enumerate(same) if not equal), min(len(messages), conversation.given))
        started = self._started([messages], conversation.tools, conversation.sampled, given, None)
        return replace(started, branch=conversation.branch + 1)

    def _started(
        self,
        variants: Sequence[Sequence[Message]],
        tools: tuple[ToolSchema, ...],
        sampled: tuple[Completed, ...],
        given: int,
        replies: Sequence[str] | None,
    ) -> Conversation:
        """``variants``: the same conversation with its replies stated differently. ``given``: see
        :class:`Conversation`. ``replies``: see :func:`_said`."""

        def lacks(messages: Sequence[Message], text: str) -> str | None:
            said = _said(messages, given, replies)
            return lost(said, text) or lost_schema(tools, text, self._special.restore)

        with boundary(RENDERER):
            failure: Exception | None = None
            for shown in (tools, tuple(described(tools))) if tools and self._template.schemas else (tools,):
                try:
                    messages, marked = self._fit(lambda: variants, shown, sampled, lacks)
                except Exception as error:
                    failure = failure or error
                    continue
                ids = self._encode(marked)
                special = tuple(reply for reply in sampled if reply.special)
                text = self._special.restore(marked)
                return Conversation(tuple(messages), text, ids, ids, 0, shown, special, given)
            assert failure is not None
            raise failure

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Token ids that write ``text`` as a reply, with the end-of-turn token. For demonstrations; a policy may have
        cut the same text into other tokens. Special tokens are those that the template writes inside a reply."""
        with boundary(RENDERER):
            marked = self._special.mark(text, lambda text: self._special.spans_of(self._in_replies, text))
            return (*self._encode(marked), self._usual_end)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Ids of a text alone, for measuring and cutting."""
        with boundary(RENDERER):
            return self._encode(self._special.mark(text))

    def decode_ids(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        with boundary(RENDERER):
            return self._decode(list(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id: a part of a character where it is only that, and with the space it begins with."""
        with boundary(RENDERER):
            return self._bytes_of(token_id)

    def completed(self, completion_ids: Sequence[int]) -> Completed:
        """Decode a completion for the environment, without the end-of-turn token that closed it."""
        ids = list(completion_ids)
        end = ids.pop() if ids and ids[-1] in self._end_texts else None
        with boundary(RENDERER):
            text = self._decode(ids)
            return Completed(text, end, self._special.sampled_spans(ids, text, self._decode))

    def partial_text(self) -> PartialText:
        """The text of a completion that is still sampled: a beginning of that of :meth:`completed`."""
        return PartialText(self._decode, lambda i: i in self._end_texts or self._is_byte(i))

    def _is_byte(self, token_id: int) -> bool:
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        return isinstance(token, str) and is_byte(token)

    def extend(
        self,
        conversation: Conversation,
        completion_ids: Sequence[int],
        completed: Completed,
        new: Sequence[Message],
        *,
        parsed_reply: Message | None = None,
        append: bool = False,
    ) -> Conversation:
        """The next prompt, after a completion and the answer ``new``.

        In the same branch where the prefix property holds, or always with ``append``: ``prompt_ids`` begins with the
        old prompt and the sampled ids. Otherwise in the next branch. ``parsed_reply`` is the completion with its tool
        calls apart: it is rendered where the template refuses the completion as it was sampled."""
        sampled = (*conversation.sampled, completed) if completed.special else conversation.sampled
        with boundary(RENDERER):
            if append:
                return self._appended(conversation, completion_ids, completed, new, parsed_reply, sampled)
            messages, marked = self._whole(conversation, completed, new, parsed_reply, sampled)
            text = self._special.restore(marked)
            added = None
            if text.startswith(seen := conversation.text + completed.text):
                added = self._added(completed.end_id, marked[len(seen) :])
            branch = conversation.branch
            if added is None:
                ids = added = self._encode(marked)
                branch += 1
            else:
                ids = (*conversation.prompt_ids, *completion_ids, *added)
        return Conversation(messages, text, ids, added, branch, conversation.tools, sampled, conversation.given)

    def _whole(
        self,
        conversation: Conversation,
        completed: Completed,
        new: Sequence[Message],
        parsed_reply: Message | None,
        sampled: Sequence[Completed],
    ) -> tuple[tuple[Message, ...], str]:
        """The whole conversation and its marked text: the reply as it was sampled, or with its parts stated apart
        where the template does not take that."""
        seen = conversation.text + completed.text

        def variants() -> Iterator[tuple[Message, ...]]:
            for reply in self._replies(completed.text, parsed_reply):
                yield (*conversation.messages, reply, *new)

        def lacks(messages: Sequence[Message], text: str) -> str | None:
            if text.startswith(seen):
                return lost(new, text, len(seen))
            said = [*_said(conversation.messages, conversation.given, None), *new]
            return lost(said, text) or lost_schema(conversation.tools, text, self._special.restore)

        def doubled(text: str) -> bool:
            """The template writes once more how a reply begins."""
            opening = self._template.opening
            return bool(opening) and not text.startswith(seen) and opening + completed.text in text

        messages, marked = self._fit(variants, conversation.tools, sampled, lacks, doubled)
        return tuple(messages), marked

    def _fit(
        self,
        variants: Callable[[], Iterable[Sequence[Message]]],
        tools: Sequence[ToolSchema],
        sampled: Sequence[Completed],
        lacks: Callable[[Sequence[Message], str], str | None],
        unlike: Callable[[str], bool] = lambda text: False,
    ) -> tuple[Sequence[Message], str]:
        """The first of ``variants``, in the first form, that the template renders and ``lacks`` finds nothing missing
        in: its messages and its marked text. One that is ``unlike`` what the policy has seen is taken if no other
        can be. Raises what the template raised, or :class:`TextLost`."""
        replies = [(reply.text, reply.special) for reply in sampled]
        failure: Exception | None = None
        for attempt in itertools.count():
            spare, tried = None, False
            for messages in variants():
                forms = self._template.forms_of(messages)
                if attempt >= len(forms):
                    continue
                tried = True
                if (form := forms[attempt]) is None:
                    continue
                try:
                    marked = self._template.apply(messages, tools, replies, form)
                except Exception as error:
                    failure = failure or error
                    continue
                text = self._special.restore(marked)
                if (what := lacks(messages, text)) is not None:
                    failure = failure or TextLost(f"the chat template of {self.name} leaves out {what}")
                elif not unlike(text):
                    return messages, marked
                elif spare is None:
                    spare = messages, marked
            if spare is not None:
                return spare
            if not tried:
                break
        assert failure is not None
        raise failure

    def _replies(self, text: str, parsed: Message | None) -> Iterator[Message]:
        """A sampled reply as a message: as it is, without what the template writes around contents and thoughts, and
        with its calls apart."""
        yield Message("assistant", text)
        apart: dict[str, Any] = {}
        rest = text if parsed is None else parsed.content
        opening, closing = self._template.around_thoughts
        if opening and opening in text:
            thought = text.partition(opening)[2].partition(closing)[0]
            apart = {"reasoning_content": thought, "thinking": thought}
            rest = rest.replace(opening + thought + closing, "", 1)
        if (begun := self._template.opening) and begun in text:
            yield Message("assistant", text.rpartition(begun)[2], apart)
        if parsed is not None:
            if apart:
                shown = "" if any(True for _ in self._special.texts_in(rest)) else rest
                yield replace(parsed, content=shown, extra={**parsed.extra, **apart})
            yield parsed

    def _appended(
        self,
        conversation: Conversation,
        completion_ids: Sequence[int],
        completed: Completed,
        new: Sequence[Message],
        parsed_reply: Message | None,
        sampled: tuple[Completed, ...],
    ) -> Conversation:
        """Sampled ids as they are, then what the template puts between a reply and the next one."""
        end = self._end_texts[completed.end_id] if completed.end_id is not None else ""
        rest = self._between(completed, new, parsed_reply)
        ids = self._encode(end + rest)
        if end:
            ids = ids[1:] if ids and ids[0] == completed.end_id else self._encode(rest)
        return replace(
            conversation,
            messages=(*conversation.messages, Message("assistant", completed.text), *new),
            text=conversation.text + completed.text + end + self._special.restore(rest),
            prompt_ids=(*conversation.prompt_ids, *completion_ids, *ids),
            added_ids=ids,
            sampled=sampled,
        )

    def _between(self, completed: Completed, new: Sequence[Message], parsed_reply: Message | None) -> str:
        """The marked text that follows a completion up to the next reply: behind the end token that was sampled, or
        with the one that the template writes where none was."""
        user = Message("user", "x")
        replies = [Message("assistant", MARK)]
        if parsed_reply is not None and (calls := parsed_reply.extra.get("tool_calls")):
            stated = [{**c, "function": {**c["function"], "arguments": {MARK: MARK}}} for c in calls]
            replies.append(replace(parsed_reply, content="", extra={**parsed_reply.extra, "tool_calls": stated}))

        def variants() -> Iterator[Sequence[Message]]:
            for reply in replies:
                yield (user, reply, *new)

        def lacks(messages: Sequence[Message], text: str) -> str | None:
            return lost(new, text, max(0, text.rfind(MARK)))

        messages, text = self._fit(variants, (), (), lacks)
        if messages[1] is replies[0]:
            rest = text.partition(MARK)[2]
        else:
            rest = self._after_calls(text.rpartition(MARK)[2], completed.text)
        if completed.end_id is None:
            return rest
        end = self._end_texts[completed.end_id]
        ends = dict.fromkeys([end, *self._closing, *self._end_texts.values()])
        while found := next((text for text in ends if self._closes(text, end, rest.lstrip())), ""):
            rest = rest.lstrip()[len(found) :]
            if found == end:
                break
        return rest

    def _closes(self, text: str, sampled: str, rest: str) -> bool:
        """True if ``rest`` begins with ``text`` and that stands for the sampled end token: it is the same, or another
        end token of a template that closes turns, and not one that opens what follows."""
        if not text or not rest.startswith(text):
            return False
        if text == sampled or text in self._closing:
            return True
        after = rest[len(text) :].lstrip()
        return self._has_end and after.startswith(next(self._special.texts_in(after), "\0"))

    def _after_calls(self, rest: str, sampled: str) -> str:
        """Text behind a reply whose last call is closed in ``rest``: as the policy closed it, or by an end token."""
        last = list(self._special.texts_in(sampled))[-1:]
        closers = [text for text in last if sampled.rstrip().endswith(text)]
        found = [at + len(text) for text in closers if (at := rest.find(text)) >= 0]
        found += [at for text in self._end_texts.values() if text and (at := rest.find(text)) >= 0]
        if not found:
            raise ValueError("the chat template closes a reply with tool calls by no token")
        return rest[min(found) :]

    @cached_property
    def _in_replies(self) -> frozenset[str]:
        """Special texts that the template writes inside a reply, without those that end it."""
        return self._template.special_in_replies.difference(self._end_texts.values())

    @cached_property
    def _closing(self) -> tuple[str, ...]:
        """Tokens with which the template closes a reply: at the end, and before the user's next message. None where it
        only begins the next message."""
        if not self._has_end:
            return ()
        last = self._end_texts[self._usual_end]
        user = Message("user", _NEXT)
        try:
            text = self._template.apply([Message("user", "x"), Message("assistant", MARK), user])
        except Exception:
            return (last,)
        after, _, end = text.partition(MARK)[2].partition(_NEXT)
        inner = next(self._special.texts_in(after), "")
        return (last, inner) if inner and inner != last and inner in end else (last,)

    def _added(self, end_id: int | None, rest: str) -> tuple[int, ...] | None:
        """Ids of the marked text that follows a completion and the end token that was sampled, or None where it does
        not begin with that."""
        if end_id is None:
            return self._encode(rest)
        end_text = self._end_texts[end_id]
        if not end_text or not rest.startswith(end_text):
            return None
        ids = self._encode(rest)
        if ids and ids[0] == end_id:
            return ids[1:]
        return self._encode(rest[len(end_text) :])

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of marked text."""
        if self._special.is_marked(text):
            return self._special.encode(text)
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._decoder is not None:
            return str(self._decoder.decode(ids, skip_special_tokens=False))
        text = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def renderer_of(model: ModelConfig, folder: Path) -> Renderer:
    """The renderer of a run's model, which is prepared in ``folder``. Raises :class:`ConfigurationError`."""
    tokenizer, ends = load_tokenizer(folder, model.chat_template, model.trust_remote_code)
    return Renderer(tokenizer, ends, model.chat_template or model.source)


def _said(messages: Sequence[Message], given: int, replies: Sequence[str] | None) -> Iterator[Message]:
    """``messages`` without the policy's replies: those after the first ``given`` that are in ``replies``, or all where
    that is None. The thoughts of other replies there may be the policy's, too."""
    for place, message in enumerate(messages):
        if message.role != "assistant" or place < given:
            yield message
        elif replies is not None and not any(message.content in reply for reply in replies):
            yield replace(message, content=message.content.rpartition("</think>")[2])
