"""docs/notebooks/bank.ipynb, executed in a kernel as a reader does."""

from __future__ import annotations

import base64
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "bank.ipynb"
CELL_SECONDS_MAX = 240
pytest.importorskip("nbclient", reason="pip install nbclient ipykernel")
pytest.importorskip("ipykernel", reason="pip install nbclient ipykernel")
pytest.importorskip("pandas", reason="pip install pandas")


def executed(folder: Path) -> list[Any]:
    """The code cells with their outputs."""
    import nbformat
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    manager = AsyncKernelManager()
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    manager._kernel_spec = KernelSpec(argv=command, display_name="Python 3", language="python")
    NotebookClient(
        notebook, km=manager, timeout=CELL_SECONDS_MAX, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(cells: list[Any], source: str) -> dict[str, str]:
    """Output of the cell that has ``source``, by type; streams as ``text``."""
    (cell,) = [cell for cell in cells if source in cell.source]
    found = {}
    for output in cell.outputs:
        assert output.output_type != "error", output
        data = {output.name: output.text} if output.output_type == "stream" else output.data
        found |= {kind: found.get(kind, "") + text for kind, text in data.items()}
    return found


@pytest.mark.timeout(2 * CELL_SECONDS_MAX)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")
def test_the_notebook_trains_its_environment_and_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    cells = executed(tmp_path)
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
    import nbformat

    page = (ROOT / "docs" / "PYTHON.md").read_text()
    cell = next(c.source for c in nbformat.read(NOTEBOOK, as_version=4).cells if "class Bank" in c.source)
    assert f"# bank.py\n{cell}\n" in page
