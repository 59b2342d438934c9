"""Checks of engine.colocate, and the command line of vLLM that it makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from actors.servers import launch, vllm
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.config.rollouts import learner_share
from pipeline.runtime.run_directory import RunDirectory

EMBEDDED = {"kind": "embedded", "colocate": "sleep"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "two engines": ({"engine": {**EMBEDDED, "colocate": "split", "replicas": 2}}, "2 engines"),
    "two ranks": ({"engine": {**EMBEDDED, "colocate": "split"}, "learner": {"ranks": 2}}, "learner.ranks is 2"),
    "fewer ranks": ({"engine": {**EMBEDDED, "replicas": 2}}, r"have GPUs \(2\), got learner.ranks 1"),
    "fewer engines": ({"engine": EMBEDDED, "learner": {"ranks": 2}}, r"have GPUs \(1\), got learner.ranks 2"),
    "other numbers": (
        {
            "engine": {"colocate": "sleep", "gpu_memory_share": 0.5},
            "placement": {"tensor_parallel": 2, "engine_gpus": 4, "learner_gpus": 2},
        },
        r"have GPUs \(4\), got placement.learner_gpus 2",
    ),
    "nccl": ({"engine": {"colocate": "split", "weight_transfer": "nccl"}}, "set ipc or files"),
    "two devices": ({"engine": {**EMBEDDED, "device": "cpu"}, "learner": {"device": "cuda"}}, "set both to one"),
    "external unsaid": (
        {"engine": {"kind": "external", "urls": ["http://a:1"], "colocate": "sleep"}},
        "sleep_external: true",
    ),
    "adapters lose the base": (
        {
            "engine": {"colocate": "sleep", "sleep_level": 2},
            "learner": {"lora": {"rank": 4}, "offload": True},
            "publish": {"lora": "adapter"},
        },
        "sleep_level: 1",
    ),
    "8 bits": ({"engine": EMBEDDED, "learner": {"offload": True, "optimizer": "adamw_8bit"}}, "adamw_8bit"),
    "offload alone": ({"learner": {"offload": True}}, "omit learner.offload"),
    "no room": ({"engine": {"colocate": "sleep"}}, "engine.gpu_memory_share"),
    "nothing left": ({"engine": {"colocate": "split", "gpu_memory_share": 0.97}}, "below 0.95"),
    "said twice": (
        {"engine": {"colocate": "split", "args": ["--gpu-memory-utilization=0.4"]}},
        "set engine.gpu_memory_share instead",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_the_remedy(case: str) -> None:
    sections, words = REFUSED[case]
    with pytest.raises(ValidationError, match=words):
        RunConfig.model_validate(sections)


@pytest.mark.parametrize(
    ("engine", "flags"),
    [
        ({"colocate": "none"}, []),
        ({"colocate": "split"}, ["--gpu-memory-utilization", "0.5"]),
        ({"colocate": "split", "gpu_memory_share": 0.3}, ["--gpu-memory-utilization", "0.3"]),
        ({"colocate": "sleep"}, ["--gpu-memory-utilization", "0.8", "--enable-sleep-mode"]),
    ],
)
def test_vllm_on_a_gpu_is_told_its_share(tmp_path: Path, monkeypatch, engine, flags) -> None:
    monkeypatch.setattr(launch, "vllm_available", lambda device: (True, "vllm 0 on GPU"))
    monkeypatch.setattr(vllm, "_build", lambda: ("vllm", "0", False))
    offload = engine["colocate"] == "sleep"
    run = RunConfig.model_validate(
        {"run": {"directory": tmp_path}, "engine": {"kind": "vllm", **engine}, "learner": {"offload": offload}}
    )
    argv, _ = vllm.vllm_command(run, RunDirectory(run.run.path).model, "127.0.0.1", 8100)
    assert [a for a in argv if a in ("--gpu-memory-utilization", "--enable-sleep-mode") or a in flags] == flags


def test_the_shares_of_a_split_device_leave_a_reserve() -> None:
    run = RunConfig.model_validate({"engine": {"colocate": "split", "gpu_memory_share": 0.4}})
    assert learner_share(run.engine) == pytest.approx(0.55)
    assert learner_share(RunConfig().engine) is None


def test_the_example_for_one_card_loads() -> None:
    run = load(Path(__file__).parents[3] / "configs" / "one_gpu.yaml")
    assert (run.engine.colocate, run.learner.offload) == ("sleep", True)
