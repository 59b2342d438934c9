"""Configurations of a run, and its use of the disk.

Configurations are compared at each start and recorded in ``history.jsonl`` with the step after which each applied, so
that earlier steps keep theirs. The first line has the whole configuration, each later one what changed: ``{"step": 12,
"at": 1.8e9, "afterplay": "0.2.0", "changes": {"learner.learning_rate": [4e-05, 1e-05]}}``. The first line, and each at
which they differ, have digests of the Python files that the configuration names (``code``).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import orjson

from pipeline.config import RunConfig
from pipeline.config.load import dump, flat, load, plain
from pipeline.errors import ConfigurationError
from pipeline.runtime.disk import size, wait_for_room
from pipeline.runtime.plugins import file_in_working_folder
from pipeline.runtime.run_directory import RunDirectory, write_bytes_atomically
from pipeline.store.store import store_path

FIXED = {
    "model.source": "its weights belong to one model",
    "model.tiny": "its weights belong to one model",
    "learner.lora.rank": "its checkpoints have adapters of one shape",
    "learner.lora.targets": "its checkpoints have adapters of one shape",
    "learner.lora.alpha": "another scale of its adapters would be another policy",
    "learner.optimizer": "its checkpoints have the state of one optimizer",
    "stage.store": "its trajectories and tasks are in one store",
}
"""Keys that a run cannot change once it has made steps, and the reason."""
IGNORED = (
    "run.id",
    "run.directory",
    "engine.port",
    "engine.actor_key",
    "engine.learner_key",
    "stage.address",
    "stage.curve",
)
"""Keys that may differ at every start."""
ABSENT = "absent"
"""In place of a value that a configuration does not have."""
_CODE = re.compile(r"(?P<file>.+\.py)(:\w+)?|(?P<module>\w+(\.\w+)*):\w+")
"""A Python file, or a plug-in as ``path/file.py:name`` or ``module:name``."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Difference between a configuration and that of the last start."""

    step: int
    """The newest checkpoint, after which the run continues; 0: it begins."""
    changes: Mapping[str, tuple[Any, Any]]
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The difference for people."""
        if not self.changes:
            return list(self.notes)
        shown = [f"  {key}: {_short(old)} -> {_short(new)}" for key, (old, new) in self.changes.items()]
        return [f"the configuration has changed; from step {self.step + 1} on:", *shown, *self.notes]


def compare(directory: RunDirectory, config: RunConfig) -> Resumed:
    """Compare a resolved configuration with that of the last start. Raises :class:`ConfigurationError` for a change
    that the run cannot make, and for a folder whose ``config.yaml`` is no run's."""
    if is_foreign(directory):
        raise ConfigurationError(
            f"run.directory: expected a folder for the run at {directory.path}, got one with a config.yaml of another "
            "program, which the run would replace: give the run another name (--set run.name=NAME) or directory"
        )
    found = complete_checkpoints(directory)
    step = max(found, default=0)
    if not found or not directory.config_file.exists():
        return Resumed(step, {})
    try:
        before = load(directory.config_file, environment={})
    except ConfigurationError as error:
        why = str(error).splitlines()[0]
        return Resumed(step, {}, (f"the configuration of the last start cannot be read, changes are not known: {why}",))
    changes = difference(before, config)
    store_was_moved = store_path(config, directory).exists() and not store_path(before, directory).exists()
    refused = [
        f"{key} is {_short(new)}, but the run has made {step} steps "
        f"{'without it' if old == ABSENT else f'with {_short(old)}'}, and {why}"
        for key, (old, new) in changes.items()
        for fixed, why in FIXED.items()
        if (key == fixed or key.startswith(f"{fixed}.")) and not (key == "stage.store" and store_was_moved)
    ]
    for name, section in before.environments.items():
        if name not in config.environments:
            refused.append(f"environments.{name} is gone, but the run has made {step} steps with its tasks")
        elif config.environments[name].name != section.name:
            refused.append(
                f"environments.{name} is {config.environments[name].name}, but the run has made {step} steps with the "
                f"tasks of {section.name}"
            )
    backbone = changes.get("learner.critic.backbone")
    if backbone and before.advantage.estimator.name == config.advantage.estimator.name == "gae":
        refused.append(
            f"learner.critic.backbone is {backbone[1]}, but the run has made {step} steps with {backbone[0]}, and its "
            "checkpoints have the state of one critic"
        )
    if config.learner.reference.url is not None and before.sampling.temperature != 1:
        refused.append(
            f"learner.reference.url is {config.learner.reference.url}, whose server scores with temperature 1, but the "
            f"run has rollouts of sampling.temperature {before.sampling.temperature:g}"
        )
    if refused:
        remedy = "Change it back, or give another run.name, or start over with --fresh"
        raise ConfigurationError("\n".join(f"{sentence}. {remedy}" for sentence in refused))
    if not step:  # the first weights, which were kept to be evaluated
        return Resumed(0, {})
    notes, code, recorded = list[str](), code_digests(config), recorded_code(directory)
    if edited := [name for name in code if recorded.get(name, code[name]) != code[name]]:
        notes.append(f"code has changed; from step {step + 1} on: {', '.join(edited)}")
    if any(key in changes for key in ("groups.n_rollout", "groups.groups_per_step")):
        notes.append("rollouts of unfinished groups are dropped, because the size of a batch has changed")
    return Resumed(step, changes, tuple(notes))


def is_foreign(directory: RunDirectory) -> bool:
    """True where another program has written ``config.yaml``, as many name theirs. That of a run begins with its
    section ``run``."""
    try:
        text = directory.config_file.read_bytes()
    except FileNotFoundError:
        return False
    begun = directory.history_file.exists() or directory.store_file.exists()
    return not begun and not text.startswith(b"run:")


def code_digests(config: RunConfig) -> dict[str, str]:
    """Digest of each Python file that ``config`` names, by its path or module there. Of what it imports nothing is
    known, nor of installed packages."""
    found: dict[str, str] = {}
    for match in filter(None, map(_CODE.fullmatch, _texts(config.model_dump(mode="python")))):
        name = match["file"] or match["module"]
        with suppress(OSError):
            file = Path(name).expanduser() if match["file"] else file_in_working_folder(name)
            if file is not None:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(inner)


def recorded_code(directory: RunDirectory) -> dict[str, str]:
    """The digests of the last start that has some."""
    return next((line["code"] for line in reversed(read_history(directory)) if "code" in line), {})


def difference(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Old and new value of each key that differs."""
    ignored = {*IGNORED}
    if "external" not in (before.engine.kind, after.engine.kind):
        ignored.add("engine.urls")  # a launcher makes them from nodes and ports
    old, new = (flat(plain(config.model_dump(mode="python"))) for config in (before, after))
    return {
        key: (old.get(key, ABSENT), new.get(key, ABSENT))
        for key in dict.fromkeys((*old, *new))
        if key not in ignored and old.get(key, ABSENT) != new.get(key, ABSENT)
    }


def record(directory: RunDirectory, config: RunConfig, resumed: Resumed) -> None:
    """Begin the history of a run, or add the changes."""
    line: dict[str, Any] = {"step": resumed.step, "at": time.time(), "afterplay": metadata.version("afterplay")}
    try:
        written = directory.history_file.read_bytes() if resumed.step else b""
    except FileNotFoundError:
        written = b""
    if not written:
        line["configuration"] = plain(config.model_dump(mode="python"))
    if resumed.changes:
        line["changes"] = resumed.changes
    code = code_digests(config)
    if code != (recorded_code(directory) if written else {}):
        line["code"] = code
    if not written or resumed.changes or "code" in line:
        write_bytes_atomically(directory.history_file, written + orjson.dumps(line, default=str) + b"\n")


def read_history(directory: RunDirectory) -> list[dict[str, Any]]:
    """Lines of ``history.jsonl``, in the order of the starts: several may have the same step."""
    try:
        return [orjson.loads(line) for line in directory.history_file.read_bytes().splitlines()]
    except FileNotFoundError:
        return []


def rewind(directory: RunDirectory, step: int) -> None:
    """Date changes after ``step`` back to it, where the learner resumed: the steps after it are made with the newest
    configuration. That is before the newest checkpoint where this one is damaged."""
    lines = read_history(directory)
    if any(line["step"] > step for line in lines):
        dated = [orjson.dumps({**line, "step": min(line["step"], step)}) + b"\n" for line in lines]
        write_bytes_atomically(directory.history_file, b"".join(dated))


def settle(directory: RunDirectory, config: RunConfig) -> Resumed:
    """Write the configuration of a run whose roles are started one by one, as the supervisor does for others: by
    ``prepare`` and by the learner. Raises :class:`ConfigurationError` for a change that the run cannot make."""
    resumed = compare(directory, config)
    wait_for_room(directory.create, directory.path, "the run directory")
    if not directory.has_finished(config.run.total_steps):
        directory.finished_file.unlink(missing_ok=True)
    write_start(directory, config, resumed)
    return resumed


def write_start(directory: RunDirectory, config: RunConfig, resumed: Resumed) -> None:
    """Write what a start changes, and then its configuration: after a kill between them the next start finds the same
    changes, which may be recorded twice. Waits while the disk is full."""
    write = partial(record, directory, config, resumed)
    wait_for_room(write, directory.history_file, "the history of the configuration")
    write = partial(write_bytes_atomically, directory.config_file, dump(config).encode())
    wait_for_room(write, directory.config_file, "the run file")


def newest_checkpoint(directory: RunDirectory) -> int:
    """Steps of the newest complete checkpoint; 0 without one."""
    return max(complete_checkpoints(directory), default=0)


def complete_checkpoints(directory: RunDirectory) -> dict[int, Path]:
    """Folders of the complete checkpoints by their updates: a folder gets its name once it is whole."""
    folders = (file.parent for file in directory.checkpoints.glob("u*/state.json"))
    return {int(folder.name[1:]): folder for folder in folders if re.fullmatch(r"u\d{6,}", folder.name)}


def exact_checkpoints(directory: RunDirectory) -> dict[int, Path]:
    """Complete checkpoints with the optimizer's state: an update made from one is that of a run that never stopped."""
    return {updates: folder for updates, folder in complete_checkpoints(directory).items() if _has_optimizer(folder)}


def _has_optimizer(checkpoint: Path) -> bool:
    try:
        return bool(orjson.loads((checkpoint / "state.json").read_bytes()).get("optimizer", True))
    except (OSError, ValueError, AttributeError):
        return False


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


KINDS = {
    "model": "the initial model",
    "weights": "published weights",
    "checkpoints": "checkpoints",
    "replay.sqlite": "trajectories",
    "traces": "traces",
    "evaluations": "evaluations",
    "updates": "records of updates",
    "logs": "logs",
    "chaos": "files of afterplay chaos",
}
"""First part of a path in the run directory, and what lies there. Everything else is ``other``."""
OTHER = "other"
NAMES_MAX = 3
"""Folders of a kind that are named."""
_WRITTEN = {
    "weights": ("published", "policy_version", "v", "version of the weights", "versions of the weights"),
    "checkpoints": ("saved", "updates", "u", "checkpoint", "checkpoints"),
}
"""Folder, where the lines of ``metrics.jsonl`` say what was written there, and words for it."""


def disk_usage(directory: RunDirectory) -> dict[str, int]:
    """Bytes of each of :data:`KINDS`, and of ``other``. A file with several hard links counts once, where it is met
    first in the order of the kinds."""
    used = dict.fromkeys((*KINDS, OTHER), 0)
    order = {kind: place for place, kind in enumerate(used)}
    files = []
    for folder, _, names in os.walk(directory.path):
        for path in (Path(folder, name) for name in names):
            first = path.relative_to(directory.path).parts[0]
            kind = next((kind for kind in KINDS if first == kind or first.startswith(f"{kind}-")), OTHER)
            files.append((order[kind], kind, path))
    seen: set[tuple[int, int]] = set()
    for _, kind, path in sorted(files):
        with suppress(OSError):
            status = path.lstat()
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                used[kind] += status.st_size
    return used


def remove_published(config: RunConfig, directory: RunDirectory) -> list[str]:
    """Remove the weight folders of a finished run, unless they are its only result, without a last checkpoint; their
    names. No engine may run."""
    for delta in (directory.path / "weights").glob("delta-*"):
        delta.unlink(missing_ok=True)
    if not config.checkpoint.at_end or not any(directory.checkpoints.glob("u*[0-9]/state.json")):
        return []
    folders = sorted(path for path in (directory.path / "weights").glob("v*") if path.is_dir())
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    return [folder.name for folder in folders]


def describe_disk(
    directory: RunDirectory, lines: Sequence[Mapping[str, Any]], removed: Iterable[str] = ()
) -> list[str]:
    """Lines of text: kept, removed, size of the folder. The ``lines`` of ``metrics.jsonl`` name what was written;
    ``removed``: weight folders that were removed after the last of them."""
    used = disk_usage(directory)
    kept = {kind: sorted(path.name for path in (directory.path / kind).glob("[uv]*")) for kind in _WRITTEN}
    found = []
    for kind, what in {**KINDS, OTHER: OTHER}.items():
        if used[kind]:
            listed = ", ".join(kept.get(kind, ())[:NAMES_MAX])
            found.append(f"{what} {size(used[kind])}" + (f" ({listed})" if listed else ""))
    gone = []
    for kind, (field, key, letter, one, several) in _WRITTEN.items():
        numbers = {facts[key] for line in lines if isinstance(facts := line.get(field), Mapping) and facts.get(key)}
        names = {f"{letter}{int(number):06d}" for number in numbers} | {n for n in removed if n.startswith(letter)}
        if n := len(names.difference(kept[kind])):
            gone.append(f"{n} {one if n == 1 else several}")
    return [
        f"kept: {', '.join(found) or 'nothing'}",
        f"removed: {', '.join(gone) or 'nothing'}",
        f"folder size: {size(sum(used.values()))}",
    ]
