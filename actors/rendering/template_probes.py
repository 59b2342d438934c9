"""A chat template and its abilities, found by rendering conversations of marked texts.

A template takes a conversation in one form or another (:class:`actors.rendering.tool_messages.Form`), and may leave
out a part of it (:mod:`actors.rendering.said`). Which forms it takes whole is found once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from actors.rendering.said import lost, lost_schema
from actors.rendering.special_text import Span, SpecialText
from actors.rendering.tool_messages import Form, described, forms_of_tools, with_calls_in_text, with_system_text
from actors.tools.parsing.base import ToolFormat, ToolSchema, stated_call
from actors.tools.parsing.formats import HERMES
from actors.tools.parsing.registry import FORMATS, format_of_template, marked_formats
from pipeline.errors import ConfigurationError
from pipeline.schema import Message

MARK, _THOUGHT = "afterplaymark", "afterplaythought"


class ProbedTemplate:
    """The chat template of one tokenizer."""

    def __init__(self, tokenizer: Any, special: SpecialText, name: str) -> None:
        """``name``: for errors. Raises :class:`ConfigurationError` for a template that leaves out what is said."""
        self._tokenizer = tokenizer
        self._special = special
        self._name = name
        self.source = template_source(tokenizer)
        self.base = self._find_base()
        """The form of a conversation without tools."""
        system, user = Message("system", _texts("system")), Message("user", _texts("user"))
        schema = {"type": "object", "properties": {_texts("name"): {"type": "string", "description": _texts("about")}}}
        function = {"name": _texts("tool"), "description": _texts("use"), "parameters": schema}
        tools: list[ToolSchema] = [{"type": "function", "function": function}]
        self.schemas = any(self._takes([system, user], self.base, shown) for shown in (tools, described(tools)))
        """True if the template writes ``tools``."""

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        sampled: Sequence[tuple[str, Sequence[Span]]] = (),
        form: Form | None = None,
        closed: bool = False,
    ) -> str:
        """The template's text for ``messages``, which are marked first, and for ``tools``, which are marked. With the
        generation prompt, unless ``closed``. ``sampled``: text and special parts of completions of the policy."""
        marked = [self._special.mark_message(message, sampled) for message in messages]
        shown = with_system_text(marked, tools) if tools and not self.schemas else marked
        given = (form or self.base).messages(shown, self.as_text)
        text = self._render(given, list(tools) if tools and self.schemas else None, closed)
        changed = any(a is not b for a, b in zip(messages, marked, strict=True))
        return self._special.unquoted(text) if changed else text

    def _render(
        self, messages: list[dict[str, Any]], tools: list[ToolSchema] | None = None, closed: bool = False
    ) -> str:
        options: dict[str, Any] = {"tools": tools} if tools else {}
        several = self._tokenizer.chat_template
        if isinstance(several, dict) and "tool_use" in several:
            uses = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
            options |= {"chat_template": "tool_use"} if uses else {}
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not closed, **options
        )
        assert isinstance(text, str)
        return text

    def as_text(self, message: Message) -> Message:
        """A message with its calls in its content, as the policy writes them."""
        return with_calls_in_text(message, self._call_format) if message.extra.get("tool_calls") else message

    def forms_of(self, messages: Sequence[Message]) -> Sequence[Form | None]:
        """The forms in which ``messages`` may be rendered, in the order in which they are tried; None in the place of
        one that the template does not take."""
        forms: Sequence[Form | None] = self._plain_forms
        for message in messages:
            if message.extra and message.extra.get("tool_calls"):
                return self.forms_of_calls
            if message.role == "tool":
                forms = self.forms_of_answers
        return forms

    @cached_property
    def _plain_forms(self) -> tuple[Form, ...]:
        base = self.base
        return tuple(dict.fromkeys([base, replace(base, system=False, alternating=True)]))

    @cached_property
    def forms_of_answers(self) -> tuple[Form | None, ...]:
        answers = [Message("tool", _texts(f"answer{i}"), _answered(i)) for i in "ab"]
        said = [Message("user", _texts("user")), Message("assistant", _texts("reply"))]
        last = [Message("assistant", _texts("last")), Message("user", _texts("next"))]
        return self._forms_with_tools([[*said, *answers], [*said, answers[0], *last]])

    @cached_property
    def forms_of_calls(self) -> tuple[Form | None, ...]:
        calls = [_called(i) for i in "ab"]
        answers = [Message("tool", _texts(f"answer{i}"), _answered(i)) for i in "ab"]
        user, last = Message("user", _texts("user")), Message("assistant", _texts("last"))
        one, two = ({"tool_calls": calls[:n]} for n in (1, 2))
        return self._forms_with_tools(
            [
                [user, Message("assistant", "", one), answers[0]],
                [user, Message("assistant", "", two), *answers],
                [user, Message("assistant", _texts("reply"), one), answers[0], last, Message("user", _texts("next"))],
            ]
        )

    def _forms_with_tools(self, conversations: Sequence[Sequence[Message]]) -> tuple[Form | None, ...]:
        """The forms in which the template renders one of ``conversations`` whole, and the plainest one."""
        base = self.base
        forms = forms_of_tools(self.source, self.schemas, base)
        whole = [form if any(self._takes(said, form) for said in conversations) else None for form in forms]
        plainest = replace(base, calls="text", answers=False, system=False, alternating=True)
        return *whole, None if plainest in whole else plainest

    def _find_base(self) -> Form:
        """The form, by conversations of marked texts. Raises :class:`ConfigurationError` for a template that leaves out
        the user's messages in each form."""
        user, again = Message("user", _texts("user")), Message("user", _texts("next"))
        base = next((form for form in (Form(), Form(parts=True)) if self._talks(form, user, again)), None)
        if base is None:
            raise ConfigurationError(
                f"expected a chat template that renders what is said, but that of {self._name} leaves out a message of "
                "the user: set model.chat_template to a Jinja file that does not"
            )
        base = replace(base, system=self._takes([Message("system", _texts("system")), user], base))
        return replace(base, alternating=not self._takes([user, again], base))

    def _talks(self, form: Form, user: Message, again: Message) -> bool:
        """False where the user's part of a dialogue is missing. The longest that is not refused decides; a template
        that refuses a single message is found when it is used."""
        reply = Message("assistant", _texts("reply"))
        for said in ([user, reply, again], [user]):
            try:
                text = self._render(form.messages(said, self.as_text))
            except Exception:
                continue
            return lost([message for message in said if message is not reply], text) is None
        return not form.parts

    def _takes(self, messages: Sequence[Message], form: Form, tools: list[ToolSchema] | None = None) -> bool:
        """True if nothing is missing in the template's text for ``messages`` and ``tools``."""
        try:
            text = self._render(form.messages(messages, self.as_text), tools)
        except Exception:
            return False
        return lost(messages, text) is None and lost_schema(tools or (), text, str) is None

    @cached_property
    def _call_format(self) -> ToolFormat:
        """The form in which the policy writes calls: that of the template, or that whose mark the tokenizer knows, or
        Hermes."""
        if not self.schemas:
            return HERMES
        try:
            return FORMATS.get(format_of_template(self.source, self._tokenizer), HERMES)
        except ConfigurationError:
            marked = marked_formats(self.source, self._tokenizer)
            return FORMATS[marked[0]] if len(marked) == 1 else HERMES

    @cached_property
    def special_in_replies(self) -> frozenset[str]:
        """Special texts that the template writes inside a reply, such as those around thoughts and tool calls."""
        user, prompt, found = Message("user", "x"), self.apply([Message("user", "x")]), set[str]()
        for extra in ({}, {"reasoning_content": MARK}, {"thinking": MARK, "tool_calls": [_called("a")]}):
            try:
                text = self.apply([user, Message("assistant", MARK, extra)], form=self.base, closed=True)
            except Exception:
                continue
            shared = next((i for i, (a, b) in enumerate(zip(prompt, text, strict=False)) if a != b), len(prompt))
            found.update(self._special.texts_in(text[shared:]))
        return frozenset(found)

    @cached_property
    def opening(self) -> str:
        """The text that the template writes between the generation prompt and a reply, if there are special tokens in
        it: the policy samples it, and the template writes it again."""
        return self._before_content({})

    @cached_property
    def around_thoughts(self) -> tuple[str, str]:
        """The texts before and after the thoughts of a reply, up to a special token; empty where the template takes no
        thoughts."""
        before = self._before_content({"reasoning_content": _THOUGHT, "thinking": _THOUGHT})
        opening, found, closing = before.partition(_THOUGHT)
        closing = next(self._special.texts_in(closing), "")
        return (opening, closing) if found and opening and closing else ("", "")

    def _before_content(self, extra: Mapping[str, Any]) -> str:
        """The template's text from the generation prompt to a reply's content; empty without special tokens in it."""
        user = Message("user", "x")
        try:
            prompt = self.apply([user])
            text = self.apply([user, Message("assistant", MARK, extra)], closed=True)
        except Exception:
            return ""
        before, found, _ = text.partition(MARK)
        if not found or not before.startswith(prompt):
            return ""
        before = before[len(prompt) :]
        return before if any(True for _ in self._special.texts_in(before)) else ""

    def after_reply(self) -> str:
        """The template's text behind a reply at the end. Raises :class:`ConfigurationError`."""
        try:
            text = self.apply([Message("user", "x"), Message("assistant", MARK)], closed=True)
        except Exception as error:
            raise ConfigurationError(
                f"the chat template cannot render a user and an assistant message: {type(error).__name__}: {error}"
            ) from error
        return text.rpartition(MARK)[2]


def template_source(tokenizer: Any) -> str:
    """The chat template's source: the one for tools where the tokenizer has several."""
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default") or next(iter(template.values()), "")
    return str(template)


def _texts(word: str) -> str:
    """A text for probing that is in no template: without digits, because templates split at some."""
    return f"afterplay{word}mark"


def _called(word: str) -> dict[str, Any]:
    """A call for probing. Mistral's templates want ids of nine characters."""
    return stated_call(f"00000000{word}", _texts(f"call{word}"), {_texts(f"key{word}"): _texts(f"value{word}")})


def _answered(word: str) -> dict[str, str]:
    return {"name": _texts(f"call{word}"), "tool_call_id": f"00000000{word}"}
