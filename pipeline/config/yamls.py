"""YAML as run files mean it: 1.2's scalars, and no key twice.

PyYAML follows YAML 1.1, where ``1e-6`` is a string and ``no`` is a boolean. Here ``1e-6`` is a number, only ``true``
and ``false`` are booleans, and dates stay text. What :func:`dump` writes, :func:`parse` reads as the same value.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import yaml

from pipeline.errors import ConfigurationError

Lines = dict[tuple[str | int, ...], int]
"""Path of keys and list positions to the line, from 1, where its value begins."""

_RESOLVERS = (
    ("tag:yaml.org,2002:bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    (
        "tag:yaml.org,2002:float",
        r"^(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+|[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+0123456789.",
    ),
    ("tag:yaml.org,2002:int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    ("tag:yaml.org,2002:null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"^(?:<<)$", "<"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own form)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise _refusal(key_node, f"expected a text as key, got {key!r}")
            if key in seen and key != "<<":
                raise _refusal(
                    key_node, f"expected each key once, got {key!r} on line {seen[key]} and again on line {line}"
                )
            seen[key] = line
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text.lstrip("+-").startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Line separators that only YAML 1.1 knows must be escaped: elsewhere they would be read as spaces."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029\ufeff") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _represent_text)
for _tag, _pattern, _first in _RESOLVERS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_tag, re.compile(_pattern), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _refusal(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


def parse(text: str, where: str) -> Any:
    """The value of a document. Raises :class:`ConfigurationError` that names ``where``, the line and the problem."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = error.problem or str(error)
        raise ConfigurationError(f"{where}{line}: {problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigurationError(f"{where}: expected YAML, got {error}") from error


def lines(text: str) -> Lines:
    """Where each value of a document begins. The document must parse."""
    found: Lines = {}

    def walk(node: yaml.Node | None, path: tuple[str | int, ...]) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                found[(*path, key.value)] = key.start_mark.line + 1
                walk(value, (*path, key.value))
        elif isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                found[(*path, index)] = value.start_mark.line + 1
                walk(value, (*path, index))

    walk(yaml.compose(text, _Loader), ())
    return found


def dump(value: Any) -> str:
    """A document; paths become text, tuples lists."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def plain(value: Any) -> Any:
    """``value`` with nothing in it but what YAML has."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    return value
