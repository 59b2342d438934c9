"""``math``: answers are compared as mathematics by the package math-verify.

It runs in the scorer's worker processes. Its own time limits are alarms of the process, which raise outside a main
thread, so they are off: the scorer ends a worker that takes too long.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.graders.answers import given, right_answers

logging.getLogger("math_verify").setLevel(logging.ERROR)
"""It warns once a process that its time limits are off."""

_PLAIN = re.compile(r"\s*(?:[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?|[A-Za-z][A-Za-z ]*)\s*")
"""Right answers that are read as they stand: a number, a fraction, words. What else holds a comma or a bracket would be
taken for its last number."""
_THOUSANDS = re.compile(r"(?<=\d)\\[,!:; ](?=\d{3}(?!\d))")
_JOINED = re.compile(r"[\s$,;]*(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})?[\s$,;]*")
_BOXED = "\\boxed"
BOX_CHARACTERS_MAX = 10_000
BOXES_MAX = 20
JOIN_CHARACTERS_MAX = 40


def math(trajectory: Trajectory, answer: str = "answer", after: str | None = None) -> float:
    r"""The last answer in the reply (``\boxed{...}``, ``$...$`` or plain) equals the one in the payload, LaTeX or
    plain: ``1/2``, ``\frac12`` and ``0.5`` are the same."""
    from math_verify import verify

    rights = [_parsed_right(right) for right in right_answers(trajectory, answer)]
    said = _parsed(last_boxed(given(trajectory, after)))
    if not said:
        return 0.0
    return float(any(verify(right, said, timeout_seconds=None) for right in rights))


def last_boxed(text: str) -> str:
    r"""From the last ``\boxed`` on, one box with all that are joined to it; the whole text where there is none.
    math-verify takes all boxes of a text together, so that a second thought would be a set of two answers.

    >>> last_boxed(r"\boxed{3}. No, \boxed{4}."), last_boxed(r"$\boxed{3}$ and $\boxed{-2}$")
    ('\\boxed{4}.', '\\boxed{3, -2}')
    """
    begin = text.rfind(_BOXED)
    if begin < 0:
        return text
    end = _end_of_box(text, begin)
    boxes = [text[begin + len(_BOXED) + 1 : end - 1]]
    at = begin
    while (before := text.rfind(_BOXED, 0, at)) >= 0 and len(boxes) < BOXES_MAX and end > begin:
        stop = _end_of_box(text, before)
        if at - stop > JOIN_CHARACTERS_MAX or not _JOINED.fullmatch(text, stop, at):
            break
        boxes.insert(0, text[before + len(_BOXED) + 1 : stop - 1])
        at = before
    return text[begin:] if len(boxes) == 1 else f"{_BOXED}{{{', '.join(boxes)}}}"


def _end_of_box(text: str, begin: int) -> int:
    """Behind the brace that closes the box at ``begin``; ``begin`` where nothing does."""
    depth, first = 0, begin + len(_BOXED)
    for at in range(first, min(len(text), first + BOX_CHARACTERS_MAX)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return at + 1
    return begin


def _parsed_right(text: str) -> list[Any]:
    forms = (text, f"${text}$") if "$" in text or _PLAIN.fullmatch(text) else (f"${text}$", text)
    for form in forms:
        if found := _parsed(form):
            return found
    raise SchemaError(f"expected an answer that math-verify understands, got {text!r:.200}")


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(_THOUSANDS.sub("", text), parsing_timeout=None)
    return found
