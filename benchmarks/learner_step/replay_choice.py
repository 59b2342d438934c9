"""Share of an update that the choice of replays takes: all candidates scored in it, within its share, and before it.

    python -m benchmarks.learner_step.replay_choice --layers 4 --json replay-choice.json

Half of the groups are replay groups with ``--candidates`` stored trajectories, of which one is trained. Arms take turns
on the same trainer and groups. ``all``: ``replay.scoring_share: null``, every candidate in the update.
``share``: the default, and the learner never waits. ``waiting``: the default, and the candidates of all groups but the
last were scored while the learner waited. An update is its choice and its training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.learner_step.model import SHAPES, write_model
from learner.data.rows import Group, StoredRollout, build_batch
from learner.models.model_folder import ModelFolder
from learner.policy.policy import Policy
from learner.process.batches import CandidateScores, choose_replays
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.config.replay import ReplayConfig
from pipeline.schema import FinishReason, GroupPlan, Message, Task, TokenSpan, Trajectory, TrajectoryStatus, Turn

VOCABULARY = 49_152
ARMS = {"all": ReplayConfig(scoring_share=None), "share": ReplayConfig(), "waiting": ReplayConfig()}


def make_groups(n_groups: int, rollouts: int, candidates: int, prompt: int, response: int) -> list[Group]:
    """Random tokens; lengths of responses are log-normal (sigma 1). Every second rollout succeeds."""
    rng = np.random.default_rng(0)

    def trajectory(name: str, context: Sequence[int], reward: float) -> Trajectory:
        n = int(np.clip(rng.lognormal(np.log(response), 1.0), 1, 16 * response))
        turn = Turn(
            TokenSpan.context(context),
            TokenSpan.sampled(rng.integers(2, VOCABULARY, n), [-float(np.log(VOCABULARY))] * n, 0),
            (Message("user", "u"),),
            Message("assistant", "a"),
            FinishReason.STOP,
            1.0,
        )
        task = Task(f"t/{name.split('.')[0]}", "t", 0)
        return Trajectory(name, name.split(".")[0], task, (turn,), TrajectoryStatus.COMPLETE, reward=reward)

    groups = []
    for g in range(n_groups):
        context = rng.integers(2, VOCABULARY, prompt).tolist()
        stored = [trajectory(f"{g}.s{i}", context, 1.0) for i in range(candidates if g % 2 else 0)]
        k = min(1, len(stored))
        fresh = [trajectory(f"{g}.{i}", context, float(i % 2)) for i in range(rollouts - k)]
        ids = tuple(t.trajectory_id for t in stored)
        plan = GroupPlan(str(g), fresh[0].task, rollouts, len(fresh), ids[:k], ids)
        facts = {name: StoredRollout(entropy=1.0 + i, entropy_age=i) for i, name in enumerate(ids)}
        groups.append(Group(plan, (*fresh, *stored), facts))
    return groups


def update(trainer: Trainer, groups: list[Group], arm: str) -> tuple[float, float, int]:
    """Seconds of the choice and of the whole update, and candidates that it scored."""
    scores = CandidateScores(trainer.updates)
    if arm == "waiting":
        scores.score(scores.unscored(groups[:-1]), trainer.mean_entropies)
    started = time.perf_counter()
    choice = choose_replays(groups, ARMS[arm], trainer.mean_entropies, scores)
    chosen = time.perf_counter()
    trainer.train(build_batch(trainer.updates, choice.groups), 0)
    return chosen - started, time.perf_counter() - started, choice.scored["update"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--candidates", type=int, nargs="+", default=[5, 20], help="stored trajectories of a task")
    parser.add_argument("--prompt", type=int, default=40, help="tokens")
    parser.add_argument("--response", type=int, default=30, help="median tokens")
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that is not")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    learner = {"device": device, "learning_rate": 1e-6, "tokens_per_microbatch": 4096}
    config = RunConfig.model_validate({"run": {"total_steps": 1000}, "learner": learner})
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        layers = {"num_hidden_layers": a.layers}
        write_model(a.shape, Path(folder), vocab_size=VOCABULARY, tie_word_embeddings=True, **layers)
        model = ModelFolder(Path(folder)).read(torch.device(device))
        trainer = Trainer(Policy(model, config.learner, torch.device(device)), config)
        for candidates in a.candidates:
            groups = make_groups(a.groups, a.rollouts, candidates, a.prompt, a.response)
            measured: dict[str, list[tuple[float, float, int]]] = {arm: [] for arm in ARMS}
            for _ in range(a.rounds + 1):
                for arm in ARMS:
                    measured[arm].append(update(trainer, groups, arm))
            for arm, rounds in measured.items():
                shares = [choose / whole for choose, whole, _ in rounds[1:]]
                line = {
                    "candidates": candidates,
                    "arm": arm,
                    "scored_in_update": rounds[-1][2],
                    "choose_seconds": statistics.median(choose for choose, _, _ in rounds[1:]),
                    "update_seconds": statistics.median(whole for _, whole, _ in rounds[1:]),
                    "share": statistics.median(shares),
                    "share_max": max(shares),
                }
                found.append(line)
                print(
                    f"{candidates:3d} candidates, {arm:8} {line['scored_in_update']:3d} scored in the update: "
                    f"{line['choose_seconds']:6.2f} of {line['update_seconds']:6.2f} s, {line['share']:6.1%} "
                    f"(at most {line['share_max']:.1%})",
                    flush=True,
                )
    if a.json is not None:
        a.json.write_text(json.dumps({"options": {k: str(v) for k, v in vars(a).items()}, "found": found}, indent=1))


if __name__ == "__main__":
    main()
