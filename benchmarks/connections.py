"""Time until many actors are connected to one replay stage: at the start, and after the stage was killed.

    python -m benchmarks.connections [--actors 2000] [--json FILE]

The stage is a real process (``afterplay replay``) on TCP with CURVE. The actors are links of some other processes, each
with a key and a name of its own, which say HELLO as an actor does, play nothing, and connect by themselves again when
the stage is gone. Actors and stage share the cores of this machine, so it is slower than actors elsewhere would be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import anyio
import uvloop
import yaml

from pipeline.config import RunConfig
from pipeline.config.explain import free_ports
from pipeline.schema import SCHEMA_VERSION
from pipeline.transport.curve import make_keys
from pipeline.transport.messages import EventKind
from pipeline.transport.zeromq import open_link

LINKS_OF_A_PROCESS = 250
"""A context of ZeroMQ has 1,023 sockets, and a link needs three."""
SECONDS_MAX = 300


def serve(file: Path, numbers: range, ready: Barrier, connected: list[Event]) -> None:
    """The links of some actors, until the process is ended. Sets an event of ``connected`` when all are connected for
    the first time, and the second time."""
    config = RunConfig.model_validate(yaml.safe_load(file.read_text()))
    counts = {number: 0 for number in numbers}

    async def link(number: int) -> None:
        name = f"actor-{number}"
        hello = {"role": "actor", "name": name, "schema_version": SCHEMA_VERSION, "slots": 1, "splits": {}}
        async with open_link(config, name) as end:
            end.describe({**hello, "holding": []})
            while True:
                event = await end.receive()
                if event.kind is EventKind.CONNECTED:
                    counts[number] += 1
                    for times, seen in enumerate(connected, 1):
                        if min(counts.values()) >= times:
                            seen.set()

    async def main() -> None:
        async with anyio.create_task_group() as links:
            for number in numbers:
                links.start_soon(link, number)

    ready.wait()
    uvloop.run(main())


def measure(actors: int, directory: Path) -> dict[str, float]:
    """Seconds until all are connected: ``start``, from the start of the stage's process, and ``again``, from the start
    of its successor after it was killed."""
    port = free_ports("127.0.0.1", 1)
    file = directory / "run.yaml"
    raw = {
        "run": {"directory": str(directory), "name": "r"},
        "environments": {"arithmetic": {"name": "arithmetic"}},
        "stage": {"address": f"tcp://127.0.0.1:{port}", "curve": str(directory / "keys")},
        "actor": {"replicas": actors},
    }
    file.write_text(yaml.safe_dump(raw))
    make_keys(directory / "keys", actors)
    parts = [range(i, min(i + LINKS_OF_A_PROCESS, actors)) for i in range(0, actors, LINKS_OF_A_PROCESS)]
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Barrier(len(parts) + 1)
    events = [[spawn.Event(), spawn.Event()] for _ in parts]
    clients = [
        spawn.Process(target=serve, args=(file, part, ready, connected), daemon=True)
        for part, connected in zip(parts, events, strict=True)
    ]
    for client in clients:
        client.start()
    ready.wait(SECONDS_MAX)

    def timed(wait: Callable[[], bool]) -> tuple[float, subprocess.Popen[bytes]]:
        begun = time.monotonic()
        stage = subprocess.Popen([sys.executable, "-m", "pipeline.cli.app", "replay", str(file)])
        try:
            if not wait():
                raise TimeoutError(f"not all of {actors} actors are connected after {SECONDS_MAX} s")
        except BaseException:
            stage.kill()
            raise
        return time.monotonic() - begun, stage

    try:
        start, stage = timed(lambda: all(connected[0].wait(SECONDS_MAX) for connected in events))
        stage.kill()
        stage.wait()
        again, stage = timed(lambda: all(connected[1].wait(SECONDS_MAX) for connected in events))
        stage.terminate()
        stage.wait()
    finally:
        for client in clients:
            client.kill()
    return {"start": start, "again": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--actors", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result here")
    arguments = parser.parse_args()
    found = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(arguments.actors, Path(folder)))
        print(f"{arguments.actors} actors: " + ", ".join(f"{k} {v:.1f} s" for k, v in found[-1].items()), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"actors": arguments.actors, "seconds": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
