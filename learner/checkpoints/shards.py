"""Sharded part of a checkpoint, written by all ranks together with ``torch.distributed.checkpoint``.

State of the trainer that is divided among ranks (moments of the optimizer, critic) goes to ``shards/``; each shard is
written once, by one of the ranks that hold it. ``training.pt`` keeps a mark in its place, and everything else. A
learner of any number of ranks and replicas reads both, and a checkpoint of one rank, which has no ``shards/``.

The policy's weights go the same way to a folder that rank 0 makes ``model/`` of and removes before the checkpoint
appears: they are on the disk once, and no rank has all of them in memory.
"""

from __future__ import annotations

import io
import logging
import random
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor import zeros as divided_zeros

from learner.checkpoints.model_files import write_model
from learner.distributed.collectives import RankGroup
from learner.models import model_folder
from learner.models.model_folder import own_rows
from pipeline.errors import StoreError
from pipeline.runtime.disk import disk_fault

if TYPE_CHECKING:
    from learner.training.trainer import Trainer

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of every load with no_dist
log = logging.getLogger(__name__)
FOLDER = "shards"
_MARK = "shard:"
"""Beginning of the text that replaces a tensor of ``shards/`` in ``training.pt``."""
_WEIGHTS = "weights"
"""Folder of the policy's shards, in a checkpoint that is not complete yet."""
_DURABLE = "durable"
"""In place of a folder: there is nothing left to write."""
OTHERS = "random_others"
"""Random state of shards 1, 2, …"""


@dataclass(frozen=True, slots=True)
class Shards:
    """Copies of this rank's shards, on the CPU."""

    tensors: dict[str, DTensor]
    weights: dict[str, Tensor]
    """Shards of the policy's weights; a tensor that is not divided is whole."""
    group: RankGroup

    def begin(self) -> None:
        """Rank 0: an attempt at the checkpoint begins, or continues. Tells the others that it is still there."""
        self.group.broadcast_text("")

    def write(self, folder: Path, model: Any) -> None:
        """Rank 0: write into the checkpoint's ``folder``: ``shards/`` with the others, to disk, and then ``model/``,
        which belongs to ``model``. Raises :class:`StoreError` on account of the first rank that could not write."""
        self.group.broadcast_text(str(folder))
        try:
            self._save(folder)
        except CheckpointException as error:
            causes = [cause for cause, _ in error.failures.values()]
            cause = next((cause for cause in causes if disk_fault(cause, folder)), causes[0])
            raise StoreError(f"the shards of a checkpoint could not be written: {cause}") from cause

        def read(tensors: dict[str, Tensor]) -> None:
            load_shards(tensors, storage_reader=FileSystemReader(folder / _WEIGHTS), no_dist=True)

        write_model(model, folder / "model", self.weights, read, self.begin)
        shutil.rmtree(folder / _WEIGHTS)

    def finish(self) -> None:
        """Rank 0: the checkpoint is durable."""
        self.group.broadcast_text(_DURABLE)

    def follow(self) -> None:
        """The other ranks: write whenever rank 0 does, until the checkpoint is durable. An attempt that fails anywhere
        fails on all ranks, and rank 0 decides whether there is another."""
        while (text := self.group.broadcast_text("")) != _DURABLE:
            if text:
                try:
                    self._save(Path(text))
                except CheckpointException as error:
                    log.warning("the shards in %s were not written: %s", text, error)

    def _save(self, folder: Path) -> None:
        state: dict[str, Any] = {FOLDER: self.tensors, _WEIGHTS: self.weights}
        for name, tensors in state.items():
            # nothing to copy ahead: else PyTorch waits for a stream of GPU 0, on which each rank would take memory
            writer = FileSystemWriter(
                folder / name, single_file_per_rank=True, sync_files=name == FOLDER, per_thread_copy_ahead=0
            )
            save_shards(dict(tensors), storage_writer=writer, process_group=self.group.saving)


def divide_state(
    training: dict[str, Any], weights: dict[str, Tensor], group: RankGroup
) -> tuple[dict[str, Any], Shards]:
    """``training`` with marks in place of divided tensors, and those tensors beside ``weights``. Collective: gathers
    random states."""
    tensors: dict[str, DTensor] = {}

    def take(path: str, value: Any) -> Any:
        if isinstance(value, DTensor):
            tensors[path] = value
            return _MARK + path
        return value

    marked = mapped(training, take)
    buffer = io.BytesIO()
    torch.save(training["random"], buffer)
    states = group.everyones({}, {"state": np.frombuffer(buffer.getvalue(), np.uint8)})
    others = [arrays["state"].tobytes() for _, arrays in states[1 : group.mesh.size()]]
    marked[OTHERS] = [torch.load(io.BytesIO(state), weights_only=True) for state in others]
    return marked, Shards(tensors, weights, group)


def restored_state(path: Path, saved: dict[str, Any], trainer: Trainer) -> dict[str, Any]:
    """``saved``, which ``training.pt`` of the checkpoint holds, with the tensors that it has marks of; divided among
    the ranks of ``trainer`` where there are several, and then all of it copies, since ``saved`` is mapped from a file.
    Raises :class:`StoreError` where ``shards/`` cannot be read."""
    group = trainer.policy.ranks if isinstance(trainer.policy.ranks, RankGroup) else None
    if (path / FOLDER).is_dir():
        saved = _with_shards(path / FOLDER, saved, group)
    others = saved.pop(OTHERS, [])
    if group is None:
        return saved
    if group.shard:
        torch.manual_seed(trainer.seed + group.shard)  # where the checkpoint has no state of this shard
        saved["random"] = others[group.shard - 1] if group.shard <= len(others) else random_state()
    placed: dict[str, Any] = mapped(_placed(saved, trainer, group), lambda _, v: v.clone() if _is_whole(v) else v)
    return placed


def _with_shards(folder: Path, saved: dict[str, Any], group: RankGroup | None) -> dict[str, Any]:
    tensors: dict[str, Tensor] = {}
    try:
        reader = FileSystemReader(folder)
        for name, facts in reader.read_metadata().state_dict_metadata.items():
            size, dtype = facts.size, facts.properties.dtype  # type: ignore[union-attr]
            if group is None:
                tensors[name] = torch.zeros(size, dtype=dtype)
            else:
                tensors[name] = divided_zeros(*size, dtype=dtype, device_mesh=group.mesh, placements=[Shard(0)])
        load_shards(
            tensors,
            storage_reader=reader,
            process_group=None if group is None else group.saving,
            no_dist=group is None,
        )
    except (OSError, RuntimeError, CheckpointException) as error:
        raise StoreError(f"the shards in {folder} cannot be read ({error}): delete this checkpoint") from error

    def put(path: str, value: Any) -> Any:
        return tensors[value[len(_MARK) :]] if isinstance(value, str) and value.startswith(_MARK) else value

    whole: dict[str, Any] = mapped(saved, put)
    return whole


def _placed(saved: dict[str, Any], trainer: Trainer, group: RankGroup) -> dict[str, Any]:
    """Whole tensors of a checkpoint of one rank, divided as the trainer's own are."""

    def divided(tensor: Tensor) -> Tensor:
        local = tensor[own_rows(len(tensor), group.mesh)].to(trainer.policy.device, copy=True)
        return model_folder.divided(local, tensor, group.mesh)

    def divided_optimizer(value: Any, shapes: list[torch.Size]) -> Any:
        """State of an optimizer with its moments divided; they have the shape of their parameter."""
        return {
            **value,
            "state": {
                i: {k: divided(v) if _is_whole(v) and [v.shape] == shapes[i : i + 1] else v for k, v in state.items()}
                for i, state in value["state"].items()
            },
        }

    out = dict(saved)
    if "optimizer" in saved:
        out["optimizer"] = divided_optimizer(saved["optimizer"], [p.shape for p in trainer.policy.parameters])
    if trainer.critic is not None and "critic" in saved:
        state = trainer.critic.state()
        shapes = [p.shape for p in trainer.critic.parameters]
        parts = {name: _like(saved["critic"][name], state[name], divided) for name in ("backbone", "head")}
        out["critic"] = {**saved["critic"], **parts}
        out["critic"]["optimizer"] = divided_optimizer(saved["critic"]["optimizer"], shapes)
    return out


def _like(saved: Mapping[str, Any], live: Mapping[str, Any], divided: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        name: divided(value) if _is_whole(value) and isinstance(live.get(name), DTensor) else value
        for name, value in saved.items()
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def mapped(value: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """A copy of nested dicts and lists with every leaf changed; ``change`` gets the path of the leaf."""
    if isinstance(value, dict):
        return {key: mapped(item, change, f"{path}/{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, change, f"{path}/{i}") for i, item in enumerate(value))
    return change(path, value)


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
