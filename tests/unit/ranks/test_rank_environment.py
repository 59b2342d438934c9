"""Ranks of one machine: each process has the learner's visible GPUs and takes the one with the number of its rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import orjson
import pytest

from learner.distributed.collectives import ProcessRank, process_rank
from learner.process.rank_processes import RankZero

STAND_IN = """#!{python} -IS
import json, os, sys
with open("{root}/" + sys.argv[2], "w") as file:
    json.dump({{"argv": sys.argv[1:], "environment": dict(os.environ)}}, file)
os.write(os.open("{root}/ready", os.O_RDWR), b".")
sys.stdin.buffer.read()
"""


def test_ranks_see_the_gpus_of_the_learner_and_take_their_own(kit, tmp_path: Path, monkeypatch) -> None:
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable, root=tmp_path))
    program.chmod(0o755)
    os.mkfifo(tmp_path / "ready")
    ready = os.open(tmp_path / "ready", os.O_RDWR)

    def until_started(*_: object) -> str:
        seen = b""
        while len(seen) < 2:
            seen += os.read(ready, 2)
        return "a device"

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-b,6")
    monkeypatch.setattr("learner.process.rank_processes.module_command", lambda *words: [str(program), *words])
    monkeypatch.setattr("learner.process.rank_processes.join", until_started)
    monkeypatch.setattr("learner.process.rank_processes.RankGroup", lambda *_: SimpleNamespace())
    rank_zero = RankZero(kit.run_config({"ranks": 3}), ProcessRank())
    rank_zero._close(wait_seconds=0)
    os.close(ready)
    for rank in (1, 2):
        found = orjson.loads((tmp_path / str(rank)).read_bytes())
        assert found["argv"][:3] == ["learner.process.rank_processes", str(rank), "3"]
        assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "4,GPU-b,6"
        assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & found["environment"].keys()


@pytest.mark.parametrize("local", [0, 1])
def test_a_rank_of_torchrun_takes_the_gpu_of_its_number_on_its_node(kit, local: int) -> None:
    environment = {"RANK": str(8 + local), "WORLD_SIZE": "12", "LOCAL_RANK": str(local)}
    found = process_rank(kit.run_config({"ranks": 12}).learner, environment)
    assert (found.rank, found.local_rank) == (8 + local, local)
