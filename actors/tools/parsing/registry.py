"""Parsers by name, and the choice of ``auto`` by what the chat template writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.tools.parsing.base import Parsed, Thinking, ToolFormat, ToolSchema
from actors.tools.parsing.formats import GEMMA, JSON_FORMATS, PYTHONIC
from actors.tools.parsing.libraries import Parse, transformers_parser, vllm_parser
from actors.tools.parsing.partial import PartialContent
from actors.tools.parsing.probe import TemplateProbe
from actors.tools.parsing.tag_formats import QWEN, TAG_FORMATS
from pipeline.errors import ConfigurationError

FORMATS: dict[str, ToolFormat] = {**JSON_FORMATS, **TAG_FORMATS, "pythonic": PYTHONIC, "gemma": GEMMA, "qwen": QWEN}
"""``qwen`` reads ``hermes`` and ``qwen_xml``. ``auto`` takes the first that reads what the template writes."""


@dataclass(frozen=True, slots=True)
class Parser:
    """Parses replies: the first of ``reads`` that finds a call counts."""

    reads: tuple[Parse, ...]
    thinking: Thinking = field(default_factory=Thinking)
    forms: tuple[ToolFormat, ...] = ()
    """The forms that ``reads`` are of; empty where another library parses, so that nobody knows where a call begins."""

    def __call__(self, text: str, tools: Sequence[ToolSchema]) -> Parsed:
        """The reply taken apart."""
        parsed = Parsed(text)
        for read in self.reads:
            parsed = read(text, tools, self.thinking)
            if parsed.calls:
                break
        return parsed

    def partial(self) -> Callable[[str], int]:
        """For one reply: the length of its beginning that is content, from all of it so far."""
        contents = [PartialContent(form, self.thinking) for form in self.forms]
        return lambda text: min((content.known(text) for content in contents), default=0)


def parser_of(name: str, template: str, tokenizer: Any, where: str = "parser", model: str = "") -> Parser:
    """The parser with this name, which leaves out what the policy thinks. ``where`` and ``model`` are named in errors.
    Raises :class:`ConfigurationError`."""
    found = format_of_template(template, tokenizer, where, model) if name == "auto" else name
    probe = None if tokenizer is None else TemplateProbe(tokenizer)
    thinking = Thinking() if probe is None else probe.thinking
    # A template that leaves the tools out: the prompt asks for the form of Hermes.
    names = (found, "hermes") if name == "auto" and probe is not None and not probe.tells_tools else (found,)
    forms = tuple(FORMATS[one] for one in names) if found in FORMATS else ()
    return Parser(tuple(_parser(one, tokenizer, where) for one in names), thinking, forms)


def _parser(name: str, tokenizer: Any, where: str) -> Parse:
    if name in FORMATS:
        return FORMATS[name].parse
    if name == "transformers":
        return transformers_parser(tokenizer, where)
    if name.startswith("vllm:"):
        return vllm_parser(name.removeprefix("vllm:"), tokenizer, where)
    raise ConfigurationError(
        f"{where}: expected auto, transformers, vllm:NAME or one of {', '.join(FORMATS)}, got {name!r}"
    )


def marked_formats(template: str, tokenizer: Any) -> list[str]:
    """Names of the forms whose marks the chat template or the tokenizer knows."""
    known = " ".join([template, *getattr(tokenizer, "added_tokens_encoder", {})])
    return [name for name, form in FORMATS.items() if form.mark.search(known)]


def format_of_template(template: str, tokenizer: Any = None, where: str = "parser", model: str = "") -> str:
    """Name of the parser that reads the calls which a tokenizer's chat template writes, each of them as it was given.

    The tokenizer's own ``response_template`` comes first. ``hermes`` for a template that writes neither tools nor
    calls: the prompt then asks for that form (:mod:`actors.rendering.tool_messages`). ``qwen`` without a tokenizer,
    where an endpoint states the calls.

    Raises :class:`ConfigurationError` for a template whose calls no parser reads, and for one that lists tools and
    leaves their calls out."""
    if tokenizer is None:
        return "qwen"
    probe = TemplateProbe(tokenizer)
    replies = probe.replies()
    own = ["transformers"] if getattr(tokenizer, "response_template", None) else []
    for name in (*own, *FORMATS) if replies else own:
        parse = _parser(name, tokenizer, where)
        if all(reply.is_read_by(parse, probe.thinking) for reply in replies):
            return name
    if not replies and not probe.tells_tools:
        return "hermes"
    if replies:
        fault = f"writes a call in a form that no parser reads: {replies[0].text[:200]!a}"
    else:
        fault = f"lists the tools and writes no call of them{f' ({probe.failure[:200]})' if probe.failure else ''}"
    marked = marked_formats(template, tokenizer)
    hint = f"; its marks are those of {' or '.join(marked)}" if marked else ""
    raise ConfigurationError(
        f"{where}: auto found no parser: the chat template of {model or tokenizer.name_or_path or 'the model'} "
        f"{fault}. Set the parser to the form that the model writes (docs/AGENTS.md lists them){hint}"
    )
