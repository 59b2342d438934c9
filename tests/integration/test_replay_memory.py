"""The owner of a key fills the memory of the stage, which is killed at a limit as in a container."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
import zmq

from pipeline.config import RunConfig
from pipeline.config.explain import resolve, show, split_address
from pipeline.store.ledger import read_ledger
from pipeline.transport.curve import make_keys, peer_keys
from pipeline.transport.zeromq import open_link
from tests.support.fork_server import Forked, ForkServer
from tests.support.instant_peers import InstantActor, InstantLearner

KILLS = 3
GROWTH_BYTES_MAX = 32 * 1024 * 1024
PART = bytes(64 * 1024)
PARTS = 2 * GROWTH_BYTES_MAX // len(PART)


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def send_unfinished(config: RunConfig) -> None:
    """A message without its end, until the stage is gone. ZeroMQ sends whole messages, so a relay keeps back the
    end."""
    assert config.stage.curve is not None
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        peer_keys(config.stage.curve, "actor-1").apply(dealer)
        dealer.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        for _ in range(PARTS):
            dealer.send(PART, zmq.SNDMORE, copy=False)
        dealer.send(b"", copy=False)
        with server.accept()[0] as near, socket.create_connection(split_address(config.stage.address)) as far:
            back = threading.Thread(target=relay, args=(far, near, sys.maxsize))
            back.start()
            relay(near, far, PARTS * len(PART))  # encryption adds more than the end
            back.join()


def relay(source: socket.socket, target: socket.socket, n_bytes: int) -> None:
    with suppress(OSError):
        while n_bytes > 0 and (data := source.recv(min(n_bytes, 1 << 16))):
            n_bytes -= len(data)
            target.sendall(data)


def kill_at_limit(stage: Forked | subprocess.Popen[bytes], limit: int) -> None:
    """As the kernel does where a container has a limit of memory."""
    while rss(stage.pid) < limit:
        time.sleep(0.01)
    stage.kill()
    assert stage.wait() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(180)
async def test_a_stage_killed_by_its_memory_loses_nothing_and_trains_nothing_twice(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    make_keys(tmp_path / "keys", actors=2)
    raw = {
        "run": {"directory": str(tmp_path), "name": "r", "total_steps": 1_000_000},
        "groups": {"n_rollout": 4, "groups_per_step": 2},
        "environments": {"a": {"name": "arithmetic"}},
        "stage": {"address": "tcp://127.0.0.1:0", "curve": str(tmp_path / "keys")},
    }
    config = resolve(RunConfig.model_validate(raw))
    run_file, log = tmp_path / "run.yaml", tmp_path / "stage.log"
    run_file.write_text(show(config, True))
    actor, learner = InstantActor(), InstantLearner(10**9, 4, 2)

    def start() -> Forked | subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipeline.cli.app", "replay", str(run_file)]
        with log.open("ab") as output:
            return fork_server.start(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    async def work(updates: int) -> None:
        until = learner.updates + updates
        while learner.updates < until:
            await learner.progress()

    stage = start()
    try:
        with anyio.fail_after(150):
            async with anyio.create_task_group() as peers:
                peers.start_soon(actor.run, open_link(config, "actor-0"))
                peers.start_soon(learner.run, open_link(config, "learner"))
                for _ in range(KILLS):
                    await work(20)
                    async with anyio.create_task_group() as attack:
                        attack.start_soon(anyio.to_thread.run_sync, partial(send_unfinished, config))
                        limit = rss(stage.pid) + GROWTH_BYTES_MAX
                        await anyio.to_thread.run_sync(kill_at_limit, stage, limit)
                    stage = start()
                learner.steps = learner.updates + 20
                await learner.done.wait()
                peers.cancel_scope.cancel()
        stage.terminate()
        assert stage.wait(20) == 0, log.read_text()[-3000:]
    finally:
        stage.kill()
    assert len(learner.trained) == len(set(learner.trained)) == learner.updates * 2 * 4
    ledger = read_ledger(tmp_path / "r" / "replay.sqlite", rows=True)
    assert ledger.audit() == []
    assert ledger.updates == learner.updates and ledger.trajectories["trained"] == len(learner.trained)
