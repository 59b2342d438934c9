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

A tokenizer cuts its input at special tokens before it does anything else, so the rest is tokenised behind the
end-of-turn token and the ids are those of the whole text. Only a template without special tokens around turns can
give other ids than a tokenisation of the whole text would; the ids that are recorded are those that the engine sees
in either case.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from actors.rendering.special_text import Span, SpecialText
from actors.rendering.tool_messages import ToolSchema, style_of
from pipeline.cli.viewer.vocabulary import bytes_of_tokens
from pipeline.errors import ConfigurationError, boundary
from pipeline.schema import Message

RENDERER = "renderer"
_MARK = "afterplay"
PLAIN = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Tokenizer classes that add nothing to ``tokenizer.json``."""


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

    def __init__(self, tokenizer: Any, end_ids: Iterable[int] = ()) -> None:
        """``end_ids``: more end-of-turn tokens, beside the tokenizer's and the template's.

        Raises :class:`ConfigurationError` for a tokenizer without a chat template or without any end-of-turn token.
        """
        self._tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise ConfigurationError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no chat template: "
                "set model.chat_template to a Jinja file"
            )
        self._backend = _plain_backend(tokenizer)
        self._decoder = _plain_decoder(tokenizer, self._backend)
        self._bytes_of = bytes_of_tokens(tokenizer)
        self._special_ids = frozenset(int(i) for i in tokenizer.all_special_ids)
        self._special = SpecialText(tokenizer, self._backend, self.template)
        self._style = style_of(self.template, self._render)
        ends = {int(i) for i in end_ids}
        if tokenizer.eos_token_id is not None:
            ends.add(int(tokenizer.eos_token_id))
        template_end = self._template_end()
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
    def tokenizer(self) -> Any:
        """For parsers that want the tokenizer itself."""
        return self._tokenizer

    @property
    def template(self) -> str:
        """The chat template's source: the one for tools where the tokenizer has several."""
        template = self._tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("tool_use") or template.get("default") or next(iter(template.values()), "")
        return str(template)

    def start(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), sampled: Sequence[Completed] = ()
    ) -> Conversation:
        """The first prompt. ``tools``: the schemas of what may be called, rendered as the template does. ``sampled``:
        completions of the policy that stand in ``messages`` as replies; other replies are the text of others."""
        with boundary(RENDERER):
            marked = tuple(self._special.mark_all(tool) for tool in tools)
        return self._started(messages, marked, tuple(reply for reply in sampled if reply.special))

    def restart(self, conversation: Conversation, messages: Sequence[Message]) -> Conversation:
        """The next branch, which begins with a rewritten history."""
        started = self._started(messages, conversation.tools, conversation.sampled)
        return replace(started, branch=conversation.branch + 1)

    def _started(
        self, messages: Sequence[Message], tools: tuple[ToolSchema, ...], sampled: tuple[Completed, ...]
    ) -> Conversation:
        with boundary(RENDERER):
            marked = self._apply(messages, tools, sampled)
            ids = self._encode(marked)
            return Conversation(tuple(messages), self._special.restore(marked), ids, ids, 0, tools, sampled)

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
        return Conversation(messages, text, ids, added, branch, conversation.tools, sampled)

    def _whole(
        self,
        conversation: Conversation,
        completed: Completed,
        new: Sequence[Message],
        parsed_reply: Message | None,
        sampled: Sequence[Completed],
    ) -> tuple[tuple[Message, ...], str]:
        """The whole conversation and its marked text: the reply as it was sampled, or ``parsed_reply`` where that is
        refused."""
        messages = (*conversation.messages, Message("assistant", completed.text), *new)
        try:
            return messages, self._apply(messages, conversation.tools, sampled)
        except Exception:
            if parsed_reply is None:
                raise
            messages = (*conversation.messages, parsed_reply, *new)
            return messages, self._apply(messages, conversation.tools, sampled)

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
        end, rest = self._between(new, parsed_reply)
        ids = self._encode(end + rest)
        sampled_end = self._end_texts[completed.end_id] if completed.end_id is not None else ""
        if end and sampled_end:
            end = sampled_end
            ids = ids[1:] if ids and ids[0] == self._usual_end else self._encode(rest)
        messages = (*conversation.messages, Message("assistant", completed.text), *new)
        return Conversation(
            messages,
            conversation.text + completed.text + end + self._special.restore(rest),
            (*conversation.prompt_ids, *completion_ids, *ids),
            ids,
            conversation.branch,
            conversation.tools,
            sampled,
        )

    def _between(self, new: Sequence[Message], parsed_reply: Message | None) -> tuple[str, str]:
        """(end-of-turn text, marked text that follows it up to the next reply). No end-of-turn text where the template
        has none."""
        forms = [Message("assistant", _MARK)]
        if parsed_reply is not None:
            forms.append(replace(parsed_reply, content=_MARK))
        failure: Exception | None = None
        for form in forms:
            try:
                text = self._apply([Message("user", "x"), form, *new])
            except Exception as error:
                failure = error
                continue
            tail = text.partition(_MARK)[2]
            end = self._end_texts[self._usual_end] if self._has_end else ""
            if not end:
                return "", tail
            _, found, rest = tail.partition(end)
            if found:
                return end, rest
        raise ValueError(
            f"the chat template closes no turn of the assistant before {[m.role for m in new]}"
        ) from failure

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

    def _template_end(self) -> int | None:
        """The special token that the template puts right after an assistant's content."""
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
        except Exception as error:
            raise ConfigurationError(
                f"the chat template cannot render a user and an assistant message: {type(error).__name__}: {error}"
            ) from error
        _, found, tail = text.rpartition(_MARK)
        ids = self._encode(tail) if found and tail else ()
        return ids[0] if ids and ids[0] in self._special_ids else None

    @cached_property
    def _in_replies(self) -> frozenset[str]:
        """Special texts that the template writes inside a reply, such as those around thoughts and tool calls."""
        user = {"role": "user", "content": "x"}
        call = {"id": "000000000", "type": "function", "function": {"name": "x", "arguments": {"x": "x"}}}
        reply: dict[str, Any] = {"role": "assistant", "content": _MARK}
        prompt, found = self._render([user]), set[str]()
        for form in (reply, reply | {"reasoning_content": _MARK}, reply | {"thinking": _MARK, "tool_calls": [call]}):
            try:
                text = self._tokenizer.apply_chat_template([user, form], tokenize=False, add_generation_prompt=False)
            except Exception:
                continue
            shared = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
            found.update(self._special.texts_in(text[shared:]))
        return frozenset(found.difference(self._end_texts.values()))

    def _apply(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] = (), sampled: Sequence[Completed] = ()
    ) -> str:
        """The template's text for ``messages``, which are marked first, and for ``tools``, which are marked."""
        replies = [(reply.text, reply.special) for reply in sampled]
        marked = [self._special.mark_message(message, replies) for message in messages]
        shown = self._style.messages(marked, tools) if tools or _has_answers(messages) else marked
        text = self._render([m.as_template_input() for m in shown], self._style.tools(tools))
        changed = any(a is not b for a, b in zip(messages, marked, strict=True))
        return self._special.unquoted(text) if changed else text

    def _render(self, messages: list[dict[str, Any]], tools: list[ToolSchema] | None = None) -> str:
        options = {"tools": tools} if tools else {}
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
        assert isinstance(text, str)
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        """Ids of marked text."""
        if self._special.is_marked(text):
            return self._special.encode(text)
        if self._backend is not None:
            return tuple(self._backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _decode(self, ids: list[int]) -> str:
        if not ids:
            return ""
        if self._decoder is not None:
            return str(self._decoder.decode(ids, skip_special_tokens=False))
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _has_answers(messages: Sequence[Message]) -> bool:
    return any(message.role == "tool" for message in messages)


def _plain_backend(tokenizer: Any) -> Any | None:
    """The Rust tokenizer itself, where there is one: the same ids at a quarter of the cost, and no thread pool per
    call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return None
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = False
    return backend


def _plain_decoder(tokenizer: Any, backend: Any | None) -> Any | None:
    """The Rust tokenizer where the tokenizer decodes as transformers' own class does: the same text without a look at
    the type of every id, which is 0.22 instead of 0.88 ms for 1,000 tokens."""
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast as Plain

    kind = type(tokenizer)
    if not isinstance(tokenizer, Plain) or kind.decode is not Plain.decode or kind._decode is not Plain._decode:
        return None
    return backend


def load_tokenizer(
    folder: Path, chat_template: str | None = None, trust_remote_code: bool = False
) -> tuple[Any, tuple[int, ...]]:
    """The tokenizer of a prepared model folder and the end-of-turn ids of its ``generation_config.json``.

    Raises :class:`ConfigurationError` when the folder or the template file cannot be read.
    """
    try:
        tokenizer = _load(folder, trust_remote_code)
    except Exception as error:
        raise ConfigurationError(
            f"no tokenizer can be loaded from {folder}: {error}; prepare the model first"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text()
        except OSError as error:
            raise ConfigurationError(f"model.chat_template: {error}") from error
    return tokenizer, _generation_ends(folder / "generation_config.json")


def _load(folder: Path, trust_remote_code: bool) -> Any:
    """transformers' tokenizer. ``AutoTokenizer`` imports torch (4 s of CPU, 340 MB an actor), so a folder whose
    tokenizer is wholly its ``tokenizer.json`` is loaded without it."""
    if (folder / "tokenizer.json").is_file() and _json_of(folder / "tokenizer_config.json").get(
        "tokenizer_class"
    ) in PLAIN:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)


def _json_of(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _generation_ends(path: Path) -> tuple[int, ...]:
    value = _json_of(path).get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))
