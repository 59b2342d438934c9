"""``passcode``: locks whose codes can only be found by trying; short codes are easy, long ones succeed rarely."""

from __future__ import annotations

import random
import re

from pydantic import Field
from pydantic.dataclasses import dataclass

from actors.environments.base import Environment, Episode, Reply, Step
from actors.environments.options import STRICT_OPTIONS
from pipeline.schema import Message, Task

_INTEGER = re.compile(r"\d+")


@dataclass(config=STRICT_OPTIONS)
class Passcode(Environment):
    """Say a lock's code one number a turn. The whole code pays 1.0, the first wrong number ends the game with 0.

    A family of mixed difficulty: lock i has a code of ``lengths[i % len(lengths)]`` numbers, each of which may be any
    of ``answers[i % len(answers)]``; guessing blindly opens it with probability ``(answers / numbers) ** length``. Give
    the environment a finite number of ``tasks``: a code is learned by meeting its lock again.
    """

    lengths: tuple[int, ...] = Field(default=(1, 2, 3), min_length=1)
    """Code length of lock i, cyclically. Each at least 1."""
    numbers: int = Field(default=8, ge=2, le=10**6)
    """Codes are made of the numbers 0 to ``numbers - 1``."""
    answers: tuple[int, ...] = Field(default=(1,), min_length=1)
    """How many numbers lock i takes at each place of its code, cyclically. 1 to ``numbers``."""
    compact: bool = False
    """Messages of one or two words (``open 7``, ``yes``), for tiny models with a tokenizer of words."""

    def __post_init__(self) -> None:
        if min(self.lengths) < 1:
            raise ValueError(f"lengths must be at least 1, got {list(self.lengths)}")
        if not 1 <= min(self.answers) <= max(self.answers) <= self.numbers:
            raise ValueError(f"answers must be from 1 to numbers ({self.numbers}), got {list(self.answers)}")

    def start(self, task: Task) -> PasscodeEpisode:
        return PasscodeEpisode(self, task.seed, self.code(task.seed))

    def code(self, lock: int) -> tuple[frozenset[int], ...]:
        """The numbers that open each place of a lock: they depend on the lock, the place and the options only."""
        count = self.answers[lock % len(self.answers)]
        return tuple(
            frozenset(random.Random(f"passcode/{lock}/{place}").sample(range(self.numbers), count))
            for place in range(self.lengths[lock % len(self.lengths)])
        )


class PasscodeEpisode(Episode):
    def __init__(self, options: Passcode, lock: int, code: tuple[frozenset[int], ...]) -> None:
        numbers = f"{len(code)} number{'s' if len(code) > 1 else ''} from 0 to {options.numbers - 1}"
        text = f"Lock {lock} opens with a code of {numbers}. Say its first number. Reply with only a number."
        self.messages = (Message("user", f"open {lock}" if options.compact else text),)
        self._yes = Message("user", "yes" if options.compact else "Right. Say the next number.")
        self._code = code
        opening = " ".join(str(min(place)) for place in code)
        self.hint = opening if options.compact else f"The code is {opening}."
        self._turn = 0

    def step(self, reply: Reply) -> Step:
        found = _INTEGER.findall(reply)
        right = bool(found) and len(found[-1]) < 20 and int(found[-1]) in self._code[self._turn]
        self._turn += 1
        opened = right and self._turn == len(self._code)
        done = opened or not right
        return Step(
            messages=() if done else (self._yes,),
            reward=float(opened),
            done=done,
            signals={"solved": float(opened)} if done else {},
        )
