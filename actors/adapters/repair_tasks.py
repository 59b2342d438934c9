"""Tasks of ``repair``: small functions, each with one fault, and examples that show it.

A fault is one change of an operator, a comparison, a whole number or a name. It counts only where the changed function
gives another result for some drawn arguments. No function has a ``while``, so that every changed one ends too.
"""

from __future__ import annotations

import ast
import inspect
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from textwrap import dedent
from typing import Any

EXAMPLES = 3
"""Examples in the text of a task; the first shows the fault."""
HIDDEN = 24
"""Examples that decide whether a repair is right."""
HELD_OUT = 8
"""Functions whose tasks are the ``eval`` split."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Example:
    arguments: Arguments
    expected: Any


@dataclass(frozen=True, slots=True)
class RepairTask:
    """One broken function."""

    name: str
    broken: str
    """Source of the broken function, with its docstring."""
    shown: tuple[Example, ...]
    hidden: tuple[Example, ...]


def second_largest(numbers: list[int]) -> int | None:
    """Give the second largest of the different numbers, or None where there is none."""
    largest = second = None
    for number in numbers:
        if largest is None or number > largest:
            largest, second = number, largest
        elif number != largest and (second is None or number > second):
            second = number
    return second


def longest_run(items: list[int]) -> int:
    """Give the length of the longest run of equal neighbours."""
    best = run = 0
    for index, item in enumerate(items):
        run = run + 1 if index > 0 and item == items[index - 1] else 1
        best = max(best, run)
    return best


def running_total(numbers: list[int]) -> list[int]:
    """Give the sum of the numbers up to each position."""
    total, totals = 0, []
    for number in numbers:
        total = total + number
        totals.append(total)
    return totals


def rotate(items: list[int], steps: int) -> list[int]:
    """Move every item ``steps`` places to the right; items that leave at the end come back at the start."""
    if not items:
        return []
    cut = (len(items) - steps) % len(items)
    return items[cut:] + items[:cut]


def clamp(number: int, low: int, high: int) -> int:
    """Give the number, or the bound that it is beyond."""
    return max(low, min(number, high))


def merge_sorted(left: list[int], right: list[int]) -> list[int]:
    """Merge two sorted lists into one sorted list."""
    merged, i, j = [], 0, 0
    for _ in range(len(left) + len(right)):
        if j == len(right) or (i < len(left) and left[i] <= right[j]):
            merged.append(left[i])
            i = i + 1
        else:
            merged.append(right[j])
            j = j + 1
    return merged


def is_leap(year: int) -> bool:
    """Tell whether a year of the Gregorian calendar has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def count_vowels(text: str) -> int:
    """Count the letters a, e, i, o and u, small or capital."""
    count = 0
    for letter in text.lower():
        if letter in "aeiou":
            count = count + 1
    return count


def is_palindrome(text: str) -> bool:
    """Tell whether the letters read the same backwards; case and other characters do not matter."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return all(letters[index] == letters[len(letters) - 1 - index] for index in range(len(letters) // 2))


def caesar(text: str, shift: int) -> str:
    """Shift each small letter in the alphabet, from z on to a; other characters stay."""
    out = ""
    for letter in text:
        out = out + (chr((ord(letter) - 97 + shift) % 26 + 97) if "a" <= letter <= "z" else letter)
    return out


def digits_sum(number: int) -> int:
    """Add up the decimal digits; a sign does not matter."""
    total = 0
    for digit in str(abs(number)):
        total = total + int(digit)
    return total


def primes_below(limit: int) -> list[int]:
    """List the primes below the limit."""
    primes: list[int] = []
    for number in range(2, limit):
        if all(number % prime != 0 for prime in primes):
            primes.append(number)
    return primes


def fibonacci(index: int) -> int:
    """Give the Fibonacci number of the index: 0, 1, 1, 2, 3, 5 and so on from index 0."""
    first, second = 0, 1
    for _ in range(index):
        first, second = second, first + second
    return first


def chunks(items: list[int], size: int) -> list[list[int]]:
    """Divide the items into lists of ``size``; the last may be shorter."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def transpose(rows: list[list[int]]) -> list[list[int]]:
    """Make columns of the rows, which are of one length."""
    if not rows:
        return []
    return [[row[column] for row in rows] for column in range(len(rows[0]))]


def pairs_with_sum(numbers: list[int], target: int) -> int:
    """Count the pairs of positions whose numbers add up to the target."""
    count = 0
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            if numbers[i] + numbers[j] == target:
                count = count + 1
    return count


def best_profit(prices: list[int]) -> int:
    """Give the largest profit of one purchase and a later sale, at least 0."""
    profit, cheapest = 0, None
    for price in prices:
        if cheapest is None or price < cheapest:
            cheapest = price
        profit = max(profit, price - cheapest)
    return profit


def balanced(text: str) -> bool:
    """Tell whether every round bracket has its partner."""
    depth = 0
    for letter in text:
        if letter == "(":
            depth = depth + 1
        elif letter == ")":
            depth = depth - 1
            if depth < 0:
                return False
    return depth == 0


def run_lengths(text: str) -> str:
    """Write each run of equal characters as the character and its length: a2b1 for aab."""
    out, length = "", 0
    for index, letter in enumerate(text):
        length = length + 1
        if index + 1 == len(text) or text[index + 1] != letter:
            out, length = out + letter + str(length), 0
    return out


def median(numbers: list[int]) -> float | None:
    """Give the number in the middle of the sorted ones, the mean of both where there are two, None of none."""
    if not numbers:
        return None
    ordered, middle = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2 == 1:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2


def overlap(first: list[int], second: list[int]) -> int:
    """Give the length that two intervals [start, end] have in common."""
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


def binary(number: int) -> str:
    """Write a number from 0 to 255 as eight binary digits."""
    out = ""
    for place in range(7, -1, -1):
        out = out + ("1" if number // 2**place % 2 == 1 else "0")
    return out


def edit_distance(first: str, second: str) -> int:
    """Count the fewest insertions, deletions and replacements that turn one text into the other."""
    row = list(range(len(second) + 1))
    for i, left in enumerate(first):
        above, row = row, [i + 1]
        for j, right in enumerate(second):
            row.append(min(above[j + 1] + 1, row[j] + 1, above[j] + (left != right)))
    return row[-1]


def common_prefix(words: list[str]) -> str:
    """Give the longest text with which all words begin."""
    if not words:
        return ""
    for index, letter in enumerate(words[0]):
        for word in words[1:]:
            if index >= len(word) or word[index] != letter:
                return words[0][:index]
    return words[0]


def change(amount: int) -> list[int]:
    """Pay an amount in the fewest coins of 50, 20, 10, 5, 2 and 1, the largest first."""
    coins: list[int] = []
    for coin in (50, 20, 10, 5, 2, 1):
        coins = coins + [coin] * (amount // coin)
        amount = amount % coin
    return coins


def water(heights: list[int]) -> int:
    """Give the units of rain that stay between walls of the heights."""
    total = 0
    for index, height in enumerate(heights):
        level = min(max(heights[: index + 1]), max(heights[index:]))
        total = total + level - height
    return total


def triangle_kind(a: int, b: int, c: int) -> str:
    """Name a triangle by its sides: equilateral, isosceles or scalene, or none where the sides do not meet."""
    short, middle, long = sorted([a, b, c])
    if short <= 0 or short + middle <= long:
        return "none"
    if short == long:
        return "equilateral"
    return "isosceles" if short == middle or middle == long else "scalene"


def spiral_sum(size: int) -> int:
    """Add both diagonals of a spiral of whole numbers with ``size`` rows, an odd number: 1, 25 and 101 for 1, 3, 5."""
    total, number = 1, 1
    for step in range(2, size, 2):
        for _ in range(4):
            number = number + step
            total = total + number
    return total


def roman(number: int) -> str:
    """Write a number from 1 to 399 in Roman numerals."""
    out = ""
    values = ((100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))
    for value, numeral in values:
        out = out + numeral * (number // value)
        number = number % value
    return out


def _numbers(draw: random.Random, low: int = -9, high: int = 20, length: int = 8) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(0, length))]


def _text(draw: random.Random, letters: str, length: int = 10) -> str:
    return "".join(draw.choice(letters) for _ in range(draw.randint(0, length)))


def _rows(draw: random.Random) -> list[list[int]]:
    height, width = draw.randint(0, 4), draw.randint(1, 4)
    return [[draw.randint(0, 9) for _ in range(width)] for _ in range(height)]


def _interval(draw: random.Random) -> list[int]:
    return sorted(draw.sample(range(30), 2))


def _mirrored(draw: random.Random) -> str:
    half = _text(draw, "abC ,", 4)
    return half + draw.choice(["", "x", "ab"]) + half[::-1].upper()


FUNCTIONS: dict[Callable[..., Any], Callable[[random.Random], Arguments]] = {
    second_largest: lambda draw: (_numbers(draw, 0, 6),),
    longest_run: lambda draw: (_numbers(draw, 0, 2, 10),),
    running_total: lambda draw: (_numbers(draw),),
    rotate: lambda draw: (_numbers(draw), draw.randint(0, 9)),
    clamp: lambda draw: (draw.randint(-20, 20), draw.randint(-12, 0), draw.randint(1, 12)),
    merge_sorted: lambda draw: (sorted(_numbers(draw)), sorted(_numbers(draw))),
    is_leap: lambda draw: (draw.choice([draw.randint(1890, 2110), 100 * draw.randint(15, 24), 2000, 2024]),),
    count_vowels: lambda draw: (_text(draw, "abeEioUxyz "),),
    is_palindrome: lambda draw: (draw.choice([_mirrored(draw), _text(draw, "ab", 5)]),),
    caesar: lambda draw: (_text(draw, "abmxyz AZ!"), draw.randint(-30, 30)),
    digits_sum: lambda draw: (draw.randint(-9999, 99999),),
    primes_below: lambda draw: (draw.randint(0, 60),),
    fibonacci: lambda draw: (draw.randint(0, 30),),
    chunks: lambda draw: (_numbers(draw), draw.randint(1, 4)),
    transpose: lambda draw: (_rows(draw),),
    pairs_with_sum: lambda draw: (_numbers(draw, 0, 6), draw.randint(2, 9)),
    best_profit: lambda draw: (_numbers(draw, 1, 20),),
    balanced: lambda draw: (_text(draw, "()a", 7),),
    run_lengths: lambda draw: (_text(draw, "ab"),),
    median: lambda draw: (_numbers(draw),),
    overlap: lambda draw: (_interval(draw), _interval(draw)),
    binary: lambda draw: (draw.randint(0, 255),),
    edit_distance: lambda draw: (_text(draw, "abc", 6), _text(draw, "abc", 6)),
    common_prefix: lambda draw: (
        ["ab"[: draw.randint(0, 2)] + _text(draw, "abc", 3) for _ in range(draw.randint(0, 3))],
    ),
    change: lambda draw: (draw.randint(0, 200),),
    water: lambda draw: (_numbers(draw, 0, 6),),
    triangle_kind: lambda draw: tuple(draw.randint(0, 6) for _ in range(3)),
    spiral_sum: lambda draw: (2 * draw.randint(0, 8) + 1,),
    roman: lambda draw: (draw.randint(1, 399),),
}
"""Each function with the draw of its arguments. The last :data:`HELD_OUT` are held out."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.Is: ast.IsNot},
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv},
}
_NAMES = {"min": "max", "max": "min", "all": "any"}


def _changes(body: list[ast.stmt]) -> Iterator[tuple[ast.AST, str, Any]]:
    """Changes of one node each: the node, its field and the new value."""
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARISONS:
            yield node, "ops", [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            yield node, "op", _OPERATORS[type(node.op)]()
        elif isinstance(node, ast.BoolOp):
            yield node, "op", ast.Or() if isinstance(node.op, ast.And) else ast.And()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield node, "value", node.value + 1
            yield node, "value", node.value - 1
        elif isinstance(node, ast.Name) and node.id in _NAMES:
            yield node, "id", _NAMES[node.id]


def _broken(function: Callable[..., Any]) -> Iterator[str]:
    """Sources of the function with one change each, in a fixed order."""
    definition = ast.parse(dedent(inspect.getsource(function))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    seen = {ast.unparse(definition)}
    for node, field, value in list(_changes(definition.body)):
        before = getattr(node, field)
        setattr(node, field, value)
        source = ast.unparse(definition)
        setattr(node, field, before)
        if source not in seen:
            seen.add(source)
            yield source


def outcome(function: Callable[..., Any], arguments: Arguments) -> Any:
    """Result of a call, as JSON can hold it, or the name of its error."""
    try:
        return function(*deepcopy(arguments))
    except Exception as error:
        return {"error": type(error).__name__}


@cache
def tasks() -> dict[str, tuple[RepairTask, ...]]:
    """All tasks by split, in a fixed order. Takes a second, once in a process."""
    names = list(FUNCTIONS)
    out: dict[str, tuple[RepairTask, ...]] = {}
    for split, chosen in (("train", names[:-HELD_OUT]), ("eval", names[-HELD_OUT:])):
        made = [task for function in chosen for task in _tasks_of(function)]
        random.Random(split).shuffle(made)
        out[split] = tuple(made)
    return out


def _tasks_of(function: Callable[..., Any]) -> Iterator[RepairTask]:
    name = function.__name__
    draw = random.Random(name)
    drawn = [FUNCTIONS[function](draw) for _ in range(200)]
    examples = list({repr(a): Example(a, function(*deepcopy(a))) for a in drawn}.values())
    for source in _broken(function):
        namespace: dict[str, Any] = {}
        exec(compile(source, name, "exec"), namespace)
        wrong = [e for e in examples if outcome(namespace[name], e.arguments) != e.expected]
        right = [e for e in examples if e not in wrong]
        if len(wrong) < 2:
            continue
        shown = (wrong[0], *right[: EXAMPLES - 1], *wrong[1:])[:EXAMPLES]
        rest = [e for e in examples if e not in shown]
        hidden = sorted(rest, key=lambda e: e not in wrong)[: HIDDEN // 2]
        hidden += [e for e in rest if e not in hidden][: HIDDEN - len(hidden)]
        yield RepairTask(name, source, shown, tuple(hidden))
