"""A bundle: one update of a run in one file, with what makes it again on another machine.

A zip file with a small run directory: ``config.yaml`` with the sections that an update reads, ``model/``, the
checkpoint that the update begins with, what the learner was sent for it (``update.groups``), what the run recorded of
it (``updates/``), and its line of ``metrics.jsonl``. It has no address, key or path of the machine that wrote it. A
checkpoint that is too large to send lies beside it as ``FILE.weights``; the bundle has its digests.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

import orjson

from learner.checkpoints.checkpoint import checkpoint_path
from learner.models.info import MANIFEST
from learner.process.retrain import (
    OF_THE_MACHINE,
    RunSource,
    Source,
    begin,
    checkpoint_before,
    configuration_at,
    located,
)
from learner.process.update_record import record_path
from learner.training.trainer import needed_scores
from pipeline.config import RunConfig
from pipeline.config.load import dump_yaml, load
from pipeline.errors import ConfigurationError, DamagedFiles, StoreError, WireError
from pipeline.runtime.disk import bytes_below
from pipeline.runtime.folders import CONTENTS, find_damage, write_contents
from pipeline.runtime.run_directory import RunDirectory
from pipeline.schema import EngineRecord, GroupPlan, Message, Trajectory
from pipeline.schema import record_file as frames
from pipeline.schema.codec import Limits, decode_trajectory, encode_trajectory
from pipeline.schema.orders import decode_request, encode_request
from pipeline.store.trained import SentGroup, SentRollout, SentUpdate
from pipeline.views.step_lines import read_lines

KIND = frames.FileKind("bundle", 1, "a bundle of an update", "write it again with this Afterplay")
WHOLE_BYTES_MAX = 1 << 30
"""A larger checkpoint lies beside the bundle."""
GROUPS, ABOUT = "update.groups", "bundle.json"
SECTIONS = ("advantage", "importance", "loss", "learner", "replay", "groups")
_WEIGHTS = (".safetensors", ".pt", ".bin")
_ORIGIN = "name_or_path"
"""End of the keys in a model's JSON files that may name a folder."""


def write_bundle(source: Source, step: int | None, file: Path, *, texts: bool = True) -> int:
    """Write ``step`` (None: the first behind the newest checkpoint that has any) of a run to ``file``; its bytes.
    ``texts`` false: without the texts of prompts, replies and tasks.

    Raises :class:`ConfigurationError` for a step that cannot be made again, and for a configuration that names files.
    """
    update, start = begin(source, step)
    with tempfile.TemporaryDirectory() as scratch:
        root = RunDirectory(Path(scratch) / "run").create()
        config, end = configuration_at(source, start)
        if end is not None and end <= update:
            raise ConfigurationError(f"step {update + 1} was made with other keys than its checkpoint u{start:06d}")
        root.config_file.write_text(dump_yaml(portable_sections(config)))
        with checkpoint_before(source, config, update, start) as checkpoint:
            target = checkpoint_path(root.checkpoints, update)
            shutil.copytree(checkpoint, target)
        _forget_origins(target)
        _copy_model(source, config, root.model)
        record = record_path(source.directory.updates, update)
        if record.exists():
            root.updates.mkdir()
            shutil.copy(record, root.updates)
        lines = [line for line in read_lines(source.directory.metrics_file) if line.get("step") == update + 1]
        kept = [{key: value for key, value in line.items() if key not in OF_THE_MACHINE} for line in lines]
        root.metrics_file.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in kept))
        sent = source.sent(update)
        (root.path / GROUPS).write_bytes(pack_groups(sent, Limits.of(source.config), texts=texts))
        about = {"step": update + 1, "afterplay": metadata.version("afterplay"), "texts": texts}
        (root.path / ABOUT).write_bytes(orjson.dumps(about))
        file.parent.mkdir(parents=True, exist_ok=True)
        part, beside = file.with_name(f".{file.name}.{os.getpid()}"), weights_beside(file)
        part_beside = weights_beside(part)
        try:  # a full disk leaves a bundle of the same name as it was
            if bytes_below(target) > WHOLE_BYTES_MAX:
                shutil.copytree(target, part_beside)
                for path in target.rglob("*"):
                    if path.suffix in _WEIGHTS:
                        path.unlink()
            with zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as packed:
                for path in sorted(p for p in root.path.rglob("*") if p.is_file()):
                    packed.write(path, path.relative_to(root.path).as_posix())
            shutil.rmtree(beside, ignore_errors=True)
            if part_beside.exists():
                part_beside.replace(beside)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)
            shutil.rmtree(part_beside, ignore_errors=True)
    return file.stat().st_size


def weights_beside(file: Path) -> Path:
    """Folder of a checkpoint that is too large for its bundle."""
    return file.with_name(f"{file.name}.weights")


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """The run or the bundle at ``path``. Raises :class:`ConfigurationError` for anything else, :class:`DamagedFiles`
    for a bundle whose checkpoint is another one."""
    if not path.is_file():
        yield RunSource.open(path)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = RunDirectory(Path(scratch) / "run").create()
        try:
            with zipfile.ZipFile(path) as packed:
                packed.extractall(root.path)
            about = orjson.loads((root.path / ABOUT).read_bytes())
            sent = unpack_groups((root.path / GROUPS).read_bytes(), path)
        except (zipfile.BadZipFile, OSError, ValueError, KeyError, WireError) as error:
            raise StoreError(f"expected {path} to be {KIND.noun}, got {error}: {KIND.remedy}") from error
        checkpoint = checkpoint_path(root.checkpoints, sent.update)
        if (beside := weights_beside(path)).is_dir():
            _compare_digests(checkpoint, beside)
            shutil.rmtree(checkpoint)
            checkpoint.symlink_to(beside.resolve())
        if problem := find_damage(checkpoint):
            raise DamagedFiles(f"the checkpoint of {path} (step {about['step']}) is not whole: {problem}")
        config = located(load(root.config_file, environment={}), root)
        yield BundleSource(config, root, sent)


@dataclass(frozen=True, slots=True)
class BundleSource:
    config: RunConfig
    directory: RunDirectory
    update: SentUpdate

    @property
    def updates(self) -> frozenset[int]:
        return frozenset({self.update.update})

    def sent(self, update: int) -> SentUpdate:
        """Raises :class:`KeyError` for another update."""
        if update != self.update.update:
            raise KeyError(update)
        return self.update


def portable_sections(config: RunConfig) -> dict[str, Any]:
    """The sections that an update reads. Of a function's file only the name stays: it must lie in the working folder of
    who opens the bundle. Raises :class:`ConfigurationError` for keys that name other files, folders or addresses: those
    whose type is a path, and texts with a slash."""
    plain = config.model_dump(mode="python")
    kept = {name: plain[name] for name in SECTIONS}
    kept["environments"] = {name: {"name": "arithmetic"} for name in config.trained_environments}  # none is played
    kept["run"] = {key: plain["run"][key] for key in ("seed", "total_steps")}
    kept["scorer"] = {"environment_weight": plain["scorer"]["environment_weight"]}
    kept["stage"] = {key: plain["stage"][key] for key in ("tokens_max", "message_bytes_max")}
    return {name: _portable(name, section) for name, section in kept.items()}


def _portable(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _portable(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(f"{key}.{i}", inner) for i, inner in enumerate(value)]
    if isinstance(value, str) and ".py:" in value:
        module, _, name = value.rpartition(":")
        return f"{Path(module).name}:{name}"
    if isinstance(value, PurePath) or (isinstance(value, str) and any(mark in value for mark in "/\\~")):
        raise ConfigurationError(f"{key} is {str(value)!r}, which another machine does not have: no bundle can be made")
    return value


def _copy_model(source: Source, config: RunConfig, target: Path) -> None:
    """The model folder; its weights only where adapters, a reference policy or a critic begin with them."""
    needs = needed_scores(config) & {"reference", "values"} or config.learner.lora.rank
    for path in source.directory.model.rglob("*"):
        if path.is_file() and (needs or path.suffix not in _WEIGHTS):
            copy = target / path.relative_to(source.directory.model)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    _forget_origins(target)


def _forget_origins(folder: Path) -> None:
    """Remove the folders that models came from. A folder with digests gets new ones."""
    for path in folder.rglob("*.json"):
        if path.name == MANIFEST:
            path.unlink()
            continue
        value = json.loads(path.read_bytes())  # orjson reads no Infinity, which files of models may have
        if isinstance(value, dict) and any(key.endswith(_ORIGIN) and value[key] for key in value):
            changed = {key: "" if key.endswith(_ORIGIN) else inner for key, inner in value.items()}
            path.write_text(json.dumps(changed, indent=2))
    if (folder / CONTENTS).exists():
        write_contents(folder)


def _compare_digests(checkpoint: Path, beside: Path) -> None:
    if (checkpoint / CONTENTS).read_bytes() != (beside / CONTENTS).read_bytes():
        raise DamagedFiles(f"{beside} is not the checkpoint of its bundle: its digests are others")


def pack_groups(sent: SentUpdate, limits: Limits, *, texts: bool) -> bytes:
    """Records of the groups that the learner was sent, without names of actors and engines."""
    plans = [group.plan if texts else without_payload(group.plan) for group in sent.groups]
    header = {
        "update": sent.update,
        "policy_version": sent.policy_version,
        "plans": [encode_request(plan) for plan in plans],
    }
    buffers = [KIND.magic, *frames.pack(header)]
    for number, group in enumerate(sent.groups):
        for rollout in group.rollouts:
            trajectory = portable(decode_trajectory(rollout.frames, limits), texts=texts)
            buffers += frames.pack({"group": number, "about": rollout.about}, encode_trajectory(trajectory))
    return b"".join(buffers)


def unpack_groups(data: bytes, where: Path) -> SentUpdate:
    """The inverse of :func:`pack_groups`. Raises :class:`StoreError` and :class:`WireError`."""
    KIND.check(where, data)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        first, *rest = frames.scan(file.fileno(), len(KIND.magic), bodies=True)
        header, rollouts = first.header, [list[SentRollout]() for _ in first.header["plans"]]
        for frame in rest:
            parts = tuple(frame.load(file.fileno()))
            rollouts[frame.header["group"]].append(SentRollout(frame.header["about"], parts))
    plans = [decode_request(GroupPlan, plan) for plan in header["plans"]]
    groups = tuple(SentGroup(plan, tuple(found)) for plan, found in zip(plans, rollouts, strict=True))
    if any(len(group.rollouts) != group.plan.delivered for group in groups):
        raise StoreError(f"{where} is cut off: expected every rollout of its groups")
    return SentUpdate(header["update"], header["policy_version"], groups)


def without_payload(plan: GroupPlan) -> GroupPlan:
    return replace(plan, task=replace(plan.task, payload={}))


def portable(trajectory: Trajectory, *, texts: bool) -> Trajectory:
    """The trajectory without the names of its actor and engines; ``texts`` false: with empty messages too."""
    trajectory = replace(trajectory, actor_id="actor", engine=EngineRecord())
    if texts:
        return trajectory
    turns = tuple(
        replace(
            turn,
            context_messages=tuple(Message(m.role, "") for m in turn.context_messages),
            completion_message=Message(turn.completion_message.role, ""),
        )
        for turn in trajectory.turns
    )
    lessons = None if trajectory.lessons is None else replace(trajectory.lessons, query="")
    return replace(trajectory, turns=turns, lessons=lessons, task=replace(trajectory.task, payload={}))
