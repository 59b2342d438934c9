"""Records in memory and in files: whole, or noticed not to be; never other data."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import StoreError, WireError
from pipeline.schema import record_file as frames

json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
records = st.tuples(
    st.dictionaries(st.text(max_size=5), json, max_size=4),
    st.lists(st.binary(max_size=60), max_size=4),
    st.sampled_from([None, 1]),
)
MAGIC = b"Afterplay test 1\n"


def packed(record) -> bytes:
    header, parts, level = record
    return b"".join(frames.pack(header, parts, level=level))


def scanned(path, data, *, bodies=True):
    path.write_bytes(data)
    with path.open("rb") as file:
        return [
            (f.header, list(map(bytes, f.load(file.fileno())))) for f in frames.scan(file.fileno(), 0, bodies=bodies)
        ]


@given(records)
def test_a_record_comes_back_as_it_was_packed(record):
    header, parts = frames.unpack(packed(record))
    assert (header, list(map(bytes, parts))) == (record[0], record[1])


@given(records, st.data())
def test_a_record_with_any_byte_changed_or_missing_is_refused(record, data):
    whole = packed(record)
    at = data.draw(st.integers(0, len(whole) - 1))
    changed = bytearray(whole)
    changed[at] ^= data.draw(st.integers(1, 255))
    for broken in (bytes(changed), whole[:at], whole + b"\0"):
        with pytest.raises(WireError):
            frames.unpack(broken)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_record(data):
    with pytest.raises(WireError):
        frames.unpack(data)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("frames") / "file"


@given(st.lists(records, min_size=1, max_size=4), st.data())
def test_a_damaged_file_gives_the_records_before_the_damage_and_no_other(path, written, data):
    whole = list(map(packed, written))
    expected = [(header, parts) for header, parts, _ in written]
    assert scanned(path, b"".join(whole)) == expected
    damaged = data.draw(st.integers(0, len(whole) - 1))
    at = sum(map(len, whole[:damaged])) + data.draw(st.integers(0, len(whole[damaged]) - 1))
    assert scanned(path, b"".join(whole)[:at]) == expected[:damaged]
    changed = bytearray(b"".join(whole))
    changed[at] ^= data.draw(st.integers(1, 255))
    assert scanned(path, changed) == expected[:damaged]


@given(st.lists(records, min_size=1, max_size=3), st.integers(1, 40))
def test_a_file_that_is_truncated_at_damage_can_be_appended_to(path, written, cut):
    whole = list(map(packed, written))
    path.write_bytes(b"".join(whole)[: -min(cut, len(whole[-1]))])
    with path.open("r+b") as file:
        end = max((f.end for f in frames.scan(file.fileno(), 0)), default=0)
        frames.truncate(path, end)
        file.seek(end)
        frames.write(file.fileno(), frames.pack(*written[-1][:2]))
    assert scanned(path, path.read_bytes()) == [(header, parts) for header, parts, _ in written]


def test_headers_and_bodies_of_any_size_are_written_and_read(path):
    header, parts = {"long": "x" * 5000}, [bytes([i % 256]) * i for i in range(1500)]
    with path.open("wb") as file:
        size = frames.write(file.fileno(), frames.pack(header, parts))
    assert size == os.path.getsize(path)
    assert scanned(path, path.read_bytes()) == [(header, parts)]


def test_parts_are_views_and_arrays_are_packed_without_a_copy():
    array = np.arange(1000, dtype=np.int32)
    _, body = frames.pack({}, [frames.array_bytes(array)])
    assert np.shares_memory(np.frombuffer(body, np.int32), array)
    whole = bytearray().join(frames.pack({}, [body]))
    _, (part,) = frames.unpack(whole)
    assert np.shares_memory(np.frombuffer(part, np.uint8), np.frombuffer(whole, np.uint8))


def test_a_compressed_body_is_not_inflated_beyond_what_its_header_says(monkeypatch):
    whole = b"".join(frames.pack({}, [bytes(10_000)], level=1))
    monkeypatch.setattr(frames, "INFLATED_BYTES_MAX", 9999)
    with pytest.raises(WireError, match="at most 9999 bytes"):
        frames.unpack(whole)


KIND = frames.FileKind("test", 3, "a file of this test", "make it again")


@pytest.mark.parametrize(
    ("start", "recognised", "came"),
    [
        (b"Afterplay test 2\nmore", True, "format 2"),
        (b"Afterplay test 33\n", True, "format 33"),
        (b"Afterplay test\r\n\x1a\n\0", True, "format 1"),
        (b"Afterplay traces 3\n", False, "something else"),
        (b"Afterplay test 3", False, "something else"),
        (b"", False, "something else"),
        (bytes(99), False, "something else"),
    ],
)
def test_a_file_of_another_kind_or_format_is_refused_in_one_sentence(tmp_path, start, recognised, came):
    assert KIND.recognises(start) is recognised
    with pytest.raises(StoreError) as caught:
        KIND.check(tmp_path / "f", start)
    assert str(caught.value) == f"expected {tmp_path}/f to be a file of this test (format 3), got {came}: make it again"


def test_a_file_of_its_kind_and_format_is_taken(tmp_path):
    assert KIND.recognises(KIND.magic)
    KIND.check(tmp_path, KIND.magic + b"more")
