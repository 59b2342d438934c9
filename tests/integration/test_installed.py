"""The wheel, unpacked beside the packages that it needs, in a folder whose names are those of its packages."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STOPS = 'raise ImportError("a package of the user was imported in place of Afterplay\'s")'
SCRIPT = """
import afterplay

run = afterplay.train("@tiny", run__total_steps=2, environments={"guess": {"name": "colours:Mine"}})
print([step["step"] for step in run], afterplay.__file__)
"""


@pytest.mark.timeout(240)
def test_a_wheel_runs_its_example_where_folders_have_the_names_of_its_packages(tmp_path: Path) -> None:
    for tool in ("pip", "hatchling"):
        if not any(importlib.metadata.distributions(name=tool)):
            pytest.skip("pip install pip hatchling")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    packages = ("afterplay", "pipeline", "actors", "learner")
    assert all((tmp_path / "site" / package / "py.typed").exists() for package in packages)
    here = tmp_path / "here"
    for package in packages[1:]:
        (here / package).mkdir(parents=True)
        (here / package / "__init__.py").write_text(STOPS)
    (here / "colours.py").write_text("from actors.adapters.games import NumberGuess as Mine")
    (here / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "pipeline.cli.app", "run", "@tiny", "--set", "run.total_steps=2"]
    command += ["--set", "environments.guess.name=colours:Mine"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    how = {"cwd": here, "env": environment, "capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run([sys.executable, "train.py"], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"[1, 2] {tmp_path / 'site' / 'afterplay' / '__init__.py'}"
    assert (here / "runs" / "tiny" / "curves.png").exists()
    again = subprocess.run(command, **how)
    assert again.returncode == 0 and "is finished: 2 steps. Continue it with" in again.stdout, again.stdout
