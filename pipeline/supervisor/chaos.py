"""``afterplay chaos``: a run that is killed, stopped and starved on schedule, and its ledger audited from outside.

The audit has two sources: the store's ledger, whose sums must add up, and what actors and learner recorded themselves
(:mod:`pipeline.runtime.witness`), with which the store must agree (:mod:`pipeline.store.witness`).

The schedule is drawn from a seed. What is hit depends on which processes live at that moment, so the same seed gives
the same faults at the same times, not the same run.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import orjson
from rich.console import Console

from pipeline.config import RunConfig
from pipeline.errors import AfterplayError, StoreError
from pipeline.runtime.children import ChildGroup, OrphanReaper, describe_exit
from pipeline.runtime.disk import size
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory, read_json
from pipeline.runtime.witness import WITNESS
from pipeline.store import tables
from pipeline.store.ledger import Ledger, read_ledger
from pipeline.store.store import ReplayStore, marks_path, store_path
from pipeline.store.witness import StoredOutcomes, Witness, audit, read_witness, unread_groups
from pipeline.supervisor.history import disk_usage
from pipeline.supervisor.run import RunIsAlive, empty_directory, run_lock
from pipeline.views.plots import draw_resources
from pipeline.views.step_lines import Line, MetricsTail, read_lines
from pipeline.views.tables import plain_console

LOOK_SECONDS = 0.5
"""Interval at which the run is looked at: there is no event to wait for across processes."""
SAMPLE_SECONDS = 5.0
"""Interval at which memory and disk are measured, and ended groups read from the store before it rolls them up."""
DRAIN_SECONDS_MAX = 90.0
USEFUL_MIN = 10
"""Updates of which most may be undisturbed, so that their median is the time of such a one."""
STEPS_AFTERWARDS = 2
"""Updates that the run must make after the last fault."""
OVERRIDES = (
    "run.total_steps=1000000", "supervisor.restarts_max=1000000", "replay.start_ratio=0", "stage.store=null",
)  # fmt: skip
"""The run ends with the time of the command, replay, if enabled, begins at once, and the store is one of its own."""


class FaultKind(StrEnum):
    KILL = "kill"
    """SIGKILL to one process."""
    STOP = "stop"
    """SIGSTOP to one process, and SIGCONT after a while: it was stopped, swapped out or cut off."""
    STARVE = "starve"
    """Other programs take all cores for a while."""
    RESTART = "restart"
    """SIGKILL to the supervisor, which takes the whole run with it. The run is started again."""
    DAMAGE = "damage"
    """A copy of the store is damaged and read."""


SHARES = {FaultKind.KILL: 8, FaultKind.STOP: 5, FaultKind.STARVE: 2, FaultKind.RESTART: 1, FaultKind.DAMAGE: 2}
"""Shares of the kinds in a schedule."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the schedule."""

    at: float
    """Seconds since the first update."""
    kind: FaultKind
    draw: float
    """In [0, 1): which of the processes that live at that time is hit, or where the damage is."""
    seconds: float
    """Duration of a STOP or STARVE."""


def schedule(seed: int, seconds: float, every_seconds: float, silence_seconds_max: float) -> list[Fault]:
    """Faults with exponential times between them, ``every_seconds`` on average. A stop lasts up to twice the silence
    after which a peer counts as lost, so half of them cost the process its connection."""
    rng, faults, at = random.Random(seed), [], 0.0
    kinds, shares = list(SHARES), list(SHARES.values())
    while (at := at + rng.expovariate(1 / every_seconds)) < seconds:
        (kind,) = rng.choices(kinds, shares)
        faults.append(Fault(at, kind, rng.random(), rng.uniform(0.5, 2 * silence_seconds_max)))
    return faults


def damaged(data: bytes, draw: float) -> tuple[bytes, str]:
    """``data`` truncated, with a zeroed block or with a flipped bit, at a place that ``draw`` in [0, 1) decides; and
    the damage in words."""
    way, place = divmod(draw * 3, 1)
    at = min(int(place * len(data)), len(data) - 1)
    if way == 0:
        return data[:at], f"cut off at byte {at}"
    if way == 1:
        return data[:at] + bytes(min(4096, len(data) - at)) + data[at + 4096 :], f"zeroed from byte {at} on"
    return data[:at] + bytes([data[at] ^ 1 << int(place * 2**20) % 8]) + data[at + 1 :], f"a bit flipped in byte {at}"


@dataclass(frozen=True, slots=True)
class ResourceUse:
    """Memory and disk at one time."""

    seconds: float
    memory: Mapping[str, int]
    """Resident bytes of each role, its children included."""
    disk: Mapping[str, int]
    """Bytes in the run directory by kind (:func:`pipeline.supervisor.history.disk_usage`)."""


@dataclass(slots=True)
class LedgerAudit:
    """Accounts of the run, read from its files while it runs and after it ended."""

    received: int = 0
    steps: int = 0
    """Updates, with those that a learner made again."""
    changed_at: float = 0.0
    """Time at which something new was last seen: a trajectory or an update."""
    longest: float = 0.0
    """Seconds of the longest time without anything new."""
    longest_from: float = 0.0
    """Time at which it began."""
    lost: int = 0
    """Trajectories that were counted once and were missing later."""
    witnessed: str = ""
    """Numbers of what actors and learner recorded."""
    problems: list[str] = field(default_factory=list)

    def look(self, ledger: Ledger, steps: int, now: float) -> None:
        """Compare with the last look."""
        before = self.received, self.steps
        self.count(ledger)
        self.steps = steps
        if (self.received, self.steps) != before or not steps:  # programs and model are loaded before the first update
            self.changed_at = now
        if now - self.changed_at > self.longest:
            self.longest, self.longest_from = now - self.changed_at, self.changed_at

    def count(self, ledger: Ledger) -> None:
        """Take the number of trajectories that the store has received, and add those that are missing to ``lost``."""
        received = ledger.trajectories.get("received", 0)
        self.lost += max(0, self.received - received)
        self.received = received

    def close(self, ledger: Ledger, lines: Sequence[Line]) -> None:
        """The audit after the end of the run."""
        self.problems += ledger.audit()
        if [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
            self.problems.append(f"expected the steps 1 to {len(lines)} in metrics.jsonl, got others")
        if len(lines) != ledger.updates:
            self.problems.append(f"metrics.jsonl has {len(lines)} updates, the store {ledger.updates}")
        fresh = sum(line["n_trajectories"] - line["n_replayed"] for line in lines)
        if fresh != ledger.trajectories.get("trained", 0):
            self.problems.append(
                f"the learner trained on {fresh} fresh trajectories, the store has "
                f"{ledger.trajectories.get('trained', 0)} as trained"
            )

    def compare(self, witness: Witness, stored: StoredOutcomes, environment_weight: float | None) -> None:
        """The audit against what actors and learner recorded."""
        self.problems += audit(witness, stored, environment_weight)
        trained = sum(len(learner.trained) for learner in witness.learners)
        unread = unread_groups(witness, stored)
        self.witnessed = (
            f"{len(witness.made)} trajectories made, {len(witness.acknowledged)} acknowledged, {trained} updates of "
            f"{len(witness.learners)} learner processes" + (f"; not compared: {unread} groups" if unread else "")
        )


class Chaos:
    """Runs ``file`` in ``directory`` and injects the faults of a schedule. Blocks; one use."""

    def __init__(self, config: RunConfig, command: Sequence[str], reaper: OrphanReaper, console: Console) -> None:
        self.directory = RunDirectory(config.run.path.absolute())
        self.audit = LedgerAudit()
        self.samples: list[ResourceUse] = []
        self.faults: list[tuple[float, str]] = []
        """Seconds and description of what was done."""
        self.done: Counter[str] = Counter()
        self._config = config
        self._command = command
        self._reaper = reaper
        self._console = console
        self._folder = self.directory.path / "chaos"
        self._witness = self._folder / "witness"
        self._store = store_path(config, self.directory)
        self._stored = StoredOutcomes()
        self._log = self.directory.path.with_name(f"{self.directory.path.name}.log")
        self._begun = time.monotonic()
        self._tail = MetricsTail(self.directory.metrics_file)
        self._made = 0
        """Updates, with those that were made again."""
        self._undo: list[tuple[float, contextlib.ExitStack]] = []
        """Times at which faults that last end."""
        self._run: ChildGroup

    @property
    def now(self) -> float:
        return time.monotonic() - self._begun

    def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Until ``seconds`` after the first update and some updates more, then audit. A run that ends by itself or
        stands still is audited too; that is one more problem. Raises :class:`AfterplayError` when there is nothing to
        audit."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._log.unlink(missing_ok=True)
        with run_lock(self.directory, mark=False):
            empty_directory(self.directory)
        shutil.rmtree(self._witness, ignore_errors=True)
        self._start()
        failure: AfterplayError | None = None
        try:
            self._until(lambda: self.audit.steps > 0, "its first update")
            first, waiting = self.now, list(faults)
            while self.now < first + seconds:
                while waiting and waiting[0].at <= self.now - first:
                    self._inject(waiting.pop(0))
                self._look()
            self._end_faults(math.inf)
            goal = self.audit.steps + STEPS_AFTERWARDS
            self._until(lambda: self.audit.steps >= goal, f"update {goal}, after the last fault")
            self._stop()
        except AfterplayError as error:
            failure = error
            self.audit.problems.append(str(error))
        finally:
            self._end_faults(math.inf)
            self._run.kill()
        if failure is not None:
            self._await_lock()
        try:
            ledger = read_ledger(self._store, rows=True)
            self.audit.count(ledger)  # what came in while the run stopped
            if failure is None:
                self.audit.close(ledger, read_lines(self.directory.metrics_file))
            else:  # it may have ended in the middle of an update
                self.audit.problems += ledger.audit()
            self._stored.read(self._store, end=True)
            scorer = self._config.scorer
            weight = None if scorer.parts else scorer.environment_weight
            self.audit.compare(read_witness(self._witness), self._stored, weight)
        except AfterplayError as error:
            raise failure or error from None
        finally:
            self._write()

    def _start(self) -> None:
        with self._log.open("ab") as output:
            environment = {**os.environ, WITNESS: str(self._witness)}
            self._run = ChildGroup(self._command, self._reaper, environment=environment, output=output)

    def _stop(self) -> None:
        if not self._run.stop(DRAIN_SECONDS_MAX):
            self.audit.problems.append(f"the run did not end within {DRAIN_SECONDS_MAX:g} s after SIGTERM")
        elif code := self._run.end.result():
            self.audit.problems.append(f"the run ended with {describe_exit(code)} when it was asked to stop")

    def _until(self, reached: Callable[[], bool], what: str) -> None:
        limit = self._config.engine.start_seconds_max + self._config.supervisor.stuck_seconds_max
        deadline = self.now + limit
        while not reached():
            if self.now > deadline:
                raise AfterplayError(f"the run did not come to {what} within {limit:g} s: see {self._log}")
            self._look()

    def _look(self) -> None:
        """Wait a moment, note what is new, measure, and end faults whose time is over."""
        time.sleep(LOOK_SECONDS)
        if self._run.end.done():
            raise AfterplayError(f"the run ended by itself ({describe_exit(self._run.end.result())}): see {self._log}")
        self._end_faults(self.now)
        self._made += len(self._tail.read())
        with contextlib.suppress(StoreError):  # not there yet, or it restarts
            self.audit.look(read_ledger(self._store), self._made, self.now)
        if not self.samples or self.now - self.samples[-1].seconds >= SAMPLE_SECONDS:
            memory = read_processes().memory(self._pids())
            self.samples.append(ResourceUse(self.now, memory, disk_usage(self.directory)))
            with contextlib.suppress(StoreError):
                self._stored.read(self._store)

    def _inject(self, fault: Fault) -> None:
        live = sorted((name, pid) for name, pid in self._pids().items() if name != "supervisor")
        if fault.kind in (FaultKind.KILL, FaultKind.STOP) and not live:
            return
        what = f"{fault.kind}"
        match fault.kind:
            case FaultKind.KILL | FaultKind.STOP:
                name, pid = live[int(fault.draw * len(live))]
                what += f" {name}"
                number = signal.SIGKILL if fault.kind is FaultKind.KILL else signal.SIGSTOP
                if not send(pid, number):
                    return
                if fault.kind is FaultKind.STOP:
                    what += f" for {fault.seconds:.1f} s"
                    self._end_later(fault.seconds).callback(send, pid, signal.SIGCONT)
            case FaultKind.STARVE:
                what += f" for {fault.seconds:.1f} s"
                end = self._end_later(fault.seconds)
                for _ in range(2 * (os.cpu_count() or 1)):
                    end.callback(ChildGroup([sys.executable, "-c", "while True: pass"], self._reaper).kill)
            case FaultKind.RESTART:
                self._end_faults(math.inf)
                send(self._run.pid, signal.SIGKILL)
                self._await_lock()
                self._start()
            case FaultKind.DAMAGE:
                what += f": {self._damage(fault.draw)}"
        self.done[fault.kind] += 1
        self.faults.append((self.now, what))
        self._console.print(f"{self.now:7.1f} s  {what}")

    def _await_lock(self) -> None:
        """Wait until the processes of the killed run are gone, so that it can be started again."""
        deadline = self.now + DRAIN_SECONDS_MAX
        while self.now < deadline:
            with contextlib.suppress(RunIsAlive), run_lock(self.directory, mark=False):
                return
            time.sleep(LOOK_SECONDS)
        raise AfterplayError(f"{self.directory.path} is still locked {DRAIN_SECONDS_MAX:g} s after the run was killed")

    def _end_later(self, seconds: float) -> contextlib.ExitStack:
        end = contextlib.ExitStack()
        self._undo.append((self.now + seconds, end))
        return end

    def _end_faults(self, now: float) -> None:
        for entry in [entry for entry in self._undo if entry[0] <= now]:
            self._undo.remove(entry)
            entry[1].close()

    def _damage(self, draw: float) -> str:
        """Damage a copy of the store, and open it as a run does; the damage and its result in words."""
        copy = self._folder / "damaged.sqlite"
        self._folder.mkdir(exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # first, so that the copy is not older than its marks
            shutil.copyfile(marks_path(self._store), marks_path(copy))
        tables.STORE.copy(self._store, copy)
        data, what = damaged(copy.read_bytes(), draw)
        copy.write_bytes(data)
        try:
            ReplayStore(copy).close()
            wrong = read_ledger(copy, rows=True).audit()
        except AfterplayError as error:
            return f"a copy of the store, {what}, is refused: {error}"
        finally:
            for file in self._folder.glob(f"{copy.name}*"):
                file.unlink()
        return f"a copy of the store, {what}, is opened; its audit finds {len(wrong)} problems"

    def _pids(self) -> dict[str, int]:
        """Processes that live, by role, the supervisor among them. The file may be old and a number taken by a
        stranger, so only children of the supervisor count."""
        states = read_json(self.directory.processes_file) or {}
        ours = read_processes().children[self._run.pid]
        found = {name: int(state["pid"]) for name, state in states.items() if state.get("pid") in ours}
        return {"supervisor": self._run.pid, **found}

    def _write(self) -> None:
        """``samples.jsonl``, ``faults.jsonl`` and the picture of both."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / "samples.jsonl").open("wb") as file:
            file.writelines(orjson.dumps(sample, option=orjson.OPT_APPEND_NEWLINE) for sample in self.samples)
        with (self._folder / "faults.jsonl").open("wb") as file:
            file.writelines(orjson.dumps({"seconds": at, "what": what}) + b"\n" for at, what in self.faults)
        panels = {
            "resident memory by role": [sample.memory for sample in self.samples],
            "disk by kind": [sample.disk for sample in self.samples],
        }
        seconds = [sample.seconds for sample in self.samples]
        draw_resources(seconds, panels, [at for at, _ in self.faults], self._folder / "resources.png")


def useful_time(lines: Sequence[Line]) -> str:
    """Effective training time ratio: productive seconds over all seconds (ETTR; Kokolis et al. 2024, arXiv:2410.21680),
    in words.

    ``lines``: of the updates that are kept. All seconds are those from the end of the first to the end of the last;
    productive is the median time of an update for each between. So updates that were made again, restarts and longer
    waits are lost. It says too much where faults hit most updates.
    """
    if len(lines) < USEFUL_MIN:
        return f"unknown: {len(lines)} kept updates, fewer than {USEFUL_MIN}"
    kept, each = len(lines) - 1, statistics.median(line["seconds"]["step"] for line in lines[1:])
    seconds = lines[-1]["finished"] - lines[0]["finished"]
    return f"{kept * each / seconds:.3f} (ETTR): {kept} kept updates of {each:.3g} s, their median, in {seconds:.0f} s"


def send(pid: int, number: int) -> bool:
    """Signal a process; False when it is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Processes:
    """All processes of the machine."""

    children: Mapping[int, Sequence[int]]
    resident: Mapping[int, int]
    """Bytes."""

    def memory(self, roles: Mapping[str, int]) -> dict[str, int]:
        """Resident bytes of each process in ``roles`` and its descendants, up to those that are a role themselves."""
        others = set(roles.values())

        def family(pid: int) -> Iterator[int]:
            yield pid
            for child in self.children.get(pid, ()):
                if child not in others:
                    yield from family(child)

        return {name: sum(self.resident.get(one, 0) for one in family(pid)) for name, pid in roles.items()}


def read_processes() -> Processes:
    """From ``ps``, which Linux and macOS have."""
    answer = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,rss="], capture_output=True, text=True, check=False)
    children: dict[int, list[int]] = defaultdict(list)
    resident = {}
    for line in answer.stdout.splitlines():
        pid, parent, kilobytes = map(int, line.split())
        children[parent].append(pid)
        resident[pid] = kilobytes * 1024
    return Processes(children, resident)


def run_chaos(
    config: RunConfig, command: Sequence[str], faults: Sequence[Fault], seconds: float, stall_seconds_max: float
) -> ExitCode:
    """Run, inject, report. FAILED when the ledger does not balance, something was lost, nothing was new for longer than
    ``stall_seconds_max``, or the run did not continue. Raises :class:`AfterplayError` where there is nothing to audit.
    """
    console = plain_console()
    with OrphanReaper() as reaper:
        chaos = Chaos(config, command, reaper, console)
        chaos.run(faults, seconds)
    print_report(chaos, console)
    folder = chaos.directory.path / "chaos"
    console.print(f"faults.jsonl, samples.jsonl and resources.png are in {folder}")
    audit = chaos.audit
    failed = audit.problems or audit.lost or audit.longest > stall_seconds_max
    return ExitCode.FAILED if failed else ExitCode.FINISHED


def print_report(chaos: Chaos, console: Console) -> None:
    """Print what was done and the result of the audit."""
    audit, samples = chaos.audit, chaos.samples
    rows = {
        "faults": ", ".join(f"{kind} {n}" for kind, n in sorted(chaos.done.items())) or "none",
        "updates": f"{audit.steps}",
        "trajectories": f"{audit.received} received, {audit.lost} lost",
        "share of useful time": useful_time(read_lines(chaos.directory.metrics_file)),
        "longest time without anything new": f"{audit.longest:.1f} s, from {audit.longest_from:.0f} s on",
        "recorded by actors and learner": audit.witnessed,
        "audit": "; ".join(audit.problems) or "every sum adds up",
    }
    if samples:
        ends = samples[len(samples) // 4], samples[-1]
        memory = (size(sum(s.memory.values())) for s in ends)
        disk = (size(sum(s.disk.values()) - s.disk.get("chaos", 0)) for s in ends)
        for what, sizes in (("memory", memory), ("disk", disk)):
            rows[what] = "{} after a quarter of the time, {} at the end".format(*sizes)
    width = max(map(len, rows))
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}")
