"""Built-in graders: functions of a trajectory that compare its last reply with the task's payload, 1.0 or 0.0.

A wrong or missing answer of the policy is 0.0. A payload that cannot be graded with raises, so the trajectory has no
reward. ``exact``, ``contains``, ``number`` and ``choice`` take time linear in the reply; ``regex``, ``json_schema`` and
``math`` may never return on some replies and run in worker processes, which the scorer can end. The time limits of
math-verify are off, because they use signals, which work only in a main thread.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from pipeline.errors import ConfigurationError, SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.conversation import reply


@dataclass(frozen=True, slots=True)
class Grader:
    """Import path of a built-in grader, and the package it needs."""

    path: str
    worker: bool = False
    """The grader may take very long on some replies and needs a process that can be stopped."""
    needs: str | None = None
    """Module that is imported before the first reply: jsonschema, or one of the extra ``graders``."""

    def check(self, name: str) -> None:
        """Raises :class:`ConfigurationError` when what it needs is not installed."""
        if self.needs is not None and importlib.util.find_spec(self.needs) is None:
            raise ConfigurationError(
                f"score function {name}: expected the package {self.needs.replace('_', '-')} to be installed, got "
                "none: pip install 'afterplay[graders]'"
            )


_HERE = "pipeline.scorer.graders"
BUILT_IN = {
    "exact": Grader(f"{_HERE}:exact"),
    "contains": Grader(f"{_HERE}:contains"),
    "number": Grader(f"{_HERE}:number"),
    "choice": Grader(f"{_HERE}:choice"),
    "regex": Grader(f"{_HERE}:regex", worker=True),
    "json_schema": Grader(f"{_HERE}:json_schema", worker=True, needs="jsonschema"),
    "math": Grader(f"{_HERE}:math", worker=True, needs="math_verify"),
}


CHARACTERS_MAX = 1_000_000
"""Characters at the end of a reply that graders read."""


def payload_value(trajectory: Trajectory, name: str) -> Any:
    """Raises :class:`SchemaError` that says what to map where the payload lacks it."""
    value = trajectory.task.payload.get(name)
    if value is None:
        raise SchemaError(
            f"expected {name!r} in the payload of task {trajectory.task.task_id}, which has "
            f"{', '.join(trajectory.task.payload) or 'nothing'}: map a column to it in tasks_from.columns, or name the "
            "environments that have it in the function's key environments"
        )
    return value


def right_answers(trajectory: Trajectory, name: str) -> list[str]:
    """One or several texts, any of which is right."""
    value = payload_value(trajectory, name)
    values = value if isinstance(value, list) else [value]
    if not values or any(v is None or isinstance(v, dict | list) for v in values):
        raise SchemaError(f"expected {name!r} as text, number or a list of them, got {value!r:.200}")
    return [str(v) for v in values]


def given(trajectory: Trajectory, after: str | None = None, between: Sequence[str] | None = None) -> str:
    """The reply; with ``after``, what follows it; with ``between: [start, end]``, what lies between the last such pair
    (nothing where there is none)."""
    text = reply(trajectory, after)[-CHARACTERS_MAX:]
    if between is None:
        return text
    if len(between) != 2:
        raise SchemaError(f"expected between as [start, end], got {between!r}")
    start, end = between
    stop = text.rfind(end)
    begin = text.rfind(start, 0, stop) if stop >= 0 else -1
    return text[begin + len(start) : stop] if begin >= 0 else ""


_FENCE = "```"


def json_schema(trajectory: Trajectory, schema: Mapping[str, Any] | None = None, after: str | None = None) -> float:
    """The reply, or the last fenced block in it, is JSON that satisfies the schema (of the options, else ``schema`` of
    the payload). References to other documents are not followed."""
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    rule = schema if schema is not None else payload_value(trajectory, "schema")
    if isinstance(rule, str):
        rule = orjson.loads(rule)
    validator = validator_for(rule, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(rule)
    except jsonschema.SchemaError as error:
        raise SchemaError(f"expected a JSON schema, got one that is not: {error.message}") from error
    try:
        value = orjson.loads(_json_text(given(trajectory, after)))
    except orjson.JSONDecodeError:
        return 0.0
    return float(validator(rule, registry=Registry()).is_valid(value))


def _json_text(text: str) -> str:
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return text.strip()
    block = parts[-2] if len(parts) % 2 else parts[-1]
    first, _, rest = block.partition("\n")
    return rest if first.strip().isalpha() else block


logging.getLogger("math_verify").setLevel(logging.ERROR)
"""Silences the warning that the time limits of ``math_verify`` are off."""

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
    answered = _parsed(last_boxed(given(trajectory, after)))
    if not answered:
        return 0.0
    return float(any(verify(right, answered, timeout_seconds=None) for right in rights))


def last_boxed(text: str) -> str:
    r"""Text from the last ``\boxed`` on: one box with all that are joined to it; the whole text where there is none.
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


def regex(trajectory: Trajectory, pattern: str | None = None, after: str | None = None, whole: bool = False) -> float:
    """The pattern (of the options, else ``pattern`` of the payload) is found in the reply; ``whole``: is all of it,
    white space around it aside."""
    compiled = re.compile(pattern if pattern is not None else str(payload_value(trajectory, "pattern")))
    answered = given(trajectory, after).strip()
    return float((compiled.fullmatch(answered) if whole else compiled.search(answered)) is not None)


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
    answered = normal(given(trajectory, after, between), case, punctuation)
    return float(any(answered == normal(right, case, punctuation) for right in right_answers(trajectory, answer)))


def contains(
    trajectory: Trajectory, answer: str = "answer", after: str | None = None, every: bool = False, case: bool = False
) -> float:
    """One of the answers (``every``: all of them) stands somewhere in the reply."""
    answered = normal(given(trajectory, after), case, punctuation=True)
    found = [normal(right, case, punctuation=True) in answered for right in right_answers(trajectory, answer)]
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
    answered = last_number(given(trajectory, after, between))
    if answered is None:
        return 0.0
    return float(
        any(abs(answered - right) <= tolerance * max(1.0, abs(right)) for right in rights if right is not None)
    )


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
