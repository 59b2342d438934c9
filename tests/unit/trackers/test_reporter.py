"""Each record arrives once, whenever the reporter is killed and the learner goes back."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.cli.replay import open_run
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, StoreError
from pipeline.runtime.run_directory import FileLock, RunDirectory, write_bytes_atomically
from pipeline.store import tables
from pipeline.trackers import records as records_module
from pipeline.trackers import reporter as reporter_module
from pipeline.trackers.delivery import DeliveryFile
from pipeline.trackers.records import RunRecords, numbers_of
from pipeline.trackers.reporter import Reporter, delivery_path, describe_delivery
from pipeline.trackers.tracker import require_package
from tests.support.fake_tracker import FakeTracker, Fuse, Killed, TrackerStore
from tests.unit.show.making import Rollout, make_run


class RunOnDisk:
    """A run directory whose learner and replay stage are this object."""

    def __init__(self, path: Path) -> None:
        self.directory = RunDirectory(path)
        self.config = RunConfig.model_validate(
            {"run": {"directory": str(path.parent), "name": path.name}, "trackers": {"rollouts": 0}}
        )
        self._made = 0

    def step(self) -> None:
        lines = self.lines
        self._made += 1
        self._write(self.directory.metrics_file, [*lines, self._line(len(lines) + 1)])

    def resume_from(self, updates: int) -> None:
        """As the learner does: the lines of steps that it makes again go."""
        kept = self.lines[:updates]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in kept)
        write_bytes_atomically(self.directory.metrics_file, data)

    def evaluate(self) -> None:
        self._made += 1
        found = self.evaluations
        line = {
            "evaluation": len(found),
            "updates": len(self.lines),
            "score": self._made,
            "started_at": 1.0,
            "seconds": 2,
        }
        self._write(self.directory.evaluations_file, [*found, line])

    @property
    def lines(self) -> list[dict]:
        return self._read(self.directory.metrics_file)

    @property
    def evaluations(self) -> list[dict]:
        return self._read(self.directory.evaluations_file)

    def _line(self, step: int) -> dict:
        return {"step": step, "time": 10.0 * step, "reward_mean": self._made, "seconds": {"step": 1.5}, "kl": None}

    def _write(self, path: Path, lines: list[dict]) -> None:
        with path.open("ab") as file:
            file.write(json.dumps(lines[-1]).encode() + b"\n")

    def _read(self, path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class ReporterProcess:
    """Starts a reporter, and again after each kill."""

    def __init__(self, run: RunOnDisk, store: TrackerStore, patch: pytest.MonkeyPatch) -> None:
        self.run, self.store, self.fuse = run, store, Fuse()
        self.reporter: Reporter | None = None
        self._held: list[FileLock | DeliveryFile] = []
        """Open files and locks, which the kernel takes from a process that is killed."""
        fuse, held = self.fuse, self._held

        class Lock(FileLock):
            def __init__(self, *arguments) -> None:
                super().__init__(*arguments)
                held.append(self)

        class FusedFile(DeliveryFile):
            def __init__(self, path: Path) -> None:
                super().__init__(path)
                held.append(self)

            def write(self, line: dict) -> None:
                fuse.tick()
                try:
                    fuse.tick()
                except Killed:
                    os.write(self._file.fileno(), json.dumps(line).encode()[:-1])  # cut off by the kill
                    raise
                super().write(line)
                fuse.tick()

        patch.setattr(reporter_module, "DeliveryFile", FusedFile)
        patch.setattr(reporter_module, "FileLock", Lock)
        patch.setattr(RunRecords, "curves", lambda self: None)

    def advance(self, fuse: int | None, lost: int, complete: bool = False) -> None:
        self.fuse.left = fuse
        try:
            if self.reporter is None:
                self.reporter = Reporter("wandb", self.run.config, self.run.directory, self._open)
            self.reporter.advance()
            if complete:
                self.reporter.close()
                self.reporter = None
                self._held.clear()
        except Killed:
            self.kill(lost)
        self.fuse.left = None

    def kill(self, lost: int) -> None:
        self.reporter = None
        for one in self._held:
            with suppress(OSError):
                one.release() if isinstance(one, FileLock) else one.close()
        self._held.clear()
        self.store.lose(lost)

    def _open(self, name: str, run) -> FakeTracker:
        self.fuse.tick()
        return FakeTracker(self.store, self.fuse, run)


EVENTS = st.one_of(
    st.just(("step",)),
    st.just(("step",)),
    st.just(("evaluate",)),
    st.tuples(st.just("resume"), st.integers(1, 5)),
    st.tuples(st.just("report"), st.none() | st.integers(0, 14), st.integers(0, 5)),
    st.tuples(st.just("report"), st.none() | st.integers(0, 14), st.integers(0, 5)),
    st.tuples(st.just("end"), st.none() | st.integers(0, 14), st.integers(0, 5)),
)


@settings(max_examples=40)
@given(st.lists(EVENTS, max_size=30), st.sampled_from(["plain", "buffers", "rewinds"]))
def test_each_record_arrives_once_whatever_happens(events: list[tuple], kind: str) -> None:
    """A tracker that rewinds ends with the numbers of the run directory; the others keep the first ones."""
    store = TrackerStore(rewinds=kind == "rewinds", buffers=kind == "buffers")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "BATCH", 3)
        run = RunOnDisk(Path(folder))
        process = ReporterProcess(run, store, patch)
        first: dict[str, float] = {}
        for event in [*events, ("end", None, 0)]:
            match event:
                case ("step",):
                    run.step()
                case ("evaluate",):
                    run.evaluate()
                case ("resume", back):
                    run.resume_from(max(0, len(run.lines) - back))
                case (what, fuse, lost):
                    process.advance(fuse, lost, complete=what == "end")
            for record, _ in store.records:
                first.setdefault(record.key, record.numbers.get("episode/reward_mean", 0))
        steps = {f"step/{line['step']}": line["reward_mean"] for line in run.lines}
        evaluations = [f"evaluation/{line['evaluation']}" for line in run.evaluations]
        assert len(store.keys) == len(set(store.keys)), "nothing is doubled"
        assert len(store.ids) == 1, "it is one run at the tracker"
        assert {*steps, *evaluations} <= set(store.keys), "nothing is lost"
        sent = {r.key: r.numbers["episode/reward_mean"] for r, _ in store.records if r.key.startswith("step/")}
        if store.rewinds:
            assert sent.items() >= steps.items(), "the later numbers win"
        elif not store.buffers:
            assert all(first[key] == value for key, value in sent.items()), "the first numbers stay"


@pytest.mark.parametrize("kind", ["plain", "buffers", "rewinds"])
def test_a_kill_at_each_point_of_a_rollback_loses_and_doubles_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuse, killed = 0, True
    while killed:
        store = TrackerStore(rewinds=kind == "rewinds", buffers=kind == "buffers")
        (tmp_path / str(fuse)).mkdir()
        run = RunOnDisk(tmp_path / str(fuse))
        with monkeypatch.context() as patch:
            process = ReporterProcess(run, store, patch)
            for _ in range(5):
                run.step()
            process.advance(None, 0)
            run.resume_from(2)
            for _ in range(4):  # longer than before, so that only the file itself tells that it is another one
                run.step()
            process.advance(fuse, fuse % 3)
            killed = process.reporter is None
            process.advance(None, 0, complete=True)
        assert sorted(store.keys) == [f"step/{n}" for n in range(1, 7)], f"killed at point {fuse}"
        sent = {r.step: r.numbers["episode/reward_mean"] for r, _ in store.records}
        if store.rewinds:
            assert sent == {line["step"]: line["reward_mean"] for line in run.lines}
        fuse += 1
    assert fuse > 5


def test_a_step_that_is_not_made_again_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = RunOnDisk(tmp_path), TrackerStore(rewinds=True)
    process = ReporterProcess(run, store, monkeypatch)
    for _ in range(4):
        run.step()
    process.advance(None, 0)
    run.resume_from(2)
    process.advance(None, 0)
    assert store.keys == ["step/1", "step/2", "step/3", "step/4"], "nothing has taken their place yet"
    run.step()
    process.advance(None, 0)
    assert [r.numbers["episode/reward_mean"] for r, _ in store.records] == [1, 2, 5]
    process.advance(None, 0, complete=True)


def test_a_tracker_at_another_place_gets_all_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, elsewhere = RunOnDisk(tmp_path), TrackerStore(place="elsewhere")
    process = ReporterProcess(run, first := TrackerStore(), monkeypatch)
    for store, steps in ((first, 2), (elsewhere, 1), (first, 0), (elsewhere, 1)):
        process.store = store
        for _ in range(steps):
            run.step()
        process.advance(None, 0, complete=True)
    assert (first.keys, elsewhere.keys) == (["step/1", "step/2"], [f"step/{i}" for i in range(1, 5)])


def test_numbers_of_a_line_are_the_same_at_the_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = RunOnDisk(tmp_path), TrackerStore()
    run.step()
    ReporterProcess(run, store, monkeypatch).advance(None, 0, complete=True)
    ((record, _),) = store.records
    assert record.numbers == {"time/step": 1, "time/time": 10.0, "episode/reward_mean": 1, "time/seconds/step": 1.5}
    assert (record.step, record.time) == (1, 10.0)
    assert numbers_of({"on": True, "name": "x", "bad": float("nan"), "list": [1]}, "t") == {}


def test_two_reporters_do_not_report_one_run_to_one_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunOnDisk(tmp_path)
    process = ReporterProcess(run, TrackerStore(), monkeypatch)
    process.advance(None, 0)
    with pytest.raises(StoreError, match="another process reports"):
        ReporterProcess(run, TrackerStore(), monkeypatch).advance(None, 0)
    process.advance(None, 0, complete=True)


def test_an_unknown_tracker_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    run = RunOnDisk(tmp_path)
    known = "tensorboard, wandb, mlflow, trackio, otel"
    with pytest.raises(ConfigurationError, match=f"expected one of {known}, got 'comet'"):
        Reporter("comet", run.config, run.directory)


def test_what_is_behind_is_told_with_the_command_that_completes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = RunOnDisk(tmp_path), TrackerStore()
    process = ReporterProcess(run, store, monkeypatch)
    run.step()
    process.advance(None, 0, complete=True)
    assert describe_delivery(run.directory, "wandb") == "wandb has all 1 steps: memory"
    run.step()
    told = describe_delivery(run.directory, "wandb")
    assert told == f"wandb has 1 of 2 steps: afterplay report {tmp_path} --to wandb sends the rest"
    assert "has 0 of 2 steps" in describe_delivery(run.directory, "mlflow")


@pytest.mark.parametrize("line", [b"\0" * 8, b"3", b'{"send": [["step/1"]]}', b'{"send": [["st'])
def test_a_damaged_journal_loses_nothing(line: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, first, second = RunOnDisk(tmp_path), TrackerStore(), TrackerStore()
    process = ReporterProcess(run, first, monkeypatch)
    run.step()
    process.advance(None, 0, complete=True)
    journal = delivery_path(run.directory, "wandb")
    journal.write_bytes(journal.read_bytes().replace(b"\n", b"\n" + line + b"\n", 1))
    process.store = second
    run.step()
    process.advance(None, 0, complete=True)
    assert second.keys == ["step/1", "step/2"] and first.ids.isdisjoint(second.ids)
    assert describe_delivery(run.directory, "wandb") == "wandb has all 2 steps: memory"


def test_a_tracker_that_rewinds_drops_what_a_journal_that_is_gone_had_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, store = RunOnDisk(tmp_path), TrackerStore(rewinds=True)
    process = ReporterProcess(run, store, monkeypatch)
    for _ in range(2):
        run.step()
        process.advance(None, 0, complete=True)
        delivery_path(run.directory, "wandb").unlink()
    assert store.keys == ["step/1", "step/2"]


def count_updates(store: Path, updates: int) -> None:
    connection = tables.STORE.connect(store)
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('consumed', ?)", (str(updates),))
    connection.close()


def test_a_table_waits_until_the_store_has_its_rollouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner writes the line of an update before the replay stage counts it."""
    path = make_run(tmp_path / "some", [Rollout(0, 0, 0.5, "sums/1", step=1, traced=True)])
    config, directory = open_run(path)
    directory.metrics_file.write_text('{"step": 1, "time": 5.0, "finished": 5.0}\n')
    store, fuse = TrackerStore(), Fuse()
    monkeypatch.setattr(RunRecords, "curves", lambda self: None)

    def open_reporter() -> Reporter:
        return Reporter("trackio", config, directory, lambda name, run: FakeTracker(store, fuse, run))

    open_reporter().close()
    assert store.keys == ["step/1"]
    reporter = open_reporter()
    reporter.advance()
    with directory.metrics_file.open("a") as file:  # it is made again
        file.write('{"step": 1, "time": 7.0, "finished": 7.0}\n')
    reporter.advance()
    count_updates(directory.store_file, 1)
    reporter.close()
    assert store.keys == ["step/1", "rollouts/step/1"]


def test_rollouts_of_a_step_and_of_an_evaluation_become_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = (("what is 1+1?", "two"), ("are you sure?", "2"))
    rollouts = [
        Rollout(0, 0, 0.5, "sums/1", step=1, traced=True, said=said),
        Rollout(1, 0, 1.0, "sums/2", state="evaluated", step=None, evaluation=0, traced=True),
    ]
    path = make_run(tmp_path / "some", rollouts)
    config, directory = open_run(path, ["trackers.rollouts=3"])
    directory.metrics_file.write_text('{"step": 1, "time": 5.0, "reward_mean": 0.5}\n')
    directory.evaluations_file.write_text('{"evaluation": 0, "updates": 0, "score": 1.0}\n')
    count_updates(directory.store_file, 1)
    store, fuse = TrackerStore(), Fuse()
    monkeypatch.setattr(RunRecords, "curves", lambda self: None)
    reporter = Reporter("trackio", config, directory, lambda name, run: FakeTracker(store, fuse, run))
    reporter.advance()
    reporter.close()
    made = {record.key: record.table for record, _ in store.records if record.table is not None}
    assert set(made) == {"rollouts/step/1", "rollouts/evaluation/0"}
    (row,) = made["rollouts/step/1"].rows
    found = dict(zip(made["rollouts/step/1"].columns, row, strict=True))
    assert found["task"] == "sums/1" and found["reward"] == 0.5 and found["step"] == 1
    assert found["text"] == "[user]\nwhat is 1+1?\n\n[assistant]\ntwo\n\n[user]\nare you sure?\n\n[assistant]\n2"
    assert delivery_path(directory, "trackio").exists()


def test_a_folder_without_code_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offline_runs").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigurationError, match="expected the package offline_runs, which is not installed"):
        require_package("offline_runs")


@pytest.mark.parametrize(("total", "goes_on", "finished"), [(2, False, True), (3, False, False), (3, True, True)])
def test_a_tracker_is_told_whether_the_run_made_all_its_steps(
    total: int, goes_on: bool, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, told = RunOnDisk(tmp_path), []

    class Told(FakeTracker):
        def close(self, finished: bool = True) -> None:
            super().close()
            told.append(finished)

    monkeypatch.setattr(RunRecords, "curves", lambda self: None)
    run.config = RunConfig.model_validate({**run.config.model_dump(), "run": {"total_steps": total}})
    run.step()
    run.step()
    store, fuse = TrackerStore(), Fuse()
    reporter = Reporter("wandb", run.config, run.directory, lambda name, tracked: Told(store, fuse, tracked))
    reporter.close(goes_on=goes_on)
    assert told == [finished]


def test_a_second_signal_ends_a_reporter_that_waits_for_its_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, raised = RunOnDisk(tmp_path), []

    class Waiting(Reporter):
        def __init__(self, *arguments) -> None:
            """The server is away."""

        def advance(self) -> int:
            return 0

        def close(self, complete: bool = True, goes_on: bool = False) -> None:
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
                raised.append(1)

    monkeypatch.setattr(reporter_module, "Reporter", Waiting)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with pytest.raises(KeyboardInterrupt):
            reporter_module.report("wandb", run.config, run.directory, lambda: False)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert len(raised) == 1
