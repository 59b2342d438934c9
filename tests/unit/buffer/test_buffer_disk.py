"""Survival of a buffer on disk: resumes, kills, cut-off and damaged files, and the example of the page."""

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from pipeline.buffer import checkpoint as buffer_checkpoint
from pipeline.buffer import segments
from pipeline.buffer.payloads import UnitDraws, join_steps
from pipeline.buffer.trajectory_buffer import TrajectoryBuffer, load
from pipeline.errors import NotEnough, SchemaError, StoreError


def trajectory(number, units=4):
    return {"who": np.full(units, number, np.int64), "x": np.full((units, 8), number, np.float32)}


def filled(path, n=10, **options):
    buffer = TrajectoryBuffer(path, **options)
    for i in range(n):
        buffer.add(trajectory(i))
    buffer.flush()
    return buffer


def draws(buffer, n=100):
    return [tuple(map(tuple, buffer.draw(7))) for _ in range(n)]


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_after_a_resume_the_next_100_draws_are_those_that_would_have_come(tmp_path, where):
    own = tmp_path / "own" if where == "disk" else None
    with filled(own, window=6, seed=11) as buffer:
        draws(buffer, 13)
        buffer.save(tmp_path / "copy" if own is None else None)
        expected = draws(buffer)
        buffer.add(trajectory(99)).result(10)
    if own is not None:
        with TrajectoryBuffer(own, window=6, resume="checkpoint") as again:
            assert draws(again) == expected
    with load(own or tmp_path / "copy", window=6) as again:
        assert draws(again) == expected


class Killed(BaseException):
    pass


@pytest.mark.parametrize("in_place", [True, False])
def test_kill_at_any_moment_of_a_save_leaves_a_readable_state(tmp_path, monkeypatch, in_place):
    """Every system call of a save is its last, in turn: what is then on disk is the old state or the new one."""
    target = tmp_path / "target"
    buffer = filled(target if in_place else None, 3, capacity=4, segment_bytes=300)
    buffer.save(target)
    old = buffer.ids()
    for i in range(3, 6):
        buffer.add(trajectory(i))
    buffer.flush()
    before = tmp_path / "before"
    shutil.copytree(target, before)
    kill_at, finished, seen = 0, False, set()
    while not finished:
        calls = 0

        def dying(name, real, kill_at=kill_at):
            def call(*args, **kwargs):
                nonlocal calls
                calls += 1
                if calls > kill_at:
                    raise Killed(name)
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in ("fsync", "writev", "open"):
                patch.setattr(os, name, dying(name, getattr(os, name)))
            for name in ("replace", "unlink", "open"):
                patch.setattr(f"pathlib.Path.{name}", dying(name, getattr(__import__("pathlib").Path, name)))
            try:
                buffer.save(target)
                finished = True
            except Killed:
                pass
        with load(target) as found:
            assert found.ids() in (old, buffer.ids())
            seen.add(tuple(found.ids()))
            for i in found.ids():
                assert (found.get(i)["who"] == i).all()
        kill_at += 1
    assert seen == {tuple(old), tuple(buffer.ids())}
    assert kill_at > 3
    buffer.close()


def test_saves_of_several_threads_leave_the_newest_checkpoint_whole(tmp_path, monkeypatch):
    written = []

    def checked(directory, state):
        buffer_checkpoint.write_checkpoint(directory, state)
        load(directory).close()
        written.append(state.added)

    monkeypatch.setattr("pipeline.buffer.trajectory_buffer.write_checkpoint", checked)
    with TrajectoryBuffer(tmp_path / "own", capacity=2, segment_bytes=300) as buffer:

        def work():
            for i in range(8):
                buffer.add(trajectory(i))
                buffer.save()

        with ThreadPoolExecutor(2) as threads:
            for done in [threads.submit(work) for _ in range(2)]:
                done.result()
    assert written == sorted(written)


def test_a_copy_that_was_cut_off_is_not_taken_for_newer_trajectories(tmp_path):
    with filled(None, 3) as buffer:
        buffer.save(tmp_path / "b")
    with filled(None, 5, seed=1) as other:
        state, blocks = other.snapshot()
        w = segments.SegmentWriter(tmp_path / "b", 7, 12345)
        record = segments.Record(9, 9, 0, 0, 4, state.layout.encode(), memoryview(blocks[0]))
        w.append([record])
        w.close()
    with TrajectoryBuffer(tmp_path / "b") as again:
        assert again.ids() == [0, 1, 2]
        again.add(trajectory(3)).result(10)
    assert not segments.segment_file(tmp_path / "b", 7).exists() or 7 in segments.segment_numbers(tmp_path / "b")
    with TrajectoryBuffer(tmp_path / "b") as again:
        assert again.ids() == [0, 1, 2, 3]


PROGRAM = """
    import sys, numpy as np
    from pathlib import Path
    from pipeline.buffer.trajectory_buffer import TrajectoryBuffer
    buffer = TrajectoryBuffer(Path(sys.argv[1]), capacity=50, segment_bytes=20_000)
    i = buffer._added
    while True:
        handle = buffer.add({"who": np.full(8, i), "x": np.full((8, 40), i, np.float32)})
        if i % 7 == 0:
            buffer.save()
        handle.result()
        print(i, flush=True)
        i += 1
"""


def test_acknowledged_trajectories_survive_kill(tmp_path):
    acknowledged = -1
    for round_ in range(4):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "b")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(20 + 17 * round_):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.communicate(timeout=20)[0].split()
        acknowledged = max([acknowledged, *map(int, rest[:-1])])
        with TrajectoryBuffer(tmp_path / "b", capacity=50) as buffer:
            ids = buffer.ids()
            assert ids == list(range(ids[0], ids[-1] + 1)) and ids[-1] >= acknowledged
            assert len(ids) == min(50, ids[-1] + 1)
            for i in ids:
                assert (buffer.get(i)["x"] == i).all()


def test_a_half_written_record_is_dropped_and_the_rest_stays(tmp_path):
    filled(tmp_path / "b").close()
    (number,) = segments.segment_numbers(tmp_path / "b")
    file = segments.segment_file(tmp_path / "b", number)
    whole = file.read_bytes()
    for cut in (1, 40, 200):
        file.write_bytes(whole[:-cut])
        with TrajectoryBuffer(tmp_path / "b") as buffer:
            assert buffer.ids() == list(range(9))
        for other in segments.segment_numbers(tmp_path / "b"):
            if other != number:
                segments.segment_file(tmp_path / "b", other).unlink()


def damage(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


def test_damage_is_an_error_and_changes_nothing(tmp_path):
    buffer = filled(tmp_path / "b", 20, segment_bytes=600)
    buffer.save()
    buffer.close()
    first, *_ = segments.segment_numbers(tmp_path / "b")
    segment, saved = segments.segment_file(tmp_path / "b", first), tmp_path / "b" / buffer_checkpoint.NAME
    for file, change in [
        (segment, lambda: segment.unlink()),
        (segment, lambda: os.truncate(segment, 300)),
        (segment, lambda: segment.write_bytes(b"x" * 5000)),
        (saved, lambda: damage(saved, 200)),
        (saved, lambda: os.truncate(saved, 60)),
        (saved, lambda: saved.write_bytes(b"something else")),
        (saved, lambda: saved.unlink()),
    ]:
        kept = file.read_bytes()
        change()
        after = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
        with pytest.raises(StoreError):
            TrajectoryBuffer(tmp_path / "b")
        with pytest.raises(StoreError):
            load(tmp_path / "b")
        assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == after
        file.write_bytes(kept)
    damage(segment, segment.stat().st_size - 3)
    with TrajectoryBuffer(tmp_path / "b", cache_bytes=0) as opened, pytest.raises(StoreError, match="damaged at byte"):
        for i in opened.ids():
            opened.get(i)


def next_unit(buffer):
    """The unit that the next draw of one gives."""
    draws = UnitDraws(buffer._draws.seed, buffer._draws.stream, buffer._draws.count)
    return int(draws.next(buffer._index, buffer.window, 1)[1][0])


@pytest.mark.parametrize("saved", ["written", "copied"])
def test_a_flipped_byte_is_never_in_a_sample(tmp_path, saved):
    """Of every byte of a payload, in turn: a draw of its unit without cache is an error, a draw of another is not."""
    with filled(tmp_path / "b" if saved == "written" else None, 1) as buffer:
        buffer.save(tmp_path / "b")
    (number,) = segments.segment_numbers(tmp_path / "b")
    file = segments.segment_file(tmp_path / "b", number)
    with TrajectoryBuffer(tmp_path / "b", cache_bytes=0) as opened:
        entry = opened._index.at(0)
        start, unit_bytes = entry.offset, entry.n_bytes // 4
        for at in range(4 * unit_bytes):
            damage(file, start + at)
            if next_unit(opened) == at // unit_bytes:
                with pytest.raises(StoreError, match="damaged at byte"):
                    opened.sample(1)
            else:
                assert (opened.sample(1).arrays["x"] == 0).all()
            while next_unit(opened) != at // unit_bytes:
                opened.draw(1)
            with pytest.raises(StoreError, match="damaged at byte"):
                opened.sample(1)
            damage(file, start + at)
        assert len(opened.sample(4).ids) == 4


def test_a_unit_in_the_place_of_another_is_never_in_a_sample(tmp_path):
    with TrajectoryBuffer(tmp_path / "b", cache_bytes=0) as buffer:
        buffer.add({"x": np.arange(4, dtype=np.float32)}).result(10)
        entry = buffer._index.at(0)
        at, size = entry.offset, entry.n_bytes // 4
        file = segments.segment_file(tmp_path / "b", entry.segment)
        data = file.read_bytes()
        file.write_bytes(data[:at] + data[at + size : at + 2 * size] * 4 + data[at + 4 * size :])
        for unit in range(4):
            while next_unit(buffer) != unit:
                buffer.draw(1)
            if unit == 1:
                assert buffer.sample(1).arrays["x"] == 1
            else:
                with pytest.raises(StoreError, match="damaged at byte"):
                    buffer.sample(1)


@pytest.mark.parametrize("which", ["checkpoint", "segment"])
def test_a_buffer_of_another_format_is_refused_and_stays_as_it_was(tmp_path, which):
    with filled(tmp_path / "b", 3) as buffer:
        buffer.save()
    kind, file = buffer_checkpoint.KIND, tmp_path / "b" / buffer_checkpoint.NAME
    if which == "segment":
        kind, file = segments.KIND, segments.segment_file(tmp_path / "b", 0)
    data = file.read_bytes()
    assert data.startswith(kind.magic)
    file.write_bytes(data.replace(b" 3\n", b" 1\n", 1))
    after = {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    for opened in (TrajectoryBuffer, load):
        with pytest.raises(StoreError) as caught:
            opened(tmp_path / "b")
        assert str(caught.value) == f"expected {file} to be {kind.noun} (format 3), got format 1: {kind.remedy}"
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == after


def test_a_directory_has_one_writer(tmp_path):
    with filled(tmp_path / "b") as buffer:
        with pytest.raises(StoreError, match="written by another buffer"):
            TrajectoryBuffer(tmp_path / "b")
        with pytest.raises(StoreError, match="no checkpoint"):
            load(tmp_path)
        buffer.save()
        with load(tmp_path / "b", rank=1, world_size=3) as shard:
            assert shard.ids() == [1, 4, 7]


def test_disk_stays_bounded_while_trajectories_are_evicted(tmp_path):
    with TrajectoryBuffer(tmp_path / "b", capacity=10, segment_bytes=2000) as buffer:
        for i in range(300):
            buffer.add(trajectory(i, 16))
            if i % 50 == 0:
                buffer.save()
        buffer.save()
        used = sum(p.stat().st_size for p in (tmp_path / "b").glob("segment-*"))
        assert used < 300 * 16 * 40 / 4
        assert buffer.sample(20).ids.min() >= 290


def test_segments_stay_until_what_evicts_their_trajectories_is_durable(tmp_path, monkeypatch):
    """The disk fills while three trajectories push out the three before them, and the first of them is written."""
    buffer = filled(tmp_path / "b", 3, capacity=3, segment_bytes=1)
    append, taken, added = segments.SegmentWriter.append, threading.Event(), threading.Event()

    def fills(writer, records):
        if taken.is_set():
            raise OSError(28, "No space left on device")
        taken.set()
        assert added.wait(10)
        return append(writer, records)

    monkeypatch.setattr(segments.SegmentWriter, "append", fills)
    first = buffer.add(trajectory(3))
    assert taken.wait(10)
    handles = [buffer.add(trajectory(i)) for i in (4, 5)]
    added.set()
    assert first.result(10) == 3
    for handle in handles:
        with pytest.raises(StoreError, match="No space left"):
            handle.result(10)
    buffer.close()
    monkeypatch.undo()
    with TrajectoryBuffer(tmp_path / "b", capacity=3) as again:
        assert again.ids() == [1, 2, 3]


def test_a_buffer_opens_again_after_a_start_with_a_smaller_capacity(tmp_path):
    with TrajectoryBuffer(tmp_path / "b", segment_bytes=1) as buffer:
        for i in range(9):
            buffer.add(trajectory(i)).result(10)
    for _ in range(2):
        with TrajectoryBuffer(tmp_path / "b", capacity=2) as buffer:
            assert buffer.ids() == [7, 8]
    with TrajectoryBuffer(tmp_path / "b", capacity=2) as buffer:
        buffer.save()
        assert len(segments.segment_numbers(tmp_path / "b")) == 2


def test_a_failed_write_is_told_to_whoever_waits(tmp_path, monkeypatch):
    buffer = filled(tmp_path / "b", 3)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(segments.SegmentWriter, "append", full)
    handle = buffer.add(trajectory(3))
    with pytest.raises(StoreError, match="No space left"):
        handle.result(10)
    with pytest.raises(StoreError, match="No space left"):
        buffer.add(trajectory(4))
    with pytest.raises(StoreError, match="No space left"):
        buffer.save()
    assert (buffer.get(3)["who"] == 3).all()
    buffer.close()
    monkeypatch.undo()
    with TrajectoryBuffer(tmp_path / "b") as again:
        assert again.ids() == [0, 1, 2]


def test_a_memory_only_buffer_saves_every_live_trajectory(tmp_path):
    with TrajectoryBuffer(capacity=5, cache_bytes=0) as buffer:
        for i in range(12):
            assert buffer.add(trajectory(i)).done()
        for n in (5, 3):
            buffer.capacity = n
            buffer.add(trajectory(12 + n))
            buffer.save(tmp_path / "b")
            with load(tmp_path / "b") as again:
                assert again.ids() == buffer.ids() and len(again) == n
    with load(tmp_path / "b", directory=tmp_path / "c") as copied:
        ids = copied.ids()
    with TrajectoryBuffer(tmp_path / "c") as again:
        assert again.ids() == ids


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({}, "1 to 256 named arrays"),
        ({"x": np.zeros(0)}, "leading unit dimension"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "3 units like the others"),
        ({"x": np.array([object()])}, "numeric numpy array"),
        ({"x": [1, 2]}, "numeric numpy array, got list"),
    ],
)
def test_what_is_no_trajectory_is_refused(arrays, words):
    with pytest.raises(SchemaError, match=words):
        TrajectoryBuffer().add(dict(reversed(arrays.items())))


@pytest.mark.parametrize("reopened", [False, True])
def test_a_buffer_has_one_layout(tmp_path, reopened):
    """What could not be in a batch with the others is refused when it is added, and nothing changes."""
    steps = {"x": join_steps(np.zeros((64, 8, 5), np.float32)), "logprobs": np.zeros(512, "<f4")}
    buffer = TrajectoryBuffer(tmp_path / "b")
    first = buffer.add(steps).result(10)
    if reopened:
        buffer.close()
        buffer = TrajectoryBuffer(tmp_path / "b")
    before = buffer.ids(), buffer._index.rows().tolist()
    for name, other in [("x", np.zeros((3, 6), np.float32)), ("x", np.zeros((3, 5))), ("y", np.zeros(3, bool))]:
        arrays = {"x": np.zeros((3, 5), np.float32), "logprobs": np.zeros(3, ">f4"), name: other}
        with pytest.raises(SchemaError, match="a buffer of its own") as caught:
            buffer.add(arrays)
        assert "'x': float32 [5]" in str(caught.value)
    with pytest.raises(SchemaError, match="a buffer of its own"):
        buffer.add({"x": np.zeros((3, 5), np.float32)})
    assert (buffer.ids(), buffer._index.rows().tolist()) == before
    assert buffer.add({"x": np.ones((2, 5), np.float32), "logprobs": np.ones(2, ">f4")}).result(10) == first + 1
    assert buffer.sample(500).arrays["logprobs"].dtype == np.dtype("<f4")
    with pytest.raises(ValueError, match="read-only"):
        buffer.get(first)["x"][0] = 1
    with pytest.raises(NotEnough):
        buffer.sample(515)
    buffer.close()


def test_the_example_of_the_page_works(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "REPLAY.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(code, names)
    assert capsys.readouterr().out == "2 (16, 3)\n"
    assert names["ids"] == [0, 1, 2, 3] and names["batch"].arrays["reward"].shape == (256,)
