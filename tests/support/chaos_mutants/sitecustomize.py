"""Faults that the store cannot see, for ``afterplay chaos``: Python runs this file at its start where this folder is on
``PYTHONPATH``. ``AFTERPLAY_TEST_MUTANTS`` names them, with commas between; ``NAME:1`` is always.

ack_not_stored   the stage acknowledges one trajectory in 200 and throws it away
swap_rewards     the stage gives one trajectory in 50 the reward of the one before it
alter_tokens     the last token of one trajectory in 50 is another one when it comes to the learner
skip_rows        the optimizer leaves the first group of each third update out of its loss
train_twice      each third update trains its first group twice and its last one never
"""

import functools
import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections import defaultdict
from dataclasses import replace

MUTANTS = dict(f"{name}:".split(":")[:2] for name in os.environ.get("AFTERPLAY_TEST_MUTANTS", "").split(",") if name)
calls = defaultdict(int)


def every(n, what):
    calls[what] += 1
    return what in MUTANTS and calls[what] % int(MUTANTS[what] or n) == 0


def ingest(module):
    accept, scored, last = module.Ingest.accept, module.Ingest.scored, []

    def mutant_accept(self, actor, trajectory_id, frames):
        if every(200, "ack_not_stored"):
            self._journal.ack(actor, trajectory_id)
            return
        accept(self, actor, trajectory_id, frames)

    def mutant_scored(self, record, verdict):
        before, last[:] = last[:], [verdict.reward]
        if every(50, "swap_rewards") and before and None not in (*before, *last):
            verdict = replace(verdict, reward=before[0] if before != last else last[0] + 1)
        scored(self, record, verdict)

    module.Ingest.accept, module.Ingest.scored = mutant_accept, mutant_scored


def session(module):
    decode = module.decode_trajectory

    def mutant_decode(frames, limits):
        if every(50, "alter_tokens"):
            ids = bytearray(frames[1])
            ids[-4] ^= 1
            frames = (frames[0], bytes(ids), *frames[2:])
        return decode(frames, limits)

    module.decode_trajectory = mutant_decode


def trainer(module):
    step = module.Trainer.step

    def mutant_step(self, batch, *args):
        if "skip_rows" in MUTANTS and batch.update % 3 == 1:
            skipped = len(batch.groups[0].trajectories)
            batch = replace(batch, rows=tuple(r for r in batch.rows if r.trajectory_index >= skipped))
            args = (args[0], replace(args[1], logprobs=None, entropies=None), *args[2:])
        return step(self, batch, *args)

    module.Trainer.step = mutant_step


def loop(module):
    train = module.LearnerLoop._train

    def mutant_train(self, update, groups, prefetched):
        if "train_twice" in MUTANTS and update % 3 == 2:
            groups, prefetched = (groups[0], *groups[:-1]), None
        return train(self, update, groups, prefetched)

    module.LearnerLoop._train = mutant_train


HOOKS = {
    "pipeline.stage.ingest": ingest,
    "learner.process.session": session,
    "learner.training.trainer": trainer,
    "learner.process.loop": loop,
}


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in HOOKS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        spec.loader.exec_module = functools.partial(executed, spec.loader.exec_module)
        return spec


def executed(execute, module):
    execute(module)
    HOOKS[module.__name__](module)


if MUTANTS:
    sys.meta_path.insert(0, Finder())
