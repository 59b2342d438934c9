"""The whole run file, and the checks that involve several sections.

``report_to`` and the section ``trackers`` are about reports to experiment trackers (docs/LOOK.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeline.config.advantages import AdvantageConfig
from pipeline.config.base import Section
from pipeline.config.evaluation import EvaluationConfig, TracesConfig
from pipeline.config.learner import CheckpointConfig, LearnerConfig, PublishConfig
from pipeline.config.lessons import LessonsConfig
from pipeline.config.losses import ImportanceConfig, LossConfig
from pipeline.config.placement import PlacementConfig, check_placement
from pipeline.config.replay import ReplayConfig
from pipeline.config.rewards import ScorerConfig
from pipeline.config.rollouts import (
    ActorConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    SamplingConfig,
    check_colocation,
)
from pipeline.config.stage import GroupsConfig, StageConfig, StalenessConfig

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio", "otel"]


class TrackersConfig(Section):
    """Names and amounts of what is reported to the trackers of ``report_to``. Addresses, keys and offline modes are set
    with the environment variables of each tracker."""

    project: str = Field("afterplay", min_length=1, max_length=100)
    """Project of Weights & Biases and trackio, experiment of MLflow."""
    name: str | None = Field(None, min_length=1, max_length=100)
    """Name of the run at the tracker. None: ``run.name``."""
    rollouts: int = Field(8, ge=0, le=1000)
    """Most rollouts in a table, taken from those whose tokens are kept (``traces``). 0: no tables."""
    rollouts_every: int = Field(10, ge=1)
    """Steps between two tables of trained rollouts. Each evaluation has a table too."""


class RunSection(Section):
    """Name, place and length of the run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", max_length=100)
    """Name of the run and of its directory."""
    id: str | None = Field(None, pattern=r"^[A-Za-z0-9._-]+$", max_length=64)
    """Identity that the learner stamps on published weights. Actors sample only from weights of their own run. None:
    ``afterplay run`` makes a new one at each start; roles that you start yourself stamp versions without a run."""
    directory: Path = Path("runs")
    """Parent of the run directory, which is ``directory/name``. ``~`` is your home folder."""
    total_steps: int = Field(100, ge=1)
    """Length of the run, in updates of the learner."""
    seed: int = Field(0, ge=0, le=2**62)
    """Seed of everything that the run draws at random, except the engine's sampling."""
    disk_bytes_max: int | None = Field(None, ge=1)
    """Bytes of the run directory beyond which no new groups are admitted, until something is removed. Before that older
    logs, traces and records of updates are removed. None: no bound."""

    @property
    def path(self) -> Path:
        """The run directory."""
        return self.directory / self.name


class MetricsConfig(Section):
    """Prometheus metrics of each process."""

    host: str = "127.0.0.1"
    """Address that the metrics servers bind."""
    port: int = Field(0, ge=0, le=65535)
    """First port of ``/metrics`` and ``/healthz``: the replay stage uses port, the learner port + 1, actor i port + 2 +
    i. 0: free ports, written to ``processes.json`` in the run directory."""


class SupervisorConfig(Section):
    """Restarts, health checks and shutdown of the processes of ``afterplay run``."""

    restarts_max: int = Field(20, ge=0)
    """Restarts of one process within an hour before the run is given up. As many starts in a row without any work done
    end the run too, however long they took."""
    stuck_seconds_max: float = Field(300.0, gt=0)
    """Seconds without a health answer, or without progress beyond the limit of its state, after which a process is
    restarted. The alert comes at the limit."""
    progress_seconds_max: float = Field(120.0, gt=0)
    """Shortest limit on the seconds that a process may spend without progress in what it does. The limit is 5 times the
    longest pause that it has had there, or this if that is more; 6 times this for the first training of a process,
    publishing and saving, 30 times for loading."""


class RunConfig(Section):
    """The run file of ``afterplay run FILE``."""

    run: RunSection = RunSection()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    placement: PlacementConfig = PlacementConfig()
    sampling: SamplingConfig = SamplingConfig()
    environments: dict[str, EnvironmentConfig] = Field(default_factory=lambda: {"arithmetic": EnvironmentConfig()})
    """Environments by name. The name is ``Task.environment`` and the ``env`` label of metrics. It has letters, digits,
    ``_``, ``-`` and ``.``."""
    actor: ActorConfig = ActorConfig()
    groups: GroupsConfig = GroupsConfig()
    staleness: StalenessConfig = StalenessConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    importance: ImportanceConfig = ImportanceConfig()
    loss: LossConfig = LossConfig()
    learner: LearnerConfig = LearnerConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    stage: StageConfig = StageConfig()
    replay: ReplayConfig = ReplayConfig()
    lessons: LessonsConfig = LessonsConfig()
    scorer: ScorerConfig = ScorerConfig()
    metrics: MetricsConfig = MetricsConfig()
    traces: TracesConfig = TracesConfig()
    supervisor: SupervisorConfig = SupervisorConfig()
    report_to: tuple[TrackerName, ...] = ()
    """Trackers that the run is reported to: some of tensorboard, wandb, mlflow, trackio, otel."""
    trackers: TrackersConfig = TrackersConfig()

    def updated(self, **sections: Mapping[str, Any]) -> RunConfig:
        """A copy with other values in some sections, which are not validated."""
        changed = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=changed)

    @property
    def context_max(self) -> int:
        """Tokens of a rollout at most. A reference server samples one more for each rollout that it scores."""
        return self.model.max_length - (self.learner.reference.url is not None)

    @property
    def trained_environments(self) -> dict[str, EnvironmentConfig]:
        """Environments that are trained; the others are only evaluated. None in the run of ``afterplay eval``."""
        return {name: section for name, section in self.environments.items() if section.weight > 0}

    def check(self) -> None:
        if not self.environments:
            raise ValueError(
                "environments is empty: add at least one, for example environments: {guess: {name: number_guess}}"
            )
        for name in self.environments:
            if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name) is None:
                raise ValueError(
                    f"environments: expected names of at most 100 letters, digits, _, - and ., got {name!r:.120}"
                )
        if self.sampling.max_tokens >= self.model.max_length:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) must be below model.max_length "
                f"({self.model.max_length}), which includes the prompt"
            )
        if self.learner.reference.url is not None and self.sampling.temperature != 1:
            raise ValueError(
                f"sampling.temperature is {self.sampling.temperature:g}, but the server of learner.reference.url "
                "scores with 1: set sampling.temperature: 1, or learner.reference.folder in place of the url"
            )
        self._check_replay()
        self._check_adapters()
        self._check_delta()
        self._check_rewards()
        check_colocation(self.engine, self.learner, self.publish)
        check_placement(self.placement, self.engine, self.learner)
        self._check_evaluation()
        if len(set(self.report_to)) < len(self.report_to):
            raise ValueError(f"report_to names a tracker twice: {', '.join(self.report_to)}")
        if self.learner.minibatches > self.groups.trajectories_per_step:
            raise ValueError(
                f"learner.minibatches ({self.learner.minibatches}) is more than the "
                f"{self.groups.trajectories_per_step} trajectories of a step"
            )

    def _check_rewards(self) -> None:
        scorer = self.scorer
        for part in scorer.parts:
            unknown = sorted(set(part.environments) - set(self.environments))
            if unknown:
                raise ValueError(
                    f"scorer: {part.known_as} names unknown environments: {', '.join(unknown)}; expected some of "
                    f"{', '.join(self.environments)}"
                )
        if scorer.by_group and self.advantage.orders_greedy:
            raise ValueError(
                f"scorer.functions has one with per: group, but advantage.estimator {self.advantage.estimator.name} "
                "needs the reward of a greedy rollout, which is not part of a group: use per: trajectory, or another "
                "estimator"
            )
        for name, section in self.environments.items():
            if section.name == "question" and not any(p.weight and p.applies_to(name) for p in scorer.parts):
                raise ValueError(
                    f"environments.{name} is the built-in question, whose own score is always 0, and no part of scorer "
                    "applies to it: add a grader, for example scorer: {functions: [{path: exact}]}"
                )
            if section.name == "question" and section.tasks_from is None:
                raise ValueError(f"environments.{name} is the built-in question: set tasks_from to its questions")

    def _check_evaluation(self) -> None:
        """Refuse unknown environments and splits. Splits are checked here only for data sets; other environments report
        theirs when the first actor connects."""
        evaluation = self.evaluation
        if not evaluation.on:
            return
        unknown = sorted(set(evaluation.environments) - set(self.environments))
        if unknown:
            raise ValueError(
                f"evaluation.environments: expected some of {', '.join(self.environments)}, got {', '.join(unknown)}"
            )
        data_of = {name: section.tasks_from for name, section in self.environments.items()}
        lacking = {name: data for name, data in data_of.items() if data and evaluation.split not in data.splits}
        wanted = set(evaluation.environments)
        if not wanted and len(lacking) == len(data_of):
            wanted = {*lacking}
        elif not wanted and self.trained_environments:
            wanted = {*data_of} - {*self.trained_environments}
        for name, data in lacking.items():
            if name in wanted:
                raise ValueError(
                    f"evaluation.split is {evaluation.split}, but environments.{name}.tasks_from.splits has "
                    f"{', '.join(data.splits)}: add it there, for example splits: {{train: 0.9, eval: 0.1}}"
                )

    def _check_adapters(self) -> None:
        if self.publish.lora == "merged":
            return
        if not self.learner.lora.rank:
            raise ValueError("publish.lora is adapter, but learner.lora.rank is 0: there are no adapters to publish")
        if self.engine.kind == "embedded" or self.engine.weight_transfer != "files":
            raise ValueError(
                "publish.lora is adapter, which only vLLM servers can load, and only from files: set engine.kind to "
                "vllm or external and engine.weight_transfer to files, or publish.lora: merged"
            )

    def _check_delta(self) -> None:
        """Refuse what a weight delta cannot serve."""
        engine, publish = self.engine, self.publish
        if engine.weight_transfer != "delta":
            return
        what = "engine.weight_transfer is delta"
        if engine.kind == "external":
            raise ValueError(f"{what}, which external engines cannot load: set it to files")
        if publish.dtype == "float32":
            raise ValueError(
                f"{what}, but publish.dtype is float32, of which nearly every element changes with each update: set "
                "publish.dtype: bfloat16, or weight_transfer: files"
            )
        if (publish.dtype, self.learner.compute_dtype) == ("auto", "float32"):
            raise ValueError(
                f"{what}, but learner.compute_dtype is float32, which publish.dtype: auto follows: set "
                "learner.compute_dtype: bfloat16, or weight_transfer: files"
            )
        published = "bfloat16" if publish.dtype == "auto" else publish.dtype
        widest = "bfloat16" if engine.dtype == "auto" else engine.dtype
        if widest not in (published, "float32"):
            raise ValueError(
                f"{what}, but engine.dtype {engine.dtype} cannot hold every value of publish.dtype {published}: "
                "set both to one, or weight_transfer: files"
            )
        if not self.checkpoint.at_end:
            raise ValueError(
                f"{what}, with which the last version may not be on disk as a whole: set checkpoint.at_end: true, or "
                "weight_transfer: files"
            )

    def _check_replay(self) -> None:
        replay, n, supervised = self.replay, self.groups.n_rollout, self.loss.supervised
        if not replay.enabled and supervised.weight and supervised.demonstrations is None:
            raise ValueError(
                "loss.supervised without demonstrations trains those that are replayed, but replay.enabled is false: "
                "set replay.enabled: true, or loss.supervised.demonstrations"
            )
        if not replay.enabled:
            return
        if replay.correction.name != "token" and self.loss.off_policy.name != "clip":
            raise ValueError(
                f"replay.correction is {replay.correction.name}, but loss.off_policy is {self.loss.off_policy.name}, "
                "which weighs each token by itself: set loss.off_policy: clip, or replay.correction: token"
            )
        if replay.mode == "groups" and n == 1:
            raise ValueError(
                "replay.mode: groups brings back groups of different rewards, which groups.n_rollout: 1 has none of: "
                "set replay.enabled: false, or a larger groups.n_rollout"
            )
        if replay.mode == "mix" and replay.trajectories_per_task >= n:
            raise ValueError(
                f"replay.trajectories_per_task ({replay.trajectories_per_task}) must be below groups.n_rollout ({n}): "
                "every group needs fresh rollouts"
            )
        if replay.mode == "groups" and self.advantage.orders_greedy:
            raise ValueError(
                "replay.mode: groups brings groups back without their greedy rollout, which this advantage "
                "compares with: set replay.mode: mix, or another advantage.estimator"
            )
        if replay.max_age is not None and replay.max_age < self.staleness.max:
            raise ValueError(
                f"replay.max_age ({replay.max_age}) is below staleness.max ({self.staleness.max}): trajectories could "
                "be too old before they are first trained"
            )
