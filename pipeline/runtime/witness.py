"""Records of what a process saw itself, for ``afterplay chaos``, which compares them with the store.

Written only where the environment variable :data:`WITNESS` names a folder. Each process has a file there,
``NAME-BEGAN-PID.jsonl``, one JSON object a line with ``at``, the monotonic nanoseconds of the machine. A line is one
write, so SIGKILL loses no line that was written, and leaves none half.

========  ==============  =============================================================================================
who       line            when, and what a kill just before it costs
========  ==============  =============================================================================================
actor     made            before it can be sent: whatever was sent has its line
actor     acknowledged    after ACK came: a missing one leaves a trajectory unchecked
learner   resumed         before the first update: a process without it trained nothing
learner   trained         after the optimizer step, before it is reported: a missing one is an update that is in no
                          checkpoint and no published weights
learner   saving          before the checkpoint is written: a checkpoint without it does not exist
learner   published       after engines serve the version: a missing one leaves a version unchecked
========  ==============  =============================================================================================
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from pipeline.schema import Trajectory

WITNESS = "AFTERPLAY_WITNESS"
"""Environment variable: the folder that witness files are written to."""
DIGEST_BYTES = 6


class WitnessFile:
    """The file of this process. Raises :class:`OSError` where it cannot be written: a witness that is silent about it
    would accuse others."""

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}-{time.monotonic_ns():020d}-{os.getpid()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, what: str, **facts: Any) -> None:
        """Append one line."""
        line = orjson.dumps({"what": what, "at": time.monotonic_ns(), **facts}) + b"\n"
        if os.write(self._descriptor, line) != len(line):
            raise OSError(f"a line of {len(line)} bytes of the witness was cut")

    def made(self, trajectory: Trajectory) -> None:
        """An actor is about to send ``trajectory``."""
        digests = [
            digest
            for b in trajectory.branches()
            for digest in turn_digests(b.token_ids, b.loss_mask, b.behaviour_logprobs, b.policy_versions, b.turn_index)
        ]
        environment = trajectory.rewards.get("environment")
        self.write(
            "made",
            id=trajectory.trajectory_id,
            usable=trajectory.usable,
            environment=environment,
            digests=" ".join(digests),
        )


def open_witness(name: str) -> WitnessFile | None:
    """The witness file of this process; None where nobody asked for one."""
    folder = os.environ.get(WITNESS)
    return WitnessFile(Path(folder), name) if folder else None


def turn_digests(
    token_ids: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.bool_],
    behaviour_logprobs: npt.NDArray[np.float32],
    policy_versions: npt.NDArray[np.int32],
    turns: npt.NDArray[np.int32],
) -> list[str]:
    """``TURN:DIGEST`` of each turn of a branch that has tokens in ``loss_mask``: of these tokens, their places,
    log-probabilities and versions, and of all token ids before them. Arrays of one length, by position."""
    found = []
    for turn in np.unique(turns[loss_mask]).tolist():
        at = np.flatnonzero(loss_mask & (turns == turn))
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for values, kind in (
            (at, "<i4"),
            (token_ids[: at[-1] + 1], "<i4"),
            (behaviour_logprobs[at], "<f4"),
            (policy_versions[at], "<i4"),
        ):
            digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
        found.append(f"{turn}:{digest.hexdigest()}")
    return found
