"""Throughput, memory, logs and ledger of a run while one process throws hostile traffic at its ports.

    python -m benchmarks.fuzz configs/tiny.yaml --count 20000 --seed 0 --json fuzz.json

Thrown are bytes that are no handshake, handshakes that are cut, keys of strangers, messages of every kind with mutated
headers and payloads under the key of another actor, requests that are no HTTP, wrong keys, large headers and bodies,
deep JSON, pipelines, and connections that are reset, cut in half or held open.

One port after the other: the hub from strangers, the hub from the owner of another role's key, the engine, the ports of
the metrics, the gateway where the run has one. With ``--address ipc://`` the hub is attacked as the same user could.

For each port the time is cut into cycles: quiet, fuzz, quiet, control. In the control the same traffic goes to a
port of nobody, so its loss is what the attacker's own CPU time takes from the run on shared cores. A ratio is the rate
of trajectories in a window divided by that of the quiet ones beside it. The median over the cycles is reported.
With ``--core 1`` the attacker has that core for itself and the run the others (Linux), as if it came from another
machine; then there is no control.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import re
import secrets
import shutil
import signal
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import zmq

from pipeline.config import RunConfig
from pipeline.config.explain import free_ports
from pipeline.config.load import load
from pipeline.runtime.run_directory import read_json
from pipeline.schema import Order, Task
from pipeline.schema.codec import encode_trajectory
from pipeline.supervisor.chaos import LedgerAudit, read_processes
from pipeline.transport.curve import PeerKeys, make_keys, peer_keys
from pipeline.transport.socket_folder import SCHEME, address_to_connect
from pipeline.views.step_lines import read_lines
from tests.support import hostile_traffic
from tests.support.hostile_traffic import HttpTarget, Manner
from tests.support.run_handle import RunHandle, start_run
from tests.support.simulated_roles import rollout

THREADS = 32
"""Connections of the attacker that wait for an answer at the same time."""
HELD_MAX = 300
"""Connections that it holds open; the oldest is closed for a new one."""
ANSWER_SECONDS_MAX = 0.5
MESSAGES_PER_CONNECTION = 6
"""Fewer than the hub takes before it cuts."""
DEALERS_MAX = 500
"""Connections of a peer at the same time: the oldest had seconds for its handshake before it is closed."""
START_SECONDS_MAX = 500.0
AFTERWARDS_STEPS = 2
SAMPLE_SECONDS = 2.0
KEYS = {"actor": "AFTERPLAY_FUZZ_ACTOR_KEY", "learner": "AFTERPLAY_FUZZ_LEARNER_KEY"}


@dataclass(slots=True)
class Sent:
    """Result of one attack."""

    count: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """HTTP status, or what became of the connection."""
    cpu_seconds: float = 0.0
    """Of the attacking process."""


Address = tuple[str, int] | str
"""TCP host and port, or the path of a unix socket."""


class Held:
    """Connections that stay open."""

    def __init__(self) -> None:
        self._open: deque[socket.socket] = deque()
        self._lock = threading.Lock()

    def add(self, sock: socket.socket) -> None:
        with self._lock:
            self._open.append(sock)
            oldest = self._open.popleft() if len(self._open) > HELD_MAX else None
        if oldest is not None:
            oldest.close()

    def close(self) -> None:
        while self._open:
            self._open.popleft().close()


def connect(address: Address) -> socket.socket:
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(ANSWER_SECONDS_MAX)
        sock.connect(address)
        return sock
    return socket.create_connection(address, timeout=ANSWER_SECONDS_MAX)


def paced(n: int, rate: float) -> Iterator[int]:
    """Numbers 0 to ``n``, each not before its time."""
    begun = time.monotonic()
    for index in range(n):
        if (early := begun + index / rate - time.monotonic()) > 0:
            time.sleep(early)
        yield index


def send(address: Address, held: Held, manner: Manner, data: bytes) -> str:
    """One connection; what became of it."""
    try:
        sock = connect(address)
    except OSError as error:
        return f"not connected: {type(error).__name__}"
    try:
        sock.sendall(data)
        if manner is Manner.HOLD:
            held.add(sock)
            return "held"
        if manner is Manner.RESET:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if manner is Manner.HALF:
            sock.shutdown(socket.SHUT_WR)
        answer = sock.recv(4096) if manner in (Manner.ASK, Manner.HALF) else b""
        status = re.match(rb"HTTP/1\.\d (\d{3})", answer)
        outcome = status[1].decode() if status else f"{manner.value}: {'other' if answer else 'nothing'}"
    except TimeoutError:
        outcome = "no answer in time"
    except OSError as error:
        outcome = type(error).__name__
    sock.close()
    return outcome


@dataclass(frozen=True, slots=True)
class Connections:
    """An attack in which each message has a connection of its own."""

    traffic: Callable[[random.Random], Iterator[tuple[Manner, bytes]]]

    def draw(self, seed: int, n: int) -> list[Any]:
        return list(islice(self.traffic(random.Random(seed)), n))

    def run(self, addresses: Sequence[Address], drawn: Sequence[Any], rate: float) -> Sent:
        held = Held()
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [
                pool.submit(send, addresses[index % len(addresses)], held, *drawn[index])
                for index in paced(len(drawn), rate)
            ]
        held.close()
        return Sent(len(futures), Counter(future.result() for future in futures))


def handshake_traffic(rng: random.Random) -> Iterator[tuple[Manner, bytes]]:
    manners = (Manner.LEAVE,) * 6 + (Manner.HOLD, Manner.HOLD, Manner.RESET, Manner.HALF)
    return ((rng.choice(manners), data) for data in hostile_traffic.handshakes(rng))


@dataclass(frozen=True, slots=True)
class Peer:
    """An attack with messages of a peer whose key is known; some connections never end their last message."""

    keys: PeerKeys | None
    names: Sequence[str]

    def draw(self, seed: int, n: int) -> list[Any]:
        order = Order("g000001.0.0", "g000001", Task("guess/1", "guess", 1), 0, 0, 0, 60.0)
        payload = [bytes(frame) for frame in encode_trajectory(rollout(order, 0))]
        strangers = [f"g{group:06d}.{slot}.0" for group in range(20) for slot in range(8)]
        return list(islice(hostile_traffic.messages(random.Random(seed), payload, strangers, self.names), n))

    def run(self, addresses: Sequence[Address], drawn: Sequence[Any], rate: float) -> Sent:
        (address,) = addresses
        sent, context = Sent(), zmq.Context[zmq.Socket[bytes]]()
        dealers: deque[zmq.Socket[bytes]] = deque()
        url = f"ipc://{address}" if isinstance(address, str) else f"tcp://{address[0]}:{address[1]}"
        for index in paced(len(drawn), rate):
            if index % MESSAGES_PER_CONNECTION == 0:
                dealers.append(self._dealer(context, url))
                if len(dealers) > DEALERS_MAX:
                    dealers.popleft().close()
            with suppress(zmq.Again):
                dealers[-1].send_multipart(drawn[index], zmq.NOBLOCK)
                sent.count += 1
                if index % 100 == 99:
                    for _ in range(20):
                        dealers[-1].send(bytes(20_000), zmq.NOBLOCK | zmq.SNDMORE)
        time.sleep(0.5)
        for dealer in dealers:
            while dealer.poll(0):
                sent.outcomes[f"answered {dealer.recv_multipart()[0].decode('latin-1')[:20]}"] += 1
        context.destroy(linger=0)
        return sent

    def _dealer(self, context: zmq.Context[zmq.Socket[bytes]], url: str) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        if self.keys is not None:
            self.keys.apply(dealer)
        dealer.connect(url)
        return dealer


Attack = Connections | Peer


def _move_to(core: int | None) -> None:
    if core is not None:
        os.sched_setaffinity(0, {core})


def _attack(
    attack: Attack, addresses: Sequence[Address], drawn: Sequence[Any], rate: float, core: int | None, result: Any
) -> None:
    _move_to(core)
    started = time.process_time()
    sent = attack.run(addresses, drawn, rate)
    sent.cpu_seconds = time.process_time() - started
    result.put(sent)


def in_a_process(
    attack: Attack, addresses: Sequence[Address], drawn: Sequence[Any], rate: float, core: int | None
) -> Sent:
    context = multiprocessing.get_context("fork")
    result = context.SimpleQueue()
    process = context.Process(target=_attack, args=(attack, addresses, drawn, rate, core, result), daemon=True)
    process.start()
    sent: Sent = result.get()
    process.join()
    return sent


def _nobody(server: socket.socket, core: int | None) -> None:
    _move_to(core)
    while True:
        with suppress(OSError):
            server.accept()[0].close()


@contextmanager
def port_of_nobody(core: int | None) -> Iterator[Address]:
    """A port whose connections are closed at once, in another process."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        process = multiprocessing.get_context("fork").Process(target=_nobody, args=(server, core), daemon=True)
        process.start()
        try:
            yield ("127.0.0.1", server.getsockname()[1])
        finally:
            process.kill()
            process.join()


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in which one thing happened."""

    kind: str
    start: float
    end: float
    trajectories: int
    """Received."""


@dataclass(slots=True)
class Target:
    """A port and what is sent to it; the results."""

    name: str
    attack: Attack
    addresses: Callable[[RunHandle], list[Address]]
    windows: list[Window] = field(default_factory=list)
    sent: Sent = field(default_factory=Sent)
    control: Sent = field(default_factory=Sent)
    log_bytes: int = 0
    log_bytes_quiet: int = 0
    refused: dict[str, float] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    """By role: resident bytes before, the largest, after."""
    pids: dict[str, list[int]] = field(default_factory=dict)


class Memory(threading.Thread):
    """Samples of the resident memory of each role."""

    def __init__(self, run: RunHandle) -> None:
        super().__init__(daemon=True)
        self._run, self._end = run, threading.Event()
        self.samples: list[dict[str, int]] = []

    def look(self) -> dict[str, int]:
        found = read_processes().memory(pids_of(self._run))
        self.samples.append(found)
        return found

    def run(self) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            self.look()

    def close(self) -> None:
        self._end.set()
        self.join()


def pids_of(run: RunHandle) -> dict[str, int]:
    """Of the roles, which stay; preparation and preflight end while the run goes on."""
    states = read_json(run.directory.processes_file) or {}
    ends = ("prepare", "preflight")
    return {name: int(state["pid"]) for name, state in states.items() if state.get("pid") and name not in ends}


def log_bytes(run: RunHandle) -> int:
    return run.output.stat().st_size + sum(file.stat().st_size for file in run.directory.logs.iterdir())


def refused(run: RunHandle) -> dict[str, float]:
    """Counters of what was refused, from ``/metrics`` and the store."""
    found = {}
    for role in ("replay", "actor-0"):
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{run.metrics_port(role)}/metrics", timeout=5) as answer,
        ):
            pattern = r"^afterplay_(\w*(?:invalid|refused|dropped|door_calls)\w*_total){(.*)} (\S+)$"
            for name, labels, value in re.findall(pattern, answer.read().decode(), re.MULTILINE):
                found[f"{name}{{{labels}}}"] = float(value)
    return found | {f"trajectories.{k}": float(n) for k, n in run.ledger().trajectories.items() if "dropped" in k}


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {key: n for key, value in after.items() if (n := value - before.get(key, 0.0))}


def fuzz(run: RunHandle, target: Target, options: argparse.Namespace) -> None:
    """All cycles of one port."""
    each, cycles = options.count // options.cycles, options.cycles
    before, memory = refused(run), Memory(run)
    first, pids = memory.look(), pids_of(run)
    memory.start()

    def window(kind: str, what: Callable[[], Any]) -> Any:
        logged, received, start = log_bytes(run), run.ledger().trajectories["received"], time.time()
        result = what()
        end, more = time.time(), run.ledger().trajectories["received"] - received
        target.windows.append(Window(kind, start, end, more))
        if kind == "fuzz":
            target.log_bytes += log_bytes(run) - logged
        else:
            target.log_bytes_quiet += log_bytes(run) - logged
        return result

    for cycle in range(cycles):
        window("quiet", partial(time.sleep, options.quiet))
        drawn = target.attack.draw(options.seed * 1000 + cycle, each)
        attack = partial(in_a_process, target.attack, drawn=drawn, rate=options.rate, core=options.core)
        add(target.sent, window("fuzz", partial(attack, target.addresses(run))))
        if options.core is None:
            window("quiet", partial(time.sleep, options.quiet))
            with port_of_nobody(None) as nobody:
                add(target.control, window("control", partial(attack, [nobody])))
        if run.process.poll() is not None:
            raise SystemExit(f"the run ended while {target.name} was fuzzed:\n{run.tail()}")
    window("quiet", partial(time.sleep, options.quiet))
    memory.close()
    last = memory.look()
    target.memory = {
        role: [n, max(sample.get(role, 0) for sample in memory.samples), last.get(role, 0)] for role, n in first.items()
    }
    target.refused = difference(refused(run), before)
    now = pids_of(run)
    target.pids = {role: [pid, now.get(role, 0)] for role, pid in pids.items() if now.get(role) != pid}


def add(total: Sent, more: Sent) -> None:
    total.count += more.count
    total.outcomes += more.outcomes
    total.cpu_seconds += more.cpu_seconds


def ratios(windows: Sequence[Window]) -> dict[str, Any]:
    """Rates by kind of window, and each fuzz and control window beside its quiet neighbours; NaN beside two in which
    nothing was trained."""
    rates = [w.trajectories / (w.end - w.start) for w in windows]
    found: dict[str, Any] = {"rates": {}, "ratios": {}}
    for kind in dict.fromkeys(window.kind for window in windows):
        of_kind = [i for i, w in enumerate(windows) if w.kind == kind]
        found["rates"][kind] = statistics.median(rates[i] for i in of_kind)
        if kind != "quiet":
            quiet_rates = [statistics.mean((rates[i - 1], rates[i + 1])) for i in of_kind]
            beside = [rates[i] / q if q else math.nan for i, q in zip(of_kind, quiet_rates, strict=True)]
            known = [ratio for ratio in beside if not math.isnan(ratio)]
            found["ratios"][kind] = {"median": statistics.median(known) if known else math.nan, "all": beside}
    quiet = [i for i, w in enumerate(windows) if w.kind == "quiet"]
    found["rates"]["before"], found["rates"]["after"] = rates[quiet[0]], rates[quiet[-1]]
    return found


GENERATE = {
    "model": "policy",
    "token_ids": [1, 2, 3],
    "request_id": "r",
    "sampling_params": {"max_tokens": 1, "temperature": 1.0, "logprobs": 0, "stop_token_ids": [2], "ignore_eos": False},
}
CHAT = {
    "model": "policy",
    "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": []}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "max_tokens": 5,
    "n": 1,
    "stream": True,
    "stop": ["x"],
}
ENGINE_ROUTES = (
    *(("POST", path) for path in ("/inference/v1/generate", "/v1/completions", "/pause?mode=keep", "/resume")),
    *(("POST", path) for path in ("/sleep?level=1", "/wake_up", "/collective_rpc", "/update_weight_version")),
    *(("POST", path) for path in ("/afterplay/end", "/v1/load_lora_adapter", "/start_weight_update", "/tokenize")),
    *(("GET", path) for path in ("/health", "/metrics", "/v1/models", "/weight_info", "/is_paused", "/docs")),
)
ENGINE_BODIES = (
    GENERATE,
    GENERATE,
    {"method": "reload_weights", "kwargs": {"weights_path": "/"}},
    {"new_version": "9"},
)
METRICS_ROUTES = (("GET", "/metrics"), ("GET", "/metrics"), ("GET", "/healthz"), ("GET", "/x"), ("POST", "/metrics"))
GATEWAY_ROUTES = (
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/inference/v1/generate")),
    *(("POST", path) for path in ("/sessions", "/sessions/x/finish")),
    *(("POST", path) for path in ("/sessions/x/v1/chat/completions", "/sessions/\xff/v1/chat/completions")),
    *(("GET", path) for path in ("/sessions/x", "/v1/models", "/health", "/sessions", "/docs")),
)


def config_of(run: RunHandle) -> RunConfig:
    return load(run.directory.config_file, environment={})


def url_address(url: str) -> Address:
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def hub_address(run: RunHandle) -> list[Address]:
    config = config_of(run)
    if config.stage.address.startswith(SCHEME):
        return [address_to_connect(config.stage.address, config.run.path.absolute()).removeprefix(SCHEME)]
    return [url_address(config.stage.address)]


def engine_address(run: RunHandle) -> list[Address]:
    return [url_address(config_of(run).engine.addresses()[0])]


def metrics_addresses(run: RunHandle) -> list[Address]:
    return [("127.0.0.1", run.metrics_port(role) or 0) for role in ("replay", "learner", "actor-0")]


def targets(keys: Path | None, gateway: int | None) -> list[Target]:
    """Ports of a run and what is sent to them."""
    headers = [("Authorization", f"Bearer {os.environ[KEYS['actor']]}")]
    engine = http(HttpTarget(ENGINE_ROUTES, ENGINE_BODIES, headers))
    names = ("hub, strangers", "hub, key of another actor") if keys else ("hub, bytes", "hub, messages")
    # without keys any name may be taken, that of the learner too: one user's processes trust each other
    peer = Peer(peer_keys(keys, "actor-1"), ("actor-1", "learner")) if keys else Peer(None, ("actor-1",))
    found = [
        Target(names[0], Connections(handshake_traffic), hub_address),
        Target(names[1], peer, hub_address),
        Target("engine", engine, engine_address),
        Target("metrics", http(HttpTarget(METRICS_ROUTES, ({"a": 1},))), metrics_addresses),
    ]
    if gateway is not None:
        traffic = http(HttpTarget(GATEWAY_ROUTES, (CHAT, GENERATE, {"wait_seconds": 0.1})))
        found.append(Target("gateway", traffic, lambda run: [("127.0.0.1", gateway)]))
    return found


def http(target: HttpTarget) -> Connections:
    return Connections(partial(hostile_traffic.requests, target=target))


Start = Callable[[Path, Path, str, Sequence[str]], AbstractContextManager[RunHandle]]


def measure(arguments: argparse.Namespace, folder: Path, start: Start = start_run) -> dict[str, Any]:
    """Start the run, fuzz its ports, stop it and audit it."""
    if arguments.core is not None:
        os.sched_setaffinity(0, os.sched_getaffinity(0) - {arguments.core})
    overrides = ["run.total_steps=1000000", "metrics.port=0", *arguments.set]
    for role, name in KEYS.items():
        os.environ[name] = secrets.token_hex(16)
        overrides.append(f"engine.{role}_key=env:{name}")
    config = load(arguments.file, environment={})
    keys = None
    if arguments.address != SCHEME:
        keys = folder / "keys"
        make_keys(keys, actors=2)
        overrides += [f"stage.curve={keys}"]
    overrides.append(f"stage.address={arguments.address}")
    name, section = next(iter(config.environments.items()))
    gateway = free_ports("127.0.0.1", 1) if section.loop.name == "program" else None
    if gateway is not None:
        overrides.append(f"environments.{name}.loop.options.port={gateway}")
    chosen = [
        target
        for target in targets(keys, gateway)
        if not arguments.ports or any(target.name.startswith(port) for port in arguments.ports)
    ]
    with start(arguments.file, folder, "run", overrides) as run:
        run.until_step(arguments.settle, START_SECONDS_MAX)
        pids = pids_of(run)
        for target in chosen:
            print(f"{target.name} …", flush=True)
            fuzz(run, target, arguments)
            print(f"  {dict(target.sent.outcomes.most_common(8))}", flush=True)
        goal = run.steps()[-1]["step"] + AFTERWARDS_STEPS
        run.until_step(goal, START_SECONDS_MAX)
        restarted = {role: [pid, pids_of(run).get(role)] for role, pid in pids.items() if pids_of(run).get(role) != pid}
        run.process.terminate()
        code = run.finish(60.0)
        lines = read_lines(run.directory.metrics_file)
        audit = LedgerAudit()
        audit.close(run.ledger(rows=True), lines)
        if arguments.keep:
            shutil.copytree(run.directory.logs, arguments.keep, dirs_exist_ok=True)
    return {
        "file": str(arguments.file),
        "address": arguments.address,
        "rate": arguments.rate,
        "core": arguments.core,
        "seed": arguments.seed,
        "cycles": arguments.cycles,
        "ports": [
            {
                "port": target.name,
                "sent": target.sent.count,
                "outcomes": dict(target.sent.outcomes),
                "attacker_cpu_seconds": target.sent.cpu_seconds,
                "fuzz_seconds": sum(w.end - w.start for w in target.windows if w.kind == "fuzz"),
                **ratios(target.windows),
                "refused": target.refused,
                "log_bytes": target.log_bytes,
                "log_bytes_otherwise": target.log_bytes_quiet,
                "memory": target.memory,
                "restarted": target.pids,
                "windows": [asdict(window) for window in target.windows],
            }
            for target in chosen
        ],
        "updates": len(lines),
        "restarted": restarted,
        "exit_code": code,
        "audit": audit.problems,
    }


def table(result: Mapping[str, Any]) -> str:
    rows = [f"{'port':28} {'sent':>6} {'before':>7} {'during':>7} {'after':>7} {'ratio':>6} {'control':>7} {'log':>9}"]
    for port in result["ports"]:
        rates, found = port["rates"], port["ratios"]
        control = found["control"]["median"] if "control" in found else math.nan
        rows.append(
            f"{port['port']:28} {port['sent']:6} {rates['before']:7.2f} {rates['fuzz']:7.2f} {rates['after']:7.2f} "
            f"{found['fuzz']['median']:6.2f} {control:7.2f} {port['log_bytes']:9}"
        )
        for role, (before, largest, after) in port["memory"].items():
            rows.append(
                f"    {role:12} {before / 2**20:7.0f} MiB, at most {largest / 2**20:.0f}, {after / 2**20:.0f} after"
            )
        rows.append(f"    refused: { {k: int(v) for k, v in port['refused'].items()} }")
    rows.append(
        f"{result['updates']} updates, restarted: {result['restarted'] or 'no role'}, exit code {result['exit_code']}, "
        f"audit: {'; '.join(result['audit']) or 'every sum adds up'}"
    )
    return "\n".join(rows)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=20_000, help="messages or requests for each port")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=500.0, help="messages a second at most")
    parser.add_argument("--cycles", type=int, default=4)
    parser.add_argument("--quiet", type=float, default=5.0, help="seconds of a quiet window")
    parser.add_argument("--settle", type=int, default=20, help="updates before the first window")
    parser.add_argument("--address", default="tcp://127.0.0.1:0", help="stage.address")
    parser.add_argument("--core", type=int, help="the core of the attacker, which the run does not use")
    parser.add_argument("--ports", nargs="*", help="beginnings of the names of ports")
    parser.add_argument("--set", action="append", default=[], help="as for afterplay run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of the run")
    return parser.parse_args(words)


def main() -> int:
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the run ends with us
    with tempfile.TemporaryDirectory(prefix="afterplay-fuzz-") as folder:
        result = measure(arguments, Path(folder))
    print(table(result))
    if arguments.json is not None:
        arguments.json.write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return 0 if not (result["audit"] or result["exit_code"] or result["restarted"]) else 1


if __name__ == "__main__":
    sys.exit(main())
