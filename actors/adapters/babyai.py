"""``babyai``: levels of minigrid's BabyAI as text. The 7 x 7 view and the actions are words.

The view is what the package gives the agent (no look behind walls). A level's own limit on steps ends the game.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.adapters.catalogue import held_out, package, takes_long, undone_on_error
from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

ACTIONS = ("left", "right", "forward", "pickup", "drop", "toggle", "done")
"""Words of the package's actions 0 to 6."""
_UNSEEN, _EMPTY, _WALL, _FLOOR, _DOOR = 0, 1, 2, 3, 4
_DOOR_STATES = ("open", "closed", "locked")


@dataclass(config=STRICT_OPTIONS)
class BabyAI(Environment):
    """Reach the goal of a BabyAI level (minigrid) with words like ``left`` and ``forward``. The goal has reward 1.0."""

    splits = held_out(10**9)

    level: str = "BabyAI-GoToRedBallNoDists-v0"
    """A registered id of minigrid, BabyAI's or another."""
    steps: int | None = Field(default=None, ge=1, le=100_000)
    """Actions before the game ends unsolved. None: the level's own limit."""
    quick_pays_more: bool = False
    """Pay what the package pays, ``1 - 0.9 * steps / limit``, and not 1.0."""
    unknown_pays: float = Field(default=0.0, ge=-1, le=0)
    """Reward of a reply that is not an action. Below 0 it teaches the words to an untrained policy."""
    compact: bool = False
    """Few words a message and no instructions, for tiny models with a tokenizer of words."""

    def __post_init__(self) -> None:
        minigrid = package("babyai", "minigrid.envs.babyai.core.roomgrid_level")
        minigrid.envs.babyai.core.roomgrid_level.print = lambda *_: None  # it prints every start that it draws again
        gymnasium = package("gymnasium")
        self._make = gymnasium.make
        try:
            gymnasium.spec(self.level)
        except gymnasium.error.Error as error:
            raise ValueError(f"level: minigrid has no {self.level!r}: {error}") from error
        self.start(Task("babyai/0", "babyai", 0)).close()
        self.blocking = takes_long(lambda: self.start(Task("babyai/1", "babyai", 1)).close())

    def start(self, task: Task) -> BabyAIEpisode:
        limit = {"max_steps": self.steps} if self.steps is not None else {}
        game = self._make(self.level, disable_env_checker=True, **limit)
        with undone_on_error(game.close):
            return BabyAIEpisode(self, game, task.seed % 2**31)

    def expert(self, task: Task) -> list[str]:
        """Replies that solve ``task``, by the package's own planner. Empty where it gives up."""
        bot_class = package("babyai", "minigrid.utils.baby_ai_bot").utils.baby_ai_bot.BabyAIBot
        episode = self.start(task)
        try:
            bot, replies = bot_class(episode.game), list[str]()
            done = False
            while not done:
                replies.append(ACTIONS[int(bot.replan())])
                step = episode.step(Reply(replies[-1]))
                done = step.done
            return replies if step.reward > 0 else []
        except Exception:  # the planner raises assertions of its own in states that it does not understand
            return []
        finally:
            episode.close()


class BabyAIEpisode(Episode):
    def __init__(self, options: BabyAI, game: Any, seed: int) -> None:
        self._options = options
        self._game = game
        self.game = game.unwrapped
        observation, _ = game.reset(seed=seed)
        self.mission = str(observation["mission"])
        view = describe(observation["image"], self.game.carrying, options.compact)
        intro = (
            f"You are in a grid of rooms. Your task: {self.mission}.\n"
            f"Each turn, reply with one action: {', '.join(ACTIONS)}. "
            "forward moves one step, left and right turn you, pickup and toggle act on what is right before you."
        )
        text = f"{self.mission} . {view}" if options.compact else f"{intro}\n\n{view}"
        self.messages = (Message("user", text),)

    def step(self, reply: Reply) -> Step:
        action = action_of(reply)
        understood = action is not None
        if action is not None:
            observation, reward, terminated, truncated, _ = self._game.step(ACTIONS.index(action))
        else:  # a step passes and nothing happens: no action does that in every level, ``done`` ends some
            self.game.step_count += 1
            truncated = self.game.step_count >= self.game.max_steps
            observation, reward, terminated = self.game.gen_obs(), 0.0, False
        solved, paid = bool(terminated and reward > 0), float(reward) if self._options.quick_pays_more else 1.0
        text = describe(observation["image"], self.game.carrying, self._options.compact)
        if not understood and not self._options.compact:
            text = f"That is not an action. Reply with one of: {', '.join(ACTIONS)}.\n{text}"
        done = bool(terminated or truncated)
        return Step(
            messages=() if done else (Message("user", text),),
            reward=paid if solved else 0.0 if understood else self._options.unknown_pays,
            done=done,
            signals={"unknown_action": float(not understood), **({"solved": float(solved)} if done else {})},
        )

    def close(self) -> None:
        self._game.close()


def action_of(reply: str) -> str | None:
    """The last action word of a reply, whatever its case; None where there is none."""
    words = [word for word in re.findall(r"[a-z]+", reply[-2000:].lower()) if word in ACTIONS]
    return words[-1] if words else None


def describe(image: Any, carrying: Any, compact: bool = False) -> str:
    """The view in words. ``image`` uint8 [7, 7, 3] (column, row, (type, colour, state)); the agent stands at column 3,
    row 6, and looks towards row 0."""
    constants = package("babyai", "minigrid.core.constants").core.constants
    columns, rows, _ = image.shape
    middle = columns // 2
    seen = []
    for ahead in range(rows):
        for column in sorted(range(columns), key=lambda c: abs(c - middle)):
            kind, colour, state = (int(v) for v in image[column, rows - 1 - ahead])
            aside = column - middle
            if kind in (_UNSEEN, _EMPTY, _WALL, _FLOOR) or (ahead == 0 and aside == 0):
                continue
            name = f"{constants.IDX_TO_COLOR[colour]} {constants.IDX_TO_OBJECT[kind]}"
            name = f"{_DOOR_STATES[state]} {name}" if kind == _DOOR else name
            seen.append(f"{name} {_position(ahead, aside, compact)}")
    wall = next((a for a in range(1, rows) if int(image[middle, rows - 1 - a][0]) == _WALL), None)
    held = f"{carrying.color} {carrying.type}" if carrying is not None else None
    if compact:
        parts = [*seen, *([f"wall ahead {wall}"] if wall is not None else []), *([f"holding {held}"] if held else [])]
        return " . ".join(parts) or "nothing"
    sentence = "You see " + ", ".join(f"a {thing}" for thing in seen) + "." if seen else "You see nothing but floor."
    wall_text = f" A wall is {wall} step{'s' * (wall > 1)} ahead." if wall is not None else ""
    return sentence + wall_text + (f" You carry a {held}." if held else "")


def _position(ahead: int, aside: int, compact: bool) -> str:
    side = "right" if aside > 0 else "left"
    if compact:
        return " ".join(f"{word} {n}" for word, n in (("ahead", ahead), (side, abs(aside))) if n)
    parts = []
    if ahead:
        parts.append(f"{ahead} step{'s' * (ahead > 1)} ahead")
    if aside:
        parts.append(f"{abs(aside)} to the {side}")
    return " and ".join(parts)
