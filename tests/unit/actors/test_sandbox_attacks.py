"""Attacks from inside a sandbox, each of which must fail, and leave it usable where it was not ended."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from actors.sandboxes.base import Finished, Sandbox
from actors.sandboxes.first_process import seccomp_filter
from tests.support.sandbox_kinds import WALLS, made, said

pytestmark = [pytest.mark.parametrize("kind", WALLS), pytest.mark.timeout(300)]
SECONDS_MAX = 120.0
"""A guard against hanging."""
SMALL = {"memory_mib": 96, "disk_mib": 8, "processes_max": 24}


async def python(sandbox: Sandbox, source: str, seconds_max: float = SECONDS_MAX, **variables: str) -> Finished:
    """Run a program inside."""
    program = [sandbox.python, "-I", "-S", "-c", source]  # type: ignore[attr-defined]
    return await sandbox.run(program, environment=variables, seconds_max=seconds_max, output_bytes_max=10_000)


async def refused(sandbox: Sandbox, attempt: str) -> None:
    """The attempt must raise OSError."""
    lines = "\n".join(f"    {line}" for line in attempt.splitlines())
    source = f"import ctypes, os, socket\ntry:\n{lines}\nexcept OSError as error: print('refused', error)"
    out = said(await python(sandbox, source))
    assert out.startswith("refused"), out


async def usable(sandbox: Sandbox) -> None:
    assert said(await python(sandbox, "print(6 * 7)")) == "42\n"


LIBC = "libc = ctypes.CDLL(None, use_errno=True)\n"
FAILED = ": raise OSError(ctypes.get_errno(), '')"


# What it may see


async def test_the_engines_key_is_in_no_variable_that_can_be_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "s3cr3t-engine-key")
    source = (
        "import glob\nseen = b''\n"
        "for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "  try: seen += open(path, 'rb').read()\n"
        "  except OSError: pass\n"
        "print(len(seen) > 0, b's3cr3t' + b'-engine' in seen)"
    )
    async with made(kind) as sandbox:
        assert said(await python(sandbox, source)) == "True False\n"


async def test_the_run_directory_is_empty_where_its_folder_is_shown(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "actor_key").write_text("key")
    (tmp_path / "agent.py").write_text("")
    tmp_path.chmod(0o755)
    source = f"import os\nprint(sorted(os.listdir({str(tmp_path)!r})), os.listdir({str(tmp_path / 'runs')!r}))"
    async with made(kind, (tmp_path,), (tmp_path / "runs", run, run / "actor_key")) as sandbox:
        assert said(await python(sandbox, source)) == "['agent.py', 'runs'] []\n"
        await refused(sandbox, f"open({str(run / 'actor_key')!r})")


async def test_hidden_tests_beside_the_program_are_not_there(kind: str, tmp_path: Path) -> None:
    for name in ("program/agent.py", "grader/tests.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("answer")
    tmp_path.chmod(0o755)
    async with made(kind, (tmp_path / "program",)) as sandbox:
        await refused(sandbox, f"open({str(tmp_path / 'grader' / 'tests.jsonl')!r})")
        await refused(sandbox, f"open({str(tmp_path / 'program')!r} + '/../grader/tests.jsonl')")


async def test_no_file_of_the_users_is_there(kind: str) -> None:
    async with made(kind) as sandbox:
        for path in (
            Path(__file__),
            Path.cwd() / "pyproject.toml",
            Path.home() / ".bashrc",
            "/root/.ssh",
            "/etc/shadow",
        ):
            await refused(sandbox, f"open({str(path)!r}) and os.listdir({str(path)!r})")


async def test_other_processes_of_the_machine_are_not_there(kind: str) -> None:
    source = "import os\nprint([p for p in os.listdir('/proc') if p.isdigit() and int(p) > 20])"
    async with made(kind) as sandbox, made(kind) as other:
        assert said(await python(sandbox, source)) == "[]\n"
        await usable(other)


async def test_what_one_sandbox_writes_another_does_not_see(kind: str) -> None:
    async with made(kind) as one, made(kind) as other:
        said(await python(one, "open('/tmp/secret', 'w').write('1'); open('/dev/shm/secret', 'w').write('1')"))
        await refused(other, "open('/tmp/secret')")
        await refused(other, "open('/dev/shm/secret')")


# What it may reach


@pytest.fixture
def listening() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_only_the_gateways_port_is_reached(kind: str, listening: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gateway:
        port = gateway.getsockname()[1]
        async with made(kind, gateway=("127.0.0.1", port)) as sandbox:
            said(await python(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 60)"))
            await refused(sandbox, f"socket.create_connection(('127.0.0.1', {listening}), 60)")


async def test_the_network_is_not_there(kind: str) -> None:
    async with made(kind) as sandbox:
        await refused(sandbox, "socket.create_connection(('192.0.2.1', 80), 60)")
        await refused(sandbox, "socket.socket(2, 2).sendto(b'x', ('192.0.2.1', 53))")
        await refused(sandbox, "socket.socket(10, 2).sendto(b'x', ('2001:db8::1', 53))")
        await refused(sandbox, "socket.getaddrinfo('example.com', 80)")


async def test_sockets_that_know_no_network_namespace_are_refused(kind: str) -> None:
    """AF_VSOCK leads to the hypervisor."""
    async with made(kind) as sandbox:
        await refused(sandbox, "s = socket.socket(40, 1)\ns.settimeout(9)\ns.connect((2, 1))")


async def test_unix_sockets_of_the_machine_are_not_reached(kind: str) -> None:
    async with made(kind) as sandbox:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"\0afterplay-{os.getpid()}")
            server.listen(1)
            await refused(sandbox, f"socket.socket(1).connect('\\0afterplay-{os.getpid()}')")


# What it may use


async def test_a_fork_bomb_reaches_its_limit(kind: str) -> None:
    source = (
        "import os, time\nn = 0\n"
        "try:\n  for n in range(10_000):\n    if os.fork() == 0: time.sleep(1000)\n"
        "except OSError: print('refused', n < 100)"
    )
    async with made(kind, **SMALL) as sandbox:
        finished = await python(sandbox, source)
        assert finished.limit == "processes" or finished.stdout == b"refused True\n", finished
        await usable(sandbox)


async def test_threads_count_as_processes(kind: str) -> None:
    source = (
        "import threading, time\nn = 0\n"
        "try:\n  for n in range(1000): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
        "except RuntimeError: print('refused', n < 100)"
    )
    async with made(kind, **SMALL) as sandbox:
        finished = await python(sandbox, source)
        assert finished.limit == "processes" or finished.stdout == b"refused True\n", finished


EAT = "kept = []\nwhile True: kept.append(b'x' * 2**20)\n"


@pytest.mark.parametrize("children", [0, 8])
async def test_memory_ends_at_its_limit_however_many_share_it(kind: str, children: int) -> None:
    """One process gets a MemoryError at twice the limit at the latest; several together are ended."""
    source = f"import os\nfor _ in range({children}):\n  if os.fork() == 0: break\n" + EAT
    async with made(kind, **SMALL) as sandbox:
        started = time.monotonic()
        finished = await python(sandbox, source)
        assert finished.limit == "memory" or finished.code in (1, -9), finished
        assert time.monotonic() - started < SECONDS_MAX
        await usable(sandbox)


async def test_memory_that_belongs_to_no_process_is_refused_or_counted(kind: str) -> None:
    source = (
        "import os\n"
        "try:\n  f = os.memfd_create('x')\n  for _ in range(1000): os.write(f, bytes(2**20))\n  print('all')\n"
        "except OSError: print('refused')"
    )
    async with made(kind, **SMALL) as sandbox:
        finished = await python(sandbox, source)
        assert finished.stdout == b"refused\n" or finished.code == -9, finished


async def test_shared_memory_of_system_v_is_refused_or_counted(kind: str) -> None:
    source = (
        "import ctypes, os\nlibc = ctypes.CDLL(None)\nlibc.shmat.restype = ctypes.c_void_p\nn = 0\n"
        "for n in range(100):\n  i = libc.shmget(0, 2**23, 0o1600)\n  if i < 0: break\n"
        "  at = libc.shmat(i, None, 0)\n  ctypes.memset(at, 1, 2**23)\n  libc.shmdt(ctypes.c_void_p(at))\n"
        "print(n)"
    )
    async with made(kind, **SMALL) as sandbox:
        finished = await python(sandbox, source)
        assert finished.stdout == b"0\n" or finished.code == -9, finished


async def test_the_disk_is_full_at_its_limit(kind: str) -> None:
    source = (
        "import os\nn = 0\n"
        "try:\n  with open('/tmp/big', 'wb', buffering=0) as f:\n    for _ in range(1000): n += f.write(bytes(2**20))\n"
        "except OSError: print('refused', n)"
    )
    async with made(kind, **SMALL) as sandbox:
        words = said(await python(sandbox, source)).split()
        assert words[0] == "refused" and int(words[1]) <= 8 * 2**20
        await refused(sandbox, "open('/tmp/more', 'wb', buffering=0).write(bytes(2**20))")


async def test_empty_files_do_not_take_memory_without_end(kind: str) -> None:
    source = (
        "import os\nn = 0\n"
        "try:\n  for n in range(200_000): open(f'/tmp/{n}', 'w').close()\n  print('all')\n"
        "except OSError: print('refused')"
    )
    async with made(kind, **SMALL) as sandbox:
        finished = await python(sandbox, source)
        assert finished.limit == "disk" or finished.stdout == b"refused\n", finished


async def test_nothing_can_be_written_but_the_places_with_a_limit(kind: str) -> None:
    source = (
        "import os\nfound = set()\n"
        "for top, folders, files in os.walk('/'):\n"
        "  if top in ('/proc', '/sys') or top.count('/') > 2: folders.clear(); continue\n"
        "  try: open(top + '/probe', 'w').close(); found.add('/'.join(top.split('/')[:3]))\n"
        "  except OSError: pass\n"
        "print(sorted(found))"
    )
    async with made(kind) as sandbox:
        assert set(eval(said(await python(sandbox, source)))) <= {"/tmp", "/tmp/home", "/dev/shm", "/dev/mqueue"}


async def test_a_program_without_end_is_ended(kind: str) -> None:
    async with made(kind) as sandbox:
        source = "import signal\nfor n in (1, 2, 3, 10, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"
        assert (await python(sandbox, source, seconds_max=1.0)).limit == "time"
        await usable(sandbox)


async def test_a_flood_of_output_is_cut(kind: str) -> None:
    async with made(kind) as sandbox:
        source = "import os\nfor _ in range(200): os.write(1, b'y' * 2**20); os.write(2, b'z' * 2**20)"
        finished = await python(sandbox, source)
        assert len(finished.stdout) == len(finished.stderr) == 10_000 and finished.code == 0


# What it may become


async def test_what_a_command_started_ends_with_it(kind: str) -> None:
    source = (
        "import os, time\n"
        "for _ in range(3):\n"
        "  if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    time.sleep(1000)\n"
    )
    async with made(kind) as sandbox:
        said(await python(sandbox, source))
        count = "import os\nprint(sum(p.isdigit() for p in os.listdir('/proc')))"
        assert said(await python(sandbox, count)) == "2\n"


async def test_the_first_process_cannot_be_ended_stopped_or_looked_into(kind: str) -> None:
    source = (
        "import os, signal\n"
        "for n in (2, 9, 10, 12, 15, 19, 20):\n"
        "  try: os.kill(1, n)\n"
        "  except OSError: pass\n"
        "for path in ('/proc/1/mem', '/proc/1/fd/0', '/proc/1/environ'):\n"
        "  try: open(path, 'rb').read(1); print(path)\n"
        "  except OSError: pass\n"
        "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))"
    )
    async with made(kind) as sandbox:
        assert said(await python(sandbox, source)) == "-1\n"
        await usable(sandbox)


async def test_a_forged_answer_on_every_open_file_changes_nothing(kind: str) -> None:
    answer = json.dumps({"code": 0, "limit": None, "fault": "", "out": 0, "size": 0})
    source = (
        f"import os, glob\nanswer = {answer!r}.encode() + b'\\n'\n"
        "for n in range(3, 256):\n"
        "  try: os.write(n, answer)\n"
        "  except OSError: pass\n"
        "for path in glob.glob('/proc/*/fd/*') + glob.glob('/run/afterplay/*'):\n"
        "  try: os.write(os.open(path, os.O_WRONLY), answer)\n"
        "  except OSError: pass\n"
        "os._exit(9)"
    )
    async with made(kind) as sandbox:
        assert (await python(sandbox, source)).code == 9
        await usable(sandbox)


async def test_no_namespace_of_its_own_and_no_mount(kind: str) -> None:
    async with made(kind) as sandbox:
        for call in (
            "libc.unshare(0x10000000)",
            "libc.mount(b'x', b'/tmp', b'tmpfs', 0, 0)",
            "libc.setns(os.open('/proc/1/ns/net', 0), 0)",
        ):
            await refused(sandbox, f"{LIBC}if {call}{FAILED}")


async def test_no_rights_come_back(kind: str) -> None:
    source = "print(*(line for line in open('/proc/self/status') if line[:6] in ('CapEff', 'CapPrm', 'NoNewP')))"
    async with made(kind) as sandbox:
        words = said(await python(sandbox, source)).split()
        assert [int(word, 16) for word in words[1::2]] == [0, 0, 1]
        await refused(sandbox, "os.setresuid(0, 0, 0) if os.getuid() else os.chown('/', 1, 1)")
        await refused(sandbox, "os.setgroups([0])")


async def test_settings_of_the_kernel_cannot_be_written(kind: str) -> None:
    async with made(kind) as sandbox:
        for name in ("sys/kernel/core_pattern", "sysrq-trigger", "sys/vm/drop_caches"):
            await refused(sandbox, f"open('/proc/{name}', 'w').write('x')")


def test_calls_are_refused_by_their_numbers_of_both_machines(kind: str) -> None:
    """Programs of whole instructions, whose jumps stay inside."""
    for machine in ("x86_64", "aarch64"):
        program = seccomp_filter(machine)
        steps = [program[n : n + 8] for n in range(0, len(program), 8)]
        assert len(program) % 8 == 0 and steps[-1][0] == 0x06
        for at, step in enumerate(steps):
            if step[0] & 0x07 == 0x05:
                assert at + 1 + max(step[2], step[3]) < len(steps)
    assert seccomp_filter("vax") == b""
