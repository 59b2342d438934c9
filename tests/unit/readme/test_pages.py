"""What the pages of the documentation name is there: files, headings, keys of the run file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.config import RunConfig

ROOT = Path(__file__).parents[3]
PAGES = ["README.md", "ARCHITECTURE.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
FOLDERS = "pipeline|actors|learner|grafana|tests|configs|benchmarks|docs|scripts"
COUNTERS = {"groups.equal_kept"}
"""Of the ledger, which has groups as the run file has."""

each_page = pytest.mark.parametrize("page", PAGES)


def text(page: Path) -> str:
    return page.read_text()


def anchors(page: Path) -> set[str]:
    """As the usual renderers make them of headings."""
    headings = re.findall(r"^#+ (.*)$", text(page), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def has(model: type, names: list[str]) -> bool:
    """Whether the sections have such a key; what is below a mapping is the user's."""
    fields = getattr(model, "model_fields", None)
    if not names or fields is None:
        return True
    return names[0] in fields and has(fields[names[0]].annotation, names[1:])


@each_page
def test_links_lead_to_files_and_headings(page: str) -> None:
    here = ROOT / page
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text(here)):
        target = here.parent / path if path else here
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@each_page
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[A-Za-z0-9_./-]+)`", text(ROOT / page))
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_page
def test_keys_of_the_run_file_that_are_named_exist(page: str) -> None:
    sections = "|".join(RunConfig.model_fields)
    named = set(re.findall(rf"[`= ]((?:{sections})(?:\.[a-z_0-9]+)+)[`=: ,]", text(ROOT / page))) - COUNTERS
    files = {key for key in named if re.search(r"\.(jsonl?|sqlite|yaml|py)$", key)}
    code = {key for key in named if (ROOT / "/".join(key.split(".")[:2])).with_suffix(".py").exists()}
    keys = named - files - code
    assert [key for key in sorted(keys) if not has(RunConfig, key.split("."))] == []
