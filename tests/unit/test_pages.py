"""Pages and help texts: what they name exists, they stay in their width, and they use plain words."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from learner.process.preflight import FUNCTIONS
from pipeline.cli.app import app
from pipeline.config import RunConfig
from pipeline.config.load import parse_yaml

ROOT = Path(__file__).parents[2]
RETRAINED = ROOT / "benchmarks" / "results" / "retrain-2026-11-27"
PAGES = sorted(
    {str(page.relative_to(ROOT)) for pages in ("*.md", "docs/*.md") for page in ROOT.glob(pages)} - {"CHANGELOG.md"}
)
"""A change log names what was removed."""
FOLDERS = "afterplay|pipeline|actors|learner|grafana|tests|configs|benchmarks|docs|scripts"
COUNTERS = {"groups.zero_variance_kept"}
"""Names of the ledger that look like keys of the run file."""
COLUMNS, CELL = 100, 200
"""Longest line of prose, and longest cell of a table, in characters."""

MANNERED = {
    r"anew": "again, or: from the start",
    r"sa(?:ys|y|id) so": "what is printed, reported or set",
    r"(?:goes|go|went) on": "continues",
    r"(?:is|are|was|were|be|been|being) told": "gets, or: is reported",
    r"today": "currently, or nothing",
    r"by ear": "by judgement",
    r"walled off": "isolated",
    r"mend(?:s|ed)?": "fix",
    r"somebody": "a user, another process",
    r"so (?:often|many|much) as": "as often as, as many as",
    r"young enough": "recent enough",
    r"is there already": "already exists",
    r"begin(?:s|ning)? alike": "share a prefix",
    r"for ever": "without end, permanently, for good",
    r"(?:is|are)(?: not)? believed|(?:it|they|which) believes?": "accept, trust",
    r"of the others,? each": "the others, each",
    r"(?:that|which) (?:is|are) there": "existing, available",
}
"""Expressions with a usual word, and that word."""
OPENING = re.compile(r"(?<![^.!?:*] )\b(?:What|Whose)\b(?= [^.?!]*[.!])")
"""Beginning of a sentence that is a clause where a noun would do; questions may begin so."""

each_page = pytest.mark.parametrize("page", PAGES)


def prose(page: str) -> Iterator[tuple[int, str]]:
    """Numbered lines outside of code blocks."""
    code = False
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        fence = line.lstrip().startswith("```")
        code ^= fence
        if not code and not fence:
            yield number, line


def mannered(text: str) -> list[str]:
    """The expressions of ``MANNERED`` in a text, each with the word to use."""
    words = " ".join(text.split())
    return [
        f"{found[0]!r}: write {usual!r} (…{words[max(0, found.start() - 40) : found.end() + 20]}…)"
        for pattern, usual in MANNERED.items()
        for found in re.finditer(rf"\b{pattern}\b", words, re.IGNORECASE)
    ]


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names_of_tests(file: Path) -> set[str]:
    """Names of the test functions of a Python file; empty where it does not exist."""
    text = file.read_text() if file.exists() else ""
    return set(re.findall(r"^ *(?:async )?def (test_\w+)\(", text, re.MULTILINE))


def has(model: Any, names: list[str]) -> bool:
    """True if the sections have the key; a mapping has any."""
    fields = getattr(model, "model_fields", None)
    if not names or fields is None:
        return True
    return names[0] in fields and has(fields[names[0]].annotation, names[1:])


def sections(model: type[BaseModel] = RunConfig, path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Every section of the run file with its path, the options of losses and estimators included."""
    yield path, model
    for name, field in model.model_fields.items():
        key = f"{path}.{name}" if path else name
        kinds = FUNCTIONS[key].values() if key in FUNCTIONS else (field.annotation, *get_args(field.annotation))
        for kind in dict.fromkeys(kinds):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from sections(kind, key)


def help_texts(command: Any, name: str = "afterplay") -> Iterator[tuple[str, str]]:
    """The help of a command, of its options and of the commands below it."""
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", None) or ""
    for below, found in getattr(command, "commands", {}).items():
        yield from help_texts(found, f"{name} {below}")


# Links and names


@each_page
def test_links_lead_to_files_and_headings(page: str) -> None:
    here = ROOT / page
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", here.read_text()):
        target = here.parent / path if path else here
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@each_page
def test_files_that_are_named_exist(page: str) -> None:
    named = re.findall(rf"`((?:{FOLDERS})/[A-Za-z0-9_./-]+)`", (ROOT / page).read_text())
    assert [path for path in named if not (ROOT / path).exists()] == []


@each_page
def test_tests_that_are_named_exist(page: str) -> None:
    """``PATH::NAME``; the name of a test that runs once for each of some parameters has no brackets."""
    named = re.findall(r"`([\w/.]+\.py)::(\w+)`", (ROOT / page).read_text())
    assert [f"{path}::{name}" for path, name in named if name not in names_of_tests(ROOT / path)] == []


def test_each_row_of_the_table_of_faults_names_a_test_of_its_own() -> None:
    """One each, and no test stands for two faults."""
    lines = (ROOT / "docs" / "FAULTS.md").read_text().splitlines()
    rows = [re.split(r" *(?<!\\)\| *", line)[1:-1] for line in lines if line.startswith("| ")]
    rows = [row for row in rows if row[0] != "fault"]
    assert len(rows) > 50
    assert [row[0] for row in rows if len(row) != 3 or not re.fullmatch(r"`tests/[\w/]+\.py::\w+`", row[1])] == []
    assert len({row[1] for row in rows}) == len(rows)


@each_page
def test_keys_of_the_run_file_that_are_named_exist(page: str) -> None:
    names = "|".join(RunConfig.model_fields)
    named = set(re.findall(rf"[`= ]((?:{names})(?:\.[a-z_0-9]+)+)[`=: ,]", (ROOT / page).read_text())) - COUNTERS
    files = {key for key in named if re.search(r"\.(jsonl?|sqlite|yaml|py)$", key)}
    places = {key: ROOT / "/".join(key.split(".")[:2]) for key in named}
    code = {key for key, place in places.items() if place.is_dir() or place.with_suffix(".py").exists()}
    keys = named - files - code
    assert [key for key in sorted(keys) if not has(RunConfig, key.split("."))] == []


@pytest.mark.parametrize("key", sorted(FUNCTIONS))
def test_a_table_has_the_options_of_each_function_with_their_defaults(key: str) -> None:
    rows = [line for page in PAGES for line in (ROOT / page).read_text().splitlines() if line.startswith("| `")]
    for name, kind in FUNCTIONS[key].items():
        of_name = [row for row in rows if f"`{name}`" in row.split("|")[1]]
        for option, field in kind.model_fields.items() if name != "own" else ():
            given = {value for row in of_name for value in re.findall(rf"`{option}: ([^`]*)`", row)}
            assert option == "name" or field.default in [parse_yaml(v, key) for v in given], f"{key} {name}: {option}"


# Form


@each_page
def test_prose_fits_the_width(page: str) -> None:
    """Table rows, code blocks and the targets of links are exempt."""
    shown = [(number, re.sub(r"\]\([^)]*\)|https?://\S+", "]", line)) for number, line in prose(page)]
    wide = [(number, len(line)) for number, line in shown if len(line) > COLUMNS and not line.startswith("|")]
    assert wide == [], f"expected at most {COLUMNS} columns: wrap these lines"


@each_page
def test_table_cells_are_short(page: str) -> None:
    cells = [
        (number, len(cell.strip()))
        for number, line in prose(page)
        if line.startswith("|")
        for cell in re.split(r"(?<!\\)\|", line)
    ]
    assert [cell for cell in cells if cell[1] > CELL] == [], f"expected at most {CELL} characters: put it into prose"


# Words


@each_page
def test_pages_use_plain_words(page: str) -> None:
    assert mannered("\n".join(line for _, line in prose(page))) == []


@each_page
def test_sentences_of_pages_do_not_open_with_a_clause(page: str) -> None:
    """ "What was not saved is lost" is "Unsaved updates are lost". Headings and table rows are exempt."""
    text = " ".join(line for _, line in prose(page) if not line.startswith(("#", "|")))
    assert [text[found.start() : found.start() + 60] for found in OPENING.finditer(text)] == []


def test_every_key_of_the_run_file_is_documented_in_plain_words() -> None:
    """A key that chooses a section by its name is documented by that section."""
    found = [
        (f"{path}.{name}", field.description or (getattr(field.annotation, "__doc__", None) or ""))
        for path, model in sections()
        for name, field in model.model_fields.items()
        if not (name == "name" and field.description is None)
    ]
    assert len(found) > 250
    assert [key for key, text in found if not text] == []
    assert [(key, *wrong) for key, text in found if (wrong := mannered(text))] == []


@pytest.mark.parametrize("package", ["afterplay", "pipeline", "actors", "learner"])
def test_docstrings_use_plain_words(package: str) -> None:
    found = [
        (f"{file.relative_to(ROOT)}:{node.lineno}", *wrong)
        for file in sorted((ROOT / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if (wrong := mannered(node.value.value))
    ]
    assert found == []


def test_help_of_every_command_and_option_is_plain() -> None:
    found = [text for text in help_texts(typer.main.get_command(app)) if text[0].split()[-1] != "help"]
    assert len(found) > 70
    assert [name for name, text in found if not text] == []
    assert [(name, *wrong) for name, text in found if (wrong := mannered(text))] == []


def test_the_page_of_the_gateway_states_the_versions_of_agent_libraries_that_tests_drive() -> None:
    folder, lines = (
        ROOT / "tests" / "support" / "library_agents",
        (ROOT / "docs" / "GATEWAY.md").read_text().splitlines(),
    )
    pins = (folder / "requirements.txt").read_text().partition("\n\n")[0].splitlines()[1:]
    pins += [f"openai=={json.loads((folder / 'package.json').read_text())['dependencies']['openai']}"]
    for library, version in (pin.replace("-slim", "").split("==") for pin in pins):
        assert any(line.startswith("|") and f"`{library}`" in line and version in line for line in lines), library


def test_seconds_of_the_quickstart_made_again_are_those_of_the_raw_files() -> None:
    page, keys = (ROOT / "docs/DEBUGGING.md").read_text(), ("seconds", "recorded_seconds")
    raw = [
        [json.loads(line) for line in (RETRAINED / f"quickstart-{dtype}.jsonl").read_text().splitlines()]
        for dtype in ("float32", "bfloat16")
    ]
    assert all(step["compared"] and not step["differences"] for steps in raw for step in steps)
    rows = [[row[0]["step"], *(f"{side[key]:.1f}" for side in row for key in keys)] for row in zip(*raw, strict=True)]
    assert len(rows) == 16 and all(f"| {' | '.join(map(str, row))} |" in page for row in rows)
    added = [sum(s["seconds"] for s in steps) / sum(s["update_seconds"] for s in steps) - 1 for steps in raw]
    last = [steps[-1]["seconds"] / steps[-1]["update_seconds"] - 1 for steps in raw]
    passive = [json.loads(line) for line in (RETRAINED / "quickstart-float32-passive.jsonl").read_text().splitlines()]
    assert not any(step["differences"] for step in passive)
    alone = [json.loads(line) for line in (RETRAINED / "quickstart-float32-alone.jsonl").read_text().splitlines()]
    assert not any(step["differences"] for step in alone)
    shares = [step["seconds"] / step["recorded_seconds"] for step in alone]
    first, n = passive[0]["cpu_seconds"], len(passive)
    of_cpu = passive[-1]["cpu_seconds"], raw[0][n - 1]["cpu_seconds"]
    for said in (
        "adds {:.1f} % to the update in float32 and {:.1f} % in bfloat16".format(*(100 * share for share in added)),
        "{:.0f} and {:.0f} % in the last step".format(*(100 * share for share in last)),
        "first {} steps in float32 take {:.0f} s of CPU, imports and model included, instead of {:.0f}".format(
            n, *of_cpu
        ),
        f"takes {first:.0f} s of CPU",
        f"each of the first {len(alone)} steps took {min(shares):.2f} to {max(shares):.2f} of its time in the run",
    ):
        assert said in " ".join(page.split())
