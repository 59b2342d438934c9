"""The rooms of the source tree: imports flow one way, each heavy library has one home, and names lead somewhere.

A *room* is a folder of a package. Imports count wherever they stand: at the top, inside functions, and under
``TYPE_CHECKING``.
"""

import ast
import builtins
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("afterplay", "pipeline", "actors", "learner")
FLOOR = {
    "pipeline": ("", "config schema", "runtime tasks transport", "buffer scorer store", "lessons replay views",
                 "stage trackers", "supervisor", "launchers", "cli"),
    "actors": (" environments sandboxes tools/parsing", "engine rendering tools", "adapters rollout servers",
               "embedded env_commands gateway", "process"),
    "learner": (" data models observability", "advantages distributed losses", "policy", "training weights",
                "checkpoints", "process"),
    "afterplay": ("",),
}  # fmt: skip
"""Rooms from the bottom up (ARCHITECTURE.md): a room imports only from rooms of lower floors. The empty name is the
package's own folder."""
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "docs/*.md")
FOLDERS = "afterplay|pipeline|actors|learner|grafana|tests|configs|benchmarks|docs|scripts"


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(file: str) -> str:
    return file.rsplit("/", 1)[0]


FILES = sorted(str(f.relative_to(ROOT)) for package in PACKAGES for f in (ROOT / package).rglob("*.py"))
FILE_OF = {module_of(file): file for file in FILES}


@cache
def imports_of(file: str) -> set[str]:
    """Every module that a file imports, anywhere in it; ``from a import b`` counts as ``a`` and ``a.b``."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.ImportFrom) and node.level:
            found.add("relative import")
    return found


@cache
def arrows() -> dict[str, set[str]]:
    """The files that each file imports."""
    return {
        file: {
            FILE_OF[m]
            for m in imports_of(file)
            if m in FILE_OF and FILE_OF[m] != file and not FILE_OF[m].endswith("__init__.py")
        }
        for file in FILES
    }


def importers(module: str) -> set[str]:
    """Files that import ``module`` or something in it."""
    return {file for file in FILES if any(m == module or m.startswith(module + ".") for m in imports_of(file))}


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in arrows.get(node, ()):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            members = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(members) > 1:
                found.append(sorted(members))

    for node in arrows:
        if node not in index:
            visit(node)
    return found


@cache
def docstrings(file: str) -> tuple[str, ...]:
    """Every string that stands alone as a statement: docstrings of modules, classes, functions and fields."""
    alone = (node.value for node in ast.walk(tree_of(file)) if isinstance(node, ast.Expr))
    return tuple(one.value for one in alone if isinstance(one, ast.Constant) and isinstance(one.value, str))


@cache
def names_in(file: str) -> set[str]:
    """Everything that a file binds or imports, attributes of classes included."""
    found = set()
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


def test_files_are_found() -> None:
    assert len(FILES) > 200


# Directions


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("pipeline/", ("afterplay", "actors", "learner", "torch", "vllm", "transformers")),
        ("actors/", ("afterplay", "learner")),
        ("learner/", ("afterplay", "actors")),
        ("afterplay/", ("learner", "torch", "vllm", "transformers")),
    ],
)
def test_imports_flow_from_pipeline_outwards(folder: str, forbidden: tuple[str, ...]) -> None:
    assert {(name, m) for m in forbidden for name in importers(m) if name.startswith(folder)} == set()


def test_rooms_import_from_lower_floors() -> None:
    level = {
        f"{package}/{room}".rstrip("/"): number
        for package, floors in FLOOR.items()
        for number, rooms in enumerate(floors)
        for room in rooms.split(" ")
    }
    assert {room_of(file) for file in FILES} == set(level), "every room has a floor"
    up = {
        (file, other)
        for file, others in arrows().items()
        for other in others
        if room_of(file) != room_of(other)
        and file.split("/")[0] == other.split("/")[0]
        and level[room_of(other)] >= level[room_of(file)]
    }
    assert up == set()


def test_files_import_in_no_circle() -> None:
    assert circles(arrows()) == []


def test_the_schema_knows_only_errors() -> None:
    known = {other for file in FILES if file.startswith("pipeline/schema/") for other in arrows()[file]}
    assert {other for other in known if not other.startswith("pipeline/schema/")} == {"pipeline/errors.py"}


# Homes of libraries


@pytest.mark.parametrize(
    ("library", "homes"),
    [
        ("torch", ("learner/", "actors/embedded/", "actors/servers/deltas.py")),
        ("transformers", ("learner/", "actors/embedded/", "actors/rendering/")),
        ("zmq", ("pipeline/transport/",)),
        (
            "aiohttp",
            (
                "actors/embedded/",
                "actors/gateway/server.py",
                "actors/servers/connections.py",
                "pipeline/runtime/metrics_server.py",
                "pipeline/runtime/http.py",
            ),
        ),
        ("prometheus_client", ("pipeline/runtime/metrics",)),
        (
            "sqlite3",
            ("pipeline/store/", "pipeline/lessons/store.py", "pipeline/replay/report.py", "actors/tools/search.py"),
        ),
        ("mcp", ("actors/tools/mcp.py",)),
        ("vllm", ("learner/", "actors/servers/", "actors/tools/parsing/libraries.py")),
        ("matplotlib", ("pipeline/views/plots.py",)),
        ("typer", ("pipeline/cli/",)),
        ("pyarrow", ("pipeline/tasks/readers.py",)),
        ("datasets", ("pipeline/tasks/readers.py",)),
        *((name, (f"pipeline/trackers/{name}.py",)) for name in ("tensorboard", "wandb", "mlflow", "trackio")),
        ("opentelemetry", ("pipeline/trackers/otel.py",)),
        ("ray", ("pipeline/launchers/ray.py",)),
    ],
)
def test_a_library_lives_in_its_home(library: str, homes: tuple[str, ...]) -> None:
    assert {name for name in importers(library) if not name.startswith(homes)} == set()


def test_the_reme_client_is_a_plug_in() -> None:
    assert importers("actors.adapters.reme") == set()


def test_rendering_takes_tokenizers_but_no_models() -> None:
    taken = {m for name in FILES if name.startswith("actors/rendering/") for m in imports_of(name)}
    assert {m for m in taken if m.startswith("transformers.") and not re.search("[Tt]okeniz", m)} == set()


def test_the_embedded_engine_serves_http_and_never_calls() -> None:
    assert {
        m for n in FILES if n.startswith("actors/embedded/") for m in imports_of(n) if m.startswith("aiohttp.Client")
    } == set()


def test_nothing_pickles() -> None:
    assert importers("pickle") | importers("dill") | importers("cloudpickle") == set()


LINUX_ONLY = re.compile(
    r"\b(?:os|select)\.(?:fdatasync|memfd_create|pidfd_open|eventfd|setres[ug]id|sched_[gs]etaffinity|posix_f\w+|"
    r"copy_file_range|splice|pipe2|[gs]etxattr|unshare|setns|epoll|O_TMPFILE|O_DIRECT|O_PATH)\b"
)
"""Names that Python has on Linux and lacks on macOS."""


def test_macos_lacks_nothing_that_the_product_calls_but_in_sandboxes() -> None:
    asked = "pipeline/runtime/processor.py"  # calls it only where it is
    sandboxed = ("actors/sandboxes/first_process.py", "actors/tools/python.py")
    assert {file for file in FILES if LINUX_ONLY.search((ROOT / file).read_text())} == {asked, *sandboxed}


def test_imports_are_absolute() -> None:
    assert importers("relative import") == set()


def test_the_command_line_starts_without_heavy_libraries() -> None:
    """``afterplay --help`` must not load torch: neither directly nor through what it imports."""
    heavy = {"torch", "vllm", "transformers", "matplotlib", "zmq", "numpy", "pydantic", "prometheus_client", "aiohttp"}
    program = f"import sys, pipeline.cli.app; print(sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_run_file_is_refused_without_heavy_libraries() -> None:
    """A lack of the machine is said within a second: for that ``afterplay run`` needs no server and no model."""
    heavy = {"torch", "vllm", "transformers", "matplotlib", "aiohttp"}
    command = ["run", "configs/gpu.yaml", "--set", "placement.engine_gpus=1000"]
    program = f"import sys; from pipeline.cli.app import entry; sys.argv[1:] = {command}\ntry: entry()\n"
    program += f"except SystemExit as end: print(end.code, sorted({heavy!r} & set(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() == "2 []", result.stderr


# Names


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_name_is_used_once_in_a_package(package: str) -> None:
    counted = Counter(
        node.name
        for file in FILES
        if file.startswith(package + "/")
        for node in tree_of(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in counted.items() if n > 1] == []


def test_files_are_named_by_nouns() -> None:
    gerunds = {
        "rendering",
        "scoring",
        "mixing",
        "planning",
        "parsing",
        "timing",
        "packing",
        "training",
        "batching",
        "reasoning",
        "sampling",
    }
    """Words of the field."""
    named = {file for file in FILES if Path(file).stem.endswith("ing") and Path(file).stem not in gerunds}
    assert named == set()


def test_modules_and_classes_that_docstrings_name_exist() -> None:
    everywhere = {name for file in FILES for name in names_in(file)}
    dead = set()
    for file in FILES:
        here = names_in(file)
        for text in docstrings(file):
            for module in re.findall(r":mod:`~?([\w.]+)`", text):
                if module.split(".")[0] in PACKAGES and module not in FILE_OF:
                    dead.add((file, module))
            for name in re.findall(r":(?:class|func|meth|data|attr|exc):`~?([\w.]+)(?:\(\))?`", text):
                parts = name.split(".")
                if parts[0] in PACKAGES:
                    owner = next(
                        (".".join(parts[:i]) for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in FILE_OF), ""
                    )
                    left = parts[len(owner.split(".")) :]
                    if not owner or (left and left[0] not in names_in(FILE_OF[owner])):
                        dead.add((file, name))
                elif not hasattr(builtins, name) and not {parts[0], parts[-1]} & (here | everywhere):
                    dead.add((file, name))
    assert dead == set()


def test_paths_that_docstrings_and_pages_name_exist() -> None:
    texts = {file: "\n".join(docstrings(file)) for file in FILES}
    texts |= {str(p.relative_to(ROOT)): p.read_text() for pattern in PAGES for p in ROOT.glob(pattern)}
    named = rf"(?<![\w/.-])((?:{FOLDERS})/[A-Za-z0-9_./-]*[A-Za-z0-9_/])"
    generated = re.compile(r"docs/images/|configs/my|/\.\.\.|^tests/my|^learner/(curves|metrics)")
    dead = {
        (where, path)
        for where, text in texts.items()
        for path in re.findall(named, text)
        if not generated.search(path) and not (ROOT / path).exists()
    }
    assert dead == set()


def test_docstrings_refer_to_no_section_of_a_page_that_is_not_here() -> None:
    pages = {p.name for p in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"))}
    dead = {
        (file, page)
        for file in FILES
        for text in docstrings(file)
        for page in re.findall(r"\b(?:docs/)?([A-Z_]{4,}(?:\.md)?)(?= section| §|\.md)", text)
        if page.removesuffix(".md") + ".md" not in pages
    }
    """Pages have headings; only publications have numbered sections."""
    numbered = {
        (file, page)
        for file in FILES
        for text in docstrings(file)
        for page in re.findall(r"\b([A-Z_]{4,})(?:\.md)?(?: section| §)? ?\d", text)
        if page + ".md" in pages
    }
    assert dead | numbered == set()


RIDDLE = re.compile(
    r"(What|Which|Who|Whose|Whom|Where|When|Why|How|Whether|Whatever|Whoever|Of|It|They|Those|That|Made|Told|"
    r"By itself|As it (was|is))\b"
)
"""Openings that leave open what is described: questions, and words that refer to a text before."""


def test_docstrings_open_with_what_a_thing_is() -> None:
    product = [(file, text) for file in FILES for text in docstrings(file)]
    others = [
        (str(file.relative_to(ROOT)), ast.get_docstring(ast.parse(file.read_text())) or "")
        for folder in ("tests", "benchmarks", "scripts", "grafana")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    riddles = [(file, text[:60]) for file, text in (*product, *others) if RIDDLE.match(text.lstrip())]
    assert riddles == [], "expected a noun or a verb first: what the thing is, or does"


# The wheel


def test_no_test_double_is_in_the_wheel() -> None:
    doubles = re.compile(r"stub|fake|mock|simulat|dummy|memory_(transport|wire)")
    assert [file for file in FILES if doubles.search(Path(file).stem)] == []
    assert importers("tests") == set()


def test_every_file_is_reached_by_the_product() -> None:
    """By an import, or by its dotted name in a string (plug-ins, processes, commands)."""
    used = {other for file in FILES for other in arrows()[file]}
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= {FILE_OF[m] for m in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", node.value) if m in FILE_OF}
    strings = "\n".join(
        (ROOT / page).read_text() for page in ("pyproject.toml", *(str(p) for p in ROOT.glob("docs/*.md")))
    )
    used |= {file for module, file in FILE_OF.items() if module in strings}
    prefixes = {"actors/env_commands/"}
    """Loaded by :mod:`pipeline.cli.env` under a prefix."""
    lost = {f for f in FILES if not f.endswith("__init__.py") and f not in used and not f.startswith(tuple(prefixes))}
    assert lost == set()
