"""Parameters of a test, of which ``make test`` takes some and ``make test-all`` takes all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest


def slow_but(quick: Container[Any], values: Iterable[Any]) -> list[Any]:
    """``values``, of which all but ``quick`` are marked ``slow``."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]
