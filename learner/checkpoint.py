"""Checkpoints: everything a learner needs to go on as if it had never been stopped.

::

    checkpoints/u000010/
      model/        loads in transformers: config, float32 safetensors, tokenizer
      training.pt   optimizer and random state (tensors and plain values only)
      state.json    counters and the size of every file; written last
"""

from __future__ import annotations

import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from learner.consumed import Trained
from learner.folder import atomic_folder
from learner.trainer import Trainer
from pipeline.errors import StoreError, TrainingError

FORMAT = 1
_NAME = re.compile(r"u(\d{6,})")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
_MODEL_OWN = ("config.json", "generation_config.json", "model.safetensors.index.json")


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
    """What CONSUMED said of those updates beside the ids; checkpoints of older versions have none."""

    def as_json(self) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "policy_version": self.policy_version,
            "unacknowledged": self.unacknowledged,
            "format": self.format,
            "trained": {update: facts.as_json() for update, facts in self.trained.items()},
        }


def checkpoint_path(root: Path, updates: int) -> Path:
    return root / f"u{updates:06d}"


def save_checkpoint(root: Path, trainer: Trainer, state: CheckpointState, initial_model: Path, keep: int) -> Path:
    """Write a checkpoint and forget all but the newest ``keep``. The tokenizer comes from ``initial_model``.

    A kill at any moment leaves the older checkpoints readable. Raises :class:`TrainingError` when the weights hold a
    part of an update.
    """
    if trainer.torn:
        raise TrainingError("expected the weights of whole updates, got a part of one: nothing is saved")
    target = checkpoint_path(root, state.updates)
    with atomic_folder(target) as folder:
        trainer.policy.model.save_pretrained(folder / "model")
        _copy_tokenizer(initial_model, folder / "model")
        torch.save({"optimizer": trainer.optimizer.state_dict(), "random": random_state()}, folder / "training.pt")
        files = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
        (folder / "state.json").write_bytes(
            orjson.dumps({**state.as_json(), "files": files}, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        )
    for path in find_checkpoints(root)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def find_checkpoints(root: Path) -> list[Path]:
    """Complete checkpoints, newest first. Folders that are half-written or damaged are passed over."""
    if not root.is_dir():
        return []
    found = [(int(m.group(1)), path) for path in root.iterdir() if (m := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True) if _is_complete(path)]


def read_state(path: Path) -> CheckpointState:
    """Counters of a checkpoint. Raises :class:`StoreError` when it was written by another format."""
    raw = orjson.loads((path / "state.json").read_bytes())
    if raw.get("format") != FORMAT:
        raise StoreError(
            f"{path} has checkpoint format {raw.get('format')}, this Afterplay reads {FORMAT}: start a new run"
        )
    return CheckpointState(
        raw["updates"],
        raw["policy_version"],
        {int(u): list(ids) for u, ids in raw["unacknowledged"].items()},
        trained={int(u): Trained.from_json(facts) for u, facts in raw.get("trained", {}).items()},
    )


def restore_training(path: Path, trainer: Trainer) -> CheckpointState:
    """Optimizer, counters and random state; the model itself is loaded from ``path / "model"`` by whoever made
    ``trainer``.

    Raises :class:`StoreError` when the optimizer belongs to another model.
    """
    state = read_state(path)
    saved = torch.load(path / "training.pt", map_location="cpu", weights_only=True)
    try:
        trainer.optimizer.load_state_dict(saved["optimizer"])
    except (ValueError, KeyError) as error:
        raise StoreError(f"{path} belongs to another model ({error}): choose another run.name, or delete it") from error
    set_random_state(saved["random"])
    trainer.updates = state.updates
    return state


def random_state() -> dict[str, Any]:
    """State of Python's, numpy's and torch's generators, as tensors and plain values."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(kind),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_random_state(state: dict[str, Any]) -> None:
    """The inverse of :func:`random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def _is_complete(path: Path) -> bool:
    try:
        files = orjson.loads((path / "state.json").read_bytes())["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _copy_tokenizer(source: Path, target: Path) -> None:
    """Everything of the model folder that is not weights: tokenizer, chat template, custom code."""
    if not source.is_dir():
        return
    for path in source.iterdir():
        if path.is_file() and path.suffix not in _WEIGHTS and path.name not in _MODEL_OWN:
            shutil.copyfile(path, target / path.name)
