"""From a step report to metrics, to the line in ``metrics.jsonl`` and to the log.

``metrics.jsonl``: one JSON object a line for each update, in order, also after a resume.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import orjson

from learner.data.replay_choice import ReplayChoice
from learner.data.rows import Batch
from learner.data.trained import Trained, TrainedGroup
from learner.losses.corrections import REASONS
from learner.observability.report import CriticReport, StepReport
from learner.observability.statistics import SourceStatistics, Weights
from learner.observability.timing import StepTimes
from pipeline.metrics.learner import LearnerMetrics
from pipeline.runtime.rundir import write_bytes_atomically
from pipeline.schema import Trajectory


def record_step(
    metrics: LearnerMetrics, batch: Batch, report: StepReport, times: StepTimes, choice: ReplayChoice | None = None
) -> None:
    """Fill every metric that a step changes."""
    s = report.statistics
    metrics.updates_total.inc()
    metrics.steps_total.inc(report.optimizer_steps)
    for kind, count in _tokens(report).items():
        metrics.tokens_total.labels(kind=kind).inc(count)
    for stage, seconds in times.by_stage(report.seconds).items():
        metrics.step_duration_seconds.labels(stage=stage).observe(seconds)
    metrics.wait_seconds_total.inc(times.wait)
    for name, source in s.by_source.items():
        _record_source(metrics, name, source)
    for level, weights in (("token", s.all.ratio), ("sequence", s.all.sequence_ratio)):
        _record_weights(metrics, level, weights)
    metrics.rejected_tokens_total.labels(reason="nonfinite").inc(s.all.rejected)
    metrics.rejected_tokens_total.labels(reason="second_moment").inc(s.all.masked)
    for reason, count in masked_by(s.all).items():
        metrics.rejected_tokens_total.labels(reason=reason).inc(count)
    metrics.staleness_versions.observe_many(s.staleness)
    metrics.replay_age_versions.observe_many(s.replay_ages)
    metrics.replay_token_ratio.set(s.replay_share)
    metrics.off_policy_token_ratio.set(s.off_share)
    metrics.policy_loss.labels(policy="on").set(s.on_loss)
    metrics.policy_loss.labels(policy="off").set(s.off_loss)
    metrics.guard_learning_rate_ratio.set(report.guard_lr_factor)
    for name, trajectories in (("fresh", batch.fresh), ("replay", batch.replayed)):
        metrics.trained_trajectories_total.labels(source=name).inc(len(trajectories))
    if choice is not None:
        metrics.scored_candidates_total.inc(choice.scored)
        metrics.failed_choices_total.inc(len(choice.failed))
    metrics.logprob_diff_nats.observe_many(s.logprob_differences)
    metrics.behaviour_kl_nats.labels(estimator="k1").set(_or_zero(s.all.kl_k1.value))
    metrics.behaviour_kl_nats.labels(estimator="k3").set(_or_zero(s.all.kl_k3.value))
    metrics.entropy_nats.set(_or_zero(s.all.entropy.value))
    metrics.loss.labels(term="policy").set(report.policy_loss)
    metrics.loss.labels(term="entropy").set(report.entropy_loss)
    metrics.loss.labels(term="kl").set(report.kl_loss)
    metrics.loss.labels(term="supervised").set(report.supervised_loss)
    _record_objectives(metrics, report)
    metrics.grad_norm.set(report.grad_norm)
    metrics.learning_rate.set(report.learning_rate)
    for where, count in report.nonfinite.items():
        metrics.nonfinite_steps_total.labels(where=where).inc(count)
    for environment, reward in rewards_by_environment(batch.fresh).items():
        metrics.reward_mean.labels(env=environment).set(reward)


def _record_objectives(metrics: LearnerMetrics, report: StepReport) -> None:
    metrics.reference_kl_nats.set(_or_zero(report.statistics.all.reference_kl.value))
    metrics.kl_coefficient.set(report.kl_coefficient)
    metrics.supervised_tokens_total.inc(report.supervised_tokens)
    metrics.shared_tokens_total.inc(report.tokens_shared)
    metrics.overlong_trajectories_total.inc(report.overlong)
    critic = report.critic
    if critic is not None:
        metrics.loss.labels(term="value").set(critic.loss)
        metrics.value_clip_ratio.set(critic.clip_ratio)
        metrics.value_grad_norm.set(critic.grad_norm)
        if critic.explained_variance is not None:
            metrics.value_explained_variance.set(critic.explained_variance)


def _record_source(metrics: LearnerMetrics, name: str, source: SourceStatistics) -> None:
    for level, values, weights in (
        ("token", source.ratios_S, source.ratio),
        ("sequence", source.sequence_ratios, source.sequence_ratio),
    ):
        metrics.importance_ratio.labels(level=level, source=name).observe_many(values)
        metrics.importance_ratio_squared_total.labels(level=level, source=name).inc(weights.total_squared)
    metrics.source_loss.labels(source=name).set(source.loss)
    for stat, value in (("mean", source.ratio.mean), ("min", source.ratio.smallest), ("max", source.ratio.largest)):
        metrics.source_importance_ratio.labels(source=name, stat=stat).set(
            _or_zero(value) if source.ratio.count else 0.0
        )
    metrics.source_ess_ratio.labels(source=name).set(_or_zero(source.ratio.ess_ratio))
    for estimator, mean in (("k1", source.kl_k1), ("k3", source.kl_k3)):
        metrics.source_kl_nats.labels(source=name, estimator=estimator).set(_or_zero(mean.value))
    low, high = source.clipped_low, source.clipped_high
    metrics.clipped_tokens_total.labels(side="low").inc(low.total)
    metrics.clipped_tokens_total.labels(side="high").inc(high.total)
    metrics.clip_ratio.labels(source=name).set(_or_zero(low.value) + _or_zero(high.value))


def _record_weights(metrics: LearnerMetrics, level: str, weights: Weights) -> None:
    if weights.count:
        for stat, value in (("mean", weights.mean), ("min", weights.smallest), ("max", weights.largest)):
            metrics.batch_importance_ratio.labels(level=level, stat=stat).set(_or_zero(value))
        metrics.batch_ess_ratio.labels(level=level).set(_or_zero(weights.ess_ratio))


def step_line(
    batch: Batch, report: StepReport, times: StepTimes, published: dict[str, Any], choice: ReplayChoice | None = None
) -> dict[str, Any]:
    """The JSON object of one update. ``step`` counts finished updates (the first line is step 1); times are Unix
    seconds; ``published`` tells of the last finished publication. ``seconds``: the stages add up to ``step``, the time
    since the line before. Rewards, signals, turns and times are of fresh trajectories: they tell how good the policy
    is."""
    s, trajectories = report.statistics, batch.fresh
    rewards = [t.reward for t in trajectories if t.reward is not None]
    replayed = [t.reward for t in batch.replayed if t.reward is not None]
    timings = [t.timings for t in trajectories]
    sources = s.by_source
    tokens = _tokens(report)
    return {
        "step": report.update + 1,
        "update": report.update,
        "time": report.finished_at,
        "started": report.started_at,
        "finished": report.finished_at,
        "policy_version": report.policy_version,
        "reward_mean": _mean(rewards),
        "reward_std": float(np.std(rewards)) if rewards else None,
        "reward_mean_replayed": _mean(replayed),
        "rewards": rewards_by_environment(trajectories),
        "signals": first_signals(trajectories),
        "ratio_mean": s.all.ratio.mean,
        "ratio_min": s.all.ratio.smallest if s.all.ratio.count else None,
        "ratio_max": s.all.ratio.largest if s.all.ratio.count else None,
        "ess_ratio": s.all.ratio.ess_ratio,
        "ess_fresh": sources["fresh"].ratio.ess_ratio,
        "ess_replay": sources["replay"].ratio.ess_ratio,
        "ess_carried": sources["replay"].ratio.carried_ratio,
        "ratio_mean_replay": sources["replay"].ratio.mean,
        "ratio_max_replay": sources["replay"].ratio.largest if sources["replay"].ratio.count else None,
        "kl_k3_replay": sources["replay"].kl_k3.value,
        "sequence_ess_ratio": s.all.sequence_ratio.ess_ratio,
        "kl_k1": s.all.kl_k1.value,
        "kl_k3": s.all.kl_k3.value,
        "entropy": s.all.entropy.value,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        **_critic(report.critic),
        "clip_fraction": _or_zero(s.all.clipped_low.value) + _or_zero(s.all.clipped_high.value),
        **{
            f"clip_fraction_{name}": _or_zero(source.clipped_low.value) + _or_zero(source.clipped_high.value)
            for name, source in sources.items()
        },
        "loss_on": s.on_loss,
        "loss_off": s.off_loss,
        "guard_lr_factor": report.guard_lr_factor,
        "clip_fraction_low": s.all.clipped_low.value,
        "clip_fraction_high": s.all.clipped_high.value,
        "staleness_mean": float(s.staleness.mean()) if len(s.staleness) else None,
        "staleness_max": int(s.staleness.max()) if len(s.staleness) else None,
        "logprob_diff_mean": float(s.logprob_differences.mean()) if len(s.logprob_differences) else None,
        "replay_age_mean": _mean(s.replay_ages),
        "replay_age_max": int(s.replay_ages.max()) if len(s.replay_ages) else None,
        "replay_share": s.replay_share,
        "off_share": s.off_share,
        "n_replayed": len(batch.replayed),
        "overlong": report.overlong,
        "hinted": sum(bool(t.hinted_contexts) for t in batch.trajectories),
        "baseline_mean": _mean([g.plan.baseline for g in batch.groups if g.plan.baseline is not None]),
        "choice_failed": len(choice.failed) if choice is not None else 0,
        "sampled_tokens_fresh": sum(t.n_sampled for t in trajectories),
        "rejected": {"nonfinite": s.all.rejected, "second_moment": s.all.masked, **masked_by(s.all)},
        "masked_fraction": {
            reason: count / max(1, s.all.seen)
            for reason, count in (("second_moment", s.all.masked), *masked_by(s.all).items())
        },
        "truncated_fraction": s.all.truncated.value,
        "kl_reference": s.all.reference_kl.value,
        "kl_coefficient": report.kl_coefficient,
        "kl_loss": report.kl_loss,
        "supervised_loss": report.supervised_loss,
        "supervised_tokens": report.supervised_tokens,
        "learning_rate": report.learning_rate,
        "optimizer_steps": report.optimizer_steps,
        "nonfinite": dict(report.nonfinite),
        "tokens_trained": report.tokens_trained,
        "tokens_masked": tokens["masked"],
        "tokens_padding": tokens["padding"],
        "tokens_shared": report.tokens_shared,
        "tokens_without_signal": report.tokens_without_signal,
        "tokens_per_second": report.tokens_per_second,
        "seconds": {**times.by_stage(report.seconds), "step": times.total},
        "published": published,
        "n_groups": len(batch.groups),
        "n_trajectories": len(batch.trajectories),
        "turns_mean": _mean([len(t.turns) for t in trajectories]),
        "sampled_tokens_mean": _mean([t.n_sampled for t in trajectories]),
        "generation_started": min((t.started_at for t in timings), default=None),
        "generation_finished": max((t.finished_at for t in timings), default=None),
    }


def trained_facts(batch: Batch, report: StepReport, choice: ReplayChoice) -> Trained:
    """What CONSUMED says of the update. Entropies of trajectories of which only one turn was trained are left out: they
    are not means over the trajectory."""
    s = report.statistics
    partial = {row.trajectory_index for row in batch.rows if not row.whole}
    groups, sequence = {}, 0
    for group in batch.groups:
        entropy = {}
        for trajectory in group.trajectories:
            value = s.entropy_by_sequence.get(sequence)
            if value is not None and sequence not in partial:
                entropy[trajectory.trajectory_id] = value
            sequence += 1
        replayed = tuple(t.trajectory_id for t in group.candidates)
        groups[group.group_id] = TrainedGroup(replayed, entropy, group.group_id in choice.failed)
    ess = {"all": s.all.ratio.ess_ratio, **{name: part.ratio.ess_ratio for name, part in s.by_source.items()}}
    ess["carried"] = s.by_source["replay"].ratio.carried_ratio
    return Trained(ess, groups, report.policy_version)


def masked_by(source: SourceStatistics) -> dict[str, int]:
    """Tokens that ``importance.masks`` rejected, by reason."""
    return {reason: source.reasons[code] for code, reason in enumerate(REASONS) if code}


def rewards_by_environment(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward of each environment."""
    found: dict[str, list[float]] = {}
    for t in trajectories:
        if t.reward is not None:
            found.setdefault(t.task.environment, []).append(t.reward)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def first_signals(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of each signal, the mean over trajectories of the value in the first turn that reports it."""
    found: dict[str, list[float]] = {}
    for t in trajectories:
        first: dict[str, float] = {}
        for turn in t.turns:
            for name, value in turn.signals.items():
                first.setdefault(name, value)
        for name, value in first.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def _critic(report: CriticReport | None) -> dict[str, float | None]:
    """Of the last optimizer step of the critic; nothing without one."""
    if report is None:
        return {}
    return {
        "value_loss": report.loss,
        "value_clip_fraction": report.clip_ratio,
        "value_grad_norm": report.grad_norm,
        "value_explained_variance": report.explained_variance,
    }


def _tokens(report: StepReport) -> dict[str, int]:
    return {"trained": report.tokens_trained, "masked": report.tokens_masked, "padding": report.tokens_padding}


def _mean(values: npt.ArrayLike) -> float | None:
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def _or_zero(value: float | None) -> float:
    return 0.0 if value is None else value


class MetricsLog:
    """Appends lines; each is flushed to the operating system before ``write`` returns.

    Opening it drops the lines of steps after ``updates`` (they will be made again) and whatever is no whole line.
    """

    def __init__(self, path: Path, updates: int) -> None:
        self._path = path
        _rewind(path, updates)
        self._file: BinaryIO = path.open("ab")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        self._file.flush()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *args: object) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _rewind(path: Path, updates: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _stays(line, updates)]
    if len(kept) != len(lines):
        write_bytes_atomically(path, b"".join(kept))


def _stays(line: bytes, updates: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    step = value.get("step") if isinstance(value, dict) else None
    return isinstance(step, int) and step <= updates
