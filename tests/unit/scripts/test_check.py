"""The checks end, count what was tested and skipped, and hold tests to a budget of CPU time."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
HANGS = """
import pathlib, signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
signal.pause()
"""

SAMPLE = """
import time, pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

tried = {"default": 0, "own": 0, "machine": 0}
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
def count(name):
    tried[name] += 1

@given(st.integers())
def test_default(x): count("default")
@pytest.mark.parametrize("case", [1, 2])
@settings(max_examples=40)
@given(x=st.integers())
def test_own(case, x): count("own")
class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        count("machine")
    @rule()
    def step(self): pass
TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=20, stateful_step_count=2)
def test_a_quarter(): assert tried == {"default": 25, "own": 2 * 10, "machine": 5}

def test_within(): pass
def test_over(): burn(0.3)
@pytest.mark.slow
def test_slow(): burn(0.3)
@pytest.fixture
def costly(): burn(0.3)
def test_fixture_over(costly): pass
def test_import_over(tmp_path, monkeypatch):
    (tmp_path / "costly_to_import.py").write_text("import string, test_sample\\ntest_sample.burn(0.3)")
    monkeypatch.syspath_prepend(tmp_path)
    import costly_to_import
@pytest.mark.parametrize("case", [1, 2])
def test_skipped(case): pytest.skip("no vLLM here")
"""


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``scripts/check.py`` with parts of our own: modules in ``tmp_path``."""
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "check.py")
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


@pytest.mark.slow
def test_a_part_that_hangs_fails_and_leaves_nothing_behind(check: Any, tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(check, "LIMIT_SECONDS", {"hangs": 5})
    assert check.run("hangs") == "FAILED (did not end in 5 s)"
    assert "hangs.py" in capfd.readouterr().err, "its threads' places are printed"
    child, deadline = int((tmp_path / "pid").read_text()), monotonic() + 20
    while lives(child):
        assert monotonic() < deadline, "what the part had started lives on"
        Event().wait(0.05)


@pytest.mark.slow
def test_tests_are_counted_by_outcome_and_reason_and_held_to_their_budget(
    check: Any, tmp_path: Path, monkeypatch, capfd
) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_sample.py").write_text(SAMPLE)
    names = ("CPU_SECONDS_MAX", "CPU_NOISE", "YARDSTICK_SECONDS")
    budget = ", ".join(f"tests.conftest.{name}" for name in names) + " = 0.1, 2.0, 1e9\n"
    (tmp_path / "conftest.py").write_text(f"import tests.conftest\nfrom tests.conftest import *\n{budget}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow: sample\n")
    command = ("pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=quick", str(tmp_path / "unit"))
    monkeypatch.setattr(check, "PARTS", {"sample": command})
    monkeypatch.setattr(check, "ENVIRONMENT", {"sample": {"AFTERPLAY_TEST_BUDGET": "1"}})
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    result = check.check("sample")
    told = capfd.readouterr().out
    assert result.became == "FAILED (exit code 1)"
    assert result.tests == {"passed": 9, "failed": 1, "skipped": 2} and result.skipped == {"no vLLM here": 2}, told
    assert result.failed == ["unit.test_sample::test_over"]
    assert "test_over" in told and "expected at most 0.1 s of CPU time, it took 0." in told
    slowest = told.partition("most CPU time")[2]
    assert 0 < slowest.index("test_over") < slowest.index("test_within")
    table = check.summary([result, check.Result("lint", "passed", 1.0)])
    assert "sample       FAILED (exit code 1)" in table and "9 passed, 1 failed, 2 skipped" in table
    assert "==> 2 skipped\n      2  no vLLM here" in table


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [True, False])
def test_a_failure_that_a_repetition_does_not_show_is_listed_as_unstable(
    check: Any, tmp_path: Path, monkeypatch, capfd, repeats: bool
) -> None:
    (tmp_path / "test_sample.py").write_text(
        "from pathlib import Path\nran = Path(__file__).with_name('ran')\n"
        f"def test_rare():\n    again = {repeats} and ran.exists()\n    ran.touch()\n    assert again\n"
        "def test_good(): pass\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(check, "PARTS", {"smoke": ("pytest", "-q", f"--rootdir={tmp_path}", str(tmp_path))})
    result = check.check("smoke")
    assert result.failed == ["test_sample::test_rare"], capfd.readouterr().out
    table = check.summary([result])
    assert (result.became == "passed") == repeats
    assert ("==> 1 UNSTABLE: failed, and passed when repeated\n  test_sample::test_rare" in table) == repeats


def test_a_report_that_is_missing_or_cut_off_counts_no_test(check: Any, tmp_path: Path) -> None:
    """The part failed already; a full disk, say, keeps pytest from writing it."""
    report = tmp_path / "tests.xml"
    for text in ('<testsuites><testsuite><testcase name="a"/></testsuite></testsuites>', "<testsuites><tests", ""):
        report.write_text(text)
        assert check.counts(report)[0].total() == (1 if text.endswith("suites>") else 0)
    report.unlink()
    assert check.counts(report)[0].total() == 0


def test_both_commands_together_run_each_test_once(check: Any) -> None:
    """A test is in ``quick`` or in ``added``; only properties are in both, with more examples."""
    for folder, parts in {"integration": ("smoke", "integration"), "end_to_end": ("smoke", "end_to_end")}.items():
        quick, added = (({**check.QUICK, **check.ADDED})[part] for part in parts)
        assert f"tests/{folder}" in quick and f"tests/{folder}" in added
        assert quick[quick.index("-m") + 1] == "smoke" and added[added.index("-m") + 1] == "not smoke"
    quick, added = check.QUICK["unit"], check.ADDED["thorough"]
    assert quick[-2:] == added[-2:] == ("tests/unit", "tests/simulation")
    assert quick[quick.index("-m") + 1] == "not slow" and added[added.index("-m") + 1] == "slow or hypothesis"


def test_parts_with_the_same_folders_run_them_once_with_all_tests_and_examples(check: Any, monkeypatch) -> None:
    monkeypatch.setattr(check, "PARTS", check.QUICK | check.ADDED)
    assert check.merge(["unit", "smoke", "end_to_end"]) == ["unit", "smoke", "end_to_end"]
    assert check.PARTS == check.QUICK | check.ADDED
    assert check.merge(list(check.PARTS)) == ["lint", "types", "unit", "integration", "end_to_end"]
    folders = {"unit": ("tests/unit", "tests/simulation"), "integration": ("tests/integration",)}
    for name, own in {**folders, "end_to_end": ("tests/end_to_end",)}.items():
        command = check.PARTS[name]
        assert command[-len(own) :] == own and "-m" not in command and "--hypothesis-profile=quick" not in command


def lives(pid: int) -> bool:
    """A killed process that nobody has asked for yet does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
