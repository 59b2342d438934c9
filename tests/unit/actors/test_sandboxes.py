"""Every kind of sandbox keeps the same contract, and each one that is begun is ended and counted."""

from __future__ import annotations

import csv
import errno
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.sandboxes.base import Finished, SandboxOptions, SandboxSettings
from actors.sandboxes.bubblewrap import Bubblewrap
from actors.sandboxes.container import Container
from actors.sandboxes.registry import find_kind, given_as_word
from actors.sandboxes.unconfined import Unconfined
from pipeline.errors import ConfigurationError, PlugInError
from pipeline.runtime.children import OrphanReaper
from tests.support.sandbox_kinds import KINDS, SERVICE, WALLS, made, said, sandboxes_of

pytestmark = pytest.mark.timeout(300)
every = pytest.mark.parametrize("kind", KINDS)
alone = pytest.mark.parametrize("kind", [SERVICE])
SECONDS_MAX = 120.0
"""A guard against hanging."""


async def shell(sandbox: Any, line: str, seconds_max: float = SECONDS_MAX, **more: Any) -> Finished:
    finished: Finished = await sandbox.run(
        ["/bin/sh", "-c", line], environment=more, seconds_max=seconds_max, output_bytes_max=1000
    )
    return finished


@every
async def test_a_command_has_its_words_its_variables_and_its_own_end(kind: str) -> None:
    async with made(kind) as sandbox:
        assert said(await shell(sandbox, "echo $ONE; echo err >&2", ONE="a b")) == "a b\n"
        ended = await shell(sandbox, "echo err >&2; exit 7")
        assert (ended.code, ended.stderr, ended.limit) == (7, b"err\n", None)
        assert (await shell(sandbox, "kill -9 $$")).code == -9
        assert len((await shell(sandbox, "head -c 3000000 /dev/zero")).stdout) == 1000
        with pytest.raises(FileNotFoundError):
            await sandbox.run(["/no/such"], environment={}, seconds_max=SECONDS_MAX, output_bytes_max=10)
        assert said(await shell(sandbox, "echo again")) == "again\n"


@every
async def test_files_go_in_and_come_out_as_they_were(kind: str) -> None:
    files = {"a/b.bin": bytes(range(256)) * 1000, "c": b"", "ä x": b"1"}
    async with made(kind) as sandbox:
        await sandbox.put(files)
        assert said(await shell(sandbox, 'cat "$HOME/ä x"; echo 2 > "$HOME/made"')) == "1"
        assert await sandbox.take([*files, "made"], 10**6) == {**files, "made": b"2\n"}
        with pytest.raises(ValueError):
            await sandbox.take(["a/b.bin"], 100_000)
        with pytest.raises(FileNotFoundError):
            await sandbox.take(["missing"], 100)


@pytest.mark.parametrize("kind", WALLS)
@pytest.mark.parametrize(
    ("harm", "raised"),
    [
        ("chmod 000 x", FileNotFoundError),
        ('chmod 000 "$HOME"', FileNotFoundError),
        ('rm -r "$HOME"; touch "$HOME"', FileNotFoundError),
        ("seq 5000 | xargs touch", ValueError),
    ],
)
async def test_files_that_a_command_has_spoiled_are_missing_and_the_sandbox_is_not_at_fault(
    kind: str, harm: str, raised: type[Exception]
) -> None:
    async with made(kind, disk_mib=16) as sandbox:
        await sandbox.put({"x": b"1"})
        await shell(sandbox, harm)
        with pytest.raises(raised):
            await sandbox.take(["x"], 10**6)


@every
async def test_a_link_is_not_followed_when_files_are_taken(kind: str) -> None:
    async with made(kind) as sandbox:
        await sandbox.put({"x": b"1"})
        said(await shell(sandbox, "ln -s /etc/hosts $HOME/link"))
        with pytest.raises(FileNotFoundError):
            await sandbox.take(["link"], 10**6)


@every
async def test_a_command_beyond_its_time_is_ended_with_what_it_said(kind: str) -> None:
    async with made(kind) as sandbox:
        finished = await shell(sandbox, "echo early; exec sleep 1000", seconds_max=1.0)
        assert finished.limit == "time" and finished.stdout == b"early\n" and finished.code != 0


@every
async def test_a_sandbox_that_is_cancelled_is_ended(kind: str) -> None:
    counted: Counter[str] = Counter()
    sandboxes = sandboxes_of(kind, lambda outcome: counted.update([outcome]))
    ended = []
    with anyio.CancelScope() as scope:
        async with sandboxes.one() as sandbox:
            scope.deadline = anyio.current_time() + 0.5
            end = sandbox.end

            async def watched() -> None:
                ended.append(True)
                await end()

            sandbox.end = watched  # type: ignore[method-assign]
            await shell(sandbox, "sleep 1000")
    assert scope.cancelled_caught and ended and sandboxes.live == 0
    assert counted == {"started": 1, "ended": 1}


@alone
async def test_each_one_is_counted_once_and_a_failed_start_is_a_failure_of_the_sandbox(kind: str) -> None:
    counted: Counter[str] = Counter()
    failing = [1, 2, 3]
    sandboxes = sandboxes_of(kind, lambda outcome: counted.update([outcome]), options={"failing": failing})
    failures = []
    async with anyio.create_task_group() as group:

        async def one() -> None:
            try:
                async with sandboxes.one() as sandbox:
                    said(await shell(sandbox, ":"))
            except PlugInError as error:
                failures.append((error.boundary, error.kind))

        for _ in range(10):
            group.start_soon(one)
    assert failures == [("sandbox", "ConnectionError")] * 3
    assert counted == {"started": 7, "failed": 3, "ended": 10} and sandboxes.live == 0


@alone
async def test_no_more_live_and_no_more_start_than_is_allowed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sandboxes = sandboxes_of(kind, live_max=3, starts_per_second=10.0)
    starts, live = [], []
    async with anyio.create_task_group() as group:

        async def one() -> None:
            async with sandboxes.one():
                starts.append(anyio.current_time())
                live.append(sandboxes.live)
                await anyio.sleep(0.05)

        for _ in range(9):
            group.start_soon(one)
    assert max(live) <= 3 and starts[-1] - starts[0] >= 0.75  # eight gaps of a tenth, less the first start's own time


@alone
async def test_an_end_that_fails_is_logged_and_changes_no_result(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    sandboxes = sandboxes_of(kind)
    async with sandboxes.one() as sandbox:
        end = sandbox.end

        async def broken() -> None:
            await end()
            raise ConnectionError("gone")

        sandbox.end = broken  # type: ignore[method-assign]
    assert sandboxes.live == 0 and "a sandbox may be left" in caplog.text and "gone" in caplog.text


def test_a_container_engine_elsewhere_than_on_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigurationError, match=r"^x: sandboxes of docker need Linux, .* set x to none"):
        find_kind(SandboxOptions(kind="docker", image="any"), "x")


@alone
def test_a_kind_that_cannot_work_is_told_with_the_key_and_the_remedy(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert given_as_word("none") == {"kind": "none"} and given_as_word({"kind": "x"}) == {"kind": "x"}
    assert find_kind(SandboxOptions(kind="none"), "x") is Unconfined
    for wrong, told in (
        ("firejail", "there are auto, bubblewrap, docker, podman, none"),
        ("docker", "set image"),
        ("os.path:join", "a subclass of Sandbox"),
    ):
        with pytest.raises(ConfigurationError, match=rf"^loop\.sandbox: .*{told}"):
            find_kind(SandboxOptions(kind=wrong), "loop.sandbox")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigurationError, match=r"no bwrap.*set loop\.sandbox to none"):
        find_kind(SandboxOptions(kind="bubblewrap"), "loop.sandbox")
    assert find_kind(SandboxOptions(), "loop.sandbox") is Unconfined
    assert "without a sandbox" in caplog.text


async def test_a_container_whose_process_cannot_begin_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **more: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("actors.sandboxes.container.ChildGroup", refused)
    options, reaper = SandboxOptions(kind="docker", image="any"), OrphanReaper(grace_seconds=0)
    before = os.listdir("/dev/fd")
    with pytest.raises(OSError):
        await Container(SandboxSettings(options, None, (), (), None, reaper)).start()
    assert os.listdir("/dev/fd") == before


async def test_a_container_begins_whatever_the_length_of_the_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    for folder in (long, tmp_path / "bin"):
        folder.mkdir()
    (tmp_path / "bin" / "docker").write_text("#!/bin/sh\n[ $1 = rm ]\n")
    (tmp_path / "bin" / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    options, reaper = SandboxOptions(kind="docker", image="any"), OrphanReaper(grace_seconds=0)
    with pytest.raises(PlugInError, match="the sandbox cannot be started"):
        await Container(SandboxSettings(options, None, (), (), None, reaper)).start()


def test_a_container_gets_folders_by_any_name(tmp_path: Path) -> None:
    folder = tmp_path / 'a,b "c":d'
    (folder / "runs").mkdir(parents=True)
    (folder / "key").touch()
    options, reaper = SandboxOptions(kind="docker", image="any"), OrphanReaper(grace_seconds=0)
    hidden = (folder / "runs", folder / "key")
    words = Container(SandboxSettings(options, None, (folder,), hidden, None, reaper))._words(folder / "control")
    given = [next(csv.reader([words[i + 1]])) for i, word in enumerate(words) if word == "--mount"]
    assert given == [
        ["type=bind", f"src={folder}/control", "dst=/run/afterplay", "readonly"],
        ["type=bind", f"src={folder}", f"dst={folder}", "readonly"],
        ["type=tmpfs", "tmpfs-size=4k", f"dst={folder}/runs", "readonly"],
        ["type=bind", "src=/dev/null", f"dst={folder}/key", "readonly"],
    ]


@pytest.mark.parametrize("kind", WALLS)
async def test_a_sandbox_that_dies_is_a_failure_of_the_sandbox(kind: str) -> None:
    async with made(kind) as sandbox:
        async with anyio.create_task_group() as group:

            async def kill() -> None:
                await anyio.sleep(0.5)
                sandbox._control.shutdown(2)  # type: ignore[attr-defined]

            group.start_soon(kill)
            with pytest.raises(PlugInError) as told:
                await shell(sandbox, "sleep 1000")
        assert (told.value.boundary, told.value.kind) == ("sandbox", "Lost")


@pytest.mark.parametrize("kind", ["bubblewrap"])
async def test_paths_are_shown_under_their_own_names_links_too_and_hidden_ones_are_empty(
    kind: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    real = tmp_path / "real"
    for name in ("agent/code.py", "agent/runs/key", "agent/.env", "agent/runs/shown/x", "other/y"):
        (real / name).parent.mkdir(parents=True, exist_ok=True)
        (real / name).write_text(name)
    (tmp_path / "link").symlink_to(real / "agent")
    agent = tmp_path / "link"
    shown, hidden = (agent, agent / "runs" / "shown"), (agent / "runs", agent / ".env")
    async with made(kind, shown, hidden) as sandbox:
        out = said(
            await shell(sandbox, f"cat {agent}/code.py {agent}/.env; ls {agent}/runs; ls {real}; cat {agent}/runs/*/x")
        )
    assert out == "agent/code.pyshown\nagent\nagent/runs/shown/x"


@pytest.mark.parametrize("kind", ["bubblewrap"])
@pytest.mark.skipif(os.geteuid() != 0, reason="elsewhere commands run as the same user")
def test_what_another_user_cannot_read_is_known_before(kind: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch(0o600)
    assert Bubblewrap.unreadable(tmp_path / "file")
    tmp_path.chmod(0o755)
    assert not Bubblewrap.unreadable(tmp_path) and not Bubblewrap.unreadable(tmp_path / "missing")
