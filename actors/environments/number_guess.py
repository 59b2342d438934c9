"""``number_guess``: find a hidden number; the environment says only higher or lower."""

from __future__ import annotations

import random
import re

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.options import STRICT_OPTIONS
from pipeline.schema import Message, Task

_INTEGER = re.compile(r"\d+")


@dataclass(config=STRICT_OPTIONS)
class NumberGuess(Environment):
    """Guess a number in ``low`` to ``high`` in at most ``turns`` turns; a solved game pays 1.0."""

    low: int = Field(default=0, ge=0, le=10**9)
    high: int = Field(default=15, ge=0, le=10**9)
    turns: int = Field(default=4, ge=1, le=1000)
    compact: bool = False
    """Messages of one word each (``guess``, ``higher``, ``lower``), for tiny models with a tokenizer of words."""
    closeness: float = Field(default=0.0, ge=0, lt=1)
    """An unsolved game pays ``closeness * (1 - d / width)``, d the distance of its best guess. 0: all or nothing."""

    @model_validator(mode="after")
    def _range_not_empty(self) -> NumberGuess:
        if self.high <= self.low:
            raise ValueError(f"high ({self.high}) must be above low ({self.low})")
        return self

    def start(self, task: Task) -> NumberGuessEpisode:
        return NumberGuessEpisode(self, random.Random(task.seed).randint(self.low, self.high))


class NumberGuessEpisode(Episode):
    def __init__(self, options: NumberGuess, hidden: int) -> None:
        text = f"I think of a number from {options.low} to {options.high}. Guess it. Reply with only a number."
        self.messages = (Message("user", "guess" if options.compact else text),)
        self._options = options
        self._hidden = hidden
        self.hint = str(hidden) if options.compact else f"The number is {hidden}."
        self._turn = 0
        self._nearest = options.high - options.low + 1

    def step(self, reply: Reply) -> Step:
        self._turn += 1
        found = _INTEGER.findall(reply)
        guess = int(found[-1]) if found and len(found[-1]) < 20 else None
        if guess is not None:
            self._nearest = min(self._nearest, abs(guess - self._hidden))
        solved = guess == self._hidden
        done = solved or self._turn >= self._options.turns
        return Step(
            messages=(Message("user", self._observation(guess)),),
            reward=self._reward(solved) if done else 0.0,
            done=done,
            signals={"solved": float(solved)} if done else {},
        )

    def _reward(self, solved: bool) -> float:
        """1 when solved, else a share of ``closeness``; ``_nearest`` starts at the width, which pays 0."""
        width = self._options.high - self._options.low + 1
        return 1.0 if solved else self._options.closeness * max(0.0, 1.0 - self._nearest / width)

    def _observation(self, guess: int | None) -> str:
        if guess is None:
            return "guess" if self._options.compact else "Reply with a number."
        word = "higher" if guess < self._hidden else "lower"
        return word if self._options.compact else f"The number is {word} than {guess}."
