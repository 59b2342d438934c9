"""Checkpoints: the full state of a learner. Resuming from one equals never having stopped.

::

    checkpoints/u000010/
      model/        loads in transformers: config, float32 safetensors, tokenizer; adapters merged into the weights
      adapter/      with learner.lora: the adapters alone, float32, as peft has them; training resumes from these
      training.pt   random state, optimizer (checkpoint.optimizer), and where there are such: critic,
                    adaptive KL coefficient (tensors and plain values only)
      shards/       with several ranks (learner.ranks): what of training.pt is divided among them, written by all;
                    model/ is then several files if it is large
      state.json    counters
      contents.json    size and digest of every file; written last
    checkpoints/best    the best evaluated one, with evaluation.keep_best (learner/checkpoints/best.py)
    checkpoints/u000012.damaged    one that cannot be used

A learner resumes from the newest checkpoint whose files hold the bytes that were written. A damaged one is renamed to
``uNNNNNN.damaged``: it is never chosen again and never deleted. A sentence about it is in the learner's log, on the
console of ``afterplay run`` and in ``afterplay status``; a metric counts them.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor

from learner.checkpoints.shards import (
    Shards,
    divide_state,
    mapped,
    random_state,
    restored_state,
    set_random_state,
)
from learner.data.rows import Trained
from learner.distributed.collectives import RankGroup
from learner.distributed.ranks import ALONE
from learner.policy.policy import Policy
from learner.training.optimizer import load_moments
from learner.training.trainer import Trainer
from pipeline.errors import DamagedFiles, FormatMismatch, TrainingError
from pipeline.runtime.folders import (
    CONTENTS,
    DAMAGED,
    atomic_folder,
    damaged_folders,
    find_damage,
    remove_folder,
    set_aside,
    write_contents,
)

log = logging.getLogger(__name__)
FORMAT = 3
_NAME = re.compile(r"u(\d{6,})")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_MODEL_OWN = ("config.json", "generation_config.json", "model.safetensors.index.json", CONTENTS)


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """Counters of a checkpoint."""

    updates: int
    policy_version: int
    """Version under which these weights were, or were about to be, published."""
    unacknowledged: dict[int, list[str]]
    """Group ids by update: consumed, and not yet acknowledged by the replay stage."""
    format: int = FORMAT
    trained: dict[int, Trained] = field(default_factory=dict)
    """Facts that CONSUMED carried of those updates beside the ids; missing where it had none."""
    optimizer: bool = True
    """The optimizer's state is there (``checkpoint.optimizer``)."""

    def as_json(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "policy_version": self.policy_version,
            "unacknowledged": self.unacknowledged,
            "format": self.format,
            "trained": {update: facts.header() for update, facts in self.trained.items()},
            "optimizer": self.optimizer,
        }


def checkpoint_path(root: Path, updates: int) -> Path:
    return root / f"u{updates:06d}"


@dataclass(frozen=True, slots=True)
class CheckpointImage:
    """Everything of a checkpoint, copied into memory: training continues while it is written."""

    state: CheckpointState
    weights: dict[str, Tensor]
    """With several ranks this rank's shards of them."""
    adapters: dict[str, Tensor] | None
    training: dict[str, Any]
    shards: Shards | None
    """This rank's shards; None: there is one rank."""
    policy: Policy
    """Gives configuration and names; its weights are not read."""

    @property
    def updates(self) -> int:
        return self.state.updates

    @property
    def n_bytes(self) -> int:
        """Bytes of the weights of all ranks, less than the files have."""
        return sum(tensor.nbytes for tensor in self.weights.values())


def take_image(trainer: Trainer, state: CheckpointState) -> CheckpointImage:
    """Copies of everything that a checkpoint holds. Raises :class:`TrainingError` in the middle of an update."""
    if trainer.policy.interrupt.mid_update:
        raise TrainingError("expected the weights of complete updates, got an unfinished one: nothing is saved")
    policy = trainer.policy
    with policy.ranks.together("image", facts={"updates": state.updates}):
        training: dict[str, Any] = {"random": random_state()}
        if trainer.saves_optimizer:
            training["optimizer"] = trainer.optimizer.state_dict()
        training |= {name: part for name, (part, _) in _parts(trainer).items()}
        training, shards, weights = mapped(training, _copy), None, policy.shards("float32")
        if isinstance(policy.ranks, RankGroup):
            training, shards = divide_state(training, weights, policy.ranks)
        adapters = policy.adapter_snapshot(torch.float32)
    state = replace(state, optimizer=trainer.saves_optimizer)
    return CheckpointImage(state, weights, adapters, training, shards, policy)


def _copy(path: str, value: Any) -> Any:
    return value.detach().to(device="cpu", copy=True) if isinstance(value, Tensor) else value


def write_image(
    root: Path, image: CheckpointImage, initial_model: Path, keep: int, protected: Callable[[], Collection[int]] = tuple
) -> Path:
    """Write a checkpoint and delete all but the newest ``keep`` and those of the updates that are ``protected`` by
    then. The tokenizer comes from ``initial_model``.

    A kill at any moment leaves the older checkpoints readable. One that failed may be tried again; with several ranks
    the others follow each attempt.
    """
    target = checkpoint_path(root, image.updates)
    if image.shards is not None:
        image.shards.begin()
    with atomic_folder(target) as folder:
        torch.save(image.training, folder / "training.pt")
        if image.adapters is not None and image.policy.adapters is not None:
            image.policy.adapters.save(folder / "adapter", image.adapters)
        if image.shards is None:
            image.policy.model.save_pretrained(folder / "model", state_dict=dict(image.weights))
        else:
            image.shards.write(folder, image.policy.model)
        _copy_tokenizer(initial_model, folder / "model")
        state = orjson.dumps(image.state.as_json(), option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        (folder / "state.json").write_bytes(state)
        write_contents(folder)
    spared = {checkpoint_path(root, updates) for updates in protected()}
    for path in find_checkpoints(root)[keep:]:
        if path not in spared:
            remove_folder(path)
    if image.shards is not None:
        image.shards.finish()  # the last step: the others follow no attempt after it
    return target


def save_checkpoint(root: Path, trainer: Trainer, state: CheckpointState, initial_model: Path, keep: int) -> Path:
    """:func:`take_image` and :func:`write_image` in one."""
    return write_image(root, take_image(trainer, state), initial_model, keep)


def numbered_checkpoints(root: Path) -> list[Path]:
    """Folders with the name of a checkpoint, newest first, whatever is in them."""
    if not root.is_dir():
        return []
    found = [(int(m.group(1)), path) for path in root.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def find_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, newest first; see :func:`is_complete`."""
    return [path for path in numbered_checkpoints(root) if is_complete(path)]


def read_state(path: Path) -> CheckpointState:
    """Counters of a checkpoint. Raises :class:`FormatMismatch` when it was written by another format."""
    raw = orjson.loads((path / "state.json").read_bytes())
    if raw.get("format") != FORMAT:
        raise FormatMismatch(
            f"{path} has checkpoint format {raw.get('format')}, this Afterplay reads {FORMAT}: start a new run"
        )
    return CheckpointState(
        raw["updates"],
        raw["policy_version"],
        {int(u): list(ids) for u, ids in raw["unacknowledged"].items()},
        trained={int(u): Trained(**facts) for u, facts in raw.get("trained", {}).items()},
        optimizer=raw.get("optimizer", True),
    )


def restore_training(path: Path, trainer: Trainer) -> CheckpointState:
    """Optimizer, counters, random state and the parts beside the policy; the policy itself is loaded by whoever made
    ``trainer``: from ``path / "model"``, or with adapters from the initial model and ``adapter_folder(path)``.

    A part that the checkpoint lacks, because it was switched on later, starts from its initial state. Raises
    :class:`FormatMismatch` when a part belongs to another model.
    """
    state = read_state(path)
    several = trainer.policy.ranks is not ALONE  # which read no more of the file than their shards
    saved = torch.load(path / "training.pt", map_location="cpu", weights_only=True, mmap=several)
    saved = restored_state(path, saved, trainer)
    if "optimizer" in saved:
        try:
            load_moments(trainer.optimizer, saved["optimizer"])
        except (ValueError, KeyError) as error:
            raise FormatMismatch(
                f"{path} belongs to another model ({error}): choose another run.name, or delete it"
            ) from error
    else:
        log.warning("%s holds no state of the optimizer (checkpoint.optimizer): a fresh one is used", path)
    if trainer.critic is not None:
        trainer.critic.began = state.updates  # unless it is saved
    for name, (_, load) in _parts(trainer).items():
        if name in saved:
            load(saved[name])
        else:
            log.warning("%s has no %s: it starts from its initial state", path, name)
    set_random_state(saved["random"])
    trainer.updates = state.updates
    return state


def adapter_folder(path: Path) -> Path:
    """Folder of a checkpoint's adapters."""
    return path / "adapter"


def _parts(trainer: Trainer) -> dict[str, tuple[Any, Callable[[Any], None]]]:
    """State of what a trainer has beside policy and optimizer, where a part has one, and the function that restores
    it."""
    found: dict[str, tuple[Any, Callable[[Any], None]]] = {}
    if trainer.critic is not None:
        found["critic"] = trainer.critic.state(), trainer.critic.load
    return found


def is_complete(path: Path) -> bool:
    """True where every file is there with its size; the bytes in them are not read."""
    return not find_damage(path, digests=False)


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Everything of the model folder that is not weights: tokenizer, chat templates, custom code."""
    for path in source.rglob("*"):
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in _MODEL_OWN:
            copy = target / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint to resume from."""

    checkpoint: Path | None
    """None: the run has none yet."""
    damaged: tuple[str, ...] = ()
    """A sentence for each newer one that is damaged."""


def find_resumption(root: Path) -> Resumption:
    """Blocks while it reads the newest checkpoint. Sets damaged ones aside.

    Raises :class:`DamagedFiles` where there are checkpoints and none is intact: to start from the initial model would
    throw the run away. Raises :class:`FormatMismatch` for one of another Afterplay.
    """
    damaged: dict[Path, str] = {}
    intact = None
    for path in numbered_checkpoints(root):
        problem = find_damage(path)
        if not problem:
            intact = path
            break
        if not (path / CONTENTS).exists():  # no damage where another Afterplay wrote it
            with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
                read_state(path)
        damaged[path] = problem
    sentences = tuple(_set_aside(path, problem, intact) for path, problem in damaged.items())
    if intact is None and (known := damaged_folders(root)):
        what = "; ".join(f"{name} ({facts.get('problem', 'unknown damage')})" for name, facts in known.items())
        raise DamagedFiles(
            f"expected an intact checkpoint in {root}, found only damaged ones: {what}. Put back a copy of one as "
            "uNNNNNN, or start over with --fresh"
        )
    return Resumption(intact, sentences)


def _set_aside(path: Path, problem: str, instead: Path | None) -> str:
    """A sentence about the damaged checkpoint, also for ``afterplay status``."""
    then = "and no older one is intact"
    if instead is not None:
        updates = int(path.name[1:]) - int(instead.name[1:])
        then = f"so training resumes from {instead.name}; updates to make again: {updates}"
    sentence = f"checkpoint {path.name} is damaged ({problem}), {then}. It is kept as {path.name}{DAMAGED}"
    set_aside(path, {"problem": problem, "sentence": sentence, "at": time.time()})
    return sentence
