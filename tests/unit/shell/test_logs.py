"""Log lines as JSON objects, one for each record whatever is in it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime

import pytest

from pipeline.runtime.logs import FORMAT, JsonFormatter, LogFormat, configure_logging


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
