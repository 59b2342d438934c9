"""``calculator``: exact arithmetic by way of ``ast``, with bounds on everything. Nothing is evaluated by Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from actors.tools.base import Tool, ToolError, ToolResult

CHARACTERS_MAX = 1_000
BITS_MAX = 8_192
"""Bits of numerator and denominator of any value on the way: about 2,466 digits."""
NODES_MAX = 500
_Number = Fraction | float

_BINARY: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "min": min,
    "max": max,
    "round": lambda x, digits=Fraction(0): round(Fraction(x), _small(digits)),
    "floor": lambda x: Fraction(math.floor(x)),
    "ceil": lambda x: Fraction(math.ceil(x)),
    "sqrt": lambda x: _root(x),
    "gcd": lambda a, b: Fraction(math.gcd(_whole(a), _whole(b))),
    "factorial": lambda n: Fraction(math.factorial(_small(n))),
}
_NAMES: Mapping[str, float] = {"pi": math.pi, "e": math.e}


class Calculator(Tool):
    """Integers and fractions are exact; square roots, ``pi`` and ``e`` are floats."""

    name = "calculator"
    description = (
        "Evaluate an arithmetic expression with + - * / // % ** and parentheses, and the functions "
        "abs, min, max, round, floor, ceil, sqrt, gcd, factorial."
    )
    parameters: Mapping[str, Any] = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "For example (12 + 30) * 2"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    async def execute(self, episode_key: str, arguments: Mapping[str, Any]) -> ToolResult:
        return ToolResult(calculate(arguments["expression"]))


def calculate(expression: str) -> str:
    """The value as text. Raises :class:`ToolError` that says what is wrong.

    >>> calculate("2 ** 64 / 3 * 3"), calculate("10 / 4"), calculate("1 / 3")
    ('18446744073709551616', '2.5', '0.3333333333333333')
    """
    if len(expression) > CHARACTERS_MAX:
        raise ToolError(f"expected at most {CHARACTERS_MAX} characters, got {len(expression)}")
    text = expression.strip().replace("^", "**").replace("×", "*").replace("÷", "/").replace("−", "-")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ToolError("that is not an arithmetic expression") from None
    if sum(1 for _ in ast.walk(tree)) > NODES_MAX:
        raise ToolError("the expression is too long")
    try:
        return _text(_value(tree.body))
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except (OverflowError, ValueError, RecursionError, TypeError) as error:
        raise ToolError(f"that cannot be computed ({error})") from None


def _value(node: ast.expr) -> _Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return _bounded(Fraction(str(node.value)))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            return _power(left, right)
        if type(node.op) in _BINARY:
            result: _Number | int = _BINARY[type(node.op)](left, right)
            return _bounded(Fraction(result) if isinstance(result, int) else result)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise ToolError(f"there is no function {node.func.id[:40]!r}; there are {', '.join(_FUNCTIONS)}")
        result = _FUNCTIONS[node.func.id](*map(_value, node.args))
        return _bounded(Fraction(result) if isinstance(result, int) else result)
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    raise ToolError("only numbers, + - * / // % **, parentheses and a few functions are understood")


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) > BITS_MAX or bits * abs(exponent) > BITS_MAX:
            raise ToolError("the number is too large")
        return Fraction(base**exponent)
    if base < 0:
        raise ToolError("the root of a negative number is not a real number")
    return math.pow(float(base), float(exponent))


def _bounded(value: _Number) -> _Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS_MAX:
            raise ToolError("the number is too large")
    elif not math.isfinite(value):
        raise ToolError("the number is too large")
    return value


def _text(value: _Number) -> str:
    if isinstance(value, Fraction):
        return str(value.numerator) if value.denominator == 1 else repr(float(value))
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _whole(value: _Number) -> int:
    if value != int(value):
        raise ToolError("expected a whole number")
    return int(value)


def _small(value: _Number) -> int:
    number = _whole(value)
    if abs(number) > 500:
        raise ToolError("the number is too large")
    return number


def _root(value: _Number) -> _Number:
    if value < 0:
        raise ToolError("the root of a negative number is not a real number")
    if isinstance(value, Fraction):
        top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
        if top * top == value.numerator and bottom * bottom == value.denominator:
            return Fraction(top, bottom)
    return math.sqrt(value)
