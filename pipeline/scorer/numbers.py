"""Numbers as people write them, read exactly.

Where a form has two readings a rule decides (docs/REWARDS.md): one comma before three digits divides thousands
(``1,234``), any other single comma or dot is the decimal mark (``1,5``, ``1.234``), and of a comma and a dot the last
one is (``1.234,5``). A percent sign is a unit. A part of something else (``2π``, ``3:2``, ``1.2.3``) is no number.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

CHARACTERS_MAX = 200
"""Longest number that is read."""
EXPONENT_MAX = 400
TAILS = (300, 3000)
"""Characters at the end of a text that are read first."""
TAIL_BEGIN = 200
"""Number of these characters, from their start, in which a number may be cut."""
_DIGITS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_RAISED = re.compile(f"[⁺⁻]?[{_DIGITS}]+")
_LOWERED = str.maketrans(f"{_DIGITS}⁺⁻", "0123456789+-")
_VULGAR = re.compile("(?<=[0-9])(?=[¼-¾⅐-⅞])")
_SIGNS = {**dict.fromkeys("−–‐‑﹣－", "-"), "＋": "+", "٫": ".", "٬": ",", "⁄": "/", "’": "'", "·": "×", "⋅": "×"}
_CHARACTERS = str.maketrans(_SIGNS)
_FRACTION = re.compile(r"\\[dtc]?frac\s?(?:\{([^{}]{1,60})\}|(\d))\s?(?:\{([^{}]{1,60})\}|(\d))")
_PLAIN = re.compile(r"\s*[-+]?[\d.,]+\s*")
_TEXT = r"\\(?:text(?:bf|it|rm)?|math(?:rm|bf|it|sf)|mbox)\s?\{\s{0,3}([^{}]{0,200}?)\s{0,3}\}"
_LATEX = (
    (re.compile(rf"{_TEXT}\s?(?=[\^_])"), r" \1"),  # cm^2: its exponent stays with it
    (re.compile(_TEXT), r" \1 "),
    (re.compile(r"\^\s?(?:\\circ(?![A-Za-z])|\{\s?\\circ\s?\})"), "°"),
    (re.compile(r"(?<=\d)\^\s?\{\s?(?:st|nd|rd|th)\s?\}"), ""),
    (re.compile(r"\{([.,])\}"), r"\1"),
    (re.compile(r"\\!|\\(?:left|right)(?![A-Za-z])"), ""),
    (re.compile(r"(?<=\d)\\[ ,:;](?=\d)"), "\u202f"),
    (re.compile(r"\\[ ,:;]|\\quad(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:times|cdot)(?![A-Za-z])"), "×"),
    (re.compile(r"\\pi(?![A-Za-z])"), "π"),
    (re.compile(r"\\sqrt(?![A-Za-z])"), "√"),
    (re.compile(r"\\pm(?![A-Za-z])"), "±"),
    (re.compile(r"\\([$%])"), r"\1"),
)

_SPACE = "[ \u00a0\u2009\u202f]"
_MONEY = (
    "(?:(?:(?<![A-Za-z])(?:US|CA|AU|NZ|HK|R|A|C))?[$€£¥₹₽₩₺₴₫฿₦₱₪]|"
    r"(?<![A-Za-z])(?:USD|EUR|GBP|JPY|CNY|RMB|INR|CHF|CAD|AUD|KRW|BRL|SEK|NOK|DKK|PLN|CZK|Rs\.?))[ \u00a0]?"
)
_BODY = (
    rf"(?:(?<!\d)[1-9]\d{{0,2}}(?:{_SPACE}\d{{3}}(?!\d))+(?:[.,]\d+(?![.,'_]?\d))?|"
    r"\d+(?:[.,'_]\d+)*|(?<![A-Za-z\d_.,])\.\d+)"
)
_TOKEN = re.compile(rf"(?:(?P<sign>[-+±])(?P<gap> ?))?(?:{_MONEY})?(?P<inner>[-+±])?(?P<body>{_BODY})")
_TEN = re.compile(r"[eE]([-+]?\d{1,3})(?![A-Za-z\d_]|\.\d)|\s?[×*x]\s?10\s?\^\s?[{(]?([-+]?\d{1,3})[})]?(?![.,]?\d)")
_POWER = re.compile(r"\s?\^\s?[{(]?([-+]?\d{1,3})[})]?(?![.,]?\d)")
_OVER = re.compile(rf"{_SPACE}?/{_SPACE}?({_BODY})")
_MIXED = re.compile(rf"{_SPACE}(\d{{1,9}})\s?/\s?(\d{{1,9}})(?![A-Za-z\d])")
_SCALE = re.compile(rf"(?:{_SPACE}|-)?(thousand|million|billion|trillion)s?(?![A-Za-z])", re.IGNORECASE)
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_GOES_ON = re.compile(r"[)\]}]*\s?(?:[π√^±]|/\s?\d|:\d)")
_RAISED_BEFORE = re.compile(r"[A-Za-z\d)\]}][\^_][{(]?$")
_MINUS_BEFORE = re.compile(r"(?<![A-Za-z\d])(?<!\d )(?:minus|negative) $", re.IGNORECASE)
_OPERATED_BEFORE = re.compile(r"(?:[√π±][{(]?|\d:|/ ?)$")


def last_number(text: str) -> Fraction | None:
    """The last number of a text; None where there is none, or where the last one is part of something else.

    >>> [str(last_number(t)) for t in ("It is 1,234.5 km.", "-$5", ".5", "1 1/2", "2π", "none")]
    ['2469/2', '-5', '1/2', '3/2', 'None', 'None']
    """
    for tail in TAILS:
        value, begin = _scan(_plain(text[-tail:]))
        if begin > TAIL_BEGIN or len(text) <= tail:
            return value
    return _scan(_plain(text))[0]


def _scan(text: str) -> tuple[Fraction | None, int]:
    """The last number, and where it begins (-1 without one)."""
    value: Fraction | None = None
    at, last = 0, -1
    while (found := _TOKEN.search(text, at)) is not None:
        at = found.end()
        begin = found.start()
        before = text[max(0, begin - 3) : begin]
        if begin == found.start("body") and _is_letter(before[-1:]):
            continue  # x1, H2O
        if _RAISED_BEFORE.search(before):
            continue  # m^2, x_1
        value, at = _value(text, found)
        if value is not None and _OPERATED_BEFORE.search(before):
            value = None
        last = begin
    return value, last


def _plain(text: str) -> str:
    """The text with one character for each sign, and without LaTeX around numbers."""
    if not text.isascii():
        text = _with_ascii(text)
    if "\\" in text or "{" in text:
        text = _FRACTION.sub(_divided, text)
        for pattern, plain in _LATEX:
            text = pattern.sub(plain, text)
    return text


def _with_ascii(text: str) -> str:
    text = _RAISED.sub(lambda raised: f"^{{{raised[0].translate(_LOWERED)}}}", _VULGAR.sub(" ", text))
    text = unicodedata.normalize("NFKC", text.translate(_CHARACTERS)).translate(_CHARACTERS)
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() and not c.isascii() else c for c in text)


def _divided(found: re.Match[str]) -> str:
    over, under = found[1] or found[2], found[3] or found[4]
    if not _PLAIN.fullmatch(over) or not _PLAIN.fullmatch(under):
        return "√0"  # no number
    mixed = found.string[max(0, found.start() - 1) : found.start()].isdigit()
    return f"{' ' if mixed else ''}{over.strip()}/{under.strip()}"


def _value(text: str, found: re.Match[str]) -> tuple[Fraction | None, int]:
    """The number of a token with what belongs to it behind it, and where that ends."""
    body, at = found["body"], found.end()
    value = _decimal(body)
    sign = -1 if _sign(text, found) == "-" else 1
    if (mixed := _MIXED.match(text, at)) is not None and body.isdigit():
        over, under = int(mixed[1]), int(mixed[2])
        value = value + Fraction(over, under) if value is not None and 0 < over < under else None
        at = mixed.end()
    elif (divided := _OVER.match(text, at)) is not None:
        divisor = _decimal(divided[1])
        value = value / divisor if value is not None and divisor else None
        at = divided.end()
    if (ten := _TEN.match(text, at)) is not None:
        value, at = _times_ten(value, int(ten[1] or ten[2])), ten.end()
    elif (power := _POWER.match(text, at)) is not None:
        value, at = _raised(value, int(power[1])), power.end()
    if (scale := _SCALE.match(text, at)) is not None:
        value = value if value is None else value * _SCALES[scale[1].lower()]
        at = scale.end()
    if _GOES_ON.match(text, at) or (found["sign"] or "") + (found["inner"] or "") not in ("", "-", "+"):
        value = None
    return value if value is None else sign * value, at


def _sign(text: str, found: re.Match[str]) -> str:
    """The sign of a token: a dash behind a letter, a digit or a bracket is none, nor is one before a space unless an
    equation needs it."""
    if found["inner"]:
        return found["inner"]
    before = text[: found.start()] if found.start() < 40 else text[found.start() - 40 : found.start()]
    if found["gap"]:
        return found["sign"] if before.rstrip(" ")[-1:] in ("=", "(", ":", "≈") else ""
    if not found["sign"]:
        return "-" if _MINUS_BEFORE.search(before) else ""
    last = before[-1:]
    return "" if _is_letter(last) or last in (")", "]", "}", "%") or last.isdigit() else found["sign"]


def _decimal(body: str) -> Fraction | None:
    """None for digits that are grouped as no number is."""
    if len(body) > CHARACTERS_MAX:
        return None
    marks = re.sub(r"\d", "", body)
    decimal = ""
    if any(mark not in ".," for mark in marks):
        grouping = next(mark for mark in marks if mark not in ".,")
        decimal = marks[-1] if marks[-1] in ".," else ""
    elif len(set(marks)) == 2:
        grouping, decimal = marks[0], marks[-1]
    elif len(marks) == 1:
        whole, _, part = body.partition(marks)
        thousands = marks == "," and len(part) == 3 and 1 <= len(whole) <= 3 and whole[0] != "0"
        grouping, decimal = (marks, "") if thousands else ("", marks)
    else:
        grouping = marks[:1]
    whole, _, part = body.partition(decimal) if decimal else (body, "", "")
    groups = whole.split(grouping) if grouping else [whole]
    if (not "".join(groups).isdigit() and groups != [""]) or (part and not part.isdigit()):
        return None
    if len(groups) > 1 and not _are_groups(groups, grouping):
        return None
    return Fraction(int("".join(groups) or "0")) + (Fraction(int(part), 10 ** len(part)) if part else 0)


def _are_groups(groups: list[str], mark: str) -> bool:
    """Thousands, or India's lakhs: 12,34,567."""
    first, *middle, last = groups
    if not 1 <= len(first) <= 3 or first[0] == "0" or len(last) != 3:
        return False
    return all(len(g) == 3 for g in middle) or (mark == "," and len(first) <= 2 and all(len(g) == 2 for g in middle))


def _times_ten(value: Fraction | None, exponent: int) -> Fraction | None:
    return None if value is None or abs(exponent) > EXPONENT_MAX else value * Fraction(10) ** exponent


def _raised(value: Fraction | None, exponent: int) -> Fraction | None:
    if value is None or (value == 0 and exponent < 0) or abs(exponent) > EXPONENT_MAX:
        return None
    digits = max(len(str(value.numerator)), len(str(value.denominator)))
    return value**exponent if digits * abs(exponent) <= EXPONENT_MAX * 4 else None


def _is_letter(character: str) -> bool:
    """A letter of an alphabet that is written with spaces between words."""
    return character.isalpha() and ord(character) < 0x2E80
