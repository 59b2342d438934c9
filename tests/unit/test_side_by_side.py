"""docs/side_by_side: its environment is played with the tool, TRL takes the arguments that it shows, and verifiers
loads and scores its taskset."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app

PROGRAMS = Path(__file__).resolve().parents[2] / "docs" / "side_by_side"
CALL = '<tool_call>{"name": "balance", "arguments": {"name": "Ann"}}</tool_call>'


@pytest.mark.parametrize(("price", "reply", "reward"), [(4, "Yes.", 1.0), (4, "no", 0.0), (13, "no", 1.0)])
def test_the_environment_is_played_with_its_tool(
    price: int, reply: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed is the row of the table: Ann's prices begin with 1 in row 0."""
    for name in ("accounts.py", "afterplay/bank.py", "afterplay/run.yaml"):
        shutil.copy(PROGRAMS / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a process of a run finds files of its working directory
    arguments = ["env", "play", "bank", "--config", "run.yaml", "--seed", str(price - 1)]
    played = CliRunner().invoke(app, arguments, input=f"{CALL}\n{reply}\n")
    assert played.exit_code == 0, played.output
    assert f"The price is {price}. Can Ann pay it?" in " ".join(played.output.split())
    assert "12" in played.output, "expected the balance, which the tool has looked up"
    assert f"reward {reward:g}" in played.output


def test_trl_takes_the_arguments() -> None:
    """Read from the sources of the installed package, because importing it takes seconds."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("pip install 'trl>=1.16,<1.17' to compare the page with it")
    trainer = Path(found.origin).parent / "trainer"
    program = ast.parse((PROGRAMS / "trl" / "train.py").read_text())
    calls = [node for node in ast.walk(program) if isinstance(node, ast.Call)]
    used = {node.func.id: {k.arg for k in node.keywords} for node in calls if isinstance(node.func, ast.Name)}
    config = (trainer / "grpo_config.py").read_text()
    inherited = {
        "output_dir",
        "max_steps",
        "learning_rate",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
    }
    assert {key for key in used["GRPOConfig"] - inherited if f"\n    {key}:" not in config} == set()
    source = (trainer / "grpo_trainer.py").read_text()
    assert {key for key in used["GRPOTrainer"] if f"\n        {key}:" not in source} == set()


def test_the_file_of_prime_rl_is_valid() -> None:
    assert tomllib.loads((PROGRAMS / "prime_rl" / "rl.toml").read_text())


SCORE = """
import asyncio
from bank import taskset, tools
tasks = list(taskset.BankTaskset(taskset.BankConfig(id="bank")).load())
class Trace:
    last_reply = "Yes."
assert [type(found) for found in type(tasks[3]).toolsets(taskset.BankTaskConfig())] == [tools.BankTools]
print(len(tasks), tasks[3].data.answer, asyncio.run(tasks[3].can_pay(Trace())))
"""


@pytest.mark.slow
def test_verifiers_loads_and_scores_the_taskset(tmp_path: Path) -> None:
    python = os.environ.get("AFTERPLAY_VERIFIERS_PYTHON")
    if python is None:
        pytest.skip("set AFTERPLAY_VERIFIERS_PYTHON to a Python with verifiers==0.4.0 (make setup-dev makes one)")
    package = tmp_path / "bank"
    shutil.copytree(PROGRAMS / "prime_rl" / "bank", package)
    shutil.copy(PROGRAMS / "accounts.py", package)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-c", SCORE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "45 yes 1.0\n", done.stderr
