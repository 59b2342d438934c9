"""README.md keeps its form, the first pages' code works, and every run file loads."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml

from actors.environments.base import Reply, Step
from actors.environments.plugins import build
from learner.losses.loss import policy_loss
from learner.losses.policy_losses import loss_rules
from pipeline.config.load import load
from pipeline.config.losses import ImportanceConfig, LossConfig
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.schema import Task
from pipeline.views.step_lines import facts
from tests.unit.losses.cases import tensors
from tests.unit.losses.slow import Token

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text()
START = (ROOT / "docs" / "START.md").read_text()
ALGORITHMS = (ROOT / "docs" / "ALGORITHMS.md").read_text()
LINES_MAX, FIRST_LINES = 200, 60


def test_the_first_lines_of_the_readme_have_what_a_reader_decides_by() -> None:
    lines = README.splitlines()
    assert len(lines) <= LINES_MAX
    first = "\n".join(lines[:FIRST_LINES])
    for needed in ("docs/images/quickstart.png", "docs/images/killed.png", "uv pip install", "  pip install",
                   "afterplay run @replay_tiny", "make quickstart", "# agent.py", "## Results", "GRPO", "LoRA",
                   "nothing has run on a GPU", "(#status)"):  # fmt: skip
        assert needed in first, f"expected {needed} in the first {FIRST_LINES} lines"
    agent = re.search(r"```python\n(# agent\.py.*?)```", README, re.DOTALL)
    assert agent is not None and len(agent[1].splitlines()) <= 10


def test_the_agent_of_the_readme_is_the_one_of_the_run_file_that_it_names() -> None:
    """tests/integration/test_readme_agent.py trains it."""
    agent = re.search(r"```python\n(# agent\.py.*?)```", README, re.DOTALL)
    section = re.search(r"```yaml\n(environments:.*?)```", README, re.DOTALL)
    assert agent is not None and section is not None
    assert agent[1] == (ROOT / "configs" / "programs" / "agent.py").read_text()
    assert section[1] in (ROOT / "configs" / "agent.yaml").read_text()
    assert "`afterplay run configs/agent.yaml`" in README


def test_every_result_of_the_readme_links_its_raw_file() -> None:
    section = README.split("## Results\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 3
    for row in rows:
        files = re.findall(r"\]\((benchmarks/results/[^)]+)\)", row)
        assert files and all((ROOT / file).is_file() for file in files), row


def test_lines_of_steps_have_the_numbers_that_the_console_prints() -> None:
    """In their order; "…" stands for the rest."""
    line = dict.fromkeys(("reward_mean", "ratio_mean", "ess_ratio", "staleness_mean", "kl_k3", "tokens_per_second"), 1)
    labels = [*facts({**line, "signals": {"solved": 1}})]
    lines = re.findall(r"^(?:# )?step \d+/\d+ +(.*)$", README + START, re.MULTILINE)
    assert len(lines) >= 5
    for text in lines:
        shown = re.findall(r"(\S+) [\d,.]+", text)
        assert shown == labels or (text.endswith("  …") and shown == labels[: len(shown)]), text


def test_the_address_of_the_repository_stands_in_one_place() -> None:
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    assert {page.name for page in pages if "git clone" in page.read_text()} <= {"README.md"}


def test_environment_of_the_first_page_is_under_thirty_lines_and_plays(tmp_path: Path) -> None:
    found = re.search(r"```python\n# my_file\.py\n(.*?)```", START, re.DOTALL)
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
def test_every_run_file_loads_and_is_on_a_page(file: Path) -> None:
    load(file, environment={})
    assert f"configs/{file.name}" in START + (ROOT / "docs" / "RECIPES.md").read_text()


def test_own_loss_of_the_page_weighs_the_gradient_by_the_truncated_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = re.search(r"```python\n(# my_loss\.py\n.*?)```", ALGORITHMS, re.DOTALL)
    section = re.search(r"```yaml\n(loss: \{policy: \{name: .my_loss.*)\n```", ALGORITHMS)
    assert code is not None and section is not None
    (tmp_path / "my_loss.py").write_text(code[1])
    monkeypatch.chdir(tmp_path)
    rules = loss_rules(LossConfig(**yaml.safe_load(section[1])["loss"]), ImportanceConfig())
    tokens = tensors([Token(-1.0, -2.0, 0.0, 0.0, 0.5, weight=1.0), Token(-2.0, -1.0, 0.0, 0.0, -1.0, weight=1.0)])
    (gradient,) = torch.autograd.grad(policy_loss(tokens, rules).loss, tokens.logprobs)
    assert gradient.tolist() == pytest.approx([-0.5 * 2.0, 1.0 / math.e])
