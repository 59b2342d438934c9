"""Numbers of an update: one table for Prometheus metrics and for the line in ``metrics.jsonl``.

``metrics.jsonl``: one JSON object a line for each update, in order, also after a resume.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

import numpy as np
import numpy.typing as npt
import orjson

from learner.data.rows import Batch, Trained
from learner.losses.loss import REASONS
from learner.metrics import PADDED_BECAUSE, LearnerMetrics
from learner.observability.statistics import BatchStatistics, SourceStatistics, Weights
from learner.observability.timing import StepTimes
from learner.process.batches import ReplayChoice
from learner.training.report import CriticReport, StepReport
from pipeline.runtime.disk import left_out, whole_or_nothing
from pipeline.runtime.metrics import Declaration
from pipeline.runtime.run_directory import write_bytes_atomically
from pipeline.schema import Trajectory
from pipeline.schema import record_file as frames

log = logging.getLogger(__name__)
M = LearnerMetrics
ABSENT: Final = object()
"""Read where an update has no such number: its key is left out of the line, its metric stays as it is."""


@dataclass(frozen=True)
class Update:
    """One finished update: the source of every number."""

    batch: Batch
    report: StepReport
    times: StepTimes
    published: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the last finished publication."""
    choice: ReplayChoice | None = None
    saved: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the last finished checkpoint."""
    groups_left_out: int = 0

    @property
    def s(self) -> BatchStatistics:
        return self.report.statistics

    @property
    def all(self) -> SourceStatistics:
        return self.report.statistics.all

    @property
    def replay(self) -> SourceStatistics:
        return self.report.statistics.by_source["replay"]

    @cached_property
    def fresh(self) -> list[Trajectory]:
        return self.batch.fresh

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by stage."""
        return self.times.by_phase(self.report.seconds)

    @property
    def rejected(self) -> dict[str, int]:
        """Tokens left out of the loss, by reason."""
        masks = {reason: self.all.reasons[code] for code, reason in enumerate(REASONS) if code}
        return {"nonfinite": self.all.rejected, "second_moment": self.all.masked, **masks}


@dataclass(frozen=True, slots=True)
class Number:
    """One number of an update: its key in ``metrics.jsonl``, its metric, or both."""

    key: str
    """Empty: it is not in the line."""
    read: Callable[[Update], Any]
    """A mapping, for a metric, is from label values to numbers."""
    metric: Declaration[Any] | None = None
    labels: tuple[str, ...] = ()
    """Values of the metric's labels."""
    doc: str = ""
    """Meaning of a number without a metric."""
    keep: bool = False
    """None leaves the gauge as it is; otherwise it becomes 0."""


def _critic(read: Callable[[CriticReport], float | None]) -> Callable[[Update], Any]:
    return lambda u: ABSENT if u.report.critic is None else read(u.report.critic)


def _experts(read: Callable[[StepReport], float | None]) -> Callable[[Update], Any]:
    return lambda u: ABSENT if (value := read(u.report)) is None else value


def _of_source(source: str, **keys: str) -> tuple[Number, ...]:
    """Numbers of one source of tokens. ``keys``: those in the line."""

    def of(read: Callable[[SourceStatistics], Any]) -> Callable[[Update], Any]:
        return lambda u: read(u.s.by_source[source])

    def key(name: str) -> str:
        return keys.get(name, "")

    return (
        Number(key("ess"), of(lambda s: s.ratio.ess_ratio), M.source_ess_ratio, (source,)),
        Number(key("sequence_ess"), of(lambda s: s.sequence_ratio.ess_ratio), M.source_sequence_ess_ratio, (source,)),
        Number(key("ratio_mean"), of(lambda s: s.ratio.mean), M.source_importance_ratio, (source, "mean")),
        Number("", of(lambda s: _smallest(s.ratio)), M.source_importance_ratio, (source, "min")),
        Number(key("ratio_max"), of(lambda s: _largest(s.ratio)), M.source_importance_ratio, (source, "max")),
        Number("", of(lambda s: s.kl_k1.value), M.source_kl_nats, (source, "k1")),
        Number(key("kl_k3"), of(lambda s: s.kl_k3.value), M.source_kl_nats, (source, "k3")),
        Number(f"clip_fraction_{source}", of(lambda s: _clipped(s)), M.clip_ratio, (source,)),
        Number("", of(lambda s: s.loss), M.source_loss, (source,)),
        Number("", of(lambda s: s.ratios_S), M.importance_ratio, ("token", source)),
        Number("", of(lambda s: s.sequence_ratios), M.importance_ratio, ("sequence", source)),
        Number("", of(lambda s: s.ratio.total_squared), M.importance_ratio_squared_total, ("token", source)),
        Number(
            "", of(lambda s: s.sequence_ratio.total_squared), M.importance_ratio_squared_total, ("sequence", source)
        ),
    )


NUMBERS: Final = (
    Number("step", lambda u: u.report.update + 1, doc="Updates made; 1 in the first line."),
    Number("update", lambda u: u.report.update, doc="Number of the update, from 0."),
    Number("time", lambda u: u.report.finished_at, doc="Unix time at the end of the update."),
    Number("started", lambda u: u.report.started_at, doc="Unix time at the start of the update."),
    Number("finished", lambda u: u.report.finished_at, doc="Equal to time."),
    Number("policy_version", lambda u: u.report.policy_version, doc="Policy version before the update."),
    Number("", lambda u: 1, M.updates_total),
    Number("optimizer_steps", lambda u: u.report.optimizer_steps, M.steps_total),
    Number("reward_mean", lambda u: _mean(_rewards(u.fresh)), doc="Mean reward of fresh trajectories."),
    Number("reward_std", lambda u: _std(_rewards(u.fresh)), doc="Standard deviation of these rewards."),
    Number(
        "reward_mean_replayed", lambda u: _mean(_rewards(u.batch.replayed)), doc="Mean reward of replayed trajectories."
    ),
    Number("rewards", lambda u: rewards_by_environment(u.fresh), M.reward_mean),
    Number("signals", lambda u: first_signals(u.fresh), doc="Mean of each environment signal, the same trajectories."),
    Number("ratio_mean", lambda u: u.all.ratio.mean, M.batch_importance_ratio, ("token", "mean"), keep=True),
    Number("ratio_min", lambda u: _smallest(u.all.ratio), M.batch_importance_ratio, ("token", "min"), keep=True),
    Number("ratio_max", lambda u: _largest(u.all.ratio), M.batch_importance_ratio, ("token", "max"), keep=True),
    Number("", lambda u: u.all.sequence_ratio.mean, M.batch_importance_ratio, ("sequence", "mean"), keep=True),
    Number("", lambda u: _smallest(u.all.sequence_ratio), M.batch_importance_ratio, ("sequence", "min"), keep=True),
    Number("", lambda u: _largest(u.all.sequence_ratio), M.batch_importance_ratio, ("sequence", "max"), keep=True),
    Number("ess_ratio", lambda u: u.all.ratio.ess_ratio, M.batch_ess_ratio, ("token",), keep=True),
    Number("sequence_ess_ratio", lambda u: u.all.sequence_ratio.ess_ratio, M.batch_ess_ratio, ("sequence",), keep=True),
    *_of_source("fresh", ess="ess_fresh"),
    *_of_source(
        "replay",
        ess="ess_replay",
        sequence_ess="sequence_ess_replay",
        ratio_mean="ratio_mean_replay",
        ratio_max="ratio_max_replay",
        kl_k3="kl_k3_replay",
    ),
    Number("ess_carried", lambda u: u.replay.ratio.carried_ratio, doc="ess_replay times min(1, ratio_mean_replay)."),
    Number(
        "sequence_ess_carried",
        lambda u: u.replay.sequence_ratio.carried_ratio,
        doc="sequence_ess_replay times min(1, mean of the replayed trajectories' products of pi/mu).",
    ),
    Number("kl_k1", lambda u: u.all.kl_k1.value, M.behaviour_kl_nats, ("k1",), keep=True),
    Number("kl_k3", lambda u: u.all.kl_k3.value, M.behaviour_kl_nats, ("k3",), keep=True),
    Number("entropy", lambda u: u.all.entropy.value, M.entropy_nats, keep=True),
    Number("loss", lambda u: u.report.loss, doc="Policy loss and entropy bonus, last optimizer step."),
    Number("", lambda u: u.report.policy_loss, M.loss, ("policy",)),
    Number("", lambda u: u.report.entropy_loss, M.loss, ("entropy",)),
    Number("kl_loss", lambda u: u.report.kl_loss, M.loss, ("kl",)),
    Number("supervised_loss", lambda u: u.report.supervised_loss, M.loss, ("supervised",)),
    Number("value_loss", _critic(lambda c: c.loss), M.loss, ("value",)),
    Number("value_clip_fraction", _critic(lambda c: c.clip_ratio), M.value_clip_ratio),
    Number("value_grad_norm", _critic(lambda c: c.grad_norm), M.value_grad_norm),
    Number("value_explained_variance", _critic(lambda c: c.explained_variance), M.value_explained_variance, keep=True),
    Number("grad_norm", lambda u: u.report.grad_norm, M.grad_norm),
    Number("learning_rate", lambda u: u.report.learning_rate, M.learning_rate),
    Number("nonfinite", lambda u: dict(u.report.nonfinite), M.nonfinite_steps_total),
    Number("clip_fraction", lambda u: _clipped(u.all), doc="Share of trained tokens that were clipped."),
    Number("clip_fraction_low", lambda u: u.all.clipped_low.value, doc="Share clipped at the lower bound."),
    Number("clip_fraction_high", lambda u: u.all.clipped_high.value, doc="Share clipped at the upper bound."),
    Number("", lambda u: u.all.clipped_low.total, M.clipped_tokens_total, ("low",)),
    Number("", lambda u: u.all.clipped_high.total, M.clipped_tokens_total, ("high",)),
    Number("loss_on", lambda u: u.s.on_loss, M.policy_loss, ("on",)),
    Number("loss_off", lambda u: u.s.off_loss, M.policy_loss, ("off",)),
    Number("guard_lr_factor", lambda u: u.report.guard_lr_factor, M.guard_learning_rate_ratio),
    Number("", lambda u: u.s.staleness, M.staleness_versions),
    Number("staleness_mean", lambda u: _mean(u.s.staleness), doc="Mean age of fresh trajectories, versions."),
    Number("staleness_max", lambda u: _max(u.s.staleness), M.staleness_max_versions, keep=True),
    Number("", lambda u: u.s.logprob_differences, M.logprob_diff_nats),
    Number("logprob_diff_mean", lambda u: _mean(u.s.logprob_differences), doc="Mean engine mismatch at version lag 0."),
    Number("", lambda u: u.s.replay_ages, M.replay_age_versions),
    Number("replay_age_mean", lambda u: _mean(u.s.replay_ages), doc="Mean age of replayed trajectories, versions."),
    Number("replay_age_max", lambda u: _max(u.s.replay_ages), doc="Largest age of replayed ones, versions."),
    Number("replay_share", lambda u: u.s.replay_share, M.replay_token_ratio),
    Number("off_share", lambda u: u.s.off_share, M.off_policy_token_ratio),
    Number("", lambda u: len(u.fresh), M.trained_trajectories_total, ("fresh",)),
    Number("n_replayed", lambda u: len(u.batch.replayed), M.trained_trajectories_total, ("replay",)),
    Number("overlong", lambda u: u.report.overlong, M.overlong_trajectories_total),
    Number(
        "hinted",
        lambda u: sum(bool(t.hinted_contexts) for t in u.batch.trajectories),
        doc="Trajectories with a counterfactual prompt.",
    ),
    Number(
        "baseline_mean",
        lambda u: _mean([g.plan.baseline for g in u.batch.groups if g.plan.baseline is not None]),
        doc="Mean reward of the greedy rollouts, where groups have them.",
    ),
    Number("candidates_scored", lambda u: dict(u.choice.scored) if u.choice else {}, M.scored_candidates_total),
    Number("choice_failed", lambda u: len(u.choice.failed) if u.choice else 0, M.failed_choices_total),
    Number(
        "sampled_tokens_fresh", lambda u: sum(t.n_sampled for t in u.fresh), doc="Sampled tokens of fresh trajectories."
    ),
    Number("rejected", lambda u: u.rejected, M.rejected_tokens_total),
    Number(
        "masked_fraction",
        lambda u: {reason: n / max(1, u.all.seen) for reason, n in u.rejected.items() if reason != "nonfinite"},
        doc="Share of sampled tokens that were rejected, by reason.",
    ),
    Number(
        "truncated_fraction",
        lambda u: u.all.truncated.value,
        doc="Share of trained tokens whose correction weight was truncated.",
    ),
    Number("kl_reference", lambda u: u.all.reference_kl.value, M.reference_kl_nats),
    Number("supervised_tokens", lambda u: u.report.supervised_tokens, M.supervised_tokens_total),
    Number("tokens_trained", lambda u: u.report.tokens_trained, M.tokens_total, ("trained",)),
    Number("tokens_masked", lambda u: u.report.tokens_masked, M.tokens_total, ("masked",)),
    Number("tokens_padding", lambda u: u.report.tokens_padding, M.tokens_total, ("padding",)),
    Number("tokens_shared", lambda u: u.report.tokens_shared, M.shared_tokens_total),
    Number(
        "tokens_without_signal",
        lambda u: u.report.tokens_without_signal,
        doc="Sampled tokens with an advantage of exactly 0.",
    ),
    Number("tokens_per_second", lambda u: u.report.tokens_per_second, doc="Tokens of the rows per second of the step."),
    Number("mfu", lambda u: u.report.mfu, M.mfu_ratio),
    Number("router_entropy", _experts(lambda r: r.router_entropy), M.router_entropy_nats),
    Number("expert_imbalance", _experts(lambda r: r.expert_imbalance), M.expert_imbalance_ratio),
    Number("peak_memory_bytes", lambda u: u.report.peak_memory_bytes, M.peak_memory_bytes),
    Number("rows_form", lambda u: u.report.form.name, doc="shared, packed or padded rows."),
    Number(
        "rows_padded",
        lambda u: {reason: int(u.report.form.padded_because == reason) for reason in PADDED_BECAUSE},
        M.padded_rows,
    ),
    Number("", lambda u: u.phases, M.step_duration_seconds),
    Number(
        "seconds",
        lambda u: {**u.phases, "step": u.times.total},
        doc="Seconds by stage; step is their sum, the time since the previous line.",
    ),
    Number("", lambda u: u.times.wait, M.wait_seconds_total),
    Number("", lambda u: u.times.total, M.update_seconds),
    Number("published", lambda u: u.published, doc="The last finished publication of weights."),
    Number("n_groups", lambda u: len(u.batch.groups), doc="Groups of the update."),
    Number("n_trajectories", lambda u: len(u.batch.trajectories), doc="Trajectories of the update."),
    Number("turns_mean", lambda u: _mean([len(t.turns) for t in u.fresh]), doc="Mean turns of fresh trajectories."),
    Number(
        "sampled_tokens_mean",
        lambda u: _mean([t.n_sampled for t in u.fresh]),
        doc="Mean sampled tokens of fresh trajectories.",
    ),
    Number(
        "generation_started",
        lambda u: min((t.timings.started_at for t in u.fresh), default=None),
        doc="Unix time at the start of the first fresh trajectory.",
    ),
    Number(
        "generation_finished",
        lambda u: max((t.timings.finished_at for t in u.fresh), default=None),
        doc="Unix time at the end of the last fresh trajectory.",
    ),
    Number("saved", lambda u: u.saved, doc="The last finished checkpoint."),
    Number("groups_left_out", lambda u: u.groups_left_out, doc="Groups not trained: all rewards equal."),
)


def record_step(metrics: LearnerMetrics, update: Update) -> None:
    """Fill every metric that an update changes."""
    for number in NUMBERS:
        value = number.read(update) if number.metric is not None else ABSENT
        if number.metric is None or value is ABSENT or (value is None and number.keep):
            continue
        for labels, one in value.items() if isinstance(value, Mapping) else [(number.labels, value)]:
            number.metric.record(metrics, [labels] if isinstance(labels, str) else labels, 0.0 if one is None else one)


def step_line(update: Update) -> dict[str, Any]:
    """The JSON object of one update."""
    found = {number.key: number.read(update) for number in NUMBERS if number.key}
    return {key: value for key, value in found.items() if value is not ABSENT}


def trained_facts(
    batch: Batch, report: StepReport, choice: ReplayChoice, guard_level: Literal["token", "sequence"] = "token"
) -> Trained:
    """Facts of the update for the message CONSUMED, entropies of candidates that were not chosen among them.
    ``guard_level``: ratios that the ESS guard goes by."""
    s = report.statistics
    entropy = {name: value for of_group in choice.entropies.values() for name, value in of_group.items()}
    for index, trajectory in enumerate(batch.trajectories):
        if index in s.entropy_by_trajectory:
            entropy[trajectory.trajectory_id] = s.entropy_by_trajectory[index]
    replayed = {g.group_id: [t.trajectory_id for t in g.candidates] for g in batch.groups if g.candidates}
    failed = sum(g.group_id in choice.failed for g in batch.groups)
    ess = {"all": s.all.ratio.ess_ratio, **{name: part.ratio.ess_ratio for name, part in s.by_source.items()}}
    replay = s.by_source["replay"]
    ess["carried"] = (replay.ratio if guard_level == "token" else replay.sequence_ratio).carried_ratio
    return Trained(ess, replayed, entropy, failed, report.policy_version)


def rewards_by_environment(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean reward of each environment."""
    found: dict[str, list[float]] = {}
    for t in trajectories:
        if t.reward is not None:
            found.setdefault(t.task.environment, []).append(t.reward)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def first_signals(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean over trajectories of each signal, taken from the first turn that reports it."""
    found: dict[str, list[float]] = {}
    for t in trajectories:
        first = {name: value for turn in reversed(t.turns) for name, value in turn.signals.items()}
        for name, value in first.items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in sorted(found.items())}


def _rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    return [t.reward for t in trajectories if t.reward is not None]


def _mean(values: npt.ArrayLike) -> float | None:
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()) if array.size else None


def _std(values: Sequence[float]) -> float | None:
    return float(np.std(values)) if values else None


def _max(values: npt.NDArray[np.int64]) -> int | None:
    return int(values.max()) if len(values) else None


def _smallest(weights: Weights) -> float | None:
    return weights.smallest if weights.count else None


def _largest(weights: Weights) -> float | None:
    return weights.largest if weights.count else None


def _clipped(source: SourceStatistics) -> float:
    return (source.clipped_low.value or 0.0) + (source.clipped_high.value or 0.0)


class MetricsLog:
    """Appends lines, each whole or not at all; it is at the operating system before ``write`` returns.

    Opening it drops the lines of steps after ``updates`` (they will be made again) and whatever is no whole line.
    """

    def __init__(self, path: Path, updates: int) -> None:
        self._path = path
        _rewind(path, updates)
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, line: Mapping[str, Any]) -> None:
        """Raises :class:`OSError` where the disk refuses; the line may then be written again."""
        with whole_or_nothing(self._file.fileno()):
            data = orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE)
            frames.write(self._file.fileno(), [data])

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *args: object) -> None:
        if reason := left_out(partial(os.fsync, self._file.fileno()), self._path):
            log.warning("a power loss may take the last lines of metrics.jsonl: %s", reason)
        self._file.close()


def _rewind(path: Path, updates: int) -> None:
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if _stays(line, updates)]
    if len(kept) != len(lines):
        write_bytes_atomically(path, b"".join(kept), make_folder=False)


def _stays(line: bytes, updates: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    step = value.get("step") if isinstance(value, dict) else None
    return isinstance(step, int) and step <= updates
