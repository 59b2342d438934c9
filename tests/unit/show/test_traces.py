"""Traces: bounded, whole or cut off, and never of weights that are no more."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StoreError
from pipeline.schema.codec import encode_trajectory
from pipeline.store.traces import FILES, SeenTokens, TraceWriter, scan_traces, trace_files
from tests.unit.show.making import Rollout, seen_of, trajectory_of


def write(directory, updates, name="trained", bytes_max=1 << 24, since=None):
    trajectory = trajectory_of(Rollout(said=(("q" * 50, "a" * 200),)))
    writer = TraceWriter(directory, name, bytes_max, since)
    for update in updates:
        writer.append({"trajectory_id": f"t{update}"}, encode_trajectory(trajectory), seen_of(trajectory), update)
    writer.close()


def updates_in(directory):
    return [entry.update for entry in scan_traces(trace_files(directory))]


def test_a_trace_comes_back_as_it_was_written(tmp_path):
    trajectory = trajectory_of(Rollout())
    write(tmp_path, [4])
    writer = TraceWriter(tmp_path, "failed", 1 << 24)
    writer.append({"trajectory_id": "x", "some": 1}, encode_trajectory(trajectory), None)
    writer.close()
    failed, trained = scan_traces(trace_files(tmp_path))
    assert (failed.trajectory_id, failed.step, failed.index["some"], trained.step) == ("x", None, 1, 5)
    assert [bytes(f) for f in failed.load().frames] == [bytes(f) for f in encode_trajectory(trajectory)]
    assert failed.load().seen is None
    assert len(trained.load().seen) == 201


@given(st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=50))
def test_ratios_keep_three_digits_and_what_is_not_finite_is_unknown(values):
    log_ratios = np.asarray([*values, np.nan, np.inf], np.float32)
    n = len(log_ratios)
    came = SeenTokens.unpack(SeenTokens(log_ratios, np.zeros(n), np.full(n, 1e9), np.zeros(n, np.uint8)).pack())
    np.testing.assert_allclose(came.log_ratios[:-2], log_ratios[:-2], rtol=1e-3, atol=1e-7)
    assert np.isnan(came.log_ratios[-2:]).all()
    assert np.isfinite(came.advantages).all()


def test_a_half_written_trace_ends_a_file_and_the_next_writer_cuts_it_off(tmp_path):
    write(tmp_path, [0, 1, 2])
    (path,) = trace_files(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-7])
    assert updates_in(tmp_path) == [0, 1]
    write(tmp_path, [2, 3])
    assert updates_in(tmp_path) == [0, 1, 2, 3]


def test_traces_of_updates_that_are_made_again_are_dropped(tmp_path):
    write(tmp_path, range(6), bytes_max=1)
    assert len(trace_files(tmp_path)) > 1
    write(tmp_path, [], bytes_max=1, since=3)
    assert updates_in(tmp_path) == [0, 1, 2]


def test_no_more_bytes_are_kept_than_allowed_and_the_oldest_go(tmp_path):
    write(tmp_path, [0])
    one = sum(p.stat().st_size for p in trace_files(tmp_path))
    (trace_files(tmp_path)[0]).unlink()
    allowed = one * FILES * 3
    write(tmp_path, range(100), bytes_max=allowed)
    kept = updates_in(tmp_path)
    assert kept == list(range(kept[0], 100))
    assert kept[0] > 0
    assert sum(p.stat().st_size for p in trace_files(tmp_path)) <= allowed + FILES * one


def test_two_writers_of_different_names_do_not_touch_each_other(tmp_path):
    for name in ("failed", "failed-1", "trained"):
        write(tmp_path, [1], name)
    write(tmp_path, [], "failed", since=0)
    assert sorted(e.path.name.rsplit("-", 1)[0] for e in scan_traces(trace_files(tmp_path))) == ["failed-1", "trained"]


def test_damage_is_said_and_a_trace_that_made_room_is_none(tmp_path):
    write(tmp_path, [0])
    (path,) = trace_files(tmp_path)
    (entry,) = scan_traces([path])
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(StoreError, match="damaged"):
        entry.load()
    path.unlink()
    assert entry.load() is None
    assert list(scan_traces([path, tmp_path])) == []


def test_traces_of_another_format_are_named_and_a_writer_leaves_them_alone(tmp_path):
    older = tmp_path / "trained-00000004.traces"
    older.write_bytes(b"Afterplay traces 1\n\0" + bytes(99))
    before = older.read_bytes()
    with pytest.raises(StoreError) as caught:
        updates_in(tmp_path)
    assert str(caught.value) == (
        f"expected {older} to be a file of traces (format 2), got format 1: delete it; only afterplay show reads it"
    )
    write(tmp_path, [7, 8], since=8)
    write(tmp_path, [8], since=8)
    assert older.read_bytes() == before
    older.unlink()
    assert updates_in(tmp_path) == [7, 8]
