"""Reads the report of a program about its own rollout. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actors.gateway.messages import Refusal, wrong
from pipeline.errors import PlugInError

PROGRAM = "program"
"""The boundary of a program's failures."""
SIGNALS_MAX = 64
ANSWER_CHARACTERS_MAX = 100_000
FLOAT_MAX = 1e300
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""Colours and movements of a terminal (ECMA-48 control sequences)."""


@dataclass(frozen=True, slots=True)
class Report:
    """A program's report about its own rollout."""

    reward: float | None = None
    done: bool = True
    """False: it stopped before the end of the task, which makes the episode TRUNCATED."""
    signals: Mapping[str, float] = field(default_factory=dict)
    answer: str | None = None
    """Answer for a section whose environment judges. None: the last reply of the policy."""
    error: str | None = None
    """Error of the program: there is no reward."""


def read_report(body: Mapping[str, Any]) -> Report:
    """``{"reward", "done", "signals", "answer", "error"}``, all optional; other names are left alone. Raises
    :class:`Refusal`."""
    reward, done, answer, error = body.get("reward"), body.get("done"), body.get("answer"), body.get("error")
    if reward is not None and not _finite(reward):
        raise wrong("reward", "a finite number", reward)
    if done is not None and not isinstance(done, bool):
        raise wrong("done", "true or false", done)
    signals = body.get("signals")
    if signals is None:
        signals = {}
    if not isinstance(signals, dict) or len(signals) > SIGNALS_MAX or not all(_finite(v) for v in signals.values()):
        raise wrong("signals", f"at most {SIGNALS_MAX} names with finite numbers", signals)
    for name, value in (("answer", answer), ("error", error)):
        if value is not None and not isinstance(value, str):
            raise wrong(name, "text", value)
    return Report(
        None if reward is None else float(reward),
        done is not False,
        {str(name)[:64]: float(value) for name, value in signals.items()},
        None if answer is None else answer[:ANSWER_CHARACTERS_MAX],
        None if error is None else error[:ANSWER_CHARACTERS_MAX],
    )


def last_line(output: str) -> Report | None:
    """The report that is the last line of the output, where that is a JSON object with something of a report in it."""
    line = re.split(r"[\r\n]", output.strip())[-1]  # splitlines() would cut JSON texts at U+2028 and U+0085
    line = _TERMINAL.sub("", line).strip("\ufeff \t")
    try:
        value = json.loads(line) if line else None  # takes NaN, of which read_report() says what is wrong
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not {"reward", "answer", "error", "done", "signals"} & set(value):
        return None
    try:
        return read_report(value)
    except Refusal as refusal:
        raise PlugInError(PROGRAM, "WrongValue", f"the last line of its output: {refusal.message}") from None


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= FLOAT_MAX
