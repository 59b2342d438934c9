"""``appworld``: tasks of AppWorld, solved by writing Python that calls the APIs of nine simulated apps.

AppWorld needs pydantic 1, so it runs in an environment of its own, as its server (``appworld serve environment --port
8700``). A server has one world at a time: start as many servers as episodes run at once. The policy's
code is executed there, never here. Written for the routes of appworld 0.1.3, and tested against a stand-in, because its
data was not available.
"""

from __future__ import annotations

import json
import os
import queue
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import splits_of, task_at, undone_on_error
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.errors import ConfigurationError
from pipeline.schema import Message, Task

SETS = ("train", "dev", "test_normal", "test_challenge")
WAIT_SECONDS_MAX = 30.0
"""Longest wait of a start for a free server."""
ANSWER_BYTES_MAX = 16 * 2**20
_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses without the proxy of the environment."""
_CODE = re.compile(r"```(?:python)?\s*\n(.*?)```", re.DOTALL)
_INSTRUCTIONS = """You are {first_name} {last_name}'s assistant ({email}, {phone_number}). Solve the task by writing \
Python. Each reply holds one block of code between ```python and ```; you then see what it prints. \
apis.api_docs.show_app_descriptions(), apis.api_docs.show_api_descriptions(app_name=...) and \
apis.api_docs.show_api_doc(app_name=..., api_name=...) tell what can be called. Call apis.supervisor.complete_task() \
when the task is done, with answer=... where one was asked for.

Task: {instruction}"""


@dataclass(config=STRICT_OPTIONS)
class AppWorldTasks(Environment):
    """Tasks in a simulated world of apps, solved by code (AppWorld). Reward 1.0 if all tests pass. Needs servers."""

    blocking = True

    urls: tuple[str, ...] = Field(default=("http://127.0.0.1:8700",), min_length=1)
    """Addresses of AppWorld environment servers, one for each episode that runs at once."""
    data: str | None = None
    """AppWorld's ``data`` folder, for the lists of task ids. None: ``data`` in the folder APPWORLD_ROOT."""
    replies: int = Field(default=40, ge=1, le=1000)
    """Replies before the task ends and is judged as it stands."""
    pay: str = Field(default="tests", pattern="^(task|tests)$")
    """``task``: 1.0 when all tests pass, else 0. ``tests``: the share of tests that pass."""
    output_characters: int = Field(default=4000, ge=100, le=1_000_000)
    request_seconds_max: float = Field(default=120.0, gt=0, le=3600)

    def __post_init__(self) -> None:
        folder = Path(self.data or os.path.join(os.environ.get("APPWORLD_ROOT", "."), "data")).expanduser() / "datasets"
        self._ids = {name: _ids(folder / f"{name}.txt") for name in SETS}
        if not self._ids["train"]:
            raise ConfigurationError(
                f"expected AppWorld's task ids in {folder}/train.txt, found none: in an environment of its own, "
                "pip install appworld && appworld install && appworld download data, then set options.data to its "
                "data folder"
            )
        self.splits = splits_of(self._ids)
        self._free: queue.Queue[str] = queue.Queue()
        for url in self.urls:
            self._free.put(url.rstrip("/"))

    def start(self, task: Task) -> AppWorldEpisode:
        try:
            url = self._free.get(timeout=WAIT_SECONDS_MAX)
        except queue.Empty:
            raise TimeoutError(
                f"no AppWorld server became free in {WAIT_SECONDS_MAX:g} s: each serves one episode at a time. "
                "Give more options.urls, or lower actor.concurrency"
            ) from None
        with undone_on_error(lambda: self._free.put(url)):
            return AppWorldEpisode(self, url, task_at(self._ids, task.seed))


class AppWorldEpisode(Episode):
    def __init__(self, options: AppWorldTasks, url: str, task_id: str) -> None:
        self._options, self._url, self._task_id, self._replies = options, url, task_id, 0
        world = self._post("initialize", experiment_name="afterplay")
        text = _INSTRUCTIONS.format(instruction=world["instruction"], **world["supervisor"])
        self.messages = (Message("user", text),)

    def step(self, reply: Reply) -> Step:
        self._replies += 1
        blocks = _CODE.findall(reply)
        code = "\n".join(blocks)
        output = str(self._post("execute", code=code)) if code else "Write code between ```python and ```."
        if not self._post("task_completed") and self._replies < self._options.replies:
            limit = self._options.output_characters
            shown = output if len(output) <= limit else f"{output[:limit]} ... ({len(output) - limit} more characters)"
            return Step((Message("user", shown or "(no output)"),), signals={"no_code": float(not code)})
        result = self._post("evaluate", suppress_errors=True)
        share = len(result["passes"]) / max(1, int(result["num_tests"]))
        solved = float(bool(result["success"]))
        reward = solved if self._options.pay == "task" else share
        return Step((), reward, True, {"solved": solved, "tests_passed": share})

    def close(self) -> None:
        try:
            self._post("close")
        finally:
            self._options._free.put(self._url)

    def _post(self, route: str, **data: Any) -> Any:
        """Call a route and return its decoded answer. Raises :class:`RuntimeError` with the message of the server."""
        body = json.dumps({"task_id": self._task_id, **data}).encode()
        request = urllib.request.Request(f"{self._url}/{route}", body, {"Content-Type": "application/json"})
        try:
            with _DIRECTLY.open(request, timeout=self._options.request_seconds_max) as answer:
                return json.loads(answer.read(ANSWER_BYTES_MAX))["output"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"AppWorld {route}: {error.code} {error.read(500)!r}") from error
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(
                f"AppWorld {route} at {self._url}: {error}. Is it running? appworld serve environment --port ..."
            ) from error


def _ids(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []
