"""Built-in environments.

``arithmetic``    small sums, with feedback and another attempt after a wrong answer
``number_guess``  find a hidden number; the environment answers only higher or lower
``passcode``      locks whose codes can only be found by trial; short codes are easy, long ones rarely succeed
``program``       tasks for agent programs that compute their own reward (docs/GATEWAY.md)
"""

from __future__ import annotations

import random
import re

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from actors.environments.base import STRICT_OPTIONS, Environment, Episode, Reply, Step
from pipeline.schema import Message, Task

_INTEGER, _SIGNED_INTEGER = re.compile(r"\d+"), re.compile(r"-?\d+")


def _last(integer: re.Pattern[str], reply: str) -> int | None:
    """The last integer of a reply; None without one, and for one that is too long to be meant."""
    found = integer.findall(reply)
    return int(found[-1]) if found and len(found[-1]) < 20 else None


@dataclass(config=STRICT_OPTIONS)
class Arithmetic(Environment):
    """ "What is a + b?" The last integer of the reply is the answer: 1.0 if right at once, less on later attempts."""

    low: int = Field(default=1, ge=0, le=10**9)
    high: int = Field(default=9, ge=0, le=10**9)
    """a and b are drawn from ``low`` to ``high``, both included."""
    attempts: int = Field(default=2, ge=1, le=100)
    later_reward: float = Field(default=0.5, ge=0, le=1)
    """Attempt k (from 0) pays ``later_reward ** k`` when it is right: 1.0, 0.5, 0.25 ..."""

    @model_validator(mode="after")
    def _range_not_empty(self) -> Arithmetic:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) must not be below low ({self.low})")
        return self

    def start(self, task: Task) -> ArithmeticEpisode:
        draw = random.Random(task.seed)
        return ArithmeticEpisode(self, draw.randint(self.low, self.high), draw.randint(self.low, self.high))


class ArithmeticEpisode(Episode):
    def __init__(self, options: Arithmetic, a: int, b: int) -> None:
        self.messages = (Message("user", f"What is {a} + {b}? Reply with only the number."),)
        self._options = options
        self._answer = a + b
        self.hint = f"The answer is {a + b}."
        self._attempt = 0

    def step(self, reply: Reply) -> Step:
        right = _last(_SIGNED_INTEGER, reply) == self._answer
        first = self._attempt == 0
        self._attempt += 1
        return Step(
            messages=(Message("user", "That is not right. Try again. Reply with only the number."),),
            reward=self._options.later_reward ** (self._attempt - 1) if right else 0.0,
            done=right or self._attempt >= self._options.attempts,
            signals={"first_right": float(right)} if first else {},
        )


@dataclass(config=STRICT_OPTIONS)
class NumberGuess(Environment):
    """Guess a number in ``low`` to ``high`` in at most ``turns`` turns. A solved game has reward 1.0."""

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
        guess = _last(_INTEGER, reply)
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
    """Count of numbers that open each position of the code of lock i, cyclically. 1 to ``numbers``."""
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
        """The numbers that open each position of a lock: they depend on the lock, the position and the options only."""
        count = self.answers[lock % len(self.answers)]
        return tuple(
            frozenset(random.Random(f"passcode/{lock}/{position}").sample(range(self.numbers), count))
            for position in range(self.lengths[lock % len(self.lengths)])
        )


class PasscodeEpisode(Episode):
    def __init__(self, options: Passcode, lock: int, code: tuple[frozenset[int], ...]) -> None:
        numbers = f"{len(code)} number{'s' if len(code) > 1 else ''} from 0 to {options.numbers - 1}"
        text = f"Lock {lock} opens with a code of {numbers}. Say its first number. Reply with only a number."
        self.messages = (Message("user", f"open {lock}" if options.compact else text),)
        self._yes = Message("user", "yes" if options.compact else "Right. Say the next number.")
        self._code = code
        opening = " ".join(str(min(position)) for position in code)
        self.hint = opening if options.compact else f"The code is {opening}."
        self._turn = 0

    def step(self, reply: Reply) -> Step:
        right = _last(_INTEGER, reply) in self._code[self._turn]
        self._turn += 1
        opened = right and self._turn == len(self._code)
        done = opened or not right
        return Step(
            messages=() if done else (self._yes,),
            reward=float(opened),
            done=done,
            signals={"solved": float(opened)} if done else {},
        )


@dataclass(config=STRICT_OPTIONS)
class Program(Environment):
    """Passes the task's payload to the program unchanged. Its ``prompt``, if it has one, is also the first message."""

    loop = "program"

    def start(self, task: Task) -> Episode:
        prompt = task.payload.get("prompt")
        return _Played(prompt if isinstance(prompt, str) and prompt else f"Task {task.task_id}, seed {task.seed}.")


class _Played(Episode):
    def __init__(self, prompt: str) -> None:
        self.messages = (Message("user", prompt),)

    def step(self, reply: Reply) -> Step:
        return Step(done=True)
