"""The best evaluated checkpoint, kept beside those that training resumes from.

::

    checkpoints/
      best              points to the folder below
      best-u000020/     checkpoint u000020, its files shared with it (hard links, copies on a file system without
                        them), and evaluation.json: why it is best

*consumes* EVALUATION messages and finished writes; *produces* that folder; *waits for* any change of the session. A
kill at any moment leaves the one before or the new one. Which is best is decided by the replay stage
(``evaluation.keep_best``), which repeats its decision after every connection.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import orjson

from learner.checkpoints.checkpoint import checkpoint_path, find_checkpoints, is_complete, read_state
from learner.checkpoints.writer import CheckpointWriter
from pipeline.config.evaluation import EvaluationConfig
from pipeline.runtime.disk import when_room
from pipeline.runtime.folders import atomic_folder, find_damage, link_or_copy, remove_folder
from pipeline.runtime.run_directory import read_json, sync

log = logging.getLogger(__name__)
BEST = "best"
WHY = "evaluation.json"


@dataclass
class BestKeeper:
    """Runs during training. The checkpoint of weights that are being evaluated is protected from pruning."""

    section: EvaluationConfig
    writer: CheckpointWriter
    evaluation: Callable[[], Mapping[str, Any]]
    """Gives the newest EVALUATION header."""
    changed: Callable[[], Awaitable[None]]
    """Waits until there may be another."""

    def __post_init__(self) -> None:
        self._kept: Mapping[str, Any] | None = None
        self._lock = anyio.Lock()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            header = self.evaluation()
            await self.apply(header)
            if self.evaluation() is header:
                await self.changed()

    async def settle(self) -> None:
        """Act on the last EVALUATION header before the process ends; every checkpoint must be durable by then."""
        await self.apply(self.evaluation())

    async def apply(self, header: Mapping[str, Any]) -> None:
        """Act on an EVALUATION header, again whenever a checkpoint became durable."""
        if self.section.keep_best is None:
            return
        async with self._lock:
            await self._keep(header.get("evaluating"), header.get("best"))

    async def _keep(self, evaluating: int | None, best: Mapping[str, Any] | None) -> None:
        protected = {evaluating, None if best is None or best == self._kept else best["updates"]}
        self.writer.protected = frozenset(updates for updates in protected if updates is not None)
        if best is None or best == self._kept or self.writer.writing == best["updates"]:
            return
        folder = await when_room(partial(keep_best, self.writer.root, best), self.writer.root, "the best checkpoint")
        if folder is not None:
            log.info("checkpoint of %d updates is the best: %s %.4g", best["updates"], best["metric"], best["value"])
            self._kept = best
            return
        newest = find_checkpoints(self.writer.root)
        if newest and newest[0] > checkpoint_path(self.writer.root, best["updates"]):
            log.warning(
                "the best weights are those of %d updates, but their checkpoint does not exist (the learner was killed "
                "before it was durable): %s is unchanged", best["updates"], self.writer.root / BEST,
            )  # fmt: skip
            self._kept = best


def is_evaluated(header: Mapping[str, Any], updates: int) -> bool:
    """True where the evaluation of the weights after ``updates`` updates has ended."""
    return header.get("begun", -1) >= updates and header.get("evaluating") is None


def keep_best(root: Path, best: Mapping[str, Any]) -> Path | None:
    """Make ``root / "best"`` the checkpoint of ``best["updates"]``; None where that is not there, or is newer than the
    weights evaluated (a learner that went back makes the same updates again). A learner that resumes from a checkpoint
    may publish it again, under a newer version. Blocks."""
    source = checkpoint_path(root, int(best["updates"]))
    target = root / f"{BEST}-{source.name}"
    if not is_complete(target) or read_json(target / WHY) != dict(best):
        if not is_complete(source) or read_state(source).policy_version > best["policy_version"]:
            return None
        if problem := find_damage(source):
            log.error("checkpoint %s is damaged (%s): it does not become %s", source.name, problem, BEST)
            return None
        with atomic_folder(target) as folder:
            for path in sorted(source.rglob("*")):
                copy = folder / path.relative_to(source)
                if path.is_dir():
                    copy.mkdir()
                else:
                    link_or_copy(path, copy)
            (folder / WHY).write_bytes(orjson.dumps(dict(best), option=orjson.OPT_INDENT_2))
    link, scratch = root / BEST, root / f".{BEST}.{os.getpid()}"
    scratch.unlink(missing_ok=True)
    scratch.symlink_to(target.name)
    os.replace(scratch, link)
    sync(root)
    for path in root.glob(f"{BEST}-*"):
        if path != target:
            remove_folder(path)
    return target
