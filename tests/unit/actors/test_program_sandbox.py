"""Programs in sandboxes: they reach their session alone, and what they do there gives no reward that is not theirs."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from actors.adapters import repair_tasks
from actors.adapters.repair_tasks import FUNCTIONS
from actors.environments.host import EnvironmentHost
from actors.gateway.program_command import program_paths
from actors.gateway.program_loop import ProgramLoop
from actors.rollout.rollout import Rollout
from actors.rollout.services import Services
from pipeline.config.rollouts import LoopConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import Order, Trajectory, TrajectoryStatus
from tests.support.sandbox_kinds import SERVICE, WALLS, options_of
from tests.support.stub_engine import StubEngine

ROOT = Path(__file__).parents[3]
SECONDS = 120.0
"""For one program on a loaded machine."""
pytestmark = pytest.mark.timeout(300)
CALL = """
import json, os, sys, urllib.request, urllib.error
def post(url, body):
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=100) as response: return response.status
    except urllib.error.HTTPError as error: return error.code
def chat(): return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                        {"messages": [{"role": "user", "content": "say"}]})
"""


@pytest.fixture
def play(make_services: Callable[..., Services], make_order: Callable[..., Order], words: Any, tmp_path: Path) -> Any:
    """Plays one order by a program; its trajectory."""
    tmp_path.chmod(0o755)
    made: list[Services] = []

    async def run(source: str, kind: str = "bubblewrap", environment: str = "program", **more: Any) -> Trajectory:
        (tmp_path / "agent.py").write_text(CALL + source)
        sandbox = {**options_of(kind), **more.pop("sandbox", {})}
        seconds = more.pop("max_seconds", SECONDS)
        options = {"command": ["python", str(tmp_path / "agent.py")], "sandbox": sandbox, **more}
        engine = StubEngine(lambda ids, sampling: [10, words.eos_token_id])
        loop = LoopConfig(name="program", options=options)
        services = make_services([engine], environment, max_seconds=seconds, loop=loop)
        made.append(services)
        async with anyio.create_task_group() as group:
            group.start_soon(services.pool.watch)
            group.start_soon(services.serve)
            trajectory = await Rollout(make_order(seconds_max=seconds), services).run()
            group.cancel_scope.cancel()
        await services.close()
        return trajectory

    yield run
    for services in made:
        loop = services.loops["game"]
        assert isinstance(loop, ProgramLoop) and loop._program is not None and loop._program._sandboxes.live == 0


@pytest.mark.parametrize("kind", WALLS)
async def test_a_program_reaches_its_session_and_no_other(kind: str, play: Any) -> None:
    source = (
        "status = chat()\n"
        "base = os.environ['AFTERPLAY_SESSION_URL'].rpartition('/')[0]\n"
        "others = [post(base + '/' + 'A' * 32 + path, {}) for path in ('/v1/chat/completions', '/finish')]\n"
        "print(json.dumps({'reward': 0.5, 'signals': {'ok': status == 200, 'refused': others == [404, 404]}}))\n"
    )
    trajectory = await play(source, kind)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 0.5}
    assert {"ok": 1.0, "refused": 1.0}.items() <= trajectory.turns[-1].signals.items()


async def test_a_program_has_the_named_variables_and_no_others(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_KEY", "secret")
    source = "chat()\nprint(json.dumps({'error': ' '.join(sorted(os.environ))}))\n"
    trajectory = await play(source)
    own = {"PATH", "HOME", "LANG", "USER", "TMPDIR", "PWD", "LC_CTYPE", "NO_PROXY", "no_proxy"}
    named = {f"{client}_{name}" for client in ("OPENAI", "ANTHROPIC") for name in ("BASE_URL", "API_KEY")}
    named |= {f"AFTERPLAY_{name}" for name in ("MODEL", "SESSION", "SESSION_URL", "TASK")}
    assert set(trajectory.failure.message.split()) - own == named


async def test_a_reward_that_a_program_prints_does_not_count_where_others_judge(play: Any) -> None:
    """Nor one that something it started prints after it, or sends to its session."""
    source = (
        "chat()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    while True: print(json.dumps({'reward': 1000}), flush=True)\n"
        "post(os.environ['AFTERPLAY_SESSION_URL'] + '/finish', {'reward': 1000})\n"
    )
    trajectory = await play(source, reward="scorer")
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 0.0}


async def test_files_beside_the_program_that_begin_with_a_dot_are_not_there(play: Any, tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("KEY=1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / "data.txt").write_text("data")
    source = (
        "os.chdir(os.path.dirname(os.path.abspath(__file__)))\nchat()\n"
        "try: open('.env').read()\n"
        "except OSError: print(json.dumps({'error': repr((os.listdir('.git'), open('data.txt').read()))}))\n"
    )
    assert (await play(source)).failure.message == "([], 'data')"


async def test_a_file_elsewhere_is_named_as_readable_or_is_not_there(
    play: Any, tmp_path: Path, tmp_path_factory: Any
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    elsewhere.chmod(0o755)
    (elsewhere / "data").write_text("1")
    source = f"chat()\nprint(json.dumps({{'reward': float(open({str(elsewhere / 'data')!r}).read())}}))\n"
    failure = (await play(source)).failure
    assert failure.boundary == "program" and "No such file" in failure.message
    assert "sandbox" in failure.details and "readable" in failure.details and str(tmp_path) in failure.details
    trajectory = await play(source, sandbox={"readable": [str(elsewhere)]})
    assert trajectory.rewards == {"environment": 1.0}, trajectory.failure


async def test_a_program_beyond_a_limit_is_a_failure_that_names_the_option(play: Any) -> None:
    source = (
        "chat()\nfor _ in range(6):\n  if os.fork() == 0: break\nx = bytearray(2**26)\nimport time; time.sleep(1000)\n"
    )
    failure = (await play(source, sandbox={"memory_mib": 128})).failure
    assert (failure.boundary, failure.kind) == ("program", "SandboxLimit") and "sandbox.memory_mib" in failure.message


@pytest.mark.slow
async def test_a_program_that_hangs_is_ended_with_what_it_said(play: Any) -> None:
    source = "chat()\nprint('stuck here', file=sys.stderr, flush=True)\nimport time; time.sleep(1000)\n"
    failure = (await play(source, max_seconds=10.0)).failure
    assert (failure.boundary, failure.kind) == ("program", "TimeoutError") and "stuck here" in failure.details


async def test_a_sandbox_that_does_not_start_gives_no_reward(play: Any) -> None:
    """An ERROR is ordered again."""
    trajectory = await play("", SERVICE, sandbox={"options": {"failing": [1]}}, reward_at_limit=0.0)
    assert trajectory.status is TrajectoryStatus.ERROR and trajectory.rewards == {} and not trajectory.turns
    assert (trajectory.failure.boundary, trajectory.failure.kind) == ("sandbox", "ConnectionError")


async def test_options_that_cannot_work_are_told_with_their_key(play: Any, tmp_path: Path) -> None:
    where = r"environments\.game\.loop\.options"
    for options, told in (
        ({"sandbox": {"readable": ["/no/such"]}}, rf"{where}\.sandbox\.readable: there is no /no/such"),
        ({"folder": str(Path.home())}, rf"{where}\.folder: expected a folder of the program's own"),
    ):
        with pytest.raises(ConfigurationError, match=told):
            await play("", **options)
    if os.geteuid() == 0:
        tmp_path.chmod(0o700)
        with pytest.raises(ConfigurationError, match=rf"{where}\.command: .*chmod -R o\+rX {tmp_path}"):
            await play("")


def test_a_command_brings_the_folders_of_its_files(tmp_path: Path) -> None:
    for name in ("agents/main.py", "data/rows.jsonl", "venv/bin/python", "venv/pyvenv.cfg", "top.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("home = /opt/python3.11/bin\n")
    (tmp_path / "venv/bin/python").chmod(0o755)

    def paths(*command: str, own: bool = False) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in program_paths(command, tmp_path, own)]

    assert paths(sys.executable, "agents/main.py", "--rows", "data/rows.jsonl", "-x", "", "x" * 5000) == [
        "agents",
        "data",
    ]
    assert paths("venv/bin/python", "top.py") == ["venv", os.path.relpath("/opt/python3.11", tmp_path), "."]
    assert paths("/bin/sh", "-c", "echo agents/main.py") == [] and paths("/bin/sh", own=True) == ["."]
    assert program_paths([sys.executable, "x"], Path("/"), False) == ()


SOLUTIONS = {f.__name__: ast.unparse(ast.parse(inspect.getsource(f))) for f in FUNCTIONS}
REPAIR = (
    "import re\n"
    "chat()\n"
    "name = re.search('function `([a-z_]+)`', open('TASK.md').read()).group(1)\n"
    "assert 'def ' + name in open('solution.py').read()\n"
)
SOLVE = (
    "folder = os.path.dirname(sys.argv[0])\n"
    "open('solution.py', 'w').write(json.load(open(folder + '/solutions.json'))[name])\n"
)


@pytest.fixture
def repair(play: Any, tmp_path: Path) -> Any:
    """Plays ``repair`` by a program that can read how the functions should be."""
    (tmp_path / "solutions.json").write_text(json.dumps(SOLUTIONS))
    return functools.partial(play, environment="repair", reward="environment")


@pytest.mark.parametrize("kind", [*WALLS, "none"])
async def test_the_environment_judges_the_files_that_a_program_leaves(kind: str, repair: Any) -> None:
    solved = await repair(REPAIR + SOLVE, kind)
    assert solved.status is TrajectoryStatus.COMPLETE, solved.failure
    assert solved.rewards == {"environment": 1.0} and solved.turns[-1].signals["right_calls"] == 1.0
    untouched = await repair(REPAIR, kind)
    assert untouched.rewards == {"environment": 0.0} and untouched.turns[-1].signals["changed"] == 0.0


STEAL = """
import glob
actors, path = ROOT + "/actors", ROOT + "/actors/adapters/repair_tasks.py"
def holds(pattern):
    for path in glob.glob(pattern, recursive=True):
        try: found = os.path.isfile(path) and b"second_largest" in open(path, "rb").read()
        except OSError: continue
        if found: return True
    return False
def imported():
    sys.path.insert(0, ROOT)
    import actors.adapters
    try: from actors.adapters.repair_tasks import second_largest
    except ImportError: return False
    return second_largest([3, 1, 2]) == 2
chat()
print(json.dumps({"signals": {
    "opened": holds(path),
    "compiled": holds(actors + "/adapters/__pycache__/repair_tasks.*"),
    "found": holds(actors + "/**"),
    "by_process": holds("/proc/*/root" + path) or holds("/proc/*/cwd/../.." + path) or holds("/proc/*/fd/*"),
    "by_another_way": holds(actors + "/gateway/../adapters/./repair_tasks.py"),
    "imported": imported(),
}}))
"""


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("kind", WALLS)
async def test_an_agent_cannot_read_the_right_functions_where_afterplay_is_installed(
    kind: str, hidden: bool, repair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: an agent reads right functions that are not hidden by each of these ways."""
    py_compile.compile(repair_tasks.__file__)
    if not hidden:
        monkeypatch.setattr(EnvironmentHost, "hidden", property(lambda _: (), lambda *_: None), raising=False)
    trajectory = await repair(f"ROOT = {str(ROOT)!r}\n{STEAL}", kind, sandbox={"readable": [str(ROOT / "actors")]})
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    signals = trajectory.turns[-1].signals
    ways = ("opened", "compiled", "found", "by_process", "by_another_way", "imported")
    assert {way: signals[way] for way in ways} == dict.fromkeys(ways, float(not hidden))


@pytest.mark.parametrize(
    "last",
    [
        "os.remove('solution.py')\n",
        "open('solution.py', 'w').write('#' * 2**21)\n",
        "os.remove('solution.py'); os.symlink('/etc/hosts', 'solution.py')\n",
    ],
)
async def test_files_that_are_gone_too_long_or_links_are_not_judged(last: str, repair: Any) -> None:
    trajectory = await repair(REPAIR + last)
    assert trajectory.status is TrajectoryStatus.COMPLETE, trajectory.failure
    assert trajectory.rewards == {"environment": 0.0}


async def test_files_are_judged_where_a_limit_ended_the_program(repair: Any) -> None:
    again = "for n in range(99):\n    if post(os.environ['OPENAI_BASE_URL'] + '/chat/completions', "
    again += "{'messages': [{'role': 'user', 'content': 'say ' + str(n)}]}) != 200: break\n"
    trajectory = await repair(REPAIR + SOLVE + again)
    assert trajectory.status is TrajectoryStatus.TRUNCATED, trajectory.failure
    assert trajectory.rewards == {"environment": 1.0}


@pytest.mark.parametrize("ends", ["time.sleep(1000)", "print(json.dumps({'reward': 1.0}))"])
async def test_a_program_with_too_many_files_is_a_failure_of_the_program(ends: str, repair: Any) -> None:
    many = f"import time\nfor n in range(9_999): open(f'/tmp/{{n}}', 'w').close()\n{ends}\n"
    failure = (await repair(REPAIR + SOLVE + many, sandbox={"disk_mib": 1})).failure
    assert (failure.boundary, failure.kind) == ("program", "SandboxLimit") and "sandbox.disk_mib" in failure.message
