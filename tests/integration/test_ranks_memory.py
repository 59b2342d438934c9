"""Memory of two ranks while they load their model, and while they save it."""

import json
import subprocess
import sys

import pytest

from benchmarks.loading_memory import ROOT, SMALL, environment, write_model
from pipeline.config.explain import free_ports

SLACK = 24 << 20
"""Of the allocator, of collectives and of modules that are imported late; twice that for experts, whose files hold many
small weights (the same for 16 and 32 layers)."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("experts", [0, 16])
def test_a_rank_loads_and_copies_its_shard_and_never_more_than_a_layer_beside_it(tmp_path, fork_server, experts):
    write_model(tmp_path / "model", layers=16, hidden=512, vocabulary=1024, experts=experts)
    write_model(tmp_path / SMALL, layers=2, hidden=64, vocabulary=32, experts=min(experts, 4))
    port, program = free_ports("127.0.0.1", 1), str(ROOT / "benchmarks" / "loading_memory.py")
    ranks = []
    try:
        for rank in range(2):
            with (tmp_path / f"{rank}.log").open("wb") as log:
                command = [sys.executable, program, str(tmp_path / "model"), str(tmp_path)]
                ranks.append(
                    fork_server.start(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment(rank, 2, port), cwd=ROOT
                    )
                )
        for rank, process in enumerate(ranks):
            assert process.wait(200) == 0, (tmp_path / f"{rank}.log").read_text()[-3000:]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["model"] > 250 << 20
        assert found["anonymous"] <= found["shard"] + found["layer"] + SLACK * (1 + bool(experts)), found
        assert found["image"] <= found["shard"] + found["layer"] + SLACK, found
        assert rank == 0 or found["files"] <= SLACK, "rank 0 makes the model folder"
