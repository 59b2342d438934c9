#!/usr/bin/env python3
"""Every check of the repository, part by part, with the time of each. Exit code 0 when all parts pass.

.venv/bin/python scripts/check.py                  all parts
.venv/bin/python scripts/check.py lint types unit  some of them

A part that does not end within its limit is told to print where each of its threads stands, and is ended: it failed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = ("pytest", "--durations=10", "--color=auto", "-q")
PARTS = {
    "lint": ("ruff", "check", "."),
    "types": ("mypy",),
    "unit": (*PYTEST, "tests/unit", "tests/simulation"),
    "integration": (*PYTEST, "tests/integration"),
    "end_to_end": (*PYTEST, "tests/end_to_end"),
}
LIMIT_SECONDS = {"unit": 1_500, "integration": 1_800, "end_to_end": 3_000}
"""Several times what they take on two cores; together below what a CI run may last, unless two parts hang."""
LIMIT_SECONDS_OTHERS = 600
TRACEBACK_SECONDS = 10


def run(name: str) -> str:
    """Runs a part in a process group of its own; what became of it."""
    # Python prints every thread's traceback at SIGABRT; unbuffered, so that a log shows how far a hung part came.
    env = {**os.environ, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    limit = LIMIT_SECONDS.get(name, LIMIT_SECONDS_OTHERS)
    process = subprocess.Popen([sys.executable, "-m", *PARTS[name]], cwd=ROOT, env=env, start_new_session=True)
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
    except ProcessLookupError:
        return  # it ended and left nothing
    process.wait()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part's processes end with this one
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"check: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    results = []
    for name in names:
        print(f"\n==> {name}: {' '.join(PARTS[name])}", flush=True)
        begun = time.monotonic()
        became = run(name)
        results.append((name, became, time.monotonic() - begun))
    print("\n==> summary")
    for name, became, seconds in results:
        print(f"  {name:<12} {became:<32} {seconds:7.1f} s")
    print(f"  {'together':<12} {'':<32} {sum(r[2] for r in results):7.1f} s", flush=True)
    return int(any(became != "passed" for _, became, _ in results))


if __name__ == "__main__":
    sys.exit(main())
