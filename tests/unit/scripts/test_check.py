"""The checks end: a part that hangs is told where it stands, ended with all it started, and failed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import psutil
import pytest

HANGS = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
signal.pause()
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``scripts/check.py`` with parts of our own: modules in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("check", Path(__file__).parents[3] / "scripts" / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PARTS", {name: (name,) for name in ("good", "bad", "hangs")})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "good.py").write_text("")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "hangs.py").write_text(HANGS)
    return module


def test_what_became_of_a_part_is_what_its_process_says(check: Any) -> None:
    assert check.run("good") == "passed"
    assert check.run("bad") == "FAILED (exit code 3)"


def test_a_part_that_hangs_fails_and_leaves_nothing_behind(check: Any, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(check, "LIMIT_SECONDS", {"hangs": 5})
    assert check.run("hangs") == "FAILED (did not end in 5 s)"
    assert "hangs.py" in capfd.readouterr().err, "its threads' places are printed"
    child, deadline = int((tmp_path / "pid").read_text()), monotonic() + 20
    while lives(child):
        assert monotonic() < deadline, "what the part had started lives on"
        Event().wait(0.05)


def lives(pid: int) -> bool:
    """A killed process that nobody has asked for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
