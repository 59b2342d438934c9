#!/usr/bin/env python3
"""Every check of the repository, part by part, with the time of each. Exit code 0 when all parts pass.

.venv/bin/python scripts/check.py                  all parts, as make test-all
.venv/bin/python scripts/check.py quick            the parts of make test
.venv/bin/python scripts/check.py added            the parts that make test-all adds to those of make test
.venv/bin/python scripts/check.py lint types unit  some of them

Together with ``unit`` the tests of ``thorough`` run in its processes, and with ``integration`` and ``end_to_end`` those
of ``smoke`` in theirs: each pytest imports everything, and ``end_to_end`` starts the vLLM server of ``smoke``.
A part that does not end within its limit prints where each of its threads stands, is ended, and counts as failed. Up to
three failed tests of a part are repeated once. One that then passes is listed as unstable: its fault, in the code or in
the test, shows up rarely and is still to be found. A property's failing example is kept, and fails again.
"""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("pytest", "--color=auto", "-q")
SLOWEST = "--durations=10"
WORKERS = ("-n", str(min(8, (os.cpu_count() or 1) + 1)), "--dist=loadfile")
"""One process of pytest more than cores: tests wait for processes and timers. A file stays in one of them, for the
fixtures that its tests share."""
PAIR = ("-n", "2", "--dist=loadfile")
"""Two at a time of the tests that start processes of their own."""
QUICK = {
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "unit": (
        *(*PYTEST, *WORKERS, "-m", "not slow", "--hypothesis-profile=quick"),
        *("tests/unit", "tests/simulation"),
    ),
    "smoke": (*PYTEST, SLOWEST, "-m", "smoke", "tests/integration", "tests/end_to_end"),
}
ADDED = {
    "thorough": (*PYTEST, *WORKERS, "-m", "slow or hypothesis", "tests/unit", "tests/simulation"),
    "integration": (*PYTEST, *PAIR, SLOWEST, "-m", "not smoke", "tests/integration"),
    "end_to_end": (*PYTEST, SLOWEST, "-m", "not smoke", "tests/end_to_end"),
}
PARTS = QUICK | ADDED
CHOICES = ("-m", "not slow", "not smoke", "--hypothesis-profile=quick")
"""Arguments with which a part runs only some tests or examples of its folders."""
GROUPS = {"quick": tuple(QUICK), "added": tuple(ADDED)}
ENVIRONMENT = {"unit": {"AFTERPLAY_TEST_BUDGET": "1", "OMP_NUM_THREADS": "1"}, "thorough": {"OMP_NUM_THREADS": "1"}}
"""tests/conftest.py fails a test that exceeds its budget of CPU time. Each worker computes in one thread."""
LIMIT_SECONDS = {"unit": 1_500, "smoke": 900, "thorough": 1_800, "integration": 2_700, "end_to_end": 3_000}
"""About twice what they take on two slow cores; where those are shared with others they took as long as that."""
LIMIT_SECONDS_OTHERS = 600
REPEATED, REPEATED_MAX = ("unit", "smoke", "thorough", "integration", "end_to_end"), 3
"""Parts whose failed tests are repeated, and the most failures of a part that may be rare ones."""
TRACEBACK_SECONDS = 10


@dataclass
class Result:
    name: str
    became: str
    seconds: float
    tests: Counter[str] = field(default_factory=Counter)
    """Number of tests by outcome."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Number of skipped tests by reason."""
    failed: list[str] = field(default_factory=list)
    """Names of the tests that failed at first."""


def check(name: str) -> Result:
    """Runs a part and reads what pytest wrote about its tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        more = (f"--junitxml={report}",) if PARTS[name][0] == "pytest" else ()
        begun = time.monotonic()
        became = run(name, *more)
        found = counts(report)
        if name in REPEATED and became != "passed" and 0 < len(found[2]) <= REPEATED_MAX:
            print(f"==> {name}: {len(found[2])} failed; again", flush=True)
            became = run(name, "--last-failed")
        return Result(name, became, time.monotonic() - begun, *found)


def run(name: str, *more: str) -> str:
    """Runs a part in a process group of its own; what became of it."""
    # Python prints every thread's traceback at SIGABRT; unbuffered, so that a log shows how far a hung part came.
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **ENVIRONMENT.get(name, {})}
    # Without bytecode each of the hundreds of processes that the tests start would compile all of its sources.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    limit = LIMIT_SECONDS.get(name, LIMIT_SECONDS_OTHERS)
    process = subprocess.Popen([sys.executable, "-m", *PARTS[name], *more], cwd=ROOT, env=env, start_new_session=True)
    try:
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TRACEBACK_SECONDS)
        return f"FAILED (did not end in {limit} s)"
    else:
        return "passed" if code == 0 else f"FAILED (exit code {code})"
    finally:
        end_group(process)


def end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS refuses where only zombies are left
        return  # it ended and left nothing
    process.wait()


def counts(report: Path) -> tuple[Counter[str], Counter[str], list[str]]:
    """Numbers of tests by outcome, and of skipped tests by reason, and names of failed ones, in a JUnit file."""
    tests, skipped, failed = Counter(), Counter(), []
    with contextlib.suppress(FileNotFoundError, ElementTree.ParseError):  # not written, or not to its end
        for case in ElementTree.parse(report).iter("testcase"):
            found = {child.tag: child for child in case}
            outcome = next((tag for tag in ("failure", "error", "skipped") if tag in found), "passed")
            outcome = {"failure": "failed", "error": "failed"}.get(outcome, outcome)
            tests[outcome] += 1
            if outcome == "failed":
                failed.append(f"{case.get('classname')}::{case.get('name')}")
            if outcome == "skipped":
                skipped[found["skipped"].get("message", "no reason given").partition("\n")[0]] += 1
    return tests, skipped, failed


def summary(results: list[Result]) -> str:
    """A table of the parts, and under it unstable tests and the reasons of skipped ones."""
    lines = ["==> summary"]
    for result in results:
        tests = ", ".join(f"{result.tests[o]} {o}" for o in ("passed", "failed", "skipped") if result.tests[o])
        lines.append(f"  {result.name:<12} {result.became:<32} {result.seconds:7.1f} s  {tests}".rstrip())
    lines.append(f"  {'together':<12} {'':<32} {sum(r.seconds for r in results):7.1f} s")
    unstable = [name for result in results if result.became == "passed" for name in result.failed]
    if unstable:
        lines.append(f"==> {len(unstable)} UNSTABLE: failed, and passed when repeated")
        lines += [f"  {name}" for name in unstable]
    reasons = sum((r.skipped for r in results), Counter())
    if reasons:
        lines.append(f"==> {reasons.total()} skipped")
        lines += [f"  {n:>5}  {reason}" for reason, n in reasons.most_common()]
    return "\n".join(lines)


def merge(names: list[str]) -> list[str]:
    """``names`` without the parts whose tests others of them run too, which are changed so that they do."""
    for part, others in {"thorough": ("unit",), "smoke": ("integration", "end_to_end")}.items():
        if {part, *others} <= set(names):
            names = [name for name in names if name != part]
            for name in others:
                PARTS[name] = tuple(argument for argument in PARTS[name] if argument not in CHOICES)
                LIMIT_SECONDS[name] += LIMIT_SECONDS[part]
    return names


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part's processes end with this one
    names = [name for argument in sys.argv[1:] or GROUPS for name in GROUPS.get(argument, (argument,))]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"check: expected some of {', '.join((*GROUPS, *PARTS))}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    results = []
    for name in merge(names):
        print(f"\n==> {name}: {shlex.join(PARTS[name])}", flush=True)
        results.append(check(name))
    print("\n" + summary(results), flush=True)
    return int(any(result.became != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
