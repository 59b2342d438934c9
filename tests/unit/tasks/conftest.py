from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pytest

from pipeline.config.rollouts import EnvironmentConfig
from pipeline.tasks.open import open_source
from pipeline.tasks.source import TaskSource


def questions(n: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i} + 1?", "solution": {"value": i + 1}, "level": i % 3} for i in range(n)]


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


COLUMNS = {"prompt": "question", "answer": "solution.value"}


def environment(**tasks_from: Any) -> EnvironmentConfig:
    section = {"columns": COLUMNS, **tasks_from}
    return EnvironmentConfig.model_validate({"name": "question", "tasks_from": section})


@pytest.fixture
def opened():
    """``opened(**tasks_from)``: a source that is closed at the end."""
    sources: list[TaskSource] = []

    def make(**tasks_from: Any) -> TaskSource:
        sources.append(open_source("q", environment(**tasks_from)))
        return sources[-1]

    yield make
    for source in sources:
        source.close()


Opened = Callable[..., TaskSource]
