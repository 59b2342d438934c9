"""Engines and actors that join and leave a run while it trains."""

from __future__ import annotations

import math
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeline.config.explain import free_ports
from pipeline.runtime.engine_addresses import EngineRegistry
from pipeline.schema.codec import decode_trajectory
from pipeline.store.traces import scan_traces, trace_files
from tests.support.fork_server import Forked, ForkServer
from tests.support.run_handle import RunHandle, start_run

TINY = Path(__file__).parents[2] / "configs" / "tiny.yaml"
SECONDS_MAX = 240
"""A guard against hanging."""
ACTORS = [f"actor-{i}" for i in range(4)]


def served(run: RunHandle, version: int) -> set[str]:
    """Engines that sampled trained tokens of ``version`` or newer."""
    traces = filter(None, (entry.load() for entry in scan_traces(trace_files(run.directory.traces))))
    rollouts = [decode_trajectory(trace.frames) for trace in traces]
    return {
        engine
        for rollout in rollouts
        if all(span.policy_version >= version for turn in rollout.turns for span in turn.completion.version_spans)
        for engine in rollout.engine.engine_ids
    }


def fit_engines(run: RunHandle, actor: str) -> float:
    return run.metric(actor, "actor_engines", 'state="fit"')


def test_engines_and_actors_come_and_go_and_nothing_is_lost(
    tmp_path: Path, fork_server: ForkServer, forked_run: partial[start_run]
) -> None:
    def join(role: str, *options: str) -> Forked | subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipeline.cli.app", role, str(run.directory.config_file), "--join", *options]
        with (tmp_path / f"{role}.out").open("ab") as output:
            return fork_server.start(command, forks=True, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    overrides = ["run.total_steps=100000", "traces.trained=128", "groups.groups_per_step=8", "actor.concurrency=32"]
    with forked_run(TINY, tmp_path, "elastic", overrides) as run:
        run.until_step(2, SECONDS_MAX)
        port = free_ports("127.0.0.1", 1)
        engines, actors = [join("engine"), join("engine", "--port", str(port))], [join("actor") for _ in range(3)]
        run.until(
            "three engines that all actors use",
            lambda: all(fit_engines(run, actor) == 3 for actor in ACTORS),
            SECONDS_MAX,
        )
        joined = EngineRegistry(run.directory.engines).read()
        assert len(joined) == 2 and f"http://127.0.0.1:{port}" in joined
        with socket.create_server(("127.0.0.1", 0)) as stranger:
            stranger.setblocking(False)
            url = f"http://127.0.0.1:{stranger.getsockname()[1]}"
            for _ in range(3):
                EngineRegistry(run.directory.engines).announce("engine-9", url)
                run.until_step(run.steps()[-1]["step"] + 2, SECONDS_MAX)
            for role in ("learner", "actor-0"):
                said = run.directory.log_file(role)
                run.until(
                    f"word of the {role}", lambda said=said: "is not signed with a key" in said.read_text(), SECONDS_MAX
                )
            with pytest.raises(BlockingIOError):
                stranger.accept()  # nobody has asked, so nobody has shown a key
        EngineRegistry(run.directory.engines).withdraw("engine-9")
        version = run.steps()[-1]["policy_version"]
        run.until("tokens of the new weights from both", lambda: set(joined) <= served(run, version), SECONDS_MAX)
        for process in (*engines, *actors):
            process.terminate()
        assert [process.wait(SECONDS_MAX) for process in (*engines, *actors)] == [0] * 5, run.tail()
        assert EngineRegistry(run.directory.engines).read() == ()
        run.until("one engine", lambda: fit_engines(run, "actor-0") == 1, SECONDS_MAX)
        assert all(math.isnan(fit_engines(run, actor)) for actor in ACTORS[1:])
        run.until_step(run.steps()[-1]["step"] + 2, SECONDS_MAX)
        run.interrupt()
        ledger = run.ledger(rows=True)
        assert ledger.audit() == []
        assert (ledger.orders.get("failed", 0), ledger.trajectories.get("dropped.failed", 0)) == (0, 0)
        assert max(step["staleness_max"] for step in run.steps()) <= 1
