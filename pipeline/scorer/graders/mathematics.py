"""``math``: answers are compared as mathematics by the package math-verify.

It runs in the scorer's worker processes. Its own time limits are alarms of the process, which raise outside a main
thread, so they are off: the scorer ends a worker that takes too long.
"""

from __future__ import annotations

import logging
from typing import Any

from pipeline.errors import SchemaError
from pipeline.schema import Trajectory
from pipeline.scorer.graders.answers import given, right_answers

logging.getLogger("math_verify").setLevel(logging.ERROR)
"""It warns once a process that its time limits are off."""


def math(trajectory: Trajectory, answer: str = "answer", after: str | None = None) -> float:
    r"""The last answer in the reply (``\boxed{...}``, ``$...$`` or plain) equals the one in the payload, LaTeX or
    plain: ``1/2``, ``\frac12`` and ``0.5`` are the same."""
    from math_verify import verify

    rights = [_parsed_right(right) for right in right_answers(trajectory, answer)]
    said = _parsed(given(trajectory, after))
    if not said:
        return 0.0
    return float(any(verify(right, said, timeout_seconds=None) for right in rights))


def _parsed_right(text: str) -> list[Any]:
    forms = (text, f"${text}$") if "$" in text or not any(c in text for c in "\\^_{") else (f"${text}$", text)
    for form in forms:
        if found := _parsed(form):
            return found
    raise SchemaError(f"expected an answer that math-verify understands, got {text!r:.200}")


def _parsed(text: str) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(text, parsing_timeout=None)
    return found
