"""Parsers by name, and the choice of ``auto`` by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from actors.tools.parsing.base import Parsed, ToolFormat, ToolSchema
from actors.tools.parsing.json_formats import HERMES, LLAMA, MISTRAL, QWEN, QWEN_XML
from actors.tools.parsing.libraries import transformers_parser, vllm_parser
from actors.tools.parsing.pythonic import PYTHONIC
from pipeline.errors import ConfigurationError

FORMATS: dict[str, ToolFormat] = {
    "hermes": HERMES,
    "qwen": QWEN,
    "qwen_xml": QWEN_XML,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
}
"""``qwen`` and ``qwen_xml`` read both of Qwen's forms; they differ in what they write."""


def parser_of(
    name: str, template: str, tokenizer: Any, where: str = "parser"
) -> Callable[[str, Sequence[ToolSchema]], Parsed]:
    """The parser with this name. Raises :class:`ConfigurationError`."""
    if name == "auto":
        name = format_of_template(template, tokenizer)
    if name in FORMATS:
        return FORMATS[name].parse
    if name == "transformers":
        return transformers_parser(tokenizer, where)
    if name.startswith("vllm:"):
        return vllm_parser(name.removeprefix("vllm:"), tokenizer, where)
    raise ConfigurationError(
        f"{where}: expected auto, transformers, vllm:NAME or one of {', '.join(FORMATS)}, got {name!r}"
    )


def format_of_template(template: str, tokenizer: Any = None) -> str:
    """Name of the format in which a chat template writes calls; ``hermes`` for one that writes none, because the
    schemas are then shown in that form (:mod:`actors.rendering.tool_messages`).

    >>> format_of_template("... '<tool_call>' ..."), format_of_template("... [TOOL_CALLS] ...")
    ('qwen', 'mistral')
    """
    for mark, name in (
        ("[TOOL_CALLS]", "mistral"),
        ("<function=", "qwen_xml"),
        ("<tool_call>", "qwen"),
        ("<|python_start|>", "pythonic"),
        ("<|python_tag|>", "llama"),
    ):
        if mark in template:
            return name
    if "<|start_header_id|>" in template and "ipython" in template:
        return "llama"
    return "transformers" if getattr(tokenizer, "response_template", None) else "hermes"
