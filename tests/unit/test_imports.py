"""Imports flow one way, and each heavy library has one home."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("pipeline", "actors", "learner")


def imports_of(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it; ``from a import b`` counts as ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("relative import")
    return found


FILES = {
    str(file.relative_to(ROOT)): imports_of(file)
    for package in PACKAGES
    for file in sorted((ROOT / package).rglob("*.py"))
}


def importers(module: str) -> set[str]:
    """Files that import ``module`` or something in it."""
    return {name for name, found in FILES.items() if any(m == module or m.startswith(module + ".") for m in found)}


def outside(names: set[str], *folders: str) -> set[str]:
    return {name for name in names if not name.startswith(folders)}


def test_files_are_found():
    assert len(FILES) > 30


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("pipeline/", ("actors", "learner", "torch", "vllm", "transformers")),
        ("actors/", ("learner",)),
        ("learner/", ("actors",)),
    ],
)
def test_imports_flow_from_the_vocabulary_outwards(folder, forbidden):
    wrong = {(name, m) for m in forbidden for name in importers(m) if name.startswith(folder)}
    assert wrong == set()


def test_the_schema_knows_only_errors():
    allowed = ("pipeline.schema", "pipeline.errors")
    wrong = {
        (name, module)
        for name, found in FILES.items()
        if name.startswith("pipeline/schema/")
        for module in found
        if module.split(".")[0] in PACKAGES and not module.startswith(allowed)
    }
    assert wrong == set()


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("torch", ("learner/", "actors/embedded/")),
        ("transformers", ("learner/", "actors/embedded/", "actors/rendering/")),
        ("zmq", ("pipeline/transport/",)),
        (
            "aiohttp",
            (
                "actors/engine/",
                "actors/embedded/",
                "actors/gateway/server.py",
                "actors/rollout/reme.py",
                "learner/publisher",
                "learner/policy/reference.py",
                "pipeline/scorer/http/",
            ),
        ),
        ("prometheus_client", ("pipeline/metrics/",)),
        ("sqlite3", ("pipeline/replay/", "pipeline/lessons/", "actors/tools/search.py")),
        ("mcp", ("actors/tools/mcp.py",)),
        ("vllm", ("learner/", "actors/engine/servers/", "actors/tools/parsing/libraries.py")),
        ("matplotlib", ("pipeline/cli/viewer/plots.py",)),
        ("typer", ("pipeline/cli/",)),
        ("pyarrow", ("pipeline/tasks/parquet.py",)),
        ("datasets", ("pipeline/tasks/huggingface.py",)),
    ],
)
def test_a_library_lives_in_its_home(library, homes):
    assert outside(importers(library), *homes) == set()


def test_rendering_takes_tokenizers_but_no_models():
    taken = {m for name, found in FILES.items() if name.startswith("actors/rendering/") for m in found}
    wrong = {m for m in taken if m.startswith("transformers.") and "Tokenizer" not in m and "tokenization" not in m}
    assert wrong == set()


def test_lesson_sources_are_loaded_by_name_alone():
    assert importers("actors.rollout.reme") == set()


def test_the_embedded_engine_serves_http_and_never_calls():
    assert {
        m for n in FILES if n.startswith("actors/embedded/") for m in FILES[n] if m.startswith("aiohttp.Client")
    } == set()


def test_nothing_pickles():
    assert importers("pickle") | importers("dill") | importers("cloudpickle") == set()


def test_imports_are_absolute():
    assert importers("relative import") == set()


def test_the_command_line_starts_without_heavy_libraries():
    """``afterplay --help`` must not load torch: neither directly nor through what it imports."""
    import subprocess
    import sys

    heavy = {"torch", "vllm", "transformers", "matplotlib", "zmq"}
    program = f"import sys, pipeline.cli.app; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"
