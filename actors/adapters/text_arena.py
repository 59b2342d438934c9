"""``textarena``: the single-player games of TextArena, many turns of plain text.

The games draw from Python's global ``random`` and seed it. Every episode has its own random state, which
replaces the global one while a method of the game runs, so episodes do not affect each other.
"""

from __future__ import annotations

import random
import re
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import held_out, own_random, package, takes_long
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

GAMES = (
    "2048-v0", "2048-v0-3x3", "2048-v0-easy", "2048-v0-ultra-easy", "Bandit-v0", "Blackjack-v0", "Countdown-v0",
    "Crosswords-v0", "Cryptarithm-v0", "FifteenPuzzle-v0", "FrozenLake-v0", "FrozenLake-v0-hardcore",
    "FrozenLake-v0-random", "GuessTheNumber-v0", "GuessTheNumber-v0-hardcore", "LightsOut-v0", "LogicPuzzle-v0",
    "LogicPuzzle-v0-hard", "Mastermind-v0", "Mastermind-v0-hard", "Minesweeper-v0", "Minesweeper-v0-small",
    "PegJump-v0", "RushHour-v0", "Secretary-v0", "Set-v0", "Slitherlink-v0", "Sokoban-v0", "Sudoku-v0",
    "Sudoku-v0-very-easy", "ThreeCardMonte-v0", "TowerOfHanoi-v0", "TowerOfHanoi-v0-hard",
)  # fmt: skip
"""Tested with TextArena 0.7.4. Other single-player ids may need a download (Hangman, Wordle and the other
word games) or a newer Python (LinesOfAction, Surround ...); building one says which."""

_LONG = re.compile(r"(\d{18})\d+")
"""A number longer than any that a game takes. Python reads none of more than 4,300 digits, and games do not expect it.
"""
INVALID_MOVE_PAYS = -1.0
"""TextArena's default."""


@dataclass(config=STRICT_OPTIONS)
class TextArena(Environment):
    """A single-player game of TextArena: 2048, Sudoku, FrozenLake, Mastermind, TowerOfHanoi and others."""

    splits = held_out(2**31)

    game: str = "GuessTheNumber-v0"
    """An id of TextArena without ``-train`` or ``-raw``. Tested: see docs/ENVIRONMENTS.md."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the game, which override those of its id, for example ``{max_turns: 20}``."""
    loss_pays: float | None = Field(default=None, ge=-100, le=100)
    """Replacement for a negative reward (often an invalid move, -1). None: the reward as it is."""

    def __post_init__(self) -> None:
        library = package("textarena")
        self._make = library.make
        try:
            with own_random(random.Random(0)):
                self._new(0)
            self.blocking = takes_long(lambda: self.start(Task("textarena/1", "textarena", 1)))
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"game {self.game!r} cannot be played: {type(error).__name__}: {reason}") from error

    def start(self, task: Task) -> TextArenaEpisode:
        return TextArenaEpisode(self, task.seed)

    def _new(self, seed: int) -> Any:
        game = self._make(f"{self.game}-raw", **self.options)
        game.reset(num_players=1, seed=seed)
        return game


class TextArenaEpisode(Episode):
    def __init__(self, options: TextArena, seed: int) -> None:
        self._options = options
        self._random = random.Random(seed)
        with own_random(self._random):
            self._game = options._new(seed)
            self.messages = (Message("user", self._seen() or "Begin."),)

    def step(self, reply: Reply) -> Step:
        with own_random(self._random):
            done, _ = self._game.step(action=_LONG.sub(r"\1", reply))
            if not done:
                return Step((Message("user", self._seen() or "Your move."),))
            rewards, information = self._game.close()
        reward = (rewards or {}).get(0, 0.0)
        if isinstance(reward, str):  # some games give reward and reason of an invalid move in the wrong order
            number = re.search(r"-?\d+(?:\.\d+)?(?:e-?\d+)?$", str(information[0]["reason"]))
            reward = number[0] if number else INVALID_MOVE_PAYS
        reward = float(reward)
        if reward < 0 and self._options.loss_pays is not None:
            reward = self._options.loss_pays
        invalid = bool(information.get(0, {}).get("invalid_move", False))
        return Step(reward=reward, done=True, signals={"invalid_move": float(invalid), "solved": float(reward >= 1.0)})

    def _seen(self) -> str:
        """Text of the game since the last call, without the player's own moves."""
        player, observed = self._game.get_observation()
        return "\n".join(str(text).strip() for sender, text, *_ in observed if sender != player)
