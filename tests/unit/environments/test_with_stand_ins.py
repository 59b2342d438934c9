"""ALFWorld and AppWorld cannot be had here (their data is a download). Stand-ins keep the parts of their interfaces
that the adapters use, read from alfworld 0.4.2 and appworld 0.1.3: this shows the adapters' side of it and no more."""

import json
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from actors.adapters import catalogue
from actors.environments import Reply
from actors.environments.plugins import build
from pipeline.config.rollouts import EnvironmentConfig
from pipeline.errors import ConfigurationError


class FakeGame:
    """What ``textworld.start`` gives: won by "put pan"."""

    closed = 0

    def __init__(self, path):
        self.path = path

    def _state(self, text, won=False):
        return {"feedback": text, "won": won, "admissible_commands": ["look", "put pan"]}

    def reset(self):
        return self._state(f"You are in a kitchen. Your task is to: put the pan away. {self.path}")

    def step(self, command):
        won = command == "put pan"
        return self._state("Nothing happens." if not won else "Done.", won), float(won), won

    def close(self):
        FakeGame.closed += 1


@pytest.fixture
def alfworld(monkeypatch, tmp_path):
    module = types.ModuleType("alfworld.agents.environment.alfred_tw_env")
    module.AlfredDemangler = module.AlfredInfos = object
    module.textworld = types.SimpleNamespace(
        EnvInfos=lambda **wanted: wanted, start=lambda path, infos, wrappers: FakeGame(path)
    )
    chain = [types.ModuleType(name) for name in ("alfworld", "alfworld.agents", "alfworld.agents.environment")]
    chain[0].agents, chain[1].environment, chain[2].alfred_tw_env = chain[1], chain[2], module
    for part in [*chain, module]:
        monkeypatch.setitem(sys.modules, part.__name__, part)
    adapter = catalogue.ADAPTERS["alfworld"]
    monkeypatch.setitem(catalogue.ADAPTERS, "alfworld", catalogue.Adapter(None, adapter.install))
    monkeypatch.setattr("actors.adapters.alfworld.package", lambda name, *modules: chain[0], raising=True)
    for split, games in (("train", 3), ("valid_seen", 1), ("valid_unseen", 2)):
        for i in range(games):
            folder = tmp_path / "json_2.1.1" / split / f"task-{i}"
            folder.mkdir(parents=True)
            (folder / "traj_data.json").write_text("{}")
            (folder / "game.tw-pddl").write_text(json.dumps({"solvable": True}))
    unsolvable = tmp_path / "json_2.1.1" / "train" / "task-9"
    unsolvable.mkdir()
    (unsolvable / "traj_data.json").write_text("{}")
    (unsolvable / "game.tw-pddl").write_text(json.dumps({"solvable": False}))
    return tmp_path


def section(name, **options):
    return build("game", EnvironmentConfig(name=name, options=options))


def test_alfworld_plays_the_solvable_games_of_each_split(kit, alfworld):
    environment = section("alfworld", data=str(alfworld))
    assert {name: len(seeds) for name, seeds in environment.splits.items()} == {
        "train": 3, "valid_seen": 1, "valid_unseen": 2
    }  # fmt: skip
    first = environment.start(kit.task(environment.splits["valid_unseen"][1]))
    assert "valid_unseen/task-1" in first.messages[0].content
    assert "Possible actions: look, put pan" in first.messages[0].content
    before = FakeGame.closed
    total, last = kit.play(environment, 0, ["look", "I will\nPUT PAN"])
    assert (total, last.signals, FakeGame.closed - before) == (1.0, {"solved": 1.0}, 1)
    assert environment.start(kit.task(7)).messages == environment.start(kit.task(1)).messages


def test_alfworld_ends_after_its_steps(kit, alfworld):
    total, last = kit.play(section("alfworld", data=str(alfworld), steps=2), 0, ["look", "", "put pan"])
    assert (total, last.done, last.signals) == (0.0, True, {"solved": 0.0})


def test_alfworld_without_its_data_says_how_to_get_it(alfworld, tmp_path):
    with pytest.raises(ConfigurationError, match="alfworld-download"):
        section("alfworld", data=str(tmp_path / "nowhere"))


@pytest.mark.skipif(catalogue.ADAPTERS["alfworld"].missing is None, reason="alfworld is installed")
def test_alfworld_without_its_package_says_what_to_install():
    with pytest.raises(ConfigurationError, match="pip install"):
        section("alfworld")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        route = self.path.strip("/")
        self.server.asked.append((route, told))
        answers = {
            "initialize": {
                "instruction": "Like all songs.",
                "supervisor": {"first_name": "Ada", "last_name": "B", "email": "a@b.c", "phone_number": "1"},
            },
            "execute": "ran " + told.get("code", ""),
            "task_completed": "complete_task" in self.server.code,
            "evaluate": {"success": False, "num_tests": 4, "passes": [1, 2, 3], "failures": [4]},
            "close": None,
        }
        self.server.code += told.get("code", "")
        answers["task_completed"] = "complete_task" in self.server.code
        body = json.dumps({"output": answers.get(route)}).encode()
        self.send_response(500 if self.server.broken else 200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.code, server.broken = [], "", False
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def world(server, tmp_path, **options):
    (tmp_path / "datasets").mkdir(exist_ok=True)
    (tmp_path / "datasets" / "train.txt").write_text("t_1\nt_2\n")
    (tmp_path / "datasets" / "dev.txt").write_text("d_1\n")
    return section("appworld", urls=[f"http://127.0.0.1:{server.server_port}"], data=str(tmp_path), **options)


@pytest.mark.parametrize(("pay", "reward"), [("tests", 0.75), ("task", 0.0)])
def test_appworld_sends_code_to_its_server_and_pays_for_tests(kit, server, tmp_path, pay, reward):
    environment = world(server, tmp_path, pay=pay)
    code = "```python\napis.supervisor.complete_task()\n```"
    total, last = kit.play(environment, 1, ["Let me think.", "```python\nprint(1)\n```", f"So:\n{code}"])
    assert (total, last.signals) == (reward, {"solved": 0.0, "tests_passed": 0.75})
    assert server.asked[0] == ("initialize", {"task_id": "t_2", "experiment_name": "afterplay"})
    assert server.asked[-1] == ("close", {"task_id": "t_2"})
    assert ("execute", {"task_id": "t_2", "code": "print(1)\n"}) in server.asked


def test_appworld_is_reached_without_the_proxy_of_the_environment(kit, server, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    world(server, tmp_path).start(kit.task(0)).close()
    assert server.asked


def test_appworld_episodes_wait_for_a_server_of_their_own(kit, server, tmp_path, monkeypatch):
    monkeypatch.setattr("actors.adapters.appworld.WAIT_SECONDS_MAX", 0.05)
    environment = world(server, tmp_path)
    first = environment.start(kit.task(0))
    assert "Ada B" in first.messages[0].content and "Like all songs." in first.messages[0].content
    with pytest.raises(TimeoutError, match=r"options\.urls"):
        environment.start(kit.task(1))
    first.close()
    environment.start(kit.task(100_000)).close()
    assert server.asked[-1] == ("close", {"task_id": "d_1"})


def test_appworld_failure_is_raised_and_the_server_comes_back(kit, server, tmp_path):
    environment = world(server, tmp_path)
    episode = environment.start(kit.task(0))
    server.broken = True
    with pytest.raises(RuntimeError, match="500"):
        episode.step(Reply("```python\nx\n```"))
    with pytest.raises(RuntimeError, match="500"):
        episode.close()
    server.broken = False
    environment.start(kit.task(0)).close()


def test_appworld_without_its_data_says_how_to_get_it(tmp_path):
    with pytest.raises(ConfigurationError, match="appworld download data"):
        section("appworld", data=str(tmp_path))
