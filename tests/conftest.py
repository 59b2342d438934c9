"""What all tests share."""

import pytest
from hypothesis import settings

# A loaded machine with two cores is no reason for a property to fail.
settings.register_profile("afterplay", deadline=None)
settings.load_profile("afterplay")

QUICK_SECONDS_MAX = 300
"""For a unit or simulation test that says nothing itself: a hang is told with a traceback, and soon."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        quick = {"unit", "simulation"} & set(item.path.parts)
        if quick and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(QUICK_SECONDS_MAX))
