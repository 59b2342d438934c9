"""Tasks, simulators and checks of the Berkeley Function Calling Leaderboard's multi-turn categories (package
bfcl-eval). Nothing that a model wrote is evaluated: a call is a name and JSON arguments, looked up in a whitelist.
"""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from actors.adapters.catalogue import package

NUMBER_MAX = 10.0**15
SMALL_NUMBER_MAX = 1000
"""Bound of ``precision`` and ``exponent``, which decide how much a calculation costs."""
TEXT_MAX = 20_000
_CONSTANTS = "bfcl_eval.constants.executable_backend_config"
_CHECKER = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"
_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


@dataclass(frozen=True, slots=True)
class Call:
    """One function call of the ground truth; ``arguments`` are literals."""

    name: str
    positional: tuple[Any, ...]
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One task of the benchmark."""

    questions: tuple[str, ...]
    """Messages of the user, one for each turn; empty where functions are added instead."""
    classes: tuple[str, ...]
    """Names of the simulators."""
    initial_config: Mapping[str, Any]
    held_back: Mapping[int, tuple[str, ...]]
    """Functions that appear only in that turn."""
    truth: tuple[tuple[Call, ...], ...]
    """Calls of each turn."""


@cache
def rows(category: str) -> tuple[Row, ...]:
    """All tasks of ``base``, ``miss_func``, ``miss_param`` or ``long_context``, in the order of the file."""
    name = f"BFCL_v4_multi_turn_{category}.json"
    answers = {line["id"]: line["ground_truth"] for line in _lines(f"possible_answer/{name}")}
    return tuple(
        Row(
            questions=tuple("\n".join(m["content"] for m in turn) for turn in line["question"]),
            classes=tuple(line["involved_classes"]),
            initial_config=line["initial_config"],
            held_back={int(turn): tuple(names) for turn, names in line.get("missed_function", {}).items()},
            truth=tuple(tuple(parse_call(text) for text in turn) for turn in answers[line["id"]]),
        )
        for line in _lines(name)
    )


def parse_call(text: str) -> Call:
    """A call of the ground truth (``cd(folder='x')``), read without evaluating it. Raises :class:`ValueError`."""
    node = ast.parse(text.strip(), mode="eval").body
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and all(k.arg for k in node.keywords)):
        raise ValueError(f"expected a call of literals, got {text!r}")
    return Call(
        node.func.id,
        tuple(ast.literal_eval(argument) for argument in node.args),
        {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords},
    )


@cache
def schemas(class_name: str) -> tuple[dict[str, Any], ...]:
    """Name, description and JSON schema of the functions that a simulator offers."""
    files = importlib.import_module(_CONSTANTS).MULTI_TURN_FUNC_DOC_FILE_MAPPING
    return tuple(
        {
            "name": line["name"],
            "description": line["description"].rpartition("Tool description: ")[2],
            "parameters": _schema(line["parameters"]),
        }
        for line in _lines(f"multi_turn_func_doc/{files[class_name]}")
    )


class Simulators:
    """The simulators of one episode, whose state the calls change."""

    def __init__(self, row: Row, long_context: bool) -> None:
        constants = importlib.import_module(_CONSTANTS)
        self.instances: dict[str, Any] = {}
        self._methods: dict[str, Callable[..., Any]] = {}
        for name in row.classes:
            instance = getattr(importlib.import_module(constants.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in constants.STATELESS_CLASSES:
                instance._load_scenario(copy.deepcopy(row.initial_config.get(name, {})), long_context=long_context)
            self.instances[name] = instance
            # Where two simulators have a method of one name, the benchmark calls the later one's.
            self._methods |= {schema["name"]: getattr(instance, schema["name"]) for schema in schemas(name)}

    def named(self, call: Call) -> dict[str, Any]:
        """The arguments of a call of the ground truth by name."""
        signature = inspect.signature(self._methods[call.name])
        return dict(signature.bind_partial(*call.positional, **call.arguments).arguments)

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run one call; returns its result in the benchmark's form. Never raises for what the policy wrote."""
        method = self._methods.get(name)
        if method is None:
            return f"Error during execution: there is no function {name!r}"
        try:
            _check(arguments)
            result = method(**arguments)
        except Exception as error:
            return f"Error during execution: {error}"
        if isinstance(result, dict):
            with suppress(TypeError, ValueError):
                return json.dumps(result)
        return str(result)


def turn_is_right(actual: Simulators, truth: Simulators, all_answers: Sequence[str], right_answers: list[str]) -> bool:
    """The benchmark's own check of one turn: equal states, and every answer of the ground truth among the answers so
    far."""
    checker = importlib.import_module(_CHECKER)
    if not checker.state_checker(actual.instances, truth.instances)["valid"]:
        return False
    return bool(checker.response_checker(list(all_answers), right_answers, 0)["valid"])


def _lines(path: str) -> list[dict[str, Any]]:
    folder = Path(package("bfcl").__file__).parent / "data"
    with (folder / path).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _schema(value: Any) -> Any:
    """The benchmark's Python types as JSON schema."""
    if isinstance(value, list):
        return [_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("type")
    changed = {key: _schema(item) for key, item in value.items()}
    return {**changed, "type": _TYPES.get(kind, kind)} if isinstance(kind, str) else changed


def _check(value: Any, name: str = "") -> None:
    """Refuse arguments with which a simulator would never return. Raises :class:`ValueError`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check(item, str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, name)
    elif isinstance(value, str) and len(value) > TEXT_MAX:
        raise ValueError(f"{name} is longer than {TEXT_MAX} characters")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        limit = SMALL_NUMBER_MAX if name in ("precision", "exponent") else NUMBER_MAX
        if not -limit <= value <= limit:
            raise ValueError(f"{name} must be between -{limit:g} and {limit:g}")
