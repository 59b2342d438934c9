"""docs/notebooks/bank.ipynb, executed in a kernel as a reader does."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "bank.ipynb"
SECONDS_MAX = 400
NEEDED = ("nbclient", "ipykernel", "openai", "pandas")
EXECUTE = "from nbclient.cli import main; main()"


def executed(notebook: Path, folder: Path) -> list[Any]:
    """The code cells with their outputs; the kernel's working folder is ``folder``."""
    shutil.copy(notebook, folder / "given.ipynb")
    command = [sys.executable, "-c", EXECUTE, "given.ipynb", "--output=made.ipynb", "--kernel_name=python3"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    places = {name: str(folder / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    environment = {**os.environ, **places, "PYTHONPATH": path}
    how: dict[str, Any] = {"env": environment, "capture_output": True, "text": True, "timeout": SECONDS_MAX}
    done = subprocess.run(command, cwd=folder, check=False, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return [cell for cell in json.loads((folder / "made.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]


def outputs(cells: list[Any], source: str) -> dict[str, str]:
    """Output of the cell that has ``source``, by type; streams as ``text``."""
    (cell,) = [cell for cell in cells if source in "".join(cell["source"])]
    found: dict[str, str] = {}
    for output in cell["outputs"]:
        data = {output["name"]: output["text"]} if output["output_type"] == "stream" else output["data"]
        found |= {kind: found.get(kind, "") + "".join(text) for kind, text in data.items()}
    return found


@pytest.mark.timeout(SECONDS_MAX + 60)
@pytest.mark.skipif(not all(map(find_spec, NEEDED)), reason=f"pip install {' '.join(NEEDED)}")
def test_the_notebook_trains_its_environment_and_shows_it(tmp_path: Path) -> None:
    cells = executed(NOTEBOOK, tmp_path)
    steps = re.findall(r"step (\d+): reward (\d\.\d+)", outputs(cells, "afterplay.train(")["stdout"])
    assert [int(step) for step, _ in steps] == list(range(1, len(steps) + 1)) and len(steps) >= 10
    rewards = [float(reward) for _, reward in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]), rewards
    assert base64.b64decode(outputs(cells, "run.curves()")["image/png"]).startswith(b"\x89PNG")
    assert "mean" in outputs(cells, 'groupby("step")')["text/html"]
    assert "bank/" in outputs(cells, 'rows["reply"]')["text/html"]
    assert "srcdoc=" in outputs(cells, "run.show(")["text/html"]
    assert outputs(cells, "run.policy()")["text/plain"].startswith("'")
    assert "not running" in outputs(cells, "run.stop()")["text/plain"]
    assert "class Payment" in (tmp_path / "runs" / "bank" / "source" / "environment.py").read_text()


def test_the_notebook_has_the_environment_of_the_page() -> None:
    page = (ROOT / "docs" / "PYTHON.md").read_text()
    sources = ["".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"]]
    (cell,) = [source for source in sources if "class Bank" in source]
    assert f"# bank.py\n{cell}\n" in page
