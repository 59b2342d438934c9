"""Success rate of the weights of one version, measured outside the run that made them.

A fixed number of rollouts of every task of the run file's environments at temperature 1, through the environment's own
episodes and the actor's renderer, with random numbers that depend on the version only. The run's state does not matter:
neither retired tasks nor rollouts in flight.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import isawaitable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from actors.environments.base import Environment, Episode, Reply
from actors.environments.plugins import build
from actors.rendering.renderer import Conversation, Renderer, renderer_of
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.schema import FinishReason, Task

LOADING = threading.Lock()
"""transformers imports its parts when they are first used, and two threads must not do that at once."""
Tokens = tuple[int, ...]
Score = Callable[[Sequence[Tokens]], npt.NDArray[np.float64]]
"""log-probabilities of the next token ``[N, V]`` after each of N different contexts."""


@dataclass(slots=True)
class Play:
    """One play that has not ended."""

    number: int
    """Index of its task."""
    episode: Episode
    conversation: Conversation
    turns: int = 0
    reward: float = 0.0


class Examination:
    """All tasks of one run file, or a number of held-out ones."""

    def __init__(self, config: RunConfig, renderer: Renderer, plays: int, held_out: int = 0) -> None:
        """``held_out``: so many tasks of each environment's own split ``eval`` in place of its training tasks.

        Raises :class:`ConfigurationError` for an environment with endless tasks, or without that split: no fixed set
        to measure.
        """
        self.tasks: list[Task] = []
        self._environments: dict[str, Environment] = {}
        for name, section in config.environments.items():
            self._environments[name] = build(name, section)
            seeds: Sequence[int] = range(section.seed, section.seed + (section.tasks or 0))
            if held_out:
                seeds = self._environments[name].splits.get("eval", ())[:held_out]
            if not seeds:
                what = "a split eval of its own" if held_out else "a number of tasks to measure"
                raise ConfigurationError(f"environments.{name}.tasks: expected {what}, got none")
            self.tasks += [Task(f"{name}/{seed}", name, seed) for seed in seeds]
        self._config = config
        self._renderer = renderer
        self._plays = plays
        self._rendered: dict[tuple[object, ...], Conversation] = {}
        """Every prompt so far: the same ones come again and again, and rendering is most of the cost."""

    def success(self, score: Score, version: int) -> npt.NDArray[np.float64]:
        """Share of rollouts that reach ``replay.success_threshold``, one number for each task."""
        random = np.random.default_rng([20260101, version])
        rewards = np.zeros((len(self.tasks), self._plays))
        ended = [0] * len(self.tasks)
        live = [self._start(number) for number in range(len(self.tasks)) for _ in range(self._plays)]
        while live:
            said = self._say([play.conversation.prompt_ids for play in live], score, random)
            going = []
            for play, ids in zip(live, said, strict=True):
                if self._turn(play, ids):
                    going.append(play)
                else:
                    rewards[play.number, ended[play.number]] = play.reward
                    ended[play.number] += 1
                    play.episode.close()
            live = going
        solved = rewards >= self._config.replay.success_threshold
        return np.asarray(solved.mean(axis=1), dtype=np.float64)

    def probability(self, score: Score) -> float:
        """Mean probability, over its tasks, that a rollout succeeds, from the probabilities of all its tokens. For
        ``sampling.max_tokens: 1``, and episodes that few replies let continue."""
        found = np.zeros(len(self.tasks))
        live = [(1.0, self._start(number)) for number in range(len(self.tasks))]
        while live:
            rows, going = np.exp(score([play.conversation.prompt_ids for _, play in live])), []
            for (reached, play), row in zip(live, rows, strict=True):
                for token in np.flatnonzero(row).tolist():
                    branch = replace(play, episode=copy.deepcopy(play.episode))
                    if self._turn(branch, (token,)):
                        going.append((reached * row[token], branch))
                    elif branch.reward >= self._config.replay.success_threshold:
                        found[play.number] += reached * row[token]
            live = going
        return float(found.mean())

    def _start(self, number: int) -> Play:
        task = self.tasks[number]
        episode = self._environments[task.environment].start(task)
        if isawaitable(episode):
            raise ConfigurationError(f"environments.{task.environment}: only environments with a plain start() here")
        key = (str(episode.messages),)
        if key not in self._rendered:
            self._rendered[key] = self._renderer.start(episode.messages)
        return Play(number, episode, self._rendered[key])

    def _turn(self, play: Play, ids: Tokens) -> bool:
        """Give one reply to the environment; True while the episode continues."""
        said = self._renderer.completed(ids)
        reason = FinishReason.STOP if said.end_id is not None else FinishReason.LENGTH
        step = play.episode.step(Reply(said.text, reason))
        if isawaitable(step):
            raise ConfigurationError("only environments with a plain step() can be measured here")
        play.reward += step.reward
        play.turns += 1
        section = self._config.environments[self.tasks[play.number].environment]
        if step.done or play.turns >= section.max_turns:
            return False
        key = (play.conversation.prompt_ids, ids, str(step.messages))
        if key not in self._rendered:
            self._rendered[key] = self._renderer.extend(play.conversation, ids, said, step.messages)
        play.conversation = self._rendered[key]
        return True

    def _say(self, prompts: Sequence[Tokens], score: Score, random: np.random.Generator) -> list[Tokens]:
        """A sampled reply to each prompt: up to the end-of-turn token or ``sampling.max_tokens``."""
        said: list[Tokens] = [()] * len(prompts)
        talking = list(range(len(prompts)))
        for _ in range(self._config.sampling.max_tokens):
            contexts = [prompts[i] + said[i] for i in talking]
            for i, token in zip(talking, sample(contexts, score, random), strict=True):
                said[i] += (token,)
            talking = [i for i in talking if said[i][-1] not in self._renderer.end_ids]
            if not talking:
                break
        return said


def sample(contexts: Sequence[Tokens], score: Score, random: np.random.Generator) -> list[int]:
    """One token after each context, by the inverse of the distribution function; equal contexts are scored once."""
    different = list(dict.fromkeys(contexts))
    place = {context: i for i, context in enumerate(different)}
    cumulative = np.cumsum(np.exp(score(different)), axis=1)
    draws = random.random(len(contexts))
    rows = cumulative[[place[context] for context in contexts]]
    return [int(i) for i in (rows < (draws * rows[:, -1])[:, None]).sum(axis=1)]


def load_examination(config: RunConfig, model: Path, plays: int, held_out: int = 0) -> Examination:
    """``model``: the run's prepared model folder, for its tokenizer."""
    with LOADING:
        renderer = renderer_of(config.model, model)
    return Examination(config, renderer, plays, held_out)


def load_score(folder: Path) -> Score:
    """The policy whose weights are in ``folder``, in float32 on the CPU."""
    with LOADING:
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    return score_of(model)


def score_of(model: Any) -> Score:
    """The policy of a model in memory, with the weights that it has when it is called."""
    import torch

    def score(contexts: Sequence[Tokens]) -> npt.NDArray[np.float64]:
        # padding on the right: causal attention keeps it out of what is read
        ends = torch.tensor([len(context) - 1 for context in contexts])
        ids = torch.zeros(len(contexts), int(ends.max()) + 1, dtype=torch.long)
        for row, context in zip(ids, contexts, strict=True):
            row[: len(context)] = torch.tensor(context)
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(contexts)), ends]
        return torch.log_softmax(logits.double(), dim=-1).numpy()

    return score
