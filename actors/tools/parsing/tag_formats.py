"""Forms of calls whose arguments stand in tags, each between tags of its own.

Text stands there as it is, and other values as JSON or as Python writes them, so that only the tool's schema tells what
``7`` is (:mod:`actors.tools.parsing.argument_types`). The forms are those of the chat templates published with
Qwen3-Coder (also Qwen 3.5 and Nemotron 3), Seed-OSS, GLM, MiniMax-M2, MiniCPM5, DeepSeek V3.2 and V4, and Muse::

    <tool_call>
    <function=add>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from actors.tools.parsing.argument_types import typed, untyped
from actors.tools.parsing.base import CallError, ToolCall, ToolFormat, ToolSchema, Unreadable, call, schema_in, shown
from actors.tools.parsing.formats import HERMES

_BLANKS = {"NAME": r"(?P<name>[^<>{}\"\n]+)", "KEY": r"(?P<key>[^<>\"\n]+)", "TYPE": "(?P<type>true|false)"}
_CDATA = re.compile(r"<!\[CDATA\[(.*?)\]\]>", re.S)


@dataclass(frozen=True, slots=True)
class Tags:
    """``before`` (``head`` (``key`` value ``value_end``)... ``end``)... ``after``, as a template writes it. White space
    between tags may differ in what is read."""

    before: str
    head: str
    """With NAME."""
    key: str
    """With KEY, and with TYPE where the template says of each value whether it is text (``true``, ``false``)."""
    value_end: str
    end: str
    after: str
    several: bool = False
    """Calls of one reply stand in one frame of ``before`` and ``after``."""
    lines: bool = False
    """A value stands on lines of its own."""
    address: str = ""
    """Pattern of what belongs to the calls in front of ``before``."""

    def format(self) -> ToolFormat:
        """Parser and writer of this form."""
        head, key, end = map(_pattern, (self.head, self.key, self.end))
        value_end, after = self.value_end.strip(), self.after.strip()

        def one(text: str, found: re.Match[str], tools: Sequence[ToolSchema]) -> tuple[ToolCall, int]:
            name, at = found["name"].strip(), found.end()
            schema = schema_in(tools, name)
            arguments: dict[str, Any] = {}
            while (begun := key.match(text, at)) is not None:
                ended = text.find(value_end, begun.end())
                if ended < 0:
                    raise Unreadable(f"the parameter {shown(begun['key'])} is not closed")
                value = text[begun.end() : ended]
                value = value.removeprefix("\n").removesuffix("\n") if self.lines else value
                arguments[begun["key"].strip()] = _value(value, begun, schema)
                at = ended + len(value_end)
            finished = end.match(text, at)
            if finished is None:
                raise Unreadable(f"expected {self.end} after the parameters, got {shown(text[at : at + 80])}")
            return call(name, arguments), finished.end()

        def read(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
            found = head.match(text, at)
            if found is None:
                raise Unreadable(f"expected the name of a tool, got {shown(text[at : at + 80])}")
            calls: list[ToolCall | CallError] = []
            while found is not None:
                done, at = one(text, found, tools)
                calls.append(done)
                found = head.match(text, at)
            rest = text[at : at + 64 + len(after)].lstrip()
            if rest and not rest.startswith(after):
                raise Unreadable(f"expected {after} after the call")
            return calls, at

        mark = re.escape(self.before.strip()) or f"(?={re.escape(self.head.partition('NAME')[0].strip())})"
        return ToolFormat(re.compile(self.address + mark), read, self.render, close=after or self.end.strip())

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Calls as the template writes them."""
        written = [self._written(call) for call in calls]
        if self.several:
            return self.before + "\n".join(written) + self.after
        return "\n".join(self.before + one + self.after for one in written)

    def _written(self, call: ToolCall) -> str:
        parts = [self.head.replace("NAME", call.name, 1)]
        for name, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            key = self.key.replace("TYPE", "true" if isinstance(value, str) else "false").replace("KEY", name, 1)
            parts += [key, f"\n{text}\n" if self.lines else text, self.value_end]
        return "".join(parts) + self.end


def _pattern(written: str) -> re.Pattern[str]:
    text = r"\s*".join(["", *map(re.escape, written.split())])
    for blank, pattern in _BLANKS.items():
        text = text.replace(blank, pattern, 1)
    return re.compile(text)


def _value(text: str, begun: re.Match[str], schema: Any) -> Any:
    if (is_text := begun.groupdict().get("type")) is not None:
        return text if is_text == "true" else untyped(text)
    if (quoted := _CDATA.fullmatch(text)) is not None:
        return quoted[1]
    return typed(text, schema, begun["key"].strip())


def _dsml(frame: str) -> ToolFormat:
    return Tags(
        f"<｜DSML｜{frame}>\n",
        '<｜DSML｜invoke name="NAME">\n',
        '<｜DSML｜parameter name="KEY" string="TYPE">',
        "</｜DSML｜parameter>\n",
        "</｜DSML｜invoke>",
        f"\n</｜DSML｜{frame}>",
        several=True,
    ).format()


_QWEN = ("<function=NAME>\n", "<parameter=KEY>", "</parameter>\n", "</function>")
TAG_FORMATS = {
    "qwen_xml": Tags("<tool_call>\n", *_QWEN, "\n</tool_call>", lines=True).format(),
    "seed": Tags("<seed:tool_call>\n", *_QWEN, "\n</seed:tool_call>").format(),
    "glm": Tags(
        "", "<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n", "</tool_call>", ""
    ).format(),
    "minimax": Tags(
        "<minimax:tool_call>\n",
        '<invoke name="NAME">\n',
        '<parameter name="KEY">',
        "</parameter>\n",
        "</invoke>",
        "\n</minimax:tool_call>",
        several=True,
    ).format(),
    "minicpm": Tags("", '<function name="NAME">', '<param name="KEY">', "</param>", "</function>", "").format(),
    "dsml": _dsml("function_calls"),
    "dsml_v4": _dsml("tool_calls"),
    "muse": Tags(
        "<atem:function_calls>\n",
        '<atem:invoke name="NAME">\n',
        '<atem:parameter name="KEY">',
        "</atem:parameter>\n",
        "</atem:invoke>",
        "\n</atem:function_calls>",
        address=r"(?:(?:<\|start\|>assistant)?\s{0,8}to=[\w.\-]{1,200}<\|message\|>\s{0,8})?",
    ).format(),
}


def _read_either(text: str, at: int, tools: Sequence[ToolSchema]) -> tuple[list[ToolCall | CallError], int]:
    in_tags = text[at : at + 64].lstrip().startswith("<function=")
    return (TAG_FORMATS["qwen_xml"] if in_tags else HERMES).read(text, at, tools)


QWEN = ToolFormat(HERMES.mark, _read_either, HERMES.render, close=HERMES.close)
"""Both of Qwen's forms, block by block."""
