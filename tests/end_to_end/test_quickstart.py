"""``make quickstart`` keeps its promise: a real model on a real vLLM server learns to add."""

from __future__ import annotations

import pytest

from tests.end_to_end.recorded_runs import RIGHT_ENOUGH, StoppedRun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


def test_share_of_right_first_answers_doubles(quickstart_run: StoppedRun) -> None:
    run = quickstart_run.run
    first_right = [step["signals"]["first_right"] for step in run.steps()]
    print("share of right first answers by step:", first_right)
    assert first_right[0] < RIGHT_ENOUGH / 2
    assert max(first_right) >= RIGHT_ENOUGH
    assert run.ledger(rows=True).audit() == []
    from transformers import AutoModelForCausalLM, AutoTokenizer

    newest = max(p for p in run.directory.checkpoints.iterdir() if (p / "model").is_dir())
    AutoModelForCausalLM.from_pretrained(newest / "model")
    AutoTokenizer.from_pretrained(newest / "model")
