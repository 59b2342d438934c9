"""Imports at the top of modules need only the base installation; the tested versions of packages are allowed ones."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
TRACKERS = tuple(f"pipeline/trackers/{name}.py" for name in ("tensorboard", "wandb", "mlflow", "trackio", "otel"))
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


CONSTRAINTS = [
    Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
]
TESTED = {canonicalize_name(line.name): line.specifier for line in CONSTRAINTS}


def declared(*extras: str) -> list[Requirement]:
    """What the base installation and extras require, without what they take from each other."""
    texts = [*PROJECT["dependencies"], *(one for extra in extras for one in PROJECT["optional-dependencies"][extra])]
    return [found for text in texts if (found := Requirement(text)).name != PROJECT["name"]]


def test_constraints_name_one_allowed_version_of_each_package() -> None:
    assert [canonicalize_name(line.name) for line in CONSTRAINTS] == sorted(TESTED)
    versions = {}
    for name, specifier in TESTED.items():
        (pin,) = specifier
        assert pin.operator == "==" and "+" not in pin.version and "*" not in pin.version, f"{name}{specifier}"
        versions[name] = pin.version
    for requirement in declared(*PROJECT["optional-dependencies"]):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is None or requirement.specifier.contains(version, prereleases=True), requirement


def test_constraints_cover_the_base_installation_and_what_the_tests_need() -> None:
    assert {canonicalize_name(requirement.name) for requirement in declared("quickstart", "dev")} <= set(TESTED)


def test_one_version_of_pytorch_is_the_tested_one() -> None:
    pin = f"torch{TESTED['torch']}"
    named = {file: (ROOT / file).read_text() for file in ("Makefile", "scripts/setup.py", "scripts/check_wheel.py")}
    assert [
        file for file, text in named.items() if pin not in text or set(re.findall(r"torch==[\d.]*\d", text)) != {pin}
    ] == []
    overridden = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["override-dependencies"]
    assert overridden == [pin]


def test_actions_of_workflows_are_pinned_by_commit_and_jobs_may_do_no_more_than_they_must() -> None:
    """A tag can be moved. Only the job that publishes the pages may write anything, and it runs no code of ours."""
    writing = {}
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = path.read_text()
        used = re.findall(r"uses: (.*)$", text, flags=re.MULTILINE)
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action) for action in used), path
        workflow = yaml.safe_load(text)
        for name, job in workflow["jobs"].items():
            granted = {**workflow["permissions"], **job.get("permissions", {})}
            rights = {right for right, level in granted.items() if level != "read"}
            if rights:
                writing[path.name, name] = (rights, [step for step in job["steps"] if "run" in step])
    assert writing == {("docs.yml", "publish"): ({"pages", "id-token"}, [])}
