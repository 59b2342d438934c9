"""A configuration as YAML with the documentation of each key as comments."""

from __future__ import annotations

import textwrap
from typing import Any

from pydantic import BaseModel

from pipeline.config import yamls
from pipeline.config.load import dump
from pipeline.config.run import RunConfig

_WIDTH = 110


def show(config: RunConfig, plain: bool = False) -> str:
    """YAML that loads as an equal configuration; without ``plain``, every key has its docstring above it."""
    return dump(config) if plain else "\n".join(_section(config, 0)) + "\n"


def _section(model: BaseModel, depth: int) -> list[str]:
    lines: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        documentation = field.description or (
            type(value).__doc__ if depth == 0 and isinstance(value, BaseModel) else ""
        )
        if depth == 0 and lines:
            lines.append("")
        lines += _comment(documentation or "", depth)
        lines += _entry(name, value, depth)
    return lines


def _entry(name: str, value: Any, depth: int) -> list[str]:
    indent = "  " * depth
    if isinstance(value, BaseModel):
        return [f"{indent}{name}:", *_section(value, depth + 1)]
    if isinstance(value, dict) and value and all(isinstance(v, BaseModel) for v in value.values()):
        return [f"{indent}{name}:", *(line for key, v in value.items() for line in _entry(_key(key), v, depth + 1))]
    if isinstance(value, tuple):
        value = [item.model_dump(mode="python") if isinstance(item, BaseModel) else item for item in value]
    text = yamls.dump({name: value}).rstrip("\n")
    return [indent + line if line else line for line in text.split("\n")]


def _key(key: str) -> str:
    return yamls.dump({key: 0}).rsplit(":", 1)[0]


def _comment(text: str, depth: int) -> list[str]:
    indent = "  " * depth
    words = " ".join(text.replace("``", "").split())
    return [f"{indent}# {line}" for line in textwrap.wrap(words, _WIDTH - len(indent) - 2)]
