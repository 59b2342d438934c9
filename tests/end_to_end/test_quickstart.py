"""``make quickstart`` keeps its promise: a real model on a real vLLM server learns to add."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.servers.vllm import vllm_available
from tests.support.run_handle import start_run

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


def test_share_of_right_first_answers_reaches_nine_tenths(tmp_path: Path) -> None:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    with start_run(QUICKSTART, tmp_path, "quickstart") as run:
        assert run.finish(1800) == 0, run.tail()
        first_right = [step["signals"]["first_right"] for step in run.steps()]
        print("share of right first answers by step:", first_right)
        assert first_right[0] < 0.5
        assert max(first_right) >= 0.9
        assert run.directory.curves_file.is_file()
        assert run.ledger(rows=True).audit() == []
        from transformers import AutoModelForCausalLM, AutoTokenizer

        newest = max(p for p in run.directory.checkpoints.iterdir() if (p / "model").is_dir())
        AutoModelForCausalLM.from_pretrained(newest / "model")
        AutoTokenizer.from_pretrained(newest / "model")
