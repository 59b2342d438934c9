"""Updates of a run made again, without engines and environments: the code of ``afterplay retrain``.

*consumes* a checkpoint and what the learner was sent for the updates behind it, from the store of a run or from a
bundle (:mod:`learner.process.bundle`); *produces* each update with where it differs from what the run recorded. The
trainer is the learner's own.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import orjson
import torch
from safetensors import safe_open
from torch import Tensor

from learner.checkpoints.checkpoint import CheckpointState, checkpoint_path, save_checkpoint
from learner.data.rows import Batch, Group, StoredRollout
from learner.observability.timing import LoopClock
from learner.policy.policy import Policy
from learner.process.batches import make_batch
from learner.process.build import load_trainer
from learner.process.preflight import with_options
from learner.process.rank_processes import RankZero
from learner.process.recorder import Update, step_line
from learner.process.session import GroupAssembler
from learner.process.update_record import Difference, differences, of_metrics, read_record
from learner.training.report import StepReport
from learner.training.trainer import Trainer
from pipeline.config import RunConfig
from pipeline.config.load import dump, load, loads, read_override
from pipeline.errors import ConfigurationError, DamagedFiles
from pipeline.runtime.folders import find_damage
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema.codec import Limits, decode_trajectory
from pipeline.store.store import store_path
from pipeline.store.trained import SentUpdate, TrainedUpdates, describe_steps, repeatable
from pipeline.supervisor.history import ABSENT, FIXED, exact_checkpoints, read_history
from pipeline.views.step_lines import read_lines

OFFLINE = (
    "learner.", "loss.", "advantage.", "importance.", "replay.correction", "replay.ess_guard.",
    "scorer.environment_weight", "run.seed", "run.total_steps",
)  # fmt: skip
"""Beginnings of the keys that an update reads."""
REASONS = {
    "environments": "the rollouts are recorded",
    "actor": "the rollouts are recorded",
    "sampling": "the rollouts are recorded, with the log-probabilities of the policy that sampled them",
    "engine": "nothing is sampled",
    "groups": "the groups are recorded",
    "staleness": "the ages of the rollouts are recorded; importance.* has their correction",
    "replay": "the rollouts that were replayed are recorded; of replay only correction and ess_guard can change",
    "scorer": "the rewards are recorded",
    "lessons": "the prompts are recorded",
    "evaluation": "nothing is evaluated: save weights and use afterplay eval",
    "model": "the weights are those of a checkpoint",
}
"""Sections that cannot change, and why; the others take no part in an update."""
OF_THE_MACHINE = frozenset({
    "time", "started", "finished", "seconds", "tokens_per_second", "published", "saved", "mfu", "peak_memory_bytes",
    "candidates_scored", "choice_failed",
})  # fmt: skip
"""Keys of ``metrics.jsonl`` that are not of the computation."""


class Source(Protocol):
    """A run, or a bundle of one."""

    @property
    def config(self) -> RunConfig:
        """``run.path`` is the directory."""

    @property
    def directory(self) -> RunDirectory: ...

    @property
    def updates(self) -> frozenset[int]:
        """Updates whose groups are there."""

    def sent(self, update: int) -> SentUpdate:
        """Groups of one of these."""


@dataclass(frozen=True)
class RunSource:
    """A run directory, also of a run that is alive: its updates are those of the first look."""

    config: RunConfig
    directory: RunDirectory

    @classmethod
    def open(cls, path: Path) -> RunSource:
        """Raises :class:`ConfigurationError` where there is no run."""
        directory = RunDirectory(path.expanduser().absolute())
        if not directory.config_file.exists():
            raise ConfigurationError(f"expected a run directory or a bundle, got {path}, which has no config.yaml")
        return cls(located(load(directory.config_file, environment={}), directory), directory)

    @functools.cached_property
    def _trained(self) -> TrainedUpdates:
        return TrainedUpdates(store_path(self.config, self.directory))

    @property
    def updates(self) -> frozenset[int]:
        return self._trained.updates

    def sent(self, update: int) -> SentUpdate:
        return self._trained.sent(update)


@dataclass(frozen=True, slots=True)
class Retrained:
    """One update made again."""

    batch: Batch
    """The batch before advantages were estimated."""
    policy: Policy
    """Its weights are those after this update until the next one is made."""
    report: StepReport
    line: Mapping[str, Any]
    """Its line of ``metrics.jsonl``."""
    recorded: Mapping[str, Any] | None
    """The run's line; None: there is none."""
    differences: tuple[Difference, ...] | None
    """The first of each stage, in the order of the computation; None where the configuration is another one."""
    compared: bool
    """The run recorded what this update computed, not only its line."""
    recorded_machine: Mapping[str, Any] | None
    """See :func:`learner.process.update_record.describe_machine`."""
    seconds: float
    """Wall time of all that it took: reading the groups, the update and the comparison."""

    @property
    def step(self) -> int:
        return self.report.update + 1


def located(config: RunConfig, directory: RunDirectory) -> RunConfig:
    """The configuration of a run that lies in ``directory`` now."""
    return config.updated(run={"directory": directory.path.parent, "name": directory.path.name})


def check_overrides(overrides: Sequence[str]) -> None:
    """Raises :class:`ConfigurationError` for keys that an update does not read, each with the reason."""
    problems = []
    for key in (read_override(text)[0] for text in overrides):
        section = key.partition(".")[0]
        fixed = next((why for name, why in FIXED.items() if key == name or key.startswith(f"{name}.")), None)
        if fixed is not None:
            problems.append(f"--set {key}: {fixed}")
        elif not key.startswith(OFFLINE):
            problems.append(f"--set {key}: {REASONS.get(section, 'it takes no part in an update')}")
    if problems:
        raise ConfigurationError("\n".join(problems))


def begin(source: Source, step: int | None) -> tuple[int, int]:
    """Update to begin with, and the updates of the checkpoint before it. ``step``: the first, counted from 1; None: the
    one behind the newest checkpoint that has any. Raises :class:`ConfigurationError` for one that cannot be made
    again."""
    found = repeatable(source.updates, exact_checkpoints(source.directory))
    if not found:
        raise ConfigurationError(
            f"no step of {source.directory.path} can be made again: its store has no groups behind a checkpoint that "
            "has the state of the optimizer. Set replay.keep_trained and checkpoint.keep above 1, and omit "
            "checkpoint.optimizer"
        )
    update = max(found.values()) if step is None else step - 1
    if update not in found:
        raise ConfigurationError(f"step {update + 1} cannot be made again, only {describe_steps(found)}")
    return update, found[update]


def retrain(
    source: Source, step: int | None = None, count: int | None = None, overrides: Sequence[str] = ()
) -> Iterator[Retrained]:
    """Make ``count`` updates again (None: all that can be) from ``step`` on; those between the checkpoint and it come
    first. ``overrides``, as of ``--set``, apply from ``step`` on; then nothing is compared.

    Raises :class:`ConfigurationError` for a step or key that cannot be, :class:`StoreError` for damaged files.
    """
    check_overrides(overrides)
    first, start = begin(source, step)
    recorded, end = configuration_at(source, start)
    if end is not None and end <= first:
        raise ConfigurationError(
            f"step {first + 1} cannot be made again: the run was resumed with other keys after step {end}, behind "
            f"checkpoint u{start:06d}. The steps before can: {describe_steps(range(start, end))}"
        )
    available, last = source.updates, first
    while last + 1 in available and last + 1 != end and (count is None or last + 1 < first + count):
        last += 1
    changed = recorded
    if overrides:
        changed = located(loads(dump(recorded), "the run", overrides, environment={}), source.directory)
    with ExitStack() as stack:
        checkpoint = exact_checkpoints(source.directory).get(start)
        if overrides and start < first:
            checkpoint = stack.enter_context(checkpoint_before(source, recorded, first, start))
            changed = located(changed, RunDirectory(checkpoint.parents[1]))
            start = first
        with trainer_of(source, changed, checkpoint, start) as trainer:
            for update in range(start, last + 1):
                yield _make(source, changed, trainer, update, compare=not overrides)


def configuration_at(source: Source, update: int) -> tuple[RunConfig, int | None]:
    """The configuration that ``update`` was made with, of a run that was resumed with other keys since; and the first
    update after it that was made with another one."""
    sections, end = source.config.model_dump(mode="python"), None
    for line in reversed(read_history(source.directory)):
        if line["step"] <= update:
            break
        for key, (old, _) in line.get("changes", {}).items():
            if key.startswith(OFFLINE):
                *path, last = key.split(".")
                at = functools.reduce(lambda section, name: section.setdefault(name, {}), path, sections)
                at.pop(last, None)
                if old != ABSENT:
                    at[last] = old
                end = int(line["step"])
    return (source.config if end is None else RunConfig.model_validate(sections)), end


@contextmanager
def checkpoint_before(source: Source, config: RunConfig, update: int, start: int) -> Iterator[Path]:
    """A checkpoint of the weights that ``update`` begins with, made from the one of ``start`` updates in a run
    directory of its own, which has the model and is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = RunDirectory(Path(folder) / "run").create()
        scratch.model.symlink_to(source.directory.model.resolve())
        checkpoint = exact_checkpoints(source.directory).get(start)
        config = config.updated(checkpoint={"optimizer": True})  # on all ranks
        with trainer_of(source, config, checkpoint, start) as trainer:
            version = source.sent(update).policy_version
            for before in range(start, update):
                _make(source, config, trainer, before, compare=False)
            state = CheckpointState(update, version, {})
            checkpoint = save_checkpoint(scratch.checkpoints, trainer, state, scratch.model, 1)
        yield checkpoint


@contextmanager
def trainer_of(source: Source, config: RunConfig, checkpoint: Path | None, update: int) -> Iterator[Trainer]:
    """The learner's trainer, with the threads and the type of passes that the run had, where its configuration leaves
    them to the machine, and its other ranks. Raises :class:`DamagedFiles`."""
    if checkpoint is not None and (problem := find_damage(checkpoint)):
        raise DamagedFiles(f"checkpoint {checkpoint.name} is damaged ({problem}): begin with a step behind another one")
    record = read_record(source.directory.updates, update)
    if record is not None and config.learner.threads is None:
        config = config.updated(learner={"threads": record.machine["threads"]})
    if record is not None and config.learner.compute_dtype == "auto":
        config = config.updated(learner={"compute_dtype": record.machine["compute_dtype"]})
    config = with_options(config)
    threads, rank_zero = torch.get_num_threads(), RankZero.begin(config)
    try:
        group = None if rank_zero is None else rank_zero.group
        trainer, _ = load_trainer(config, RunDirectory(config.run.path), checkpoint, group)
        yield trainer
    finally:
        if rank_zero is not None:
            rank_zero.end()
        torch.set_num_threads(threads)


def _make(source: Source, config: RunConfig, trainer: Trainer, update: int, *, compare: bool) -> Retrained:
    began, clock = time.perf_counter(), LoopClock()
    sent = source.sent(update)
    groups = groups_of(sent, Limits.of(config))
    batch = make_batch(update, groups, config.replay, trainer.mean_entropies).batch
    record = read_record(source.directory.updates, update)
    if record is not None and record.fresh_optimizer:
        trainer.forget_moments()
    report = trainer.train(batch, sent.policy_version)
    left_out = len(sent.groups) - len(batch.groups)
    made = step_line(Update(batch, report, clock.lap(), groups_left_out=left_out))
    line = orjson.loads(orjson.dumps(made, option=orjson.OPT_SERIALIZE_NUMPY))
    recorded = next((one for one in read_lines(source.directory.metrics_file) if one.get("step") == update + 1), None)
    found: list[Difference] = []
    if compare:
        models = {"policy": trainer.policy, "critic": trainer.critic}
        names = {name: [p for p, _ in model.named_parameters] for name, model in models.items() if model is not None}
        if record is not None:
            found += differences(record, batch, report, names)
        found += _of_checkpoint(trainer, checkpoint_path(source.directory.checkpoints, update + 1))
        if recorded is not None and (of_line := of_metrics(recorded, line, OF_THE_MACHINE)) is not None:
            found.append(of_line)
    return Retrained(
        batch, trainer.policy, report, line, recorded, tuple(found) if compare else None, record is not None,
        None if record is None else record.machine, time.perf_counter() - began,
    )  # fmt: skip


def groups_of(sent: SentUpdate, limits: Limits) -> tuple[Group, ...]:
    """Groups as the learner's session assembles them. Raises :class:`TrainingError` and :class:`WireError`."""
    assembler = GroupAssembler(len(sent.groups))
    for group in sent.groups:
        assembler.plan(group.plan, sent.update)
        for index, rollout in enumerate(group.rollouts):
            about, trajectory = rollout.about, decode_trajectory(rollout.frames, limits)
            stored = StoredRollout.of(about.get("replay"))
            assembler.deliver(
                group.plan.group_id, index, trajectory, about["reward"], about.get("rewards") or {}, stored
            )
    return assembler.take(sent.update)


def _of_checkpoint(trainer: Trainer, path: Path) -> Iterator[Difference]:
    """The first tensor that differs from that of the run's checkpoint, if it has one after this update."""
    if trainer.policy.ranks.size > 1 or not (path / "model").is_dir():
        return
    own, unequal = trainer.policy.shards("float32"), []

    def compare(name: str, tensor: Tensor, mine: Tensor) -> None:
        if not torch.equal(tensor, mine := mine.detach().cpu()):
            unequal.append((name, float((tensor.double() - mine.double()).abs().max())))

    for file in sorted((path / "model").glob("*.safetensors")):
        with safe_open(file, "pt") as saved:
            for name in sorted(own.keys() & set(saved.keys())):
                compare(name, saved.get_tensor(name), own[name])
    if trainer.critic is not None:
        state = torch.load(path / "training.pt", map_location="cpu", weights_only=True, mmap=True).get("critic", {})
        for part in ("backbone", "head"):
            of_critic = trainer.critic.state()[part]
            for name, tensor in state.get(part, {}).items():
                compare(f"{name} of the critic's {part}", tensor, of_critic[name])
    if unequal:
        largest = max(distance for _, distance in unequal)
        yield Difference("optimizer", f"{unequal[0][0]} of checkpoint {path.name}", count=len(unequal), largest=largest)
