"""Findings of the check: a line of the table each, and a JSON file that is complete after every one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
"""Results of one case by name; names end in their unit."""


class Report:
    """Prints and keeps findings. ``about``: the machine and the versions of its software."""

    def __init__(self, path: Path, about: Facts) -> None:
        self.findings: list[Facts] = []
        self._path = path
        self._about = about
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        print(f"\n| {'part':9} | {'case':30} | result |\n|{'-' * 11}|{'-' * 32}|---|", flush=True)
        self._write()

    def add(self, part: str, case: str, facts: Facts) -> None:
        self.findings.append({"part": part, "case": case, **facts})
        print(f"| {part:9} | {case:30} | {', '.join(map(_shown, facts.items()))} |", flush=True)
        self._write()

    def _write(self) -> None:
        scratch = self._path.with_suffix(".part")
        scratch.write_text(json.dumps({"about": self._about, "findings": self.findings}, indent=1) + "\n")
        os.replace(scratch, self._path)


def _shown(fact: tuple[str, Any]) -> str:
    name, value = fact
    if isinstance(value, float):
        value = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    elif isinstance(value, dict):
        value = " ".join(map(_shown, value.items()))
    return f"{name.replace('_', ' ')} {value}".replace("|", "/").replace("\n", " ")
