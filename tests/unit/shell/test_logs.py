"""Log lines as JSON objects, one for each record whatever is in it; and the limit of warnings that repeat."""

from __future__ import annotations

import io
import json
import logging
import sys
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.logs import (
    FORMAT,
    REPEATS_MAX,
    REPEATS_SECONDS,
    JsonFormatter,
    LimitedHandler,
    LogFormat,
    configure_logging,
)


def line_of(message: str, *arguments: object, exc_info: object = None) -> dict:
    record = logging.LogRecord("actors.rollout", logging.ERROR, "", 0, message, arguments, exc_info)
    text = JsonFormatter("actor-0", "tiny").format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert datetime.fromisoformat(line["time"]).utcoffset() is not None, "a time has its zone"
    assert datetime.fromisoformat(line["time"]).timestamp() == pytest.approx(record.created, abs=1e-3)
    return line


def test_a_line_has_run_role_and_the_ids_in_its_message() -> None:
    line = line_of("order %s of %s failed twice (%s)", "g000012.3.0", "g000012", "g000012.3.0")
    assert {key: line[key] for key in ("run", "role", "level", "logger", "message", "ids")} == {
        "run": "tiny",
        "role": "actor-0",
        "level": "ERROR",
        "logger": "actors.rollout",
        "message": "order g000012.3.0 of g000012 failed twice (g000012.3.0)",
        "ids": ["g000012.3.0", "g000012"],
    }


def test_tracebacks_line_ends_and_broken_text_stay_in_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        line = line_of("bad \ud800\n", exc_info=sys.exc_info())
    assert line["message"] == "bad \ud800\n" and "ids" not in line
    assert line["traceback"].endswith("ValueError: two\nlines")


@given(gaps=st.lists(st.sampled_from([0.0, 0.5, REPEATS_SECONDS / 2, REPEATS_SECONDS]), min_size=1, max_size=200))
def test_a_warning_that_repeats_is_written_or_counted_and_never_floods(gaps: list[float]) -> None:
    written, now = io.StringIO(), 1e9
    handler = LimitedHandler(written)
    times = [now := now + gap for gap in gaps]
    for time, level in ((time, level) for time in (*times, now + REPEATS_SECONDS) for level in (30, 20)):
        record = logging.LogRecord("actors", level, "actor.py", 7, "order %s failed", (level,), None)
        record.created = time
        handler.emit(record)
    lines = written.getvalue().splitlines()
    left_out = sum(int(line.split()[0]) for line in lines if "left out" in line)
    shown = lines.count("order 30 failed")
    assert shown + left_out == len(gaps) + 1, "the last, a minute later, tells of all before it"
    assert lines.count("order 20 failed") == len(gaps) + 1, "what is only told is not limited"
    windows = 1 + (now + REPEATS_SECONDS - times[0]) // REPEATS_SECONDS
    assert shown <= windows * REPEATS_MAX


def test_a_clock_that_is_set_back_silences_no_warnings() -> None:
    written = io.StringIO()
    handler = LimitedHandler(written)
    for time in (*[1e9] * REPEATS_MAX, 1e9 - 3600):
        record = logging.LogRecord("actors", 30, "actor.py", 7, "order failed", (), None)
        record.created = time
        handler.emit(record)
    assert len(written.getvalue().splitlines()) == REPEATS_MAX + 1


@pytest.mark.parametrize("form", LogFormat)
def test_the_environment_decides_the_form(
    form: LogFormat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setenv(FORMAT, form)
    try:
        configure_logging("learner", "tiny")
        logging.getLogger("some").warning("hello")
        written = capsys.readouterr().err
    finally:
        root.handlers[:], root.level = handlers, level
    assert written.startswith("{") == (form is LogFormat.JSON)
    assert "learner" in written and "hello" in written
