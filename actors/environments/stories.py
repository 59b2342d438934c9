"""Sums told as little stories: which operation is meant has to be read from the words."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

_TOLD: Mapping[str, Sequence[str]] = {
    "+": (
        "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
        "One hall holds {a} {things}, another holds {b}. How many {things} do both hold?",
        "A shop sold {a} {things} on Monday and {b} on Tuesday. How many {things} did it sell?",
        "{name} counted {a} {things}, then another {b}. How many {things} did {name} count?",
    ),
    "-": (
        "{name} has {a} {things} and gives {b} away. How many {things} are left?",
        "Of {a} {things} in a hall, {b} are taken out. How many {things} stay?",
        "A shop had {a} {things} and sold {b}. How many {things} does it still have?",
        "{name} wants {a} {things} and has {b}. How many {things} are missing?",
    ),
    "*": (
        "{name} buys {a} boxes with {b} {things} each. How many {things} does {name} buy?",
        "A hall has {a} rows of {b} {things}. How many {things} are in the hall?",
        "A shop sells {a} {things} a day. How many {things} does it sell in {b} days?",
        "{name} packs {b} {things} into each of {a} bags. How many {things} does {name} pack?",
    ),
}
_NAMES = ("Ada", "Ben", "Chidi", "Dana", "Emil", "Fatima", "Goran", "Hana")
_THINGS = ("apples", "books", "coins", "chairs", "eggs", "lamps", "stamps", "tickets")


def story(draw: random.Random, a: int, operation: str, b: int) -> str:
    """A question whose answer is ``a operation b``; what is taken away is not more than what is there."""
    told = draw.choice(_TOLD[operation])
    return told.format(name=draw.choice(_NAMES), things=draw.choice(_THINGS), a=a, b=b)
