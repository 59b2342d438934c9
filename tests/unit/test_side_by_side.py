"""docs/SIDE_BY_SIDE.md: its environment is played with the tool, and TRL takes the arguments that it shows."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.app import app

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "SIDE_BY_SIDE.md").read_text()
CALL = '<tool_call>{"name": "balance", "arguments": {"name": "Ann"}}</tool_call>'


def block(language: str, containing: str) -> str:
    """The one block of a language with this text."""
    (code,) = [code for code in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if containing in code]
    return code


@pytest.mark.parametrize(("price", "reply", "reward"), [(4, "Yes.", 1.0), (4, "no", 0.0), (13, "no", 1.0)])
def test_the_environment_of_the_page_is_played_with_its_tool(
    price: int, reply: str, reward: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed is the row of the table: Ann's prices begin with 1 in row 0."""
    for name in ("accounts.py", "bank.py"):
        (tmp_path / name).write_text(block("python", f"# {name}\n"))
    (tmp_path / "run.yaml").write_text(block("yaml", "bank.py:Bank"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # a process of a run finds files of its working directory
    arguments = ["env", "play", "bank", "--config", "run.yaml", "--seed", str(price - 1)]
    played = CliRunner().invoke(app, arguments, input=f"{CALL}\n{reply}\n")
    assert played.exit_code == 0, played.output
    assert f"The price is {price}. Can Ann pay it?" in " ".join(played.output.split())
    assert "12" in played.output, "expected the balance, which the tool has looked up"
    assert f"reward {reward:g}" in played.output


def test_trl_takes_the_arguments_of_the_page() -> None:
    """Read from the sources of the installed package, because importing it takes seconds."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("pip install 'trl>=1.16,<1.17' to compare the page with it")
    trainer = Path(found.origin).parent / "trainer"
    calls = [node for node in ast.walk(ast.parse(block("python", "GRPOTrainer"))) if isinstance(node, ast.Call)]
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
