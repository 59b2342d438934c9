"""A real vLLM engine on two nodes of a cluster, both of which are this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.explain import ACTOR_KEY_FILE, free_ports
from pipeline.config.load import load
from pipeline.runtime.engine_keys import authorization
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.runtime.weights import UNSTAMPED
from tests.end_to_end.recorded_runs import CONFIGS, require_vllm
from tests.support.run_handle import RunHandle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600)]
CLUSTER = """
import sys
import urllib.error
import urllib.request
from pathlib import Path
from pipeline.config.load import load
from pipeline.supervisor.cluster import Cluster
from pipeline.supervisor.inventory import Inventory, Node
from pipeline.supervisor.run import run

def on_node(place, command):
    return ["env", *(f"{name}={value}" for name, value in place.environment.items()), *command]

nodes = Inventory(tuple(Node(f"n{i}", (f"{i}",)) for i in range(3)))
sys.exit(run(load(Path(sys.argv[1]), sys.argv[2:]), cluster=Cluster(nodes, on_node)))
"""
"""``afterplay run`` on three nodes with a GPU each, as far as the plan knows: processes use the CPU."""
OVERRIDES = (
    "run.total_steps=10000",  # it is interrupted
    "engine.kind=vllm",
    "engine.kv_cache_gib=0.1",
    "engine.block_size=32",
    "engine.max_sequences=32",
    "engine.start_seconds_max=900",
    "engine.env={TORCH_COMPILE_DISABLE: '1'}",  # else tensor parallelism compiles C++ for a minute
    "actor.concurrency=32",
    "groups.groups_per_step=4",
    "placement.learner_gpus=1",
)
TOKENS = list(range(1, 13))
PARTS = ("engine-0", "engine-0-node-1")


def copies_agree(run: RunHandle) -> bool:
    """True once both copies of the model answered at the same version; then their log-probabilities are equal."""
    (url,) = load(run.directory.config_file, environment={}).engine.urls
    key = (run.directory.path / ACTOR_KEY_FILE).read_text().strip()
    sampling = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "prompt_logprobs": 0}
    body = json.dumps({"token_ids": TOKENS, "sampling_params": sampling}).encode()

    def ask(copy: int) -> tuple[list[str], list[float]]:
        headers = {"X-data-parallel-rank": str(copy), "Content-Type": "application/json", **authorization(key)}
        request = urllib.request.Request(f"{url}/inference/v1/generate", body, headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            answer = json.load(response)
        choice = answer["choices"][0]
        entries = choice.get("prompt_logprobs") or answer["prompt_logprobs"]
        logprobs = [entries[t][str(token)]["logprob"] for t, token in enumerate(TOKENS) if t]
        return [span["version"] for span in choice["weight_versions"]], logprobs

    versions, found = zip(*map(ask, range(2)), strict=True)
    with pytest.raises(urllib.error.HTTPError):  # else the header would be ignored, and one copy asked twice
        ask(2)
    assert all(version != [UNSTAMPED] for version in versions), versions
    if versions[0] != versions[1]:
        return False
    assert found[0] == pytest.approx(found[1], abs=1e-3), versions
    return True


@pytest.mark.parametrize("size", ["tensor_parallel", "data_parallel"])
def test_an_engine_on_two_nodes_serves_new_weights_and_comes_back_whole_when_one_is_lost(
    size: str, tmp_path: Path
) -> None:
    require_vllm()
    file = CONFIGS / "tiny.yaml"
    sets = [f"run.directory={tmp_path}", *OVERRIDES, f"placement.{size}=2"]
    output = tmp_path / "output"
    environment = {**os.environ, "MASTER_PORT": str(free_ports("127.0.0.1", 2))}
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER, str(file), *sets], env=environment, stdin=subprocess.DEVNULL, stdout=sink,
            stderr=sink,
        )  # fmt: skip
    run = RunHandle(process, RunDirectory(tmp_path / "tiny"), output)

    def states() -> dict[str, dict[str, Any]]:
        found = read_json(run.directory.processes_file) or {}
        return {name: found[name] for name in PARTS if name in found}

    try:
        run.until_step(2, 900)
        run.until("both parts", lambda: [s["phase"] for s in states().values()] == ["running"] * 2, 300)
        assert {state["restarts"] for state in states().values()} == {0}
        os.kill(states()["engine-0-node-1"]["pid"], signal.SIGKILL)
        run.until("a restart of both parts", lambda: all(s["restarts"] for s in states().values()), 300)
        run.until("both parts again", lambda: all(s["phase"] == "running" for s in states().values()), 900)
        step = run.steps()[-1]["step"]
        run.until_step(step + 3, 600)
        assert {state["restarts"] for state in states().values()} == {1}
        if size == "data_parallel":
            run.until("one version on both copies", lambda: copies_agree(run), 300)
        process.terminate()
        assert run.finish(300) == 0, run.tail()
    finally:
        process.kill()
        process.wait()
    said = output.read_text()
    assert "engine-0 ended (killed by SIGKILL, for it cannot continue without engine-0-node-1)" in said
    assert run.ledger(rows=True).audit() == []
