"""Gain of single updates, made again on the same recorded groups with and without a mechanism.

    python -m benchmarks.replay_mechanisms --json mechanisms.json --directory /tmp/mechanisms
    python -m benchmarks.replay_mechanisms --json mechanisms.json      # the table again

Why does replay save updates on the locks (docs/REPLAY_STUDY.md, study of 27 November) but hardly any tokens, and none
with a small batch? Runs of its arms ``groups`` and ``groups_quarter``, each with its tuned learning rate, keep their
groups and checkpoints. From the same checkpoints, with the optimizer's state, ``afterplay retrain`` makes single
updates again, with one difference each (:data:`MECHANISMS`). The gain is what the update adds to the probability that a
lock opens, the mean over all locks. It is computed exactly: a reply is one token, and a wrong one ends the game.

Protocol, before the first run: seeds 500 to 505, which no other study has used; every fourth update from 4 to 64 of
``groups``, every eighth from 8 to 128 of ``groups_quarter``. The gains of a seed are averaged over its updates; the
table has the mean over seeds with its 95 % t interval, and the same for the difference to ``recorded`` of each seed.
Each update is also made again unchanged, and has to give the run's own weights bit for bit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.replay_efficiency.examine import load_examination, load_score, score_of
from benchmarks.replay_study import read_plan
from learner.checkpoints.checkpoint import checkpoint_path
from learner.process.retrain import RunSource, retrain
from pipeline.config import RunConfig
from pipeline.config.load import load
from pipeline.errors import AfterplayError
from pipeline.runtime.run_directory import RunDirectory
from pipeline.store.trained import SentGroup, SentUpdate
from pipeline.views.comparison import t_interval
from tests.support.run_handle import start_run

SEEDS = range(500, 506)
RUN_SECONDS_MAX = 1800.0
Choice = Callable[[tuple[SentGroup, ...]], tuple[SentGroup, ...]]


def _replayed(group: SentGroup) -> bool:
    return any("replay" in rollout.about for rollout in group.rollouts)


def _fresh(groups: tuple[SentGroup, ...]) -> tuple[SentGroup, ...]:
    return tuple(group for group in groups if not _replayed(group))


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One difference to the recorded update."""

    overrides: tuple[str, ...] = ()
    choice: Choice = tuple
    """The groups that are trained."""


MECHANISMS = {
    "recorded": Mechanism(),
    "off_clip_high 4": Mechanism(("loss.off_clip_high=4",)),
    "without replays": Mechanism(choice=_fresh),
    "half of the fresh groups": Mechanism(choice=lambda groups: _fresh(groups)[: math.ceil(len(_fresh(groups)) / 2)]),
    "replays alone": Mechanism(choice=lambda groups: tuple(group for group in groups if _replayed(group))),
    "two minibatches": Mechanism(("learner.minibatches=2",)),
    "two epochs": Mechanism(("learner.epochs=2",)),
}


@dataclass(frozen=True, slots=True)
class Recording:
    """Runs of one arm of the study. ``rate``: multiple of the run file's learning rate."""

    arm: str
    rate: float
    every: int
    last: int


RECORDINGS = (Recording("groups", 2, 4, 64), Recording("groups_quarter", 1, 8, 128))


@dataclass(frozen=True, slots=True)
class Chosen:
    """A run with one update, of which these groups are trained."""

    config: RunConfig
    directory: RunDirectory
    only: SentUpdate

    @property
    def updates(self) -> frozenset[int]:
        return frozenset({self.only.update})

    def sent(self, update: int) -> SentUpdate:
        return self.only


def record(recording: Recording, seed: int, directory: Path) -> RunSource:
    """The run of that arm and seed, which is made if it is not there."""
    plan, name = read_plan(), f"{recording.arm}-{seed}"
    family, arm = plan.families["locks"], plan.arms[recording.arm]
    file = load(family.file, environment={})
    steps = recording.last + recording.every
    if len(_lines(directory / name)) < steps:
        overrides = (
            *arm.set, f"groups.groups_per_step={file.groups.groups_per_step * arm.groups:g}",
            f"learner.learning_rate={file.learner.learning_rate * recording.rate:g}",
            f"run.total_steps={steps}", f"run.seed={seed}", f"model.tiny.seed={seed}", "publish.keep=2",
            f"checkpoint.every={recording.every}", f"checkpoint.keep={steps}", f"replay.keep_trained={steps}",
        )  # fmt: skip
        with start_run(Path(family.file), directory, name, overrides) as run:
            if code := run.finish(RUN_SECONDS_MAX):
                raise AfterplayError(f"{name} ended with {code}: {run.tail()}")
    return RunSource.open(directory / name)


def _lines(run: Path) -> list[bytes]:
    file = run / "metrics.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


def gains(source: RunSource, recording: Recording) -> dict[str, list[float | None]]:
    """Gain of each update by mechanism; None where it trains no group."""
    import torch
    from transformers import AutoModelForCausalLM

    examination = load_examination(source.config, source.directory.model, 1)
    model: Any = AutoModelForCausalLM.from_pretrained(source.directory.model, dtype=torch.float32).eval()

    found: dict[str, list[float | None]] = {name: [] for name in MECHANISMS}
    for update in range(recording.every, recording.last + 1, recording.every):
        sent = source.sent(update)
        before = examination.probability(load_score(checkpoint_path(source.directory.checkpoints, update) / "model"))
        for name, mechanism in MECHANISMS.items():
            if not (groups := mechanism.choice(sent.groups)):
                found[name].append(None)
                continue
            chosen = Chosen(source.config, source.directory, replace(sent, groups=groups))
            (made,) = retrain(chosen, update + 1, 1, mechanism.overrides)
            if name == "recorded" and (made.differences or not made.compared):
                raise AfterplayError(f"step {update + 1} is not what was recorded: {made.differences or 'no record'}")
            model.load_state_dict(made.policy.shards("float32"), strict=False)  # a tied output layer is there once
            found[name].append(examination.probability(score_of(model)) - before)
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, Sequence[float | None]]]]) -> list[str]:
    """Percentage points by arm and mechanism: mean over seeds, and difference to ``recorded``, with 95 % intervals."""
    rows = []
    for arm, seeds in found.items():
        means = {
            seed: {name: 100 * statistics.fmean(g for g in own if g is not None) for name, own in gained.items()}
            for seed, gained in seeds.items()
        }
        for name in MECHANISMS:
            own = [of[name] for of in means.values()]
            less = [of[name] - of["recorded"] for of in means.values()]
            parts = [
                f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})" for mean, half in map(t_interval, (own, less))
            ]
            rows.append(f"{arm:15} {name:25} gain {parts[0]}  more than recorded {parts[1]}")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="file for the gains of all updates")
    parser.add_argument("--directory", type=Path, help="for the runs, of which those that it has are not made again")
    options = parser.parse_args(argv)
    found: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    if options.directory is None:
        found = json.loads(options.json.read_text())["updates"]
    else:
        for seed in SEEDS:
            for recording in RECORDINGS:
                source = record(recording, seed, options.directory)
                found.setdefault(recording.arm, {})[str(seed)] = gains(source, recording)
                print(f"{recording.arm} {seed} done", file=sys.stderr, flush=True)
            options.json.write_text(json.dumps({"updates": found}) + "\n")
    print("\n".join(table(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
