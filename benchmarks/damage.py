"""Full disks and damaged files: what a run makes of each.

    python -m benchmarks.damage disk --seconds 6,60,600 --out benchmarks/results/disk.json
    python -m benchmarks.damage files --out benchmarks/results/damage.json
    python -m benchmarks.damage weights --out benchmarks/results/weights.json

``disk`` (Linux, as root) fills the disk of a run for a while. ``files`` stops a run in the middle, damages one file of
a copy of its directory in each of several ways, and lets ``afterplay run`` continue from that. ``weights`` damages the
published weights of a run that goes on, and kills its engine, which then needs them. Each prints a table; the exit code
is 1 where a run lost something, trained something twice, used an id again, ended with a traceback or not in time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cli.viewer.progress import read_lines
from pipeline.config.load import load
from pipeline.errors import AfterplayError
from pipeline.runtime.process import ExitCode
from pipeline.runtime.rundir import RunDirectory
from pipeline.supervisor.chaos import Books
from pipeline.supervisor.processes import check_health, health_url
from tests.support.damage import Damage, damages_of
from tests.support.fork_server import ForkServer
from tests.support.full_disk import keep_full, small_disk
from tests.support.run_handle import RunHandle, start_run

FILE = Path(__file__).parents[1] / "configs" / "tiny.yaml"
SMALL = ("groups.groups_per_step=2", "groups.n_rollout=4", "actor.concurrency=8", "checkpoint.every=2")
"""Updates of a tenth of a second."""
OLDER, STOPPED, MORE = 3, 6, 2
"""Updates of the older copies, of the run that is damaged, and those that it must make afterwards."""
CASE_SECONDS_MAX = 120.0
LOOK_SECONDS = 0.2
DISK_MEGABYTES, DISK_STEPS = 64, 14
TOLD = re.compile(r"damaged|went back|is missing|cut off|restored|not one of ours|expected .* got ", re.IGNORECASE)
"""A line of a log that tells the user about damage."""


@dataclass(slots=True)
class Result:
    """One damage, and what the run made of it."""

    file: str
    kind: str
    outcome: str = ""
    """``goes on``, ``one sentence``, or ``FAILED``."""
    said: str = ""
    """The sentence that the user reads about the damage; empty where nothing was said."""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Facts:
    """The store of a run before it is damaged."""

    groups: dict[int, tuple[str, int | None]]
    """State and update by group number."""
    steps: int


def read_facts(directory: RunDirectory) -> Facts:
    with closing(sqlite3.connect(f"{directory.store_file.as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT group_number, state, update_number FROM groups").fetchall()
    return Facts({n: (state, update) for n, state, update in rows}, len(read_lines(directory.metrics_file)))


class Scenario:
    """A run directory that was stopped, another state of it that is older, and the command that continues it."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self._server = server
        self._overrides = [*SMALL, f"run.total_steps={STOPPED + MORE}", "supervisor.restarts_max=3"]

    def make(self) -> None:
        """The copies ``older``, ``killed`` and ``stopped`` of one run."""
        with self._start("base") as run:
            run.until_step(OLDER, CASE_SECONDS_MAX)
            run.interrupt()
        self._keep("older")
        with self._start("base") as run:
            run.until_step(STOPPED - 1, CASE_SECONDS_MAX)
            run.process.send_signal(signal.SIGKILL)
            run.process.wait(CASE_SECONDS_MAX)
            run.until("the end of all roles", lambda: all(map(gone, pids(run.directory))), CASE_SECONDS_MAX)
        self._keep("killed")
        with self._start("base", [f"run.total_steps={STOPPED}"]) as run:
            run.finish(CASE_SECONDS_MAX)
        self._keep("stopped")

    def _keep(self, name: str) -> None:
        shutil.copytree(self.folder / "base", self.folder / name, symlinks=True)

    def _start(self, name: str, more: Sequence[str] = ()) -> Any:
        return start_run(FILE, self.folder, name, [*self._overrides, *more], self._server)

    def cases(self) -> Iterator[tuple[str, str, Damage]]:
        """Copy to start from, file, and damage."""
        for base in ("stopped", "killed"):
            root = self.folder / base
            for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
                name = str(path.relative_to(root))
                if (base == "stopped" and is_damaged_here(name, root)) or (
                    base == "killed" and path.name.endswith(("-wal", "-shm", ".ids", ".pages"))
                ):
                    for damage in damages_of(path, self._older(root, name)):
                        yield base, name, damage

    def _older(self, root: Path, name: str) -> Path | None:
        """The older state of a file; of a checkpoint or weights the same file of the one before."""
        parts = Path(name).parts
        if parts[0] in ("checkpoints", "weights") and len(parts) > 2:
            before = sorted(p.name for p in (root / parts[0]).iterdir() if p.name < parts[1] and p.name[0] in "uv")
            path = Path(root, parts[0], before[-1], *parts[2:]) if before else None
        else:
            path = self.folder / "older" / name
        return path if path is not None and path.is_file() else None

    def play(self, base: str, file: str, damage: Damage) -> Result:
        """Copy, damage, continue; afterwards the books must balance."""
        result = Result(file, damage.name)
        name = "case"
        directory = RunDirectory(self.folder / name)
        shutil.rmtree(directory.path, ignore_errors=True)
        shutil.copytree(self.folder / base, directory.path, symlinks=True)
        facts = read_facts(directory)
        for log in directory.logs.glob("*.log*"):
            log.write_bytes(b"")
        damage.apply(directory.path / file)
        started, wall = time.monotonic(), time.time()
        with self._start(name) as run:
            try:
                code = run.finish(CASE_SECONDS_MAX)
            except AfterplayError:
                result.problems.append(f"did not end within {CASE_SECONDS_MAX:g} s")
                code = None
        result.seconds = round(time.monotonic() - started, 1)
        printed = run.output.read_text("utf-8", "replace")
        logs = {log.name: log.read_text("utf-8", "replace") for log in sorted(directory.logs.glob("*.log"))}
        lines = [line for text in (printed, *logs.values()) for line in text.splitlines()]
        result.said = next((clean(line) for line in lines if TOLD.search(line)), "")
        if any("Traceback (most recent call last)" in text for text in (printed, *logs.values())):
            result.problems.append("a traceback")
        if code == 0:
            result.outcome = "goes on"
            result.problems += self._audit(run, facts, wall)
        elif code is not None:
            result.outcome = "one sentence"
            if code != ExitCode.CONFIGURATION:
                result.problems.append(f"exit code {code}")
            if not result.said:
                result.problems.append(f"no sentence about it: {printed[-300:]}")
        if result.problems:
            result.outcome = "FAILED"
            result.problems.append(run.tail()[-3000:])
        return result

    def _audit(self, run: RunHandle, facts: Facts, started: float) -> list[str]:
        directory = run.directory
        books, lines = Books(), read_lines(directory.metrics_file)
        ledger = run.ledger(rows=True)
        problems = ledger.audit()
        if not lines or lines[-1]["step"] != STOPPED + MORE:
            problems.append(f"expected {STOPPED + MORE} steps, got {[line['step'] for line in lines]}")
        with closing(sqlite3.connect(directory.store_file)) as connection:
            rows = connection.execute(
                "SELECT group_number, state, update_number, planned_at, ended_at FROM groups"
            ).fetchall()
        began = min((line["step"] for line in lines if line.get("time", 0) >= started), default=STOPPED + 1) - 1
        for number, state, update, planned_at, ended_at in rows:
            if number in facts.groups and planned_at >= started:
                problems.append(f"group number {number} was used again")
            if number in facts.groups and state == "trained" and ended_at is not None and ended_at >= started:
                before, made = facts.groups[number]
                if before == "trained" and made is not None and made < began:
                    problems.append(f"group {number} was trained in update {made} and again in {update}")
        del books
        return problems


def is_damaged_here(name: str, root: Path) -> bool:
    """True for a file that ``files`` damages: of checkpoints and weights only those of the newest."""
    parts = Path(name).parts
    if parts[0] in ("checkpoints", "weights"):
        newest = max((p.name for p in (root / parts[0]).iterdir() if re.fullmatch(r"[uv]\d+", p.name)), default="")
        return len(parts) > 2 and parts[1] == newest
    return parts[0] not in ("logs",) and not name.endswith(".lock")


def clean(line: str) -> str:
    """A line of a log without its time and the path of the run."""
    line = re.sub(r"^\S+ \S+ \S+ (ERROR|WARNING|INFO) \S+ ", "", line.strip())
    return re.sub(r"/\S*/(case|run|full-\d+)/", "", line)[:400]


def pids(directory: RunDirectory) -> list[int]:
    try:
        return [state["pid"] for state in json.loads(directory.processes_file.read_bytes()).values() if state["pid"]]
    except (OSError, ValueError, KeyError):
        return []


def gone(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def play_files(options: argparse.Namespace, server: ForkServer) -> list[Result]:
    folder = options.folder or Path(tempfile.mkdtemp(prefix="afterplay-damage-"))
    scenario = Scenario(folder, server)
    if not (folder / "stopped").exists():
        scenario.make()
    cases = [case for case in scenario.cases() if re.search(options.only, f"{case[1]} {case[2].name}")]
    random.Random(options.seed).shuffle(cases)
    done = {(r["file"], r["kind"]) for r in read_results(options.out)} if options.resume else set()
    results = []
    end = time.monotonic() + options.seconds_max
    for base, file, damage in cases[: options.cases]:
        label = f"{file} (killed)" if base == "killed" else file
        if (label, damage.name) in done:
            continue
        if time.monotonic() > end:
            break
        result = scenario.play(base, file, damage)
        result.file = label
        show(result)
        results.append(result)
    return results


def play_weights(options: argparse.Namespace, server: ForkServer) -> list[Result]:
    """Damage the newest weights while a run goes on, and kill the engine."""
    results = []
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*SMALL, "run.total_steps=1000000", "supervisor.restarts_max=1000000", "publish.keep=3"]
        with start_run(FILE, Path(scratch), "run", overrides, server) as run:
            run.until_step(4, CASE_SECONDS_MAX)
            folders = sorted((run.directory.path / "weights").glob("v*"))
            names = [p.name for p in sorted(folders[-1].iterdir())]
            cases = [(n, d.name) for n in names for d in damages_of(folders[-1] / n, folders[-2] / n)]
            for name, kind in cases:
                if re.search(options.only, f"{name} {kind}"):
                    result = damage_live(run, name, kind)
                    show(result)
                    results.append(result)
            run.interrupt()
            if problems := run.ledger(rows=True).audit():
                results.append(Result("the whole run", "all", "FAILED", problems=problems))
    return results


def damage_live(run: RunHandle, name: str, kind: str) -> Result:
    result = Result(f"weights/{name}", kind, "goes on")
    engine = next(
        s["pid"] for n, s in json.loads(run.directory.processes_file.read_bytes()).items() if n.startswith("engine")
    )
    learner_log = run.directory.log_file("learner")
    told = learner_log.stat().st_size
    learner, before, started = run.pid("learner"), len(run.steps()), time.monotonic()
    assert learner is not None
    os.kill(engine, signal.SIGSTOP)
    try:  # the learner must not publish a newer version in between
        time.sleep(3 * LOOK_SECONDS)
        *_, older, newest = sorted((run.directory.path / "weights").glob("v*"))
        damage = next(d for d in damages_of(newest / name, older / name) if d.name == kind)
        damage.apply(newest / name)
    finally:
        os.kill(engine, signal.SIGKILL)
    try:
        run.until_step(before + 4, CASE_SECONDS_MAX)
    except AfterplayError as error:
        result.outcome, result.problems = "FAILED", [str(error)[-3000:]]
    result.seconds = round(time.monotonic() - started, 1)
    text = learner_log.read_bytes()[told:].decode("utf-8", "replace")
    result.said = next((clean(line) for line in text.splitlines() if TOLD.search(line)), "")
    if run.pid("learner") != learner:
        result.outcome, result.problems = "FAILED", ["the learner was started again"]
    return result


def play_disk(options: argparse.Namespace, server: ForkServer) -> list[dict[str, Any]]:
    """Fill the disk of a run for each of the times."""
    found = []
    for seconds in map(float, options.seconds.split(",")):
        with tempfile.TemporaryDirectory() as scratch, small_disk(Path(scratch) / "disk", DISK_MEGABYTES) as disk:
            name, overrides = f"full-{seconds:.0f}", [f"run.total_steps={DISK_STEPS}", "checkpoint.every=2"]
            with start_run(FILE, disk, name, overrides, server) as run:
                found.append(fill(run, disk, seconds))
        print(json.dumps(found[-1], indent=1), flush=True)
    return found


def fill(run: RunHandle, disk: Path, seconds: float) -> dict[str, Any]:
    run.until_step(3, CASE_SECONDS_MAX)
    begun = time.monotonic()
    states: defaultdict[str, Counter[str]] = defaultdict(Counter)
    filler = threading.Thread(target=keep_full, args=(disk, seconds))
    filler.start()
    while filler.is_alive():
        for role, state in states_of(run.directory).items():
            states[role][state] += 1
        filler.join(max(LOOK_SECONDS, seconds / 200))
    ended, made = time.monotonic(), len(run.steps())
    run.until_step(made + 1, CASE_SECONDS_MAX)
    back = time.monotonic() - ended
    code = run.finish(2 * CASE_SECONDS_MAX)
    lines, ledger = read_lines(run.directory.metrics_file), run.ledger(rows=True)
    processes = json.loads(run.directory.processes_file.read_bytes())
    config = load(run.directory.config_file, environment={})
    expected = DISK_STEPS * config.groups.groups_per_step * config.groups.n_rollout
    t = ledger.trajectories
    return {
        "seconds_full": round(ended - begun, 1),
        "exit_code": code,
        "seconds_to_the_next_update": round(back, 1),
        "steps": [line["step"] for line in run.steps()] == list(range(1, DISK_STEPS + 1)) and len(lines) == DISK_STEPS,
        "trained": t.get("trained", 0),
        "expected": expected,
        "rolled_back": t.get("rolled_back", 0),
        "restarts": {name: s["restarts"] for name, s in processes.items() if s["restarts"]},
        "audit": ledger.audit(),
        "states": {role: dict(counts.most_common()) for role, counts in sorted(states.items())},
        "temporary_files": [str(p.relative_to(disk)) for p in disk.rglob(".writing-*")],
    }


def states_of(directory: RunDirectory) -> dict[str, str]:
    """States that the roles tell now."""
    found = {}
    for path in directory.processes.glob("*.json"):
        with suppress(OSError, ValueError, KeyError):
            url = health_url(directory, path.stem, json.loads(path.read_bytes())["pid"])
            if url is not None and (state := check_health(url).state):
                found[path.stem] = state
    return found


def is_whole(entry: dict[str, Any]) -> bool:
    return (
        entry["exit_code"] == 0
        and entry["steps"]
        and entry["trained"] == entry["expected"]
        and not (entry["rolled_back"] or entry["restarts"] or entry["audit"] or entry["temporary_files"])
    )


def show(result: Result) -> None:
    told = f"  [{result.said}]" if result.said else ""
    print(f"{result.outcome:12} {result.seconds:5.1f} s  {result.file:55} {result.kind}{told}", flush=True)
    for problem in result.problems:
        print(f"    {problem}", flush=True)


def read_results(path: Path | None) -> list[dict[str, Any]]:
    return json.loads(path.read_bytes()) if path is not None and path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("disk", "files", "weights"))
    parser.add_argument("--seconds", default="6,60,600", help="disk: how long it is full")
    parser.add_argument("--only", default="", help="files, weights: regular expression of FILE KIND")
    parser.add_argument("--cases", type=int, help="files: at most so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds-max", type=float, default=float("inf"), help="files: begin no case after that")
    parser.add_argument("--folder", type=Path, help="files: keep the copies of the run here, for another call")
    parser.add_argument("--resume", action="store_true", help="files: leave out what --out has, and add to it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    play: dict[str, Callable[..., list[Any]]] = {"disk": play_disk, "files": play_files, "weights": play_weights}
    with ForkServer() as server:
        results = play[options.what](options, server)
    values = [r if isinstance(r, dict) else asdict(r) for r in results]
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        earlier = read_results(options.out) if options.resume else []
        options.out.write_text(json.dumps([*earlier, *values], indent=1) + "\n")
    whole = all(is_whole(v) if options.what == "disk" else v["outcome"] != "FAILED" for v in values)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
