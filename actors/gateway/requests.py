"""Reads and checks what a program sends: parameters of its calls, and the report about its own rollout. Pure; trusts
nothing.

A parameter that the gateway cannot serve is a :class:`Refusal`, or it is left out and named in ``ignored``, as the run
file says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from actors.engine.base import Sampling
from actors.gateway.conversation import TOOLS_MAX, list_of, shown, wrong
from actors.servers.refusal import Refusal
from pipeline.errors import PlugInError

STOPS_MAX = 16

DRAW = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Parameters of the draw."""

ReliedOn = Mapping[str, tuple[str, tuple[Any, ...]]]
"""Parameters that a program may rely on in the answer: why they cannot be had, and the values that are true anyway."""


@dataclass(frozen=True, slots=True)
class ParameterRules:
    """Treatment of parameters that differ from the run's."""

    sampling: Literal["ignore", "refuse"] = "ignore"
    """Treatment of sampling parameters, which would change the run's policy."""
    unsupported: Literal["ignore", "refuse"] = "refuse"
    """Treatment of parameters that a program may rely on in the answer."""
    tools_refused: str = ""
    """The reason why calls with tools are refused: no parser reads what the model writes."""


@dataclass(slots=True)
class Parameters:
    """The parameters of one request, and those that were ignored. Methods raise :class:`Refusal`."""

    body: Mapping[str, Any]
    rules: ParameterRules
    ignored: list[str] = field(default_factory=list)

    def draw(self, sampling: Sampling) -> None:
        """Parameters of the draw: only these values (and none) are what happens anyway."""
        reason = " would change how the policy is sampled, which the run file decides"
        top_k = (sampling.top_k, 0) if sampling.top_k == -1 else (sampling.top_k,)
        same = (sampling.temperature,), (sampling.top_p,), top_k, (0,), (), (0,), (0,), (1,)
        for name, values in zip(DRAW, same, strict=True):
            self._other_than(name, values, reason, "sampling_parameters", self.rules.sampling)

    def relied_on(self, table: ReliedOn) -> None:
        """Parameters that the gateway does not have."""
        for name, (reason, same) in table.items():
            self.unsupported(name, reason, *same)

    def unsupported(self, name: str, reason: str, *same: Any) -> None:
        """A parameter that the gateway does not have."""
        self._other_than(name, same, f": {reason}", "unsupported", self.rules.unsupported)

    def _other_than(self, name: str, same: tuple[Any, ...], reason: str, option: str, rule: str) -> None:
        value = self.body.get(name)
        if value is not None and all(value != accepted for accepted in same):
            words = f"{name}={shown(value)}{reason}; leave it out, or set {option}: ignore"
            self.refuse_or_ignore(name, rule, words)

    def refuse_or_ignore(self, name: str, rule: str, message: str) -> None:
        """Raises :class:`Refusal` under the rule ``refuse``."""
        if rule == "refuse":
            raise Refusal(400, message, code="unsupported_parameter", param=name)
        self.ignored.append(name)

    def tools(self, read: Callable[[Any], Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """The tools of the call, where a parser reads what the model writes."""
        found = tuple(map(read, list_of(self.body.get("tools"), "tools", TOOLS_MAX)))
        if found and self.rules.tools_refused:
            raise Refusal(400, self.rules.tools_refused, code="unsupported_parameter", param="tools")
        return found

    def unknown(self, understood: Iterable[str]) -> None:
        """Parameters that nobody knows are left out."""
        self.leave_out(name for name in self.body.keys() - set(understood) if self.body[name] is not None)

    def leave_out(self, names: Iterable[str]) -> None:
        """Names fields without effect, as far as a header can hold their names."""
        fit = (n for n in sorted(names) if n.isascii() and n.replace(".", "_").isidentifier() and len(n) <= 64)
        self.ignored += [name for name in fit if name not in self.ignored][:32]

    def whole(self, name: str, low: int, high: int) -> int | None:
        """A whole number."""
        value = self.body.get(name)
        if value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise wrong(name, f"a whole number in {low}..{high}", value)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.body.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise wrong(name, "true or false", value)

    def stops(self, name: str) -> tuple[str, ...]:
        """Texts that end a reply."""
        value = self.body.get(name)
        stops = [value] if isinstance(value, str) else value if value is not None else []
        if not isinstance(stops, list) or len(stops) > STOPS_MAX or not all(isinstance(s, str) and s for s in stops):
            raise wrong(name, f"text or a list of at most {STOPS_MAX} texts", value)
        return tuple(stops)

    def model(self) -> str:
        """The name that the program asks for; answers repeat it."""
        return str(self.body.get("model") or "")[:256]


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


def last_line(output: str) -> str:
    """The last line of the output, without colours."""
    line = re.split(r"[\r\n]", output.strip())[-1]  # splitlines() would cut JSON texts at U+2028 and U+0085
    return _TERMINAL.sub("", line).strip("\ufeff \t")


def report_in(line: str) -> Report | None:
    """The report that is the last line of the output, where that is a JSON object with something of a report in it."""
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
