"""The check of a GPU runs to its end on small shapes, and keeps what it found whatever happens to a part."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import chip
from benchmarks.gpu.__main__ import PARTS, SMALL, Part, check
from benchmarks.gpu.bench import Bench


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def small():
    return Bench("cpu", small=True, end=time.monotonic() + 3600)


@pytest.fixture
def found_by(small, tmp_path):
    def run(*parts, bench=small):
        check(bench, parts, tmp_path / "gpu.json")
        return json.loads((tmp_path / "gpu.json").read_text())["findings"]

    return run


def part_of(function, **options):
    (part,) = [p for p in PARTS if p.function == function and options.items() <= p.options.items()]
    return part


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [p for p in SMALL if p.function not in ("loop:turns", "layouts:equality", "ranks:one_rank")],
    ids=lambda p: f"{p.name} {p.title}",
)
def test_every_part_finds_something_on_small_shapes(found_by, part):
    found = found_by(part)
    assert found
    assert not [f for f in found if {"failed", "not_run", "skipped"} & f.keys()]


@pytest.mark.slow
def test_layouts_agree_and_rows_that_see_each_other_do_not(found_by):
    found = {f["case"]: f["tolerance"] for f in found_by(part_of("layouts:equality"))}
    control = found.pop("control: rows see each other")
    assert control == "outside"
    assert found == dict.fromkeys(("padded", "packed", "shared", "shared, checkpointed"), "within")


@pytest.mark.slow
def test_divided_weights_are_copied_whole_and_resume_where_they_were(found_by):
    divided, resumed = found_by(part_of("ranks:one_rank"))
    assert divided["snapshot_equals_weights"]
    assert resumed["weight_distance_after_a_step"] == 0.0


LIMITS = Part("chip", "chip:limits", seconds=10)


@pytest.mark.slow
def test_a_part_that_fails_is_a_line_and_the_next_one_runs(found_by, monkeypatch):
    def failing(bench):
        yield "first", {"seconds": 1.0}
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(chip, "limits", failing)
    found = found_by(LIMITS, Part("head", "chip:head", seconds=1))
    assert [f["case"] for f in found] == ["first", "limits", "256 tokens, hidden 64"]
    assert found[1]["failed"] == "OutOfMemoryError: no room"


def test_a_part_whose_package_is_missing_names_it_and_the_check_says_so_first(found_by, monkeypatch):
    def lacking(bench):
        raise ModuleNotFoundError("No module named 'pydantic'", name="pydantic")

    monkeypatch.setattr(chip, "limits", lacking)
    monkeypatch.setitem(command.IMPORTED_AS, "orjson", "no_such_module")
    found = found_by(LIMITS)
    assert found[0] == {"part": "packages", "case": "missing", "names": "orjson", "see": found[0]["see"]}
    assert found[1]["not_run"] == "needs the package pydantic"


def test_what_was_found_is_on_disk_while_the_next_part_runs(small, tmp_path, monkeypatch):
    def looking(bench):
        yield "first", {}
        yield "second", {"on_disk": len(json.loads((tmp_path / "gpu.json").read_text())["findings"])}

    monkeypatch.setattr(chip, "limits", looking)
    assert check(small, [LIMITS], tmp_path / "gpu.json").findings[1]["on_disk"] == 1


def test_a_part_that_does_not_fit_into_the_time_left_is_skipped(found_by):
    late = Bench("cpu", small=False, end=time.monotonic() + 5)
    (found,) = found_by(LIMITS, bench=late)
    assert "it needs 10" in found["skipped"]
