"""Two real vLLM servers: a conversation stays where its prefix is, and moves when its engine dies."""

from __future__ import annotations

import os
import signal
import urllib.request
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from actors.engine.base import PrefixCache
from actors.engine.responses import read_prefix_cache
from actors.servers.vllm import vllm_available
from pipeline.config.load import load
from pipeline.store import tables
from pipeline.transport.codec import decode_trajectory
from tests.support.run_handle import RunHandle, start_run

TWO_ENGINES = Path(__file__).parents[2] / "configs" / "two_engines.yaml"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1900)]


def caches(run: RunHandle) -> list[PrefixCache]:
    """The engines' own prefix-cache counters."""
    config = load(run.directory.config_file, environment={})
    found = []
    for url in config.engine.addresses():
        with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
            cache = read_prefix_cache(answer.read().decode())
        assert cache is not None
        found.append(cache)
    return found


def engine_process(run: RunHandle, port: int) -> psutil.Process:
    """The server that listens on ``port``."""
    for child in psutil.Process(run.process.pid).children(recursive=True):
        if f"--port {port}" in " ".join(child.cmdline()) and "api_server" in " ".join(child.cmdline()):
            return child
    raise AssertionError(f"no engine on port {port}")


def test_turns_stay_on_their_engine_and_a_killed_engine_loses_no_order(tmp_path: Path) -> None:
    usable, reason = vllm_available()
    if not usable:
        pytest.skip(f"NO vLLM TESTS HERE: {reason}")
    block = 32
    overrides = [
        "run.total_steps=6",
        "checkpoint.every=1000",
        "checkpoint.at_end=false",
        "environments.arithmetic.options.low=100",
        "environments.arithmetic.options.high=999",
        "groups.n_rollout=4",
        "groups.groups_per_step=4",
        "staleness.max=0",  # no publication in the middle of a conversation: that would empty the caches
    ]
    with start_run(TWO_ENGINES, tmp_path, "two", overrides) as run:
        run.until_step(3, 600)
        hits = sum(cache.hits for cache in caches(run))
        with closing(tables.STORE.connect(run.directory.store_file, read_only=True)) as connection:
            rows = connection.execute("SELECT header, token_ids, logprobs, spans FROM payloads").fetchall()
        trajectories = [decode_trajectory(row) for row in rows]
        assert {len(t.engine.engine_ids) for t in trajectories} == {1}
        assert len({t.engine.engine_ids for t in trajectories}) == 2
        reusable = 0
        for trajectory in trajectories:
            seen = 0
            for turn in trajectory.turns:
                reusable += (seen // block) * block  # whole blocks of what this conversation sent or sampled before
                seen += len(turn.context) + len(turn.completion)
        assert hits >= 0.9 * reusable, (hits, reusable)
        config = load(run.directory.config_file, environment={})
        victim = engine_process(run, config.engine.port)
        os.kill(victim.pid, signal.SIGKILL)
        assert run.finish(900) == 0, run.tail()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == []
        assert ledger.groups["trained"] == 6 * 4
        assert not [name for name in ledger.groups if name.startswith("cancelled") and ledger.groups[name]]
