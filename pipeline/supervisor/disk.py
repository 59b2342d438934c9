"""Disk use of a run: removes what a finished run no longer needs, and describes what is kept and removed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.cli.viewer.progress import Line
from pipeline.config import RunConfig
from pipeline.runtime.disk_wait import size
from pipeline.runtime.rundir import RunDirectory

KINDS = {
    "model": "the initial model",
    "weights": "published weights",
    "checkpoints": "checkpoints",
    "replay.sqlite": "trajectories",
    "traces": "traces",
    "evaluations": "evaluations",
    "skipped": "skipped batches",
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
    seen: set[tuple[int, int]] = set()
    for kind, path in sorted(_files(directory.path), key=lambda found: order[found[0]]):
        try:
            status = path.lstat()
        except OSError:
            continue
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


def describe_disk(directory: RunDirectory, lines: Sequence[Line], removed: Iterable[str] = ()) -> list[str]:
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


def _files(root: Path) -> Iterator[tuple[str, Path]]:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            first = path.relative_to(root).parts[0]
            yield next((kind for kind in KINDS if first == kind or first.startswith(f"{kind}-")), OTHER), path
