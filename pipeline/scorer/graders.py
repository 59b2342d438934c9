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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import orjson

from pipeline.errors import ConfigurationError, SchemaError
from pipeline.schema import Task, Trajectory
from pipeline.scorer.conversation import reply
from pipeline.scorer.numbers import last_number


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
                "none: pip install '.[graders]'"
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


def payload_value(task: Task, name: str) -> Any:
    """Raises :class:`SchemaError` that says what to map where the payload lacks it."""
    value = task.payload.get(name)
    if value is None:
        raise SchemaError(
            f"expected {name!r} in the payload of task {task.task_id}, which has "
            f"{', '.join(task.payload) or 'nothing'}: map a column to it in tasks_from.columns, or name the "
            "environments that have it in the function's key environments"
        )
    return value


def right_answers(task: Task, name: str) -> list[str]:
    """One or several texts, any of which is right."""
    value = payload_value(task, name)
    values = value if isinstance(value, list) else [value]
    if not values or any(v is None or isinstance(v, dict | list) for v in values):
        raise _unusable(task, name, "text, a number or a list of them", value)
    return [str(v) for v in values]


def right_texts(task: Task, name: str) -> list[str]:
    """Texts with something in them: every reply contains an empty one."""
    texts = right_answers(task, name)
    if not all(map(str.strip, texts)):
        raise _unusable(task, name, "text that is not empty", task.payload[name])
    return texts


def right_numbers(task: Task, name: str) -> list[tuple[Fraction, bool]]:
    """The last number of each text, and whether it is a float, which may be the nearest one to what was meant."""
    value = payload_value(task, name)
    floats = [isinstance(v, float) for v in (value if isinstance(value, list) else [value])]
    numbers = [last_number(right) for right in right_answers(task, name)]
    if any(right is None for right in numbers):
        raise _unusable(task, name, "a number", value)
    return [(right, f) for right, f in zip(numbers, floats, strict=True) if right is not None]


def right_letter(task: Task, name: str, letters: str) -> str:
    """The letter of the right choice."""
    value = payload_value(task, name)
    right = letters[value] if _is_position(value, letters) else str(value).strip().strip("().:*").upper()
    if len(right) != 1 or right not in letters:
        raise _unusable(task, name, f"one of {letters} or a number from 0", value)
    return right


def _is_position(value: Any, letters: str) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(letters)


def right_pattern(task: Task, pattern: str | None) -> re.Pattern[str]:
    """The pattern of the options, else of the payload. Not an empty one, which is found in every reply."""
    given = pattern if pattern is not None else str(payload_value(task, "pattern"))
    if not given.strip():
        raise _unusable(task, "pattern", "a regular expression that is not empty", given)
    try:
        return re.compile(given)
    except re.error as error:
        raise _unusable(task, "pattern", f"a regular expression ({error})", given) from error


def _unusable(task: Task, name: str, expected: str, value: Any) -> SchemaError:
    return SchemaError(f"expected {name!r} of task {task.task_id} as {expected}, got {value!r:.200}")


def check_answer(path: str, task: Task, options: Mapping[str, Any]) -> None:
    """Raises :class:`SchemaError` for a payload with an answer that the grader ``path`` cannot grade with. Nothing for
    a payload without one, and for graders that need a worker process."""
    name = options.get("answer", "pattern" if path == "regex" else "answer")
    if task.payload.get(name) is None:
        return
    if path in ("exact", "contains"):
        right_texts(task, name)
    elif path == "number":
        right_numbers(task, name)
    elif path == "choice":
        right_letter(task, name, options.get("letters", LETTERS))
    elif path == "regex":
        right_pattern(task, options.get("pattern"))


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
    """The reply, or else the last fenced block in it, is JSON that satisfies the schema (of the options, else
    ``schema`` of the payload). References to other documents are not followed."""
    import jsonschema
    from jsonschema.validators import validator_for
    from referencing import Registry

    rule = schema if schema is not None else payload_value(trajectory.task, "schema")
    if isinstance(rule, str):
        rule = orjson.loads(rule)
    validator = validator_for(rule, jsonschema.Draft202012Validator)
    try:
        validator.check_schema(rule)
    except jsonschema.SchemaError as error:
        raise SchemaError(f"expected a JSON schema, got one that is not: {error.message}") from error
    for text in _json_texts(given(trajectory, after)):
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        return float(validator(rule, registry=Registry()).is_valid(value))
    return 0.0


def _json_texts(text: str) -> Iterator[str]:
    """All of the text, what lies between its first and its last fence (a block whose texts have fences themselves), and
    the last block."""
    yield text.strip()
    parts = text.split(_FENCE)
    if len(parts) < 3:
        return
    for block in (_FENCE.join(parts[1:-1]), parts[-2] if len(parts) % 2 else parts[-1]):
        first, _, rest = block.partition("\n")
        yield rest if first.strip().isalpha() else block


logging.getLogger("math_verify").setLevel(logging.ERROR)
"""Silences the warning that the time limits of ``math_verify`` are off."""

_PLAIN = re.compile(r"\s*(?:[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:\s*/\s*\d+)?\s*%?|[A-Za-z][A-Za-z ]*)\s*")
"""Right answers that are read as they stand: a number, a fraction, words. What else holds a comma or a bracket would be
taken for its last number."""
_THOUSANDS = re.compile(r"(?<=\d)\\[,!:; ](?=\d{3}(?!\d))")
_JOINED = re.compile(r"[\s$,;]*(?:and|or|\\text\s*\{\s*(?:and|or)\s*\})?[\s$,;]*")
_BOXED = "\\boxed"
_FRAMED = re.compile(r"\\(?:fbox|framebox)\s{0,3}(?=\{)|\\boxed\s{1,3}(?=\{)")
BOX_CHARACTERS_MAX = 10_000
BOXES_MAX = 20
JOIN_CHARACTERS_MAX = 40


def math(trajectory: Trajectory, answer: str = "answer", after: str | None = None) -> float:
    r"""The last answer in the reply (``\boxed{...}``, ``\fbox{...}``, ``$...$`` or plain) equals the one in the
    payload, LaTeX or plain: ``1/2``, ``\frac12`` and ``0.5`` are the same."""
    from math_verify import verify

    rights = [_parsed_right(right) for right in right_answers(trajectory.task, answer)]
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
    text = _FRAMED.sub(lambda _: _BOXED, text)
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
    compiled = right_pattern(trajectory.task, pattern)
    answered = given(trajectory, after).strip()
    return float((compiled.fullmatch(answered) if whole else compiled.search(answered)) is not None)


LETTERS = "ABCDEFGHIJ"
FLOAT_SHARE = Fraction(1, 10**12)
"""Share of an answer that is a JSON float within which the nearest float to a number lies."""
_LETTER = r"[*_(\[\"'$]{0,4}\s{0,3}([A-Z])(?![A-Za-z'])"
_NOUN = r"(?i:answer|choice|option|solution)"
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,3}\{")
_LATEX = re.compile(r"\\(?:text|math)[a-z]{0,6}\s?\{([^{}]{0,200})\}|\\(?=[()\[\]])")
_BRACES = str.maketrans("{}", "()")
_STATED = (
    re.compile(
        rf"{_NOUN}(?i:\s{{0,3}}[:=]|\s{{1,3}}(?:is|was|must\sbe|should\sbe|would\sbe|has\sto\sbe)\s?:?)\s{{0,3}}"
        rf"(?:(?i:option|choice|letter)\s{{1,3}})?{_LETTER}"
        rf"|\b(?i:choose|chose|pick|picked|select|selected|go\swith|going\swith)\s{{1,3}}"
        rf"(?:(?i:the\s)?{_NOUN}\s{{1,3}})?{_LETTER}"
    ),
    re.compile(rf"{_NOUN}\s{{0,3}}{_LETTER}"),
    re.compile(
        r"[(\[*]([A-Z])[)\]*]|(?:^|\n)[ \t]{0,20}([A-Z])[ \t]?[.):](?!\w)"
        r"|(?:^|\n)[ \t]{0,20}([A-Z])[ \t]{0,20}(?=\n|$)"
    ),
    re.compile(r"(?<![A-Za-z'])([A-Z])(?![A-Za-z'])(?!\s{1,3}[a-z])"),
)
_DENIED_BEFORE = re.compile(
    r"(?i:\b(?:not|cannot|never|neither|nor|except|than|instead\sof|eliminate|rule\sout|exclude|reject)|n['’]t)"
    rf"(?i:\s{{1,3}}(?:be|the|to\sbe|choose|pick))?\s{{1,3}}(?:{_NOUN}\s{{1,3}})?[*_(\[\"'$]{{0,4}}$"
)
_DENIED_AFTER = re.compile(
    r"[*_)\]\"'$.]{0,4}\s{1,3}(?i:is|was|are|seems|looks|would\sbe|can(?:no|')t\sbe)\s{1,3}"
    r"(?i:(?:clearly|obviously|definitely|also|just|simply)\s)?"
    r"(?i:false|wrong|incorrect|not\b|untrue|impossible|invalid|out\b|ruled|eliminated|excluded|never)"
    r"|[*_)\]\"'$.]{0,4}\s{1,3}(?i:isn['’]t|wasn['’]t|cannot|can['’]t|doesn['’]t|fails)"
)
_ANOTHER = re.compile(
    r"[*_)\]\"'$]{0,4}(?:\s{0,3},\s{0,3}[A-Z](?![A-Za-z'])){0,9}"
    r"\s{0,3}(?:,?\s{0,3}(?i:\b(?:or|and)\b)|/|&)\s{0,3}(?:(?i:option|choice|answer)\s{1,3})?"
    r"[*_(\[\"'$]{0,4}([A-Z])(?![A-Za-z'])(?!\s{1,3}[a-z])"
    r"|[*_)\]\"'$]{0,4}\s{0,3},\s{0,3}([A-Z])(?=\s{0,3}(?:[.)\n]|$))"
)


def exact(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    case: bool = False,
    punctuation: bool = False,
) -> float:
    """The reply is the answer. Not compared unless asked for: ``case``, ``punctuation`` around words; white space
    never, and characters by their NFKC form."""
    answered = normal(given(trajectory, after, between), case, punctuation)
    return float(any(answered == normal(right, case, punctuation) for right in right_texts(trajectory.task, answer)))


def contains(
    trajectory: Trajectory, answer: str = "answer", after: str | None = None, every: bool = False, case: bool = False
) -> float:
    """One of the answers (``every``: all of them) stands somewhere in the reply, and not inside a longer number."""
    answered = normal(given(trajectory, after), case, punctuation=True)
    found = [_stands_in(normal(right, case, True), answered) for right in right_texts(trajectory.task, answer)]
    return float(all(found) if every else any(found))


def _stands_in(right: str, text: str) -> bool:
    before = r"(?<!\d)(?<!\d[.,])" if right[:1].isdigit() else ""
    after = r"(?![.,]?\d)" if right[-1:].isdigit() else ""
    return re.search(f"{before}{re.escape(right)}{after}", text) is not None


def number(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    tolerance: float = 0.0,
) -> float:
    """The last number of the reply is the (last number of the) answer, up to the share ``tolerance`` of it
    (:mod:`pipeline.scorer.numbers`)."""
    rights = right_numbers(trajectory.task, answer)
    answered = last_number(given(trajectory, after, between))
    if answered is None:
        return 0.0
    share = Fraction(tolerance)
    return float(any(abs(answered - right) <= max(share, FLOAT_SHARE if f else 0) * abs(right) for right, f in rights))


def choice(
    trajectory: Trajectory,
    answer: str = "answer",
    after: str | None = None,
    between: Sequence[str] | None = None,
    letters: str = LETTERS,
) -> float:
    """The letter that the reply chooses is the answer, a letter or the number of a choice (from 0)."""
    right = right_letter(trajectory.task, answer, letters)
    return float(chosen_letter(given(trajectory, after, between), letters) == right)


def chosen_letter(text: str, letters: str) -> str | None:
    r"""The last letter that is chosen (``the answer is B``, ``\boxed{B}``), else named (``option B``), else marked
    (``(B)``, a line ``B.``), else alone. None for one of several (``A or B``); a letter that is denied (``not A``, ``A
    is wrong``) does not count.

    >>> [chosen_letter(t, "ABCD") for t in ("The answer is (B), as option A is false", "A. no. C", "b", "A or B")]
    ['B', 'C', 'B', None]
    """
    text = text.strip()
    if len(text) == 1:
        text = text.upper()
    if "\\" in text:
        text = _LATEX.sub(r"\1", _BOX.sub("answer: {", text)).translate(_BRACES)
    for pattern in _STATED:
        chosen: str | None = None
        behind = 0
        for match in pattern.finditer(text):
            begin, end = next(match.span(n) for n in range(1, match.re.groups + 1) if match[n])
            letter = text[begin:end]
            if begin < behind or letter not in letters:
                continue
            if _DENIED_BEFORE.search(text[max(0, begin - 40) : begin]) or _DENIED_AFTER.match(text, end):
                continue
            another = _ANOTHER.match(text, end)
            several = another is not None and letter != (another[1] or another[2])
            chosen = "" if several else letter
            behind = another.end() if another is not None and several else 0
        if chosen is not None:
            return chosen or None
    return None


_APOSTROPHES = str.maketrans("‘’“”", "''\"\"")
_BETWEEN_WORDS = re.compile(r"(?<!\d)[,;]|[,;](?!\d)")
_ENDS = ".,;:!?…。，、！？：；"
_QUOTES = "\"'«»„‚¿¡"
LAYERS_MAX = 8
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ("*", "*"), ("_", "_"), ("`", "`"))


def normal(text: str, case: bool, punctuation: bool) -> str:
    """White space joined; unless asked for, case folded and punctuation around words taken away, as long as something
    remains: ``C#`` is not ``C``, and ``*`` is not ``?``."""
    text = unicodedata.normalize("NFKC", text).translate(_APOSTROPHES)
    text = text if case else text.casefold()
    if punctuation:
        return " ".join(text.split())
    words = [bare for word in _BETWEEN_WORDS.sub(" ", text).split() if (bare := _bare(word))]
    return " ".join(words or text.split())


def _bare(word: str) -> str:
    """A word without the punctuation of a sentence and without quotes, brackets and marks of Markdown around it."""
    if word.isalnum():
        return word
    for _ in range(LAYERS_MAX):
        shorter = word.rstrip(_ENDS + _QUOTES).lstrip(_QUOTES)
        for opening, closing in _PAIRS:
            if len(shorter) > 2 and shorter[0] == opening and shorter[-1] == closing:
                shorter = shorter[1:-1]
            elif opening != closing and shorter.count(opening) != shorter.count(closing):
                shorter = shorter.removeprefix(opening) if opening in shorter else shorter.removesuffix(closing)
        if shorter == word:
            break
        word = shorter
    return word
