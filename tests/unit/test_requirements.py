"""Imports at the top of modules need only packages of the base installation."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("afterplay", "pipeline", "actors", "learner")
BROUGHT = {
    "filelock": "huggingface_hub",
    "pydantic_core": "pydantic",
    "referencing": "jsonschema",
}
"""Packages that come with one of ours, and are part of its interface."""
BASE = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in PROJECT["dependencies"]}
TRACKERS = tuple(f"pipeline/trackers/{name}.py" for name in ("tensorboard", "wandb", "mlflow", "trackio"))
OPTIONAL = ("actors/adapters/", "actors/servers/", *TRACKERS)
"""Modules that are imported only once their package was found."""


def imported_at_the_top(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_modules_import_only_what_the_base_installation_has() -> None:
    base = {name.lower().replace("-", "_") for name in BASE}
    owners = metadata.packages_distributions()
    missing: dict[str, set[str]] = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        where = file.relative_to(ROOT).as_posix()
        for name in imported_at_the_top(ast.parse(file.read_text())) - set(sys.stdlib_module_names) - set(PACKAGES):
            distributions = {one.lower().replace("-", "_") for one in owners.get(name, [name])}
            known = distributions & base or BROUGHT.get(name) in base
            if not known and not where.startswith(OPTIONAL):
                missing.setdefault(name, set()).add(where)
    assert missing == {}


def test_packages_that_come_with_another_are_of_packages_that_we_require() -> None:
    assert set(BROUGHT.values()) <= BASE
