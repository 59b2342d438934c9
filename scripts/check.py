#!/usr/bin/env python3
"""Every check of the repository, part by part, with the time of each. Exit code 0 when all parts pass.

.venv/bin/python scripts/check.py                  all parts
.venv/bin/python scripts/check.py lint types unit  some of them
"""

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


def main() -> int:
    names = sys.argv[1:] or list(PARTS)
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"check: expected some of {', '.join(PARTS)}, got {', '.join(unknown)}", file=sys.stderr)
        return 2
    results = []
    for name in names:
        print(f"\n==> {name}: {' '.join(PARTS[name])}", flush=True)
        begun = time.monotonic()
        code = subprocess.run([sys.executable, "-m", *PARTS[name]], cwd=ROOT, check=False).returncode
        results.append((name, code, time.monotonic() - begun))
    print("\n==> summary")
    for name, code, seconds in results:
        print(f"  {name:<12} {'passed' if code == 0 else f'FAILED (exit code {code})':<24} {seconds:7.1f} s")
    print(f"  {'together':<12} {'':<24} {sum(r[2] for r in results):7.1f} s", flush=True)
    return int(any(code for _, code, _ in results))


if __name__ == "__main__":
    sys.exit(main())
