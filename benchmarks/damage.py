"""Full disks and damaged files: what a run makes of each.

    python -m benchmarks.damage disk --seconds 6,60,600 --out benchmarks/results/disk.json
    python -m benchmarks.damage files --out benchmarks/results/damage.json
    python -m benchmarks.damage weights --out benchmarks/results/weights.json
    python -m benchmarks.damage store --store runs/tiny/replay.sqlite --count 50 --out benchmarks/results/store.json

``disk`` (Linux, as root) fills the disk of a run for a while. ``files`` stops a run and damages one file
of a copy of its directory: truncated, zeroed, a bit flipped, deleted, replaced by an older one; of the store also a bit
in each table, index and value of ``meta``. Checkpoint, model and store are opened as the roles open them, and
compared with what the undamaged ones give; ``afterplay run`` continues from all others, and from a sample. ``weights``
damages the published weights of a run that goes on, and kills its engine, which then needs them. ``store`` damages
copies of a store as ``afterplay chaos`` does, opens them as a run does, and compares the rows of those that open.

Each prints a table; the exit code is 1 where a run lost something, trained something twice, used an id again, ended
with a traceback or not in time, or where damaged files were used and nothing was said.
"""

from __future__ import annotations

import argparse
import json
import logging
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
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from learner.checkpoints.checkpoint import find_resumption, read_state
from learner.models.prepare import prepare_model
from pipeline.config.load import load
from pipeline.errors import AfterplayError, ConfigurationError, DamagedFiles, FormatMismatch
from pipeline.runtime.process import ExitCode
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.records import TrajectoryRecord
from pipeline.store.snapshot import Snapshot
from pipeline.store.store import ReplayStore, marks_path
from pipeline.store.tables import STORE
from pipeline.supervisor.chaos import damaged
from pipeline.supervisor.processes import check_health, health_url
from pipeline.views.step_lines import read_lines
from tests.support.damage import Damage, damages_of
from tests.support.fork_server import ForkServer
from tests.support.full_disk import keep_full, small_disk
from tests.support.run_handle import RunHandle, start_run

log = logging.getLogger(__name__)

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
    how: str = "run"
    """``opened`` in the process of this command, or a ``run``."""
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


Opener = Callable[[RunDirectory], Any]


def open_checkpoint(directory: RunDirectory) -> Any:
    """The checkpoint that the learner resumes from."""
    found = find_resumption(directory.checkpoints)
    for sentence in found.damaged:
        log.error("%s", sentence)
    assert found.checkpoint is not None
    return read_state(found.checkpoint)


def open_model(directory: RunDirectory) -> Any:
    """The model folder, which is prepared again where it is damaged."""
    prepare_model(load(directory.config_file, environment={}), directory.model)
    return {p.name: p.read_bytes() for p in directory.model.iterdir() if p.suffix != ".json"}


def open_store(directory: RunDirectory) -> Any:
    """Every row that the stage starts from."""
    with ReplayStore(directory.store_file) as store:
        store.payloads(group.row_id for group in trajectories_of(store.load()))
    with closing(sqlite3.connect(directory.store_file)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: connection.execute(f"SELECT * FROM {table}").fetchall() for table in tables}


def trajectories_of(snapshot: Snapshot) -> list[TrajectoryRecord]:
    slots = [slot for group in snapshot.groups.values() for slot in group.all_slots]
    return [slot.trajectory for slot in slots if slot.trajectory is not None]


OPENERS: dict[str, Opener] = {"checkpoints/": open_checkpoint, "model/": open_model, "replay.sqlite": open_store}


def opener_of(file: str) -> Opener | None:
    return next((opener for start, opener in OPENERS.items() if file.startswith(start)), None)


@contextmanager
def told() -> Iterator[list[str]]:
    """Warnings and errors that a role would log."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(clean(record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)


def read_facts(directory: RunDirectory) -> Facts:
    with closing(sqlite3.connect(f"{directory.store_file.as_uri()}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT group_number, state, update_number FROM groups").fetchall()
    return Facts({n: (state, update) for n, state, update in rows}, len(read_lines(directory.metrics_file)))


class Scenario:
    """A run directory that was stopped, another state of it that is older, and the command that continues it."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self._server = server
        self._intact: dict[str, dict[Opener, Any]] = {}
        """By copy: what its files give when nothing is damaged."""
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
            deadline = time.monotonic() + CASE_SECONDS_MAX
            while not all(map(gone, pids(run.directory))) and time.monotonic() < deadline:
                time.sleep(0.1)
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
                of_store = path.name.endswith(("-wal", "-shm", ".ids"))
                if of_store if base == "killed" else is_damaged_here(name, root):
                    yield from ((base, name, damage) for damage in damages_of(path, self._older(root, name)))

    def _older(self, root: Path, name: str) -> Path | None:
        """The older state of a file; of a checkpoint or weights the same file of the one before."""
        parts = Path(name).parts
        if parts[0] in ("checkpoints", "weights") and len(parts) > 2:
            before = sorted(p.name for p in (root / parts[0]).iterdir() if p.name < parts[1] and p.name[0] in "uv")
            path = Path(root, parts[0], before[-1], *parts[2:]) if before else None
        else:
            path = self.folder / "older" / name
        return path if path is not None and path.is_file() else None

    def _copy(self, base: str, file: str, damage: Damage) -> tuple[RunDirectory, bool]:
        """A damaged copy, and whether a byte of the file has changed."""
        directory = RunDirectory(self.folder / "case")
        shutil.rmtree(directory.path, ignore_errors=True)
        shutil.copytree(self.folder / base, directory.path, symlinks=True)
        path = directory.path / file
        before = path.read_bytes()
        damage.apply(path)
        return directory, not path.exists() or path.read_bytes() != before

    def open(self, base: str, file: str, damage: Damage) -> Result:
        """Copy, damage, and do in this process what a role does with the file when it starts."""
        result, opener = Result(file, damage.name, outcome="goes on"), opener_of(file)
        assert opener is not None
        if base not in self._intact:
            shutil.rmtree(self.folder / "case", ignore_errors=True)
            shutil.copytree(self.folder / base, self.folder / "case", symlinks=True)
            self._intact[base] = {each: each(RunDirectory(self.folder / "case")) for each in OPENERS.values()}
        directory, changed = self._copy(base, file, damage)
        started = time.monotonic()
        with told() as lines:
            try:
                found = opener(directory)
                same = found == self._intact[base][opener]
                if not same and not lines:
                    result.problems.append("something else is used, and nothing is said")
                result.said = lines[0] if lines else "" if changed else "(the same bytes)"
            except (ConfigurationError, FormatMismatch, DamagedFiles) as error:
                result.outcome, result.said = "one sentence", clean(str(error))
                if "\n" in str(error):
                    result.problems.append("more than one line")
            except Exception as error:
                result.problems.append(f"{type(error).__name__}: {error}")
        result.seconds = round(time.monotonic() - started, 1)
        result.outcome = "FAILED" if result.problems else result.outcome
        return result

    def play(self, base: str, file: str, damage: Damage) -> Result:
        """Copy, damage, continue; afterwards the ledger must balance."""
        result = Result(file, damage.name)
        facts = read_facts(RunDirectory(self.folder / base))
        directory, _ = self._copy(base, file, damage)
        for log in directory.logs.glob("*.log*"):
            log.write_bytes(b"")
        started, wall = time.monotonic(), time.time()
        with self._start("case") as run:
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
        lines = read_lines(directory.metrics_file)
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
    """First everything that a role can open in this process, then runs of the rest and of a sample."""
    folder = options.folder or Path(tempfile.mkdtemp(prefix="afterplay-damage-"))
    scenario = Scenario(folder, server)
    if not (folder / "stopped").exists():
        scenario.make()
    done = {(r["file"], r["kind"], r["how"]) for r in read_results(options.out)} if options.resume else set()
    cases = [case for case in scenario.cases() if re.search(options.only, f"{case[1]} {case[2].name}")]
    opened = [case for case in cases if opener_of(case[1]) is not None]
    rest = [case for case in cases if opener_of(case[1]) is None]
    sample = random.Random(options.seed).sample(opened, min(options.runs, len(opened)))
    results: list[Result] = []
    end = time.monotonic() + options.seconds_max
    plays = [("opened", case) for case in opened] + [("run", case) for case in rest + sample]
    for how, (base, file, damage) in plays:
        label = f"{file} (killed)" if base == "killed" else file
        if (label, damage.name, how) not in done and time.monotonic() < end:
            result = (scenario.open if how == "opened" else scenario.play)(base, file, damage)
            result.file, result.how = label, how
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
                results.append(Result("the whole run", "all", outcome="FAILED", problems=problems))
    return results


def damage_live(run: RunHandle, name: str, kind: str) -> Result:
    result = Result(f"weights/{name}", kind, outcome="goes on")
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


def play_store(options: argparse.Namespace, server: ForkServer) -> list[dict[str, Any]]:
    draws, results = random.Random(options.seed), []
    with tempfile.TemporaryDirectory() as folder:
        whole, copy = Path(folder) / "whole.sqlite", Path(folder) / "copy.sqlite"
        for path in (whole, copy):
            shutil.copyfile(marks_path(options.store), marks_path(path))
        STORE.copy(options.store, whole)
        ReplayStore(whole).close()
        data, marks, rows = whole.read_bytes(), marks_path(whole).read_bytes(), rows_of(whole)
        for _ in range(options.count):
            came, what = damaged(data, draws.random())
            copy.write_bytes(came)
            marks_path(copy).write_bytes(marks)
            entry: dict[str, Any] = {"damage": what, "outcome": "refused", "other_rows_in": []}
            try:
                ReplayStore(copy).close()
                found = rows_of(copy)
                entry["other_rows_in"] = [table for table in rows if found[table] != rows[table]]
                entry["outcome"] = "FAILED" if entry["other_rows_in"] else "same rows"
            except AfterplayError as error:
                entry["said"] = clean(str(error).replace(folder, ""))
            for file in Path(folder).glob("copy.sqlite-*"):
                file.unlink()
            print(f"{entry['outcome']:10} {what}", flush=True)
            results.append(entry)
    return results


def rows_of(path: Path) -> dict[str, list[str]]:
    with closing(sqlite3.connect(path)) as connection:
        tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: sorted(map(repr, connection.execute(f"SELECT * FROM {table}"))) for table in tables}


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
    parser.add_argument("what", choices=("disk", "files", "weights", "store"))
    parser.add_argument("--seconds", default="6,60,600", help="disk: how long it is full")
    parser.add_argument("--only", default="", help="files, weights: regular expression of FILE KIND")
    parser.add_argument("--runs", type=int, default=40, help="files: so many of those that are opened are also run")
    parser.add_argument("--store", type=Path, help="store: of a run that has ended")
    parser.add_argument("--count", type=int, default=50, help="store: number of copies")
    parser.add_argument("--seed", type=int, default=0, help="files, store: of the draws")
    parser.add_argument("--seconds-max", type=float, default=float("inf"), help="files: begin no case after that")
    parser.add_argument("--folder", type=Path, help="files: keep the copies of the run here, for another call")
    parser.add_argument("--resume", action="store_true", help="files: leave out what --out has, and add to it")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    play: dict[str, Callable[..., list[Any]]]
    play = {"disk": play_disk, "files": play_files, "weights": play_weights, "store": play_store}
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
