"""Does it pay to train summaries? A task that cannot be solved without a good one, trained and masked.

::

    python -m benchmarks.summaries --directory summaries       # six runs, about five minutes on two cores

The first prompt of ``key`` names one of four keys by a word and asks for a note of one token. Then the context is too
short for more (``model.max_length``), and the loop compacts it: the next prompt holds the note and nothing else of the
first. The reply is rewarded if it is the number of the key. Half of the groups are of ``read``, whose first prompt is
such a note with a number, and which rewards the reply that is the number: a random tiny model learns there what an
answer to a note is. Whoever knows nothing of the key is right in one of four.

Protocol, written before the runs that are compared. Arms: ``train`` and ``mask``, the values of ``loop.summaries``,
with GRPO and nothing else changed. Seeds 100, 101 and 102, each for the weights and for sampling. Success is the mean
reward of ``key`` in the last 20 of 80 updates. Two forms of the task were tried before. Without ``read`` the policy has
to find a code of its own, and three of five runs of ``train`` found none. With ``read`` and keys that the prompt names
by their numbers, ``mask`` reached 0.96 with seed 100 (``train``: 1.00), because a policy that learns to copy the number
of a note also copies that of the key.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from actors.environments import Environment, Episode, Reply, Step
from actors.rollout.agent_loop import AgentEpisode, AgentLoop, Answer, Game
from pipeline.runtime.run_directory import write_json_atomically
from pipeline.schema import Message, Task
from tests.support.run_handle import start_run

WORDS, FILLERS = ("ash", "elm", "fir", "oak"), 8
KEYS = len(WORDS)
STEPS, LAST = 80, 20
"""Updates of a run, and those at its end that are compared."""
RUN_SECONDS_MAX = 900.0
OPEN = Message("user", "open")
RUN: dict[str, Any] = {
    "model": {
        "source": "tiny",
        # the first prompt has 14 tokens; with the note and the second question the conversation would have 20
        "max_length": 16,
        "tiny": {"numbers": KEYS, "words": ["key", "note", "open", "so", *WORDS], "initializer_range": 0.1},
    },
    "engine": {"kind": "embedded", "port": 0, "dtype": "float32", "threads": 1, "max_sequences": 128},
    "sampling": {"temperature": 1.0, "max_tokens": 1},
    "environments": {
        "key": {"name": "benchmarks.summaries:Key", "tasks": KEYS, "max_turns": 2},
        "read": {"name": "benchmarks.summaries:Read", "tasks": KEYS, "max_turns": 1},
    },
    "actor": {"concurrency": 128},
    "groups": {"n_rollout": 16, "groups_per_step": 8},
    "staleness": {"max": 1},
    "loss": {"entropy_bonus": 0.02},
    "learner": {"threads": 1, "compute_dtype": "float32", "learning_rate": 3e-3},
    "publish": {"dtype": "float32"},
    "checkpoint": {"every": 1000, "at_end": False},
}


def asked(note: object) -> Message:
    """The question about a note, which is all that is left of the history."""
    return Message("user", f"note {note} open")


class Key(Environment):
    """A key early, by its word, and a question about its number after the history was compacted."""

    def start(self, task: Task) -> Episode:
        return KeyEpisode(task.seed, Message("user", f"key {WORDS[task.seed]} {'so ' * FILLERS}note"))


class Read(Environment):
    """The question about a note that has the number."""

    def start(self, task: Task) -> Episode:
        return KeyEpisode(task.seed, asked(task.seed))


class KeyEpisode(Episode):
    def __init__(self, key: int, opening: Message) -> None:
        self.messages = (opening,)
        self._key = str(key)

    def step(self, reply: Reply) -> Step:
        return Step(reward=float(reply == self._key), done=True)


class Compacting(AgentLoop):
    """Takes the first reply as a note, and continues with the note alone."""

    def begin(self, game: Game) -> AgentEpisode:
        return CompactingEpisode(game)


class CompactingEpisode(AgentEpisode):
    noted = False

    async def answer(self, reply: Reply) -> Answer:
        if self.noted:
            return Answer.of(await self.game.step(reply))
        self.noted = True
        return Answer((OPEN,))

    def rewrite(self, messages: Sequence[Message], prompt_tokens: int) -> Sequence[Message]:
        return (asked(messages[-2].content),)


def success(directory: Path, summaries: str, seed: int) -> list[float | None]:
    """Mean reward of ``key`` in each update of one run; None in updates without it."""
    loop = {"name": "benchmarks.summaries:Compacting", "summaries": summaries}
    name, file = f"{summaries}-{seed}", directory / f"{summaries}-{seed}.yaml"
    config = {**RUN, "run": {"total_steps": STEPS, "seed": seed}}
    config["model"] = {**RUN["model"], "tiny": {**RUN["model"]["tiny"], "seed": seed}}
    config["environments"] = {**RUN["environments"], "key": {**RUN["environments"]["key"], "loop": loop}}
    file.write_text(yaml.safe_dump(config))
    with start_run(file, directory / "runs", name) as run:
        run.finish(RUN_SECONDS_MAX)
        rewards = [line["rewards"].get("key") for line in run.steps()]
    if len(rewards) != STEPS:
        raise SystemExit(f"expected {STEPS} updates of {name}, got {len(rewards)}:\n{run.tail()}")
    return rewards


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.summaries",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--directory", type=Path, required=True, help="runs and the result")
    parser.add_argument("--arms", nargs="+", choices=["train", "mask"], default=["train", "mask"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[100, 101, 102])
    given = parser.parse_args(argv)
    directory: Path = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[str, list[float | None]]] = {arm: {} for arm in given.arms}
    found: dict[str, dict[str, float]] = {arm: {} for arm in given.arms}
    for seed in given.seeds:
        for arm in given.arms:
            curves[arm][str(seed)] = rewards = success(directory, arm, seed)
            found[arm][str(seed)] = mean = statistics.fmean(r for r in rewards[-LAST:] if r is not None)
            print(f"{arm:6} seed {seed}: success {mean:.3f}", flush=True)
    write_json_atomically(directory / "summaries.json", {"success": found, "rewards": curves})
    return 0


if __name__ == "__main__":
    sys.exit(main())
