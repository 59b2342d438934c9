"""Long tool answers, cut to a length in characters or tokens, with a mark where something is missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

Side = Literal["left", "right", "middle"]
"""What is cut away."""
MARK = "\n... [{n} {unit} left out] ...\n"
CHARACTERS_A_TOKEN_MAX = 64
"""No token is counted as longer, so that a text of megabytes is cut before it is tokenised."""


class Tokens(Protocol):
    """A tokenizer, as far as cutting needs one."""

    def encode_text(self, text: str) -> tuple[int, ...]: ...
    def decode_ids(self, ids: tuple[int, ...]) -> str: ...


def cut_characters(text: str, length_max: int, side: Side) -> str:
    """At most ``length_max`` characters of ``text``, and the mark beside them.

    >>> cut_characters("abcdefgh", 4, "middle")
    'ab\\n... [4 characters left out] ...\\ngh'
    """
    if len(text) <= length_max:
        return text
    head, tail = _kept(length_max, side)
    mark = MARK.format(n=len(text) - length_max, unit="characters")
    return text[:head] + mark + text[len(text) - tail :]


def cut_tokens(text: str, length_max: int, side: Side, tokens: Tokens) -> str:
    """The same in tokens of ``text`` alone; a character that a cut goes through is left out."""
    room = length_max * CHARACTERS_A_TOKEN_MAX
    long = len(text) > 4 * room
    shown = cut_characters(text, 4 * room, side) if long else text
    ids = tokens.encode_text(shown)
    if len(ids) <= length_max:
        return shown
    head, tail = _kept(length_max, side)
    mark = MARK.format(n="many" if long else len(ids) - length_max, unit="tokens")
    first = tokens.decode_ids(ids[:head]).rstrip("\ufffd") if head else ""
    last = tokens.decode_ids(ids[len(ids) - tail :]).lstrip("\ufffd") if tail else ""
    return first + mark + last


def cutter(length_max: int, side: Side, unit: Literal["characters", "tokens"], tokens: Tokens) -> Callable[[str], str]:
    """The function that cuts one answer."""
    if unit == "characters":
        return lambda text: cut_characters(text, length_max, side)
    return lambda text: cut_tokens(text, length_max, side, tokens)


def _kept(length_max: int, side: Side) -> tuple[int, int]:
    """(from the beginning, from the end)."""
    if side == "right":
        return length_max, 0
    if side == "left":
        return 0, length_max
    return length_max - length_max // 2, length_max // 2
