"""The curve of a run for comparisons: success, reward or evaluation score over updates, generated tokens and time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from pipeline.cli.viewer.comparison import Point
from pipeline.cli.viewer.metric import Metric
from pipeline.cli.viewer.progress import read_lines
from pipeline.config import RunConfig
from pipeline.runtime.rundir import RunDirectory, read_json
from pipeline.store.evaluation_results import read_results
from pipeline.store.queries import rollouts
from pipeline.store.store import store_path


@dataclass(frozen=True, slots=True)
class LearningCurve:
    """Curve of one run."""

    seed: int
    points: tuple[Point, ...]
    finished: bool
    """The run has made all its updates."""
    redone: bool
    """Updates were made again from an older checkpoint: their tokens count twice, their seconds once."""


def read_curve(config: RunConfig, directory: RunDirectory, seed: int, metric: Metric) -> LearningCurve:
    """The curve of a run, also of one that is alive.

    Tokens are those sampled for training by every rollout that the replay stage received up to the end of the update,
    also if it was not trained; rollouts of evaluations are not counted. Seconds are those of the learner's updates with
    its waits; a pause between two starts is not in them.
    """
    lines = read_lines(directory.metrics_file)
    if not lines:
        return LearningCurve(seed, (), finished=False, redone=False)
    found = rollouts(store_path(config, directory))
    times, tokens = [r.received_at for r in found], [0, *accumulate(r.n_sampled for r in found)]
    results = [r for r in read_results(directory.evaluations_file) if r.get("status") == "complete"]
    scores = {r["updates"]: r["score"] for r in results if r.get("score") is not None}
    points = [Point(0, 0, 0.0, float(scores[0]))] if metric is Metric.EVAL and 0 in scores else []
    seconds, begin = 0.0, 0
    for line in lines:
        seconds += float(line["seconds"]["step"])
        end = bisect_right(times, line["finished"])
        value, weight = None, 1.0
        if metric is Metric.EVAL:
            value = scores.get(line["step"])
        elif metric is Metric.REWARD:
            value, weight = line["reward_mean"], float(line["n_trajectories"] - line["n_replayed"])
        elif rewards := [r.reward for r in found[begin:end] if r.reward is not None]:
            value = sum(reward >= config.replay.success_threshold for reward in rewards) / len(rewards)
            weight = float(len(rewards))
        if value is not None:
            points.append(Point(line["step"], tokens[end], seconds, float(value), weight))
        begin = end
    done = read_json(directory.finished_file) or {}
    redone = any(line["policy_version"] != line["update"] for line in lines)
    return LearningCurve(seed, tuple(points), done.get("steps", 0) >= config.run.total_steps, redone)
