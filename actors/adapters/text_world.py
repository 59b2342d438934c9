"""``textworld_express``: eight text games of TextWorldExpress, with its train, dev and test seeds.

Here ``jvms`` Java processes serve all episodes of an actor (:mod:`actors.adapters.jvm_pool`).
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import package, undone_on_error, with_actions
from actors.adapters.jvm_pool import Pool, Process
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

Game = Literal["coin", "twc", "cookingworld", "mapreader", "arithmetic", "sorting", "simonsays", "peckingorder"]


ALONE = frozenset({"sorting"})
"""Its Java code keeps objects by seed: two episodes of one seed in a process disturb each other (the tests show it for
this game and for no other)."""
COMPACT = frozenset({"coin"})
"""Games that ``compact`` can tell."""
_SHORT = {way: f"move {way}" for way in ("north", "south", "east", "west")} | {"take": "take coin"}


@dataclass(config=STRICT_OPTIONS)
class TextWorldExpress(Environment):
    """A text game of TextWorldExpress (find the coin, cook, sort, ...); the score from 0 to 1 is the reward."""

    splits = MappingProxyType({"train": range(1000), "dev": range(10_000, 11_000), "test": range(20_000, 21_000)})
    """The seeds that the package gives as its own. Any other seed is taken as ``train`` with ``seed % 1000``."""
    blocking = True

    game: Game = "coin"
    """The game: find the coin, put things where they belong (``twc``), cook, read a map, calculate, sort, do what Simon
    says, follow a book of instructions."""
    params: str = Field(default="", max_length=1000)
    """The game's own parameters, for example ``numLocations=5,includeDoors=0``; empty: its defaults."""
    steps: int = Field(default=50, ge=1, le=10_000)
    """Actions before the game ends unsolved."""
    show_actions: bool = True
    """Say which actions are possible, up to 30, with each observation."""
    compact: bool = False
    """Few words a message, one word an action (``north``, ``take``) and no instructions, for tiny models with a
    tokenizer of words. ``coin`` without doors only."""
    impossible_pays: float = Field(default=0.0, ge=-1, le=0)
    """Reward of a reply that is not a possible action. Below 0 it teaches the actions to an untrained policy."""
    jvms: int = Field(default=1, ge=1, le=64)
    """Java processes. ``sorting`` needs one for each episode that runs at once, the other games share them."""
    heap_mib: int = Field(default=256, ge=64, le=65_536)
    """The most that the objects of one process take; 1,200 games one after the other are at home in 128. Not used where
    JAVA_TOOL_OPTIONS is set."""

    def __post_init__(self) -> None:
        if self.compact and (self.game not in COMPACT or "includeDoors=0" not in self.params.replace(" ", "")):
            raise ValueError(
                f"compact: expected game coin with params includeDoors=0, got {self.game} with {self.params!r}"
            )
        library = package("textworld_express")
        self._pool = Pool(library.TextWorldExpressEnv, self.jvms, alone=self.game in ALONE, heap_mib=self.heap_mib)

    def start(self, task: Task) -> TextWorldEpisode:
        process, game = self._pool.take()
        with undone_on_error(lambda: self._pool.give_back(process, game)):
            return TextWorldEpisode(self, self._pool, process, game, task.seed)

    def expert(self, task: Task) -> list[str]:
        """Actions that solve ``task``, by the package."""
        seed, fold = fold_of(task.seed)
        process, game = self._pool.take()
        try:
            with process.call():
                game.reset(seed=seed, gameFold=fold, gameName=self.game, gameParams=self.params, generateGoldPath=True)
                gold = game.server.getGoldActionSequence()
                actions = [str(gold.get(i)) for i in range(gold.size())]
                process.let_go(gold)
                return actions
        finally:
            self._pool.give_back(process, game)

    def close(self) -> None:
        """End the Java processes. They also end when this process does."""
        self._pool.close()


class TextWorldEpisode(Episode):
    def __init__(self, options: TextWorldExpress, pool: Pool, process: Process, game: Any, seed: int) -> None:
        self._options, self._game, self._left = options, game, options.steps
        self._pool, self._process = pool, process
        seed, fold = fold_of(seed)
        with process.call():
            _, state = game.reset(seed=seed, gameFold=fold, gameName=options.game, gameParams=options.params)
        intro = f"{state['taskDescription']}\nEach turn, reply with one action and nothing else."
        text = self._text(state)
        self.messages = (Message("user", text if options.compact else f"{intro}\n\n{text}"),)
        self._score = float(state["score"])

    def step(self, reply: Reply) -> Step:
        lines = [line.strip() for line in reply.strip().splitlines() if line.strip()]
        command = lines[-1][:200].rstrip(".") if lines else "look around"
        if self._options.compact:
            command = _SHORT.get(command.lower(), command)
        possible = bool(lines) and command.lower() in self._actions
        self._left -= 1
        with self._process.call():
            _, _, _, state = self._game.step(self._actions.get(command.lower(), command))
        score = max(0.0, min(1.0, float(state["score"])))
        gained, self._score = score - self._score, score
        solved = bool(state["tasksuccess"]) or score >= 1.0
        done = solved or bool(state["taskfailure"]) or self._left <= 0
        return Step(
            messages=() if done else (Message("user", self._text(state)),),
            reward=gained if possible else gained + self._options.impossible_pays,
            done=done,
            signals={"impossible_action": float(not possible), **({"solved": float(solved)} if done else {})},
        )

    def close(self) -> None:
        self._pool.give_back(self._process, self._game)

    def _text(self, state: dict[str, Any]) -> str:
        self._actions = {str(action).lower(): str(action) for action in state["validActions"]}
        if self._options.compact:
            return describe(str(state["look"]))
        actions = state["validActions"] if self._options.show_actions else ()
        return with_actions(str(state["observation"]).strip(), actions, 30)


def describe(look: str) -> str:
    """The answer of ``look around`` in ``coin``, in few words: ``kitchen . north pantry . west living room . coin``.
    Everything else in the room never matters in this game and is left out."""
    room = re.search(r"You are in the ([\w ]+)\.", look)
    exits = re.findall(r"To the (North|South|East|West) you see the ([\w ]+)\.", look)
    if room is None:
        raise ValueError(f"compact: expected 'You are in the ROOM.', got {look[:200]!r}")
    coin = ["coin"] if re.search(r"\ba coin\b", look) else []
    return " . ".join([room[1], *(f"{way.lower()} {where}" for way, where in exits), *coin])


def fold_of(seed: int) -> tuple[int, str]:
    """The package's seed and fold for the seed of a task."""
    for fold, seeds in TextWorldExpress.splits.items():
        if seed in seeds:
            return seed, fold
    return seed % len(TextWorldExpress.splits["train"]), "train"
