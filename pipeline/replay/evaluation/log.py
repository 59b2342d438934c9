"""``evaluations.jsonl``: one line for each evaluation that ended, also when the process was killed in between."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from pipeline.rundir import sync


def write_results(path: Path, results: Iterable[Mapping[str, Any]]) -> None:
    """Append those whose ``evaluation`` is not in the file yet. A line that a kill cut off is ended first."""
    known = {line.get("evaluation") for line in read_results(path)}
    new = [result for result in results if result.get("evaluation") not in known]
    if not new:
        return
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(b"".join(orjson.dumps(result) + b"\n" for result in new))
    sync(path)


def read_results(path: Path) -> list[dict[str, Any]]:
    """All whole lines, by number; none where there is no file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    found = {}
    for line in data.splitlines():
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict) and isinstance(value.get("evaluation"), int):
            found[value["evaluation"]] = value
    return [found[number] for number in sorted(found)]
