"""``exact``, ``contains``, ``number``, ``choice``: quick graders whose time is linear in the reply."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.graders.answers import given, payload_value, right_answers

_NUMBER = re.compile(r"(?:(?<![\w)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+)?(?:[eE][+-]?\d{1,3})?")
_DIGITS_MAX = 40
_STATED = re.compile(
    r"(?i:answer|choice|option)(?i:\s{1,3}is|\s{0,3}[:=])?\s{0,3}[*_(\[\"'$]{0,4}\s{0,3}([A-Z])(?![A-Za-z'])"
)
_MARKED = re.compile(
    r"[(\[*]([A-Z])[)\]*]|(?:^|\n)[ \t]{0,20}([A-Z])[ \t]?[.):](?!\w)|(?:^|\n)[ \t]{0,20}([A-Z])[ \t]{0,20}(?=\n|$)"
)
_LONE = re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])(?!\s{1,3}[a-z])")


def exact(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    case: bool = False,
    punctuation: bool = False,
) -> float:
    """The reply is the answer. Not compared unless asked for: ``case``, ``punctuation``; white space never, and
    characters by their NFKC form."""
    said = normal(given(trajectory, after, between), case, punctuation)
    return float(any(said == normal(right, case, punctuation) for right in right_answers(trajectory, answer)))


def contains(
    trajectory: Trajectory, answer: str = "answer", after: str | None = None, every: bool = False, case: bool = False
) -> float:
    """One of the answers (``every``: all of them) stands somewhere in the reply."""
    said = normal(given(trajectory, after), case, punctuation=True)
    found = [normal(right, case, punctuation=True) in said for right in right_answers(trajectory, answer)]
    return float(all(found) if every else any(found))


def number(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    tolerance: float = 1e-6,
) -> float:
    """The last number of the reply is the (last number of the) answer, up to ``tolerance`` of it. ``1,234.5``, ``-3``
    and ``1e3`` are numbers; units around them do not matter."""
    rights = [last_number(right) for right in right_answers(trajectory, answer)]
    if any(right is None for right in rights):
        raise SchemaError(f"expected a number as {answer!r} of task {trajectory.task.task_id}, got {rights}")
    said = last_number(given(trajectory, after, between))
    if said is None:
        return 0.0
    return float(any(abs(said - right) <= tolerance * max(1.0, abs(right)) for right in rights if right is not None))


def choice(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    letters: str = "ABCDEFGHIJ",
) -> float:
    """The letter that the reply chooses is the answer, a letter or the number of a choice (from 0)."""
    right = payload_value(trajectory, answer)
    if isinstance(right, int) and not isinstance(right, bool) and 0 <= right < len(letters):
        right = letters[right]
    right = str(right).strip().strip("().:*").upper()
    if len(right) != 1 or right not in letters:
        raise SchemaError(f"expected {answer!r} as one of {letters} or a number from 0, got {right!r:.200}")
    return float(chosen_letter(given(trajectory, after, between), letters) == right)


def chosen_letter(text: str, letters: str) -> str | None:
    """The last letter that is stated (``the answer is B``), else marked (``(B)``, a line ``B.``), else alone.

    >>> [chosen_letter(t, "ABCD") for t in ("The answer is (B).", "A. no. C", "b", "A dog")]
    ['B', 'C', 'B', None]
    """
    text = text.strip()
    if len(text) == 1:
        text = text.upper()
    for pattern in (_STATED, _MARKED, _LONE):
        found = [next(g for g in match.groups() if g) for match in pattern.finditer(text)]
        found = [letter for letter in found if letter in letters]
        if found:
            return found[-1]
    return None


def last_number(text: str) -> float | None:
    """None where there is none (or none of a sensible length).

    >>> last_number("It is 1,234.5 km (not 7-3)"), last_number("-2"), last_number("none")
    (3.0, -2.0, None)
    """
    found = [m.group() for m in _NUMBER.finditer(text) if len(m.group()) <= _DIGITS_MAX]
    return float(found[-1].replace(",", "").replace("−", "-")) if found else None


def normal(text: str, case: bool, punctuation: bool) -> str:
    """White space joined; unless asked for, case folded and punctuation taken away."""
    text = unicodedata.normalize("NFKC", text)
    text = text if case else text.casefold()
    if not punctuation:
        text = "".join(" " if unicodedata.category(c)[0] == "P" and c not in "-%" else c for c in text)
    return " ".join(text.split())
