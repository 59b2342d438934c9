"""The wheel, unpacked beside the packages that it needs, in a folder whose modules have the names of its packages and
are plug-ins of the run."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("afterplay", "pipeline", "actors", "learner")
STOPS = f"""
if __name__ in {PACKAGES}:
    raise ImportError("a module of the user was imported in place of Afterplay's")
"""
PLUG_INS = {
    "actors": """
from actors.adapters.games import NumberGuess
from actors.rollout.agent_loop import MultiTurn

class Guess(NumberGuess):
    pass

class Loop(MultiTurn):
    pass
""",
    "learner": """
from learner.advantages.base import spread
from learner.losses.base import TokenLosses

def loss(tokens, rules):
    return -(tokens.log_ratio.exp() * tokens.advantages)

def advantages(scored, config):
    import numpy as np

    return spread(scored, np.array([p.reward for p in scored]) - 0.5)
""",
    "pipeline": """
from pipeline.schema import Trajectory

def reward(trajectory: Trajectory):
    return trajectory.rewards["environment"]

def shaped(scored, trajectories):
    return scored
""",
    "afterplay": """
def lesson(task, trajectories):
    return ["guess in the middle"]
""",
}
RUN_FILE = """
environments:
  guess:
    name: actors:Guess
    loop: {name: actors:Loop}
    options: {low: 0, high: 7, turns: 3, compact: true}
    max_turns: 3
scorer:
  environment_weight: 0
  functions: [{path: pipeline:reward}, {path: pipeline:reward, name: worker, worker: true}]
advantage: {estimator: learner:advantages, shaping: pipeline:shaped}
loss: {policy: learner:loss}
lessons: {enabled: true, writer: afterplay:lesson}
learner: {ranks: 2}
"""
SCRIPT = """
import sys

import afterplay
import yaml

run = afterplay.train("@tiny", run__total_steps=2, **yaml.safe_load(open("more.yaml")))
print([step["step"] for step in run], afterplay.__file__)
"""


@pytest.mark.timeout(240)
def test_a_wheel_runs_plug_ins_in_modules_with_the_names_of_its_packages(tmp_path: Path) -> None:
    for tool in ("pip", "hatchling"):
        if not any(importlib.metadata.distributions(name=tool)):
            pytest.skip("pip install pip hatchling")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", str(tmp_path), str(ROOT)], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert all((tmp_path / "site" / package / "py.typed").exists() for package in PACKAGES)
    here = tmp_path / "here"
    (here / "scripts").mkdir(parents=True)
    for package, source in PLUG_INS.items():
        (here / f"{package}.py").write_text(STOPS + source)
    (here / "more.yaml").write_text(RUN_FILE)
    (here / "scripts" / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-P", "-m", "pipeline.cli.app", "run", "runs/tiny/config.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    how = {"cwd": here, "env": environment, "capture_output": True, "text": True, "timeout": 200, "check": False}
    done = subprocess.run([sys.executable, "scripts/train.py"], **how)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == f"[1, 2] {tmp_path / 'site' / 'afterplay' / '__init__.py'}"
    assert (here / "runs" / "tiny" / "curves.png").exists()
    again = subprocess.run(command, **how)
    assert again.returncode == 0 and "is finished: 2 steps. Continue it with" in again.stdout, again.stdout
