"""``alfworld``: household tasks of ALFWorld as text, from the game files that ``alfworld-download`` fetches.

Written for alfworld 0.4.2 and textworld 1.6, and tested against stand-ins for both, because their data was not
available.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import package, splits_of, task_at, with_actions
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.errors import ConfigurationError
from pipeline.schema import Message, Task

FOLDERS = ("train", "valid_seen", "valid_unseen")
_ONE_AT_A_TIME = threading.Lock()
"""TextWorld's parsers are not documented as safe in threads."""


@dataclass(config=STRICT_OPTIONS)
class AlfWorld(Environment):
    """Household tasks in text (ALFWorld). A finished task has reward 1.0. Needs the game files."""

    blocking = True

    data: str | None = None
    """Folder with ``json_2.1.1``. None: the environment variable ALFWORLD_DATA, or ``~/.cache/alfworld``."""
    steps: int = Field(default=50, ge=1, le=10_000)
    """Actions before the game ends unsolved."""
    show_actions: bool = True
    """Say which actions are possible, up to 50, with each observation."""

    def __post_init__(self) -> None:
        package("alfworld", "alfworld.agents.environment.alfred_tw_env")
        folder = Path(self.data or os.environ.get("ALFWORLD_DATA", "~/.cache/alfworld")).expanduser() / "json_2.1.1"
        self._games = {name: _games(folder / name) for name in FOLDERS}
        if not self._games["train"]:
            raise ConfigurationError(
                f"expected ALFWorld's games in {folder}/train (traj_data.json and game.tw-pddl), found none: run "
                "alfworld-download, or set options.data"
            )
        self.splits = splits_of(self._games)

    def start(self, task: Task) -> AlfWorldEpisode:
        with _ONE_AT_A_TIME:
            return AlfWorldEpisode(self, task_at(self._games, task.seed))


class AlfWorldEpisode(Episode):
    def __init__(self, options: AlfWorld, game: Path) -> None:
        library = package("alfworld", "alfworld.agents.environment.alfred_tw_env").agents.environment.alfred_tw_env
        textworld = library.textworld
        self._options, self._left = options, options.steps
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        self._game = textworld.start(str(game), infos, wrappers=[library.AlfredDemangler, library.AlfredInfos])
        state = self._game.reset()
        self.messages = (
            Message("user", f"Each turn, reply with one action and nothing else.\n\n{self._text(state)}"),
        )  # fmt: skip

    def step(self, reply: Reply) -> Step:
        lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
        with _ONE_AT_A_TIME:
            state, _, over = self._game.step(lines[-1][:200].lower() if lines else "look")
        self._left -= 1
        won = bool(state["won"])
        done = won or bool(over) or self._left <= 0
        signals = {"solved": float(won)} if done else {}
        return Step(() if done else (Message("user", self._text(state)),), float(won), done, signals)

    def close(self) -> None:
        self._game.close()

    def _text(self, state: Any) -> str:
        actions = state["admissible_commands"] if self._options.show_actions else ()
        return with_actions(str(state["feedback"]).strip(), actions, 50)


def _games(folder: Path) -> list[Path]:
    """The solvable games of a folder, sorted. Games with movable receptacles or sliced objects have no text form."""
    found = []
    for file in sorted(folder.glob("**/game.tw-pddl")):
        if "movable" in str(file.parent) or "Sliced" in str(file.parent):
            continue
        if (file.parent / "traj_data.json").is_file() and json.loads(file.read_text()).get("solvable"):
            found.append(file)
    return found
