"""What all tests share."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# A loaded machine with two cores is no reason for a property to fail.
settings.register_profile("afterplay", deadline=None)
settings.load_profile("afterplay")

VERIFIERS = Path(sys.prefix) / "verifiers" / "bin" / "python"
"""A Python with verifiers, which cannot be installed beside Afterplay; scripts/setup.py --dev makes it."""
if VERIFIERS.exists():
    os.environ.setdefault("AFTERPLAY_VERIFIERS_PYTHON", str(VERIFIERS))

QUICK_SECONDS_MAX = 300
"""For a unit or simulation test that says nothing itself: a hang is told with a traceback, and soon."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        quick = {"unit", "simulation"} & set(item.path.parts)
        if quick and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(QUICK_SECONDS_MAX))
