"""Chooses the checkpoint that a learner resumes from: the newest whose files hold the bytes that were written.

A damaged one is renamed to ``uNNNNNN.damaged``: it is never chosen again and never deleted. A sentence about it is in
the learner's log, on the console of ``afterplay run`` and in ``afterplay status``; a metric counts them.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from learner.checkpoints.checkpoint import numbered_checkpoints, read_state
from pipeline.errors import DamagedFiles
from pipeline.runtime.contents import CONTENTS, DAMAGED, damaged_folders, find_damage, set_aside


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
        _refuse_other_format(path)
        damaged[path] = problem
    sentences = tuple(_set_aside(path, problem, intact) for path, problem in damaged.items())
    if intact is None and (known := damaged_folders(root)):
        what = "; ".join(f"{name} ({facts.get('problem', 'unknown damage')})" for name, facts in known.items())
        raise DamagedFiles(
            f"expected an intact checkpoint in {root}, found only damaged ones: {what}. Put back a copy of one as "
            "uNNNNNN, or start over with --fresh"
        )
    return Resumption(intact, sentences)


def _refuse_other_format(path: Path) -> None:
    """An older Afterplay wrote no ``contents.json``; that is no damage."""
    if not (path / CONTENTS).exists():
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            read_state(path)


def _set_aside(path: Path, problem: str, instead: Path | None) -> str:
    """A sentence about the damaged checkpoint, also for ``afterplay status``."""
    then = "and no older one is intact"
    if instead is not None:
        updates = int(path.name[1:]) - int(instead.name[1:])
        then = f"so training resumes from {instead.name}; updates to make again: {updates}"
    sentence = f"checkpoint {path.name} is damaged ({problem}), {then}. It is kept as {path.name}{DAMAGED}"
    set_aside(path, {"problem": problem, "sentence": sentence, "at": time.time()})
    return sentence
