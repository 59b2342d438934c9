"""Generated tables in pages that are written by hand."""

from pathlib import Path

import pytest

from scripts import algorithms_page
from scripts.tables import update_tables

ROOT = Path(__file__).parents[3]
PAGE = """# Page

<!-- table: first -->

| old |

<!-- end of table -->

Text.

<!-- table: second -->

<!-- end of table -->
"""


def test_each_table_is_replaced_and_the_text_around_it_stays(tmp_path: Path) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text(PAGE)
    tables = {"first": ["| a |", "|---|"], "second": ["| b |"]}
    assert update_tables(page, tables, check=True) == 1
    assert page.read_text() == PAGE
    assert update_tables(page, tables, check=False) == 0
    assert page.read_text() == PAGE.replace("| old |", "| a |\n|---|").replace("second -->\n", "second -->\n\n| b |\n")
    assert update_tables(page, tables, check=True) == 0


@pytest.mark.parametrize("tables", [{"first": []}, {"first": [], "second": [], "third": []}])
def test_a_table_without_a_place_or_a_place_without_a_table_is_refused(tmp_path: Path, tables) -> None:
    page = tmp_path / "PAGE.md"
    page.write_text(PAGE)
    with pytest.raises(ValueError, match="one place for each of the tables"):
        update_tables(page, tables, check=False)
    assert page.read_text() == PAGE


def test_the_options_of_losses_and_estimators_are_current() -> None:
    assert algorithms_page.main("--check") == 0, "run python scripts/algorithms_page.py"
