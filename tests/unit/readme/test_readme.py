"""The README's environment plays, and every run file loads."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from actors.environments.base import Reply, Step
from actors.environments.discovery import build
from learner.losses.registry import loss_rules
from learner.losses.total import policy_loss
from pipeline.config.algorithm import ImportanceConfig, LossConfig
from pipeline.config.load import load
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.schema import Task
from tests.unit.losses.cases import tensors
from tests.unit.losses.slow import Token

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()


def test_environment_of_the_readme_is_under_thirty_lines_and_plays(tmp_path: Path) -> None:
    found = re.search(r"```python\n# my_file\.py\n(.*?)```", README, re.DOTALL)
    assert found is not None
    code = found[1]
    assert len(code.strip().splitlines()) < 30
    file = tmp_path / "my_file.py"
    file.write_text(code)
    environment = build("mine", EnvironmentConfig(name=f"{file}:Reverse", options={"length": 3}))
    task = Task("mine/1", "mine", 1)
    episode, twin = environment.start(task), environment.start(task)
    assert episode.messages == twin.messages  # type: ignore[union-attr]
    word = episode.messages[0].content.split()[1]  # type: ignore[union-attr]
    wrong, right = episode.step(Reply("?")), episode.step(Reply(word[::-1]))  # type: ignore[union-attr]
    assert isinstance(wrong, Step) and isinstance(right, Step)
    assert (wrong.done, wrong.reward, right.done, right.reward) == (False, 0.0, True, 0.5)


@pytest.mark.parametrize("file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_run_file_loads_and_is_in_the_readme(file: Path) -> None:
    load(file, environment={})
    assert f"configs/{file.name}" in README


def test_loss_of_the_readme_weighs_the_gradient_by_the_truncated_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.search(r"```python\n(# my_loss\.py\n.*?)```", README, re.DOTALL)
    section = re.search(r"`(loss: \{policy: \{name: my_loss.*)`", README)
    assert code is not None and section is not None
    (tmp_path / "my_loss.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    rules = loss_rules(LossConfig(**yaml.safe_load(section[1])["loss"]), ImportanceConfig())
    tokens = tensors([Token(-1.0, -2.0, 0.0, 0.0, 0.5, weight=1.0), Token(-2.0, -1.0, 0.0, 0.0, -1.0, weight=1.0)])
    (gradient,) = torch.autograd.grad(policy_loss(tokens, rules).loss, tokens.logprobs)
    assert gradient.tolist() == pytest.approx([-0.5 * 2.0, 1.0 / math.e])
