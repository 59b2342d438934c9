"""Engines that come and go are found by every reader, whichever way they are announced."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

import anyio
import pytest
from pydantic import ValidationError

from pipeline.config.explain import resolve
from pipeline.config.rollouts import EngineConfig
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime import engine_addresses as module
from pipeline.runtime.engine_addresses import LEASE_SECONDS, EngineAddresses, EngineRegistry, engine_addresses
from pipeline.runtime.engine_keys import digest_of
from pipeline.runtime.run_directory import RunDirectory

pytestmark = pytest.mark.anyio


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def followed(addresses: EngineAddresses, *changes: Callable[[], object]) -> list[tuple[str, ...]]:
    """Lists that a follower is given: the first, and one after each of ``changes``."""
    seen: list[tuple[str, ...]] = []
    new = anyio.Event()

    def changed(urls: tuple[str, ...]) -> None:
        seen.append(urls)
        new.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(addresses.follow, changed)
        for change in (*changes, None):
            await new.wait()
            new = anyio.Event()
            if change is None:
                break
            change()
        tasks.cancel_scope.cancel()
    return seen


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)


async def test_engines_that_join_and_leave_are_found_beside_the_fixed_list(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    registry = EngineRegistry(directory.engines)
    seen = await followed(
        engine_addresses(EngineConfig(urls=("http://a:1/",)), directory, None),
        partial(registry.announce, "engine-1", "http://b:2"),
        partial(registry.announce, "engine-2", "http://c:3/"),
        partial(registry.withdraw, "engine-1"),
    )
    joined = [("http://a:1",), ("http://a:1", "http://b:2"), ("http://a:1", "http://b:2", "http://c:3")]
    assert seen == [*joined, ("http://a:1", "http://c:3")]


async def test_a_file_of_urls_is_read_again_and_a_damaged_one_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "engines.txt"

    def write(text: str) -> None:
        file.with_suffix(".new").write_text(text)
        file.with_suffix(".new").replace(file)

    def remove_then_write(text: str) -> None:
        file.unlink()
        write(text)

    write("# engines\nhttp://a:1\n\n")
    config = EngineConfig(kind="external", discovery=f"file:{file}")
    seen = await followed(
        engine_addresses(config, RunDirectory(tmp_path), None),
        partial(write, "http://a:1\nhttp://b:2/\n"),
        partial(remove_then_write, "http://b:2\n"),
    )
    assert seen == [("http://a:1",), ("http://a:1", "http://b:2"), ("http://b:2",)]
    write("http://a:1\nnonsense\n")
    with pytest.raises(ConfigurationError, match="expected the base URL of an engine"):
        module.read_urls(file)


@pytest.mark.parametrize("damage", [b"no url\n", b"http://[fe80::1:8100\n", b"http://\xff\xfe\n"])
async def test_a_follower_of_a_file_survives_what_is_written_there(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "engines.txt"
    file.write_bytes(damage)
    config = EngineConfig(kind="external", discovery=f"file:{file}")
    addresses = engine_addresses(config, RunDirectory(tmp_path), None)
    assert await followed(addresses, partial(file.write_text, "http://a:1\n")) == [(), ("http://a:1",)]


async def test_a_name_that_cannot_be_one_ends_no_follower(tmp_path: Path) -> None:
    config = EngineConfig(kind="external", discovery="dns:engines..svc:8100")
    registry = EngineRegistry(RunDirectory(tmp_path).engines)
    seen = await followed(
        engine_addresses(config, RunDirectory(tmp_path), None), partial(registry.announce, "engine-1", "http://b:2")
    )
    assert seen == [(), ("http://b:2",)]


async def test_each_address_of_a_name_is_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[tuple[int, str]]] = [[(socket.AF_INET, "10.0.0.2"), (socket.AF_INET, "10.0.0.1")], [], []]
    answers.append([(socket.AF_INET6, "fd00::1")])

    def found(host: str, port: int, *, type: int) -> list[object]:
        assert (host, port) == ("engines.run.svc", 8100)
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if not answer:
            raise socket.gaierror("no name server")
        return [(family, None, None, None, (ip, port)) for family, ip in answer]

    monkeypatch.setattr(module.socket, "getaddrinfo", found)
    config = EngineConfig(kind="external", discovery="dns:engines.run.svc:8100")
    seen = await followed(engine_addresses(config, RunDirectory(tmp_path), None), lambda: None)
    assert seen == [("http://10.0.0.1:8100", "http://10.0.0.2:8100"), ("http://[fd00::1]:8100",)]


def test_an_engine_that_stopped_announcing_itself_is_gone_after_its_lease_by_any_clock(tmp_path: Path) -> None:
    clock = Clock()
    engine, reader = EngineRegistry(tmp_path / "engines"), EngineRegistry(tmp_path / "engines", now=clock)
    engine.announce("engine-7", "http://a:1")
    os.utime(tmp_path / "engines/engine-7.json", (1, 1))  # the other machine's clock is decades behind
    for _ in range(3):
        assert reader.read() == ("http://a:1",)
        clock.now += 0.9 * LEASE_SECONDS
        engine.announce("engine-7", "http://a:1")
    assert reader.read() == ("http://a:1",)
    clock.now += 1.1 * LEASE_SECONDS
    assert reader.read() == ()
    engine.announce("engine-7", "http://b:1")
    assert reader.read() == ("http://b:1",)


LEARNER, ACTOR, STRANGER = (digest_of(key) for key in ("learner's key", "actors' key", "another key"))


@pytest.mark.parametrize("reader", [LEARNER, ACTOR])
def test_an_address_counts_only_where_the_readers_own_key_signed_it(
    tmp_path: Path, reader: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An actor can write into the run directory and knows its own key: it must not be sent the learner's."""
    EngineRegistry(tmp_path, (ACTOR, LEARNER)).announce("engine-1", "http://a:1")
    engines = EngineRegistry(tmp_path, (reader,))
    true = json.loads((tmp_path / "engine-1.json").read_bytes())
    forged: dict[str, object] = {
        "unsigned": {key: true[key] for key in ("url", "process", "announcement")},
        "empty": true | {"signatures": []},
        "text": true | {"signatures": true["signatures"][0]},
        "odd": true | {"signatures": [1, None, {}, "é"]},
        "other-address": true | {"url": "http://evil:1"},
        "number": true | {"announcement": 10**400},
        "copied": true,
        "engine-2": true | {"url": "http://evil:1"},
    }
    for name, value in forged.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    EngineRegistry(tmp_path, (STRANGER,)).announce("stranger", "http://evil:1")
    EngineRegistry(tmp_path, (LEARNER if reader == ACTOR else ACTOR,)).announce("half", "http://evil:1")
    assert engines.read() == engines.read() == ("http://a:1",)
    assert len(caplog.records) == 1 and "is not signed with a key of this run" in caplog.text


async def test_a_file_of_urls_in_the_run_directory_needs_signatures_and_one_elsewhere_none(tmp_path: Path) -> None:
    directory, elsewhere = RunDirectory(tmp_path / "run").create(), tmp_path / "engines"
    for file, lines, expected in [
        (elsewhere, "http://a:1\n", ("http://a:1",)),
        (directory.path / "engine_urls", f"{module.signed_line('http://a:1', (ACTOR, LEARNER))}\n", ("http://a:1",)),
        (directory.path / "engine_urls", "http://evil:1\n", None),
        (directory.path / "engine_urls", f"{module.signed_line('http://a:1', (ACTOR,))}\n", None),
        (directory.path / "engine_urls", f"http://evil:1 {module.signed_line('', (LEARNER,))}\n", None),
    ]:
        file.write_text(lines)
        addresses = engine_addresses(EngineConfig(discovery=f"file:{file}"), directory, "learner's key")
        assert addresses.look is not None
        if expected is not None:
            assert addresses.look() == expected
        else:
            with pytest.raises(ConfigurationError, match="without a signature"):
                addresses.look()


def test_what_is_no_plain_file_holds_up_no_reader(tmp_path: Path) -> None:
    EngineRegistry(tmp_path).announce("engine-1", "http://a:1")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    (tmp_path / "large.json").write_bytes(b" " * 10**6)
    assert EngineRegistry(tmp_path).read() == ("http://a:1",)


def test_files_that_are_no_announcement_are_no_engines(tmp_path: Path) -> None:
    reader = EngineRegistry(tmp_path)
    for name, content in {
        "a.json": "{",
        "b.json": "[]",
        "c.json": '{"url": "x"}',
        "d.txt": '{"url": "http://a:1"}',
    }.items():
        (tmp_path / name).write_text(content)
    assert reader.read() == ()
    with pytest.raises(ConfigurationError, match="expected the base URL"):
        reader.announce("engine-1", "b:8100")
    assert EngineRegistry(tmp_path / "missing").read() == ()


async def test_an_engine_that_shares_the_device_of_the_learner_stays_the_only_one(tmp_path: Path) -> None:
    config = EngineConfig(kind="embedded", colocate="sleep", port=8100)
    EngineRegistry(RunDirectory(tmp_path).engines).announce("engine-1", "http://a:1")
    seen: list[tuple[str, ...]] = []
    await engine_addresses(config, RunDirectory(tmp_path), None).follow(seen.append)
    assert seen == [("http://127.0.0.1:8100",)]


@pytest.mark.parametrize("discovery", ["dns:engines", "dns:engines:0", "consul", "file:"])
def test_a_place_that_cannot_be_looked_at_is_refused(discovery: str) -> None:
    with pytest.raises(ValidationError, match="discovery"):
        EngineConfig(discovery=discovery)


@pytest.mark.parametrize("other", [{"urls": ("http://a:1",)}, {"colocate": "split"}])
def test_a_second_way_to_find_engines_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="omit"):
        EngineConfig.model_validate({"discovery": "registry", **other})


def test_files_of_urls_and_keys_are_the_same_in_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {"actor_key": "file:keys/actor.secret", "learner_key": "env:KEY"}
    config = RunConfig(engine=EngineConfig(kind="external", discovery="file:engines.txt", **keys))
    resolved = resolve(config).engine
    assert (resolved.discovery, resolved.actor_key, resolved.learner_key) == (
        f"file:{tmp_path}/engines.txt",
        f"file:{tmp_path}/keys/actor.secret",
        "env:KEY",
    )
    assert config.engine.addresses() == ()
