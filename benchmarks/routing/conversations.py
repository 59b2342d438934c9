"""Sizes of conversations: synthetic ones with long tails, games of a planner, and those of a real run."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks.recorded import read
from benchmarks.routing.simulation import Conversation, Turn

ROLLOUTS = 8


def synthetic(groups: int, seed: int, scale: float = 1.0, tail: float = 1.2) -> list[list[Conversation]]:
    """Agents with tools: a prompt of 1,000 tokens, 1 to 40 turns (8 on average, by task), replies of 250 tokens in the
    middle and at most 8,192, results of tools of 200 in the middle and at most 4,000, environments of 1 s in the middle
    and at most 60. ``tail``: standard deviation of the logarithm of a reply's length. ``scale``: of all tokens."""
    draw = random.Random(seed)

    def size(middle: float, deviation: float, most: float) -> int:
        return max(1, round(scale * min(most, middle * math.exp(draw.gauss(0.0, deviation)))))

    made: list[list[Conversation]] = []
    for _ in range(groups):
        ends = min(0.9, max(0.03, 0.125 * math.exp(draw.gauss(0.0, 0.5))))
        group: list[Conversation] = []
        for _ in range(ROLLOUTS):
            turns = min(40, 1 + int(math.log(1 - draw.random()) / math.log(1 - ends)))
            conversation = []
            for number in range(turns):
                prompt = size(1000, 0.3, 4000) if number == 0 else size(200, 1.0, 4000)
                seconds = min(60.0, math.exp(draw.gauss(0.0, 1.2)))
                conversation.append(Turn(prompt, size(250, tail, 8192), seconds))
            group.append(conversation)
        made.append(group)
    return made


def coding(groups: int, seed: int, scale: float = 1.0) -> list[list[Conversation]]:
    """Agents that mend code. Of 67,074 published trajectories of OpenHands (SWE-rebench-openhands-trajectories, as
    https://github.com/ai-dynamo/aiperf/issues/1019 sums them up) it has the turns, 64.3 on average and at most 100, and
    the deepest prompt, 27,000 tokens on average. The shapes are assumed: turns normal, by task; replies and results of
    tools lognormal with long tails; a tool takes 0.5 s in the middle and at most 120. ``scale``: of the turns."""
    draw = random.Random(seed)

    def size(middle: float, deviation: float, most: float) -> int:
        return max(1, round(min(most, middle * math.exp(draw.gauss(0.0, deviation)))))

    made: list[list[Conversation]] = []
    for _ in range(groups):
        usual = draw.gauss(65.0, 15.0)
        group: list[Conversation] = []
        for _ in range(ROLLOUTS):
            turns = round(scale * min(100.0, max(10.0, draw.gauss(usual, 15.0))))
            conversation = []
            for number in range(turns):
                prompt = size(5000, 0.3, 20_000) if number == 0 else size(85, 1.2, 8000)
                seconds = min(120.0, 0.5 * math.exp(draw.gauss(0.0, 1.5)))
                conversation.append(Turn(prompt, size(95, 1.1, 8192), seconds))
            group.append(conversation)
        made.append(group)
    return made


def games(path: Path, groups: int, seed: int) -> list[list[Conversation]]:
    """Groups drawn from those of a file with ``conversations``: groups of rollouts of turns of (new prompt tokens,
    sampled tokens, seconds of the environment)."""
    found = json.loads(path.read_text())["conversations"]
    return drawn([[[Turn(*turn) for turn in rollout] for rollout in group] for group in found], groups, seed)


def recorded(path: Path, groups: int, seed: int) -> list[list[Conversation]]:
    """Groups drawn from those of a real run (:mod:`benchmarks.recorded`), whose rollouts have one branch each. The
    environment's seconds of a rollout are divided evenly among its turns."""
    found: dict[int, list[Conversation]] = {}
    for row in read(path):
        seconds = row.environment_seconds / len(row.turns)
        found.setdefault(row.group, []).append([Turn(context, reply, seconds) for context, reply in row.turns])
    return drawn(list(found.values()), groups, seed)


def drawn(found: Sequence[list[Conversation]], groups: int, seed: int) -> list[list[Conversation]]:
    """So many of the groups, some of them several times."""
    draw = random.Random(seed)
    return [draw.choice(found) for _ in range(groups)]
