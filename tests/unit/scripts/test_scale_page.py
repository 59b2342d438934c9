"""The tables of docs/SCALE.md are those of the command that writes them."""

from __future__ import annotations

import pytest

from scripts import scale_page


@pytest.mark.slow
def test_the_tables_on_a_run_of_512_gpus_are_current() -> None:
    assert scale_page.main("--check") == 0, "run python scripts/scale_page.py"
